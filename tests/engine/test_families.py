"""Families through the whole engine: greedy tokens equal transformers', with
one R-worker and three, prompts in chunks, and the cache on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import oracle, prompts
from families import save_tiny

from fastdecode import LLM, SamplingParams

FAMILIES = ("gemma3_text", "olmo3", "cohere2", "exaone4", "mpt", "ministral3", "smollm3")
"""Windows and rotary parts by layer, norms after branches, layers that don't
turn, slopes, queries that grow."""
NUM_TOKENS = 24
LENGTHS = (1, 23, 7)
MIN_LEAD = 1e-3
WAYS: dict[str, dict[str, Any]] = {
    "r1-chunks": {"r_workers": 1, "prompt_attention": "r", "prefill_chunk": 6},
    "r3-chunks": {"r_workers": 3, "prompt_attention": "s", "prefill_chunk": 6},
    "gpu": {"kv_placement": "gpu"},
}


def _judge(directory: Path, family: str) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A model whose greedy tokens are clear, prompts, and transformers' tokens."""
    asked = prompts(LENGTHS, seed=7)
    for seed in range(20):
        path = directory / str(seed)
        save_tiny(path, family, seed)
        answers = [oracle(path).greedy(prompt, NUM_TOKENS) for prompt in asked]
        if min(lead for _, lead in answers) > MIN_LEAD:
            return path, asked, [tokens for tokens, _ in answers]
    raise AssertionError("no model's tokens are clear: draw wider weights")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(family: str, tmp_path: Path) -> None:
    path, asked, expected = _judge(tmp_path, family)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    shared = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01}
    for way, options in WAYS.items():
        with LLM(str(path), **{**shared, **options}) as llm:
            outputs = llm.generate(asked, params)
        found = [list(output.completions[0].token_ids) for output in outputs]
        assert found == expected, way

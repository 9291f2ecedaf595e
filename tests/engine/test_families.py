"""Families through the whole engine: greedy tokens equal transformers', with
one R-worker and three, prompts in chunks, and the cache on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import oracle, prompts
from families import save_tiny

from fastdecode import LLM, SamplingParams

FAMILIES = ("gemma3_text", "olmo3", "cohere2", "exaone4", "mpt", "ministral3", "smollm3",
            "gpt_oss", "llama4_text")  # fmt: skip
"""Windows and rotary parts by layer, norms after branches, layers that don't
turn, slopes, queries that grow, sinks, norms behind the turn."""
NUM_TOKENS = 24
LENGTHS = (1, 23, 7)
MIN_LEAD = 1e-3
WAYS: dict[str, dict[str, Any]] = {
    "r1-chunks": {"r_workers": 1, "prompt_attention": "r", "prefill_chunk": 6},
    "r3-chunks": {"r_workers": 3, "prompt_attention": "s", "prefill_chunk": 6},
    "gpu": {"kv_placement": "gpu"},
}


WITH_SINKS: dict[str, dict[str, Any]] = {
    "r1": {"r_workers": 1, "prompt_attention": "s"},
    "held-prompts": {"r_workers": 2, "prompt_attention": "s", "prefill_chunk": 3},
    "heads": {"r_workers": 2, "r_partition": "heads", "prefill_chunk": 6},
    "hybrid": {"r_workers": 2, "kv_placement": "hybrid", "prefill_chunk": 6},
    "gpu-chunks": {"kv_placement": "gpu", "prefill_chunk": 6},
    "swap": {"kv_placement": "swap", "pp": 3},
    "stages": {"r_workers": 2, "pp": 2},
    "parts": {"r_workers": 3, "split_tokens": 64, "prefill_chunk": 30},
}


def _judge(
    directory: Path, family: str, lengths: tuple[int, ...] = LENGTHS
) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A model whose greedy tokens are clear, prompts, and transformers' tokens."""
    asked = prompts(lengths, seed=7)
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
    for way, options in WAYS.items():
        assert _generate(path, asked, params, **options) == expected, way


def test_sinks_wherever_attention_is(tmp_path: Path) -> None:
    path, asked, expected = _judge(tmp_path, "gpt_oss", (1, 23, 7, 85))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for way, options in WITH_SINKS.items():
        assert _generate(path, asked, params, **options) == expected, way


def _generate(
    path: Path, asked: list[list[int]], params: SamplingParams, **options: Any
) -> list[list[int]]:
    shared = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01}
    with LLM(str(path), **{**shared, **options}) as llm:
        outputs = llm.generate(asked, params)
    return [list(output.completions[0].token_ids) for output in outputs]

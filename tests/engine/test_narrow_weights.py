"""16-bit checkpoints on a CPU without products of 16 bits: tokens equal those of transformers
with the weights widened to float32, and depend on their request alone."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import oracle, prompts, save_checkpoint
from families import save_tiny
from safetensors.torch import load_file, save_file
from weight_files import edit_config

from fastdecode import LLM, SamplingParams
from sworker.kernels import narrow, packing

NUM_TOKENS, LENGTHS = 24, (1, 23, 7, 40)
DENSE, EXPERTS = ("llama", "gemma2", "opt"), ("qwen3_moe", "qwen2_moe")
"""Among them: a head that is tied to the embedding, learned positions and biases."""
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
DRAWN = [
    SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i, _ in enumerate(LENGTHS)
]
_LEAD = 1e-3  # least lead of each greedy token's logit: rounding does not change it


@pytest.fixture(autouse=True)
def _no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_has_products", lambda dtype: dtype == torch.float32)


@pytest.fixture(scope="module")
def clear(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``clear(family, dtype)``: a checkpoint in ``dtype`` without near-ties, and its tokens."""

    @cache
    def make(family: str, dtype: str) -> tuple[Path, list[list[int]], list[list[int]]]:
        asked = prompts(LENGTHS, seed=7)
        for seed in range(30):
            path = tmp_path_factory.mktemp(family) / str(seed)
            if family in DENSE:
                save_checkpoint(path, family, {}, seed)
            else:
                save_tiny(path, family, seed)
            file = path / "model.safetensors"
            weights = {name: x.to(getattr(torch, dtype)) for name, x in load_file(file).items()}
            save_file(weights, file, {"format": "pt"})
            edit_config(path, dtype=dtype)
            answers = [oracle(path).greedy(prompt, NUM_TOKENS) for prompt in asked]
            if min(lead for _, lead in answers) > _LEAD:
                return path, asked, [tokens for tokens, _ in answers]
        raise AssertionError("no model's tokens are clear: draw wider weights")

    return make


def run(path: Path, asked: list[list[int]], params: Any, **options: Any) -> list[list[int]]:
    shared = {"kv_dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01}
    with LLM(str(path), **{**shared, **options}) as llm:
        outputs = llm.generate(asked, params)
    assert all(output.error is None for output in outputs)
    return [list(output.completions[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    ("family", "dtype"),
    list(zip([*DENSE, *EXPERTS], itertools.cycle(["bfloat16", "float16"]), strict=False)),
)
def test_greedy_tokens(family: str, dtype: str, clear: Any) -> None:
    path, asked, tokens = clear(family, dtype)
    assert run(path, asked, GREEDY) == tokens
    assert run(path, asked[1:2], GREEDY, prefill_chunk=6) == tokens[1:2]


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("qwen3_moe", "float16")])
def test_sampled_tokens(family: str, dtype: str, clear: Any) -> None:
    path, asked, _ = clear(family, dtype)
    tokens = run(path, asked, DRAWN)
    assert tokens == run(path, asked, DRAWN, dtype="float32")
    assert run(path, asked[2:3], DRAWN[2:3]) == tokens[2:3]


@pytest.mark.parametrize("placement", [{"r_workers": 3}, {"kv_placement": "gpu"}, {"pp": 2}])
def test_placements(placement: dict[str, Any], clear: Any) -> None:
    path, asked, tokens = clear("llama", "bfloat16")
    assert run(path, asked, GREEDY, **placement) == tokens


def test_widened_once(clear: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "is_possible", lambda: False)
    path, asked, tokens = clear("gemma2", "float16")
    assert run(path, asked, GREEDY) == tokens


def test_kv_keeps_the_checkpoints_dtype(clear: Any) -> None:
    path, asked, tokens = clear("llama", "bfloat16")
    with LLM(str(path), r_threads=1, kv_memory_gb=0.01) as llm:
        assert llm.facts.kv_dtype.value == "bfloat16"
        assert len(llm.generate(asked, GREEDY)) == len(tokens)

"""Families through the whole engine: greedy tokens equal transformers', wherever the cache
is and whatever is lost. Mixtures of experts, then dense ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import oracle, prompts
from families import save_tiny
from trouble import crash_after

from examples import TRIES_ALL
from fastdecode import LLM, SamplingParams

FAMILIES = ("qwen3_moe", "qwen2_moe", "glm4_moe", "minimax_m2", "granitemoeshared")
"""Each kind of router; shared experts; dense layers first."""
MORE_FAMILIES = ("mixtral", "olmoe", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "granitemoe",
                 "exaone_moe", "hy_v3", "mellum", "solar_open", "flex_olmo",
                 "cohere2_moe")  # fmt: skip
NUM_TOKENS, LENGTHS = 24, (1, 23, 7, 40)
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "r1-chunks": {"r_workers": 1, "prompt_attention": "r", "prefill_chunk": 6},
    "r3-lanes": {"r_workers": 3, "lanes": 2},
    "gpu": {"kv_placement": "gpu", "prefill_chunk": 6},
}
_LEAD = 1e-3  # least lead of each greedy token's logit: rounding does not change it
_Clear = tuple[Path, list[list[int]], list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def clear(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., _Clear]:
    """Make a checkpoint without near-ties. Return it, prompts, and transformers' tokens."""

    @cache
    def make(family: str, lengths: tuple[int, ...] = LENGTHS) -> _Clear:
        asked = prompts(lengths, seed=7)
        for seed in range(20):
            path = tmp_path_factory.mktemp(family) / str(seed)
            save_tiny(path, family, seed)
            answers = [oracle(path).greedy(prompt, NUM_TOKENS) for prompt in asked]
            if min(lead for _, lead in answers) > _LEAD:
                return path, asked, [tuple(tokens) for tokens, _ in answers]
        raise AssertionError("no model's tokens are clear: draw wider weights")

    return make


def _run(path: Path, asked: list[list[int]], **options: Any) -> list[tuple[int, ...]]:
    shared = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01}
    with LLM(str(path), **{**shared, **options}) as llm:
        outputs = llm.generate(asked, GREEDY)
    assert [output.error for output in outputs] == [None] * len(asked)
    return [output.completions[0].token_ids for output in outputs]


@pytest.mark.parametrize("family", FAMILIES + MORE_FAMILIES * TRIES_ALL)
def test_greedy_tokens(family: str, clear: Callable[..., _Clear]) -> None:
    path, asked, expected = clear(family)
    for way, options in WAYS.items():
        assert _run(path, asked, **options) == expected, way


def test_experts_after_a_loss_equal_tokens(
    monkeypatch: pytest.MonkeyPatch, clear: Callable[..., _Clear]
) -> None:
    path, asked, expected = clear("qwen3_moe")
    crash_after(monkeypatch, {"r1": 20})
    twice = _run(path, asked * 2, r_workers=3, prefix_cache="on", max_num_sequences=4)
    assert twice == expected * 2


def test_experts_with_int8_kv_depend_on_no_other_request(clear: Callable[..., _Clear]) -> None:
    path, asked, _ = clear("qwen3_moe")
    options = {"kv_dtype": "int8", "prompt_attention": "r"}
    together = _run(path, asked, r_workers=3, **options)
    alone = [_run(path, [prompt], r_workers=1, **options)[0] for prompt in asked]
    assert together == alone


DENSE_FAMILIES = ("gemma3_text", "olmo3", "cohere2", "exaone4", "mpt", "ministral3", "smollm3",
            "gpt_oss", "llama4_text")  # fmt: skip
"""Windows and rotary parts by layer, norms after branches, layers that don't
turn, slopes, queries that grow, sinks, norms behind the turn."""
THREE_LENGTHS = (1, 23, 7)
DENSE_WAYS: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_greedy_tokens_of_dense_families(family: str, clear: Callable[..., _Clear]) -> None:
    path, asked, expected = clear(family, THREE_LENGTHS)
    for way, options in DENSE_WAYS.items():
        assert _run(path, asked, **options) == expected, way


def test_sinks_wherever_attention_is(clear: Callable[..., _Clear]) -> None:
    path, asked, expected = clear("gpt_oss", (1, 23, 7, 85))
    for way, options in WITH_SINKS.items():
        assert _run(path, asked, **options) == expected, way

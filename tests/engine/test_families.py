"""Families through the whole engine: greedy tokens equal transformers', wherever the cache
is and whatever is lost. Mixtures of experts, then dense ones."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import oracle, prompts
from families import save_tiny
from near_ties import RouterOracle, assert_same_up_to_ties
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
_Judged = tuple[list[list[int]], list[tuple[list[int], int]]]


@cache
def _judge(path: Path) -> _Judged:
    """Prompts, and transformers' tokens with how many are clear."""
    asked, oracle = prompts(LENGTHS, seed=7), RouterOracle.load(path)
    return asked, [oracle.greedy(prompt, NUM_TOKENS) for prompt in asked]


@pytest.fixture(scope="module")
def clear(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of the family whose tokens are clear."""

    @cache
    def make(family: str) -> tuple[Path, _Judged]:
        for seed in range(20):
            path = tmp_path_factory.mktemp(family) / str(seed)
            save_tiny(path, family, seed)
            judged = _judge(path)
            if all(num_clear == NUM_TOKENS for _, num_clear in judged[1]):
                return path, judged
        raise AssertionError("no model's tokens are clear: draw wider weights")

    return make


def _run(path: Path, asked: list[list[int]], **options: Any) -> list[tuple[int, ...]]:
    shared = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01}
    with LLM(str(path), **{**shared, **options}) as llm:
        outputs = llm.generate(asked, GREEDY)
    assert [output.error for output in outputs] == [None] * len(asked)
    return [output.completions[0].token_ids for output in outputs]


@pytest.mark.parametrize("family", FAMILIES + MORE_FAMILIES * TRIES_ALL)
def test_greedy_tokens(family: str, clear: Any) -> None:
    path, (asked, expected) = clear(family)
    for options in WAYS.values():
        assert_same_up_to_ties(_run(path, asked, **options), expected)


def test_a_lost_r_worker_changes_no_token(monkeypatch: pytest.MonkeyPatch, clear: Any) -> None:
    path, (asked, expected) = clear("qwen3_moe")
    crash_after(monkeypatch, {"r1": 20})
    assert_same_up_to_ties(_run(path, asked, r_workers=3), expected)


def test_kept_blocks_change_no_token(clear: Any) -> None:
    path, (asked, expected) = clear("qwen3_moe")
    twice = _run(path, asked * 2, r_workers=1, prefix_cache="on", max_num_sequences=4)
    assert_same_up_to_ties(twice, expected * 2)


def test_int8_kv_depends_on_no_other_request(clear: Any) -> None:
    path, (asked, _) = clear("qwen3_moe")
    options = {"kv_dtype": "int8", "prompt_attention": "r"}
    together = _run(path, asked, r_workers=3, **options)
    alone = [_run(path, [prompt], r_workers=1, **options)[0] for prompt in asked]
    assert together == alone


DENSE_FAMILIES = ("gemma3_text", "olmo3", "cohere2", "exaone4", "mpt", "ministral3", "smollm3",
            "gpt_oss", "llama4_text")  # fmt: skip
"""Windows and rotary parts by layer, norms after branches, layers that don't
turn, slopes, queries that grow, sinks, norms behind the turn."""
THREE_LENGTHS = (1, 23, 7)
MIN_LEAD = 1e-3
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


def _clear_dense(
    directory: Path, family: str, lengths: tuple[int, ...] = THREE_LENGTHS
) -> tuple[Path, list[list[int]], list[tuple[int, ...]]]:
    """A model whose greedy tokens are clear, prompts, and transformers' tokens."""
    asked = prompts(lengths, seed=7)
    for seed in range(20):
        path = directory / str(seed)
        save_tiny(path, family, seed)
        answers = [oracle(path).greedy(prompt, NUM_TOKENS) for prompt in asked]
        if min(lead for _, lead in answers) > MIN_LEAD:
            return path, asked, [tuple(tokens) for tokens, _ in answers]
    raise AssertionError("no model's tokens are clear: draw wider weights")


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_greedy_tokens_of_dense_families(family: str, tmp_path: Path) -> None:
    path, asked, expected = _clear_dense(tmp_path, family)
    for way, options in DENSE_WAYS.items():
        assert _run(path, asked, **options) == expected, way


def test_sinks_wherever_attention_is(tmp_path: Path) -> None:
    path, asked, expected = _clear_dense(tmp_path, "gpt_oss", (1, 23, 7, 85))
    for way, options in WITH_SINKS.items():
        assert _run(path, asked, **options) == expected, way

"""A model whose every layer has a sliding window: KV blocks that nobody sees any
more are neither kept nor fetched, and no token changes for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from checkpoints import prompts
from disk_talks import NUM_CONVERSATIONS, talk_in_turns

from examples import TRIES_ALL
from fastdecode import LLM, SamplingParams
from fastdecode.core.dtype import DType
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.sequence import CacheUse

Said: TypeAlias = "list[list[list[int]]]"
WINDOW = 24  # of all layers
BLOCK = 16
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SIBLINGS = SamplingParams(temperature=0.9, seed=5, max_tokens=9, n=3, ignore_eos=True)
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "r_threads": 1,
    "block_size": BLOCK,
    "kv_memory_gb": 0.002,
    "max_num_sequences": 4,
}
NUM_ROUNDS = 7
WAYS: list[dict[str, Any]] = [
    {"prefill_chunk": 7},
    {"prompt_attention": "s", "r_workers": 3, "prefill_chunk": 11},
    {"kv_placement": "gpu", "prefill_chunk": 13},
    {"r_workers": 2, "lanes": 2, "length_quantile": 0.5, "schedule": "synchronized"},
    {"r_workers": 2, "split_tokens": 64},
    {"pp": 2, "r_workers": 2},
]
MORE_WAYS: list[dict[str, Any]] = [
    {"prompt_attention": "s", "kv_placement": "gpu"},
    {"block_size": 32, "r_workers": 2, "prefill_chunk": 16, "prompt_attention": "r"},
    {"r_workers": 2, "prompt_attention": "s", "prefill_chunk": 5},
]


def script(llm: LLM, cache: CacheUse) -> Said:
    """Requests that begin alike, siblings, and turns that go on from answers."""
    (common,) = prompts((75,), seed=3)
    asked = [common + own for own in prompts((3, 30, 1, 17), seed=4)]
    first = llm.generate([*asked, asked[1]], [*[GREEDY] * 4, SIBLINGS], cache=cache)
    turns = [
        prompt + list(output.completions[0].token_ids) + new
        for prompt, output, new in zip(asked, first, prompts((2, 9, 25, 1), seed=5), strict=False)
    ]
    second = llm.generate([*turns, turns[2]], [*[GREEDY] * 4, SIBLINGS], cache=cache)
    return [[list(one.token_ids) for one in output.completions] for output in [*first, *second]]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> str:
    path = str(tiny_checkpoint("mistral", sliding_window=WINDOW))
    assert {layer.sliding_window for layer in open_checkpoint(path).spec().attention} == {WINDOW}
    return path


@pytest.fixture(scope="module")
def plain(model: str) -> tuple[Said, Said]:
    """What scripts come to without a cache."""
    with LLM(model, **SMALL, prefix_cache="off") as llm:
        return script(llm, CacheUse()), talk_in_turns(llm, NUM_ROUNDS)


@pytest.mark.parametrize("way", WAYS + MORE_WAYS * TRIES_ALL, ids=str)
def test_every_way_says_the_same(way: dict[str, Any], model: str, plain: tuple[Said, Said]) -> None:
    with LLM(model, **{**SMALL, "prefix_cache": "on", **way}) as llm:
        assert (script(llm, CacheUse()), talk_in_turns(llm, NUM_ROUNDS)) == plain
        assert llm.stats.num_cached_prompt_tokens > 300


def test_from_disk_a_turn_fetches_a_window_at_most(
    model: str, tmp_path: Path, plain: tuple[Said, Said]
) -> None:
    """Histories have up to 12 blocks. Memory holds the one that runs."""
    token_bytes = open_checkpoint(model).spec().kv_spec(DType.FLOAT32).token_bytes
    memory = {"kv_memory_gb": 17.5 * BLOCK * token_bytes / 1e9, "max_num_sequences": 1}
    options = {**SMALL, **memory, "swap_threshold": 1.0}
    with LLM(model, **options, cache_disk=str(tmp_path), cache_disk_gb=0.001) as llm:
        assert talk_in_turns(llm, NUM_ROUNDS) == plain[1]
        counts = llm.stats.tiers
        most = -(-WINDOW // BLOCK) + 2  # one seen in part, and the end that isn't full
        assert 0 < counts.num_fetched <= most * NUM_CONVERSATIONS * (NUM_ROUNDS - 1)
        assert counts.num_failed == 0
        assert counts.num_stored <= most * NUM_CONVERSATIONS * NUM_ROUNDS

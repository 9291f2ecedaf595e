"""Conversations whose earlier blocks were given up, and later ones weren't, say
what they say without a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from checkpoints import FAMILIES, prompts

from examples import TRIES_ALL
from fastdecode import LLM, SamplingParams
from fastdecode.core.sequence import CacheUse

Said: TypeAlias = "list[tuple[int, ...]]"
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
BLOCK = 16
SHARED_BY_ALL = CacheUse()
SHARED: dict[str, Any] = {"dtype": "float32", "r_threads": 1, "block_size": BLOCK}
NAMES = ("a", "b", "c", "a", "b", "a")
NEW = (90, 70, 55, 9, 30, 1)
WAYS: list[dict[str, Any]] = [
    {"prefill_chunk": 23},
    {"prompt_attention": "s", "prefill_chunk": 16},
    {"prompt_attention": "s", "r_workers": 3},
    {"r_workers": 3, "lanes": 2, "prefill_chunk": 7},
    {"r_workers": 2, "r_partition": "heads", "prompt_attention": "s"},
    {"kv_placement": "gpu", "prefill_chunk": 33},
    {"r_workers": 2, "split_tokens": 64},
    {"length_quantile": 0.5, "schedule": "stabilized", "load_limit": 4000},
    {"prompt_pp": 1, "prefill_chunk": 512},
    {"prompt_pp": 2, "pp": 2, "r_workers": 2, "lanes": 2, "prefill_chunk": 23},
    {"prompt_pp": 1, "kv_placement": "gpu", "prefill_chunk": 48},
    {"prompt_pp": 2, "r_workers": 2, "replicas": 1},
    {"pp": 2, "pp_layers": "1,2"},
]


def script(llm: LLM, cache: CacheUse = SHARED_BY_ALL, *, holes: bool = False) -> Said:
    """Turns of three conversations that begin alike, two at a time, beside a
    prompt that decodes; between them all lose their second and third block."""
    said: Said = []
    (common, beside), asked = prompts((2 * BLOCK + 5, 20), seed=2), prompts(NEW, seed=1)
    begun: set[str] = set()
    for first in range(0, len(asked), 2):
        names = NAMES[first : first + 2]
        news = [
            new if name in begun else common + new
            for name, new in zip(names, asked[first:], strict=False)
        ]
        begun.update(names)
        ids = [f"{name} {cache.is_off}" for name in (*names, f"beside {first}")]
        outputs = llm.generate([*news, beside], GREEDY, conversation_id=ids, cache=cache)
        said += [output.completions[0].token_ids for output in outputs]
        if holes:
            make_holes(llm)
    return said


def make_holes(llm: LLM) -> None:
    stock = llm._running.engine._lifecycle.scheduler.ledger.cache.stock
    for holder in stock.holders:
        index = stock[holder]
        gone = [block for block in index if block.num_tokens in (2 * BLOCK, 3 * BLOCK)]
        for block in gone:
            index.idle.remove(block)
            index.blocks.forget(block)
        stock.orders.forget(holder, [block.key for block in gone])


@pytest.fixture(scope="module")
def plain(llama: str) -> Said:
    """What the script comes to without a cache."""
    with LLM(llama, **SHARED, kv_memory_gb=0.01, prefix_cache="off") as llm:
        return script(llm)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_of_keeping_kv_says_the_same(
    way: dict[str, Any], llama: str, plain: Said
) -> None:
    options = {**SHARED, "kv_memory_gb": 0.01, "prefix_cache": "on", **way}
    if way.get("kv_placement") == "gpu":
        del options["r_threads"]
    with LLM(llama, **options) as llm:
        assert script(llm, holes=True) == plain
        assert (llm.stats.num_gap_tokens > 0) == way.keys().isdisjoint(
            ("split_tokens", "prompt_pp")
        )


@pytest.mark.parametrize("family", ["mistral", "gemma2", "bloom", *FAMILIES * TRIES_ALL])
def test_every_family_says_the_same(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Windows, ALiBi and soft-caps know tokens by their positions."""
    options = {**SHARED, "kv_memory_gb": 0.01, "prefix_cache": "on", "prompt_attention": "s"}
    # Else no layer of this one would see the holes.
    wide = {"sliding_window": 100} if family == "mistral" else {}
    with LLM(str(tiny_checkpoint(family, **wide)), **options) as llm:
        alone = script(llm, CacheUse(is_off=True))
        assert llm.stats.num_cached_prompt_tokens == 0
        assert script(llm, holes=True) == alone
        assert llm.stats.num_gap_tokens > 0


def test_quantised_blocks_around_a_gap_are_reused_as_they_are(llama: str) -> None:
    options = {**SHARED, "kv_memory_gb": 0.01, "kv_dtype": "int8", "prefix_cache": "on"}
    with LLM(llama, **options) as llm:
        assert len(script(llm, holes=True)) == len(NEW) + (len(NEW) + 1) // 2
        assert llm.stats.num_gap_tokens > 0

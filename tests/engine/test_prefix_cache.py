"""Kept KV blocks change no token: not by hits, evictions, losses, or whoever keeps them, nor
where earlier blocks of a conversation were given up and later ones weren't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from checkpoints import FEW_FAMILIES, prompts

from fastdecode import LLM, SamplingParams
from fastdecode.conversations.conversations import Keeping
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.core.sequence import CacheUse, RequestOutput
from fastdecode.engine.stats import EngineFigures

Said: TypeAlias = "list[list[list[int]]]"
Texts: TypeAlias = "list[tuple[int, ...]]"
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
FIVE = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=5, max_tokens=9, n=3, ignore_eos=True)
ANYBODY = CacheUse()
COMMON = 130  # more than two blocks of 64
OWN = (0, 1, 17, 62, 33)
NEW = (3, 20, 1, 16, 8)
NAMES, TURNS = ("a", "b", "c", "a", "b", "a"), (90, 70, 55, 9, 30, 1)
"""Conversations, and the new tokens of their turns."""
BLOCK = 16
SHARED: dict[str, Any] = {
    "dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.02, "block_size": BLOCK,
}  # fmt: skip
WAYS: list[dict[str, Any]] = [
    {"prefill_chunk": 23},
    {"prompt_attention": "s", "prefill_chunk": 16},
    {"r_workers": 3, "prompt_attention": "s"},
    {"r_workers": 3, "lanes": 2, "max_num_sequences": 5, "prefill_chunk": 7},
    {"r_workers": 2, "lanes": 2, "schedule": "stabilized", "load_limit": 4000},
    {"length_quantile": 0.5, "schedule": "synchronized"},
    {"kv_placement": "gpu", "prefill_chunk": 33},
    {"r_workers": 2, "r_partition": "heads", "prompt_attention": "s", "prefill_chunk": 16},
    {"r_workers": 3, "split_tokens": 32, "prompt_attention": "s"},
    {"r_workers": 2, "split_tokens": 64, "prefill_chunk": 23, "lanes": 2},
    {"kv_memory_gb": 0.0002, "max_num_sequences": 2},  # 16 blocks: hardly more than one needs
    {"pp": 2, "pp_layers": "1,2"},
]
WITHOUT_GAPS = {"split_tokens", "kv_memory_gb"}
"""Options with which a prompt begins with contiguous blocks only, or with few."""


def tokens_of(outputs: list[RequestOutput]) -> Said:
    return [[list(one.token_ids) for one in output.completions] for output in outputs]


def script(llm: LLM, cache: CacheUse = ANYBODY) -> Said:
    """Requests that begin alike, the same again, and turns that go on from their answers."""
    (common,) = prompts((COMMON,), seed=3)
    asked = [common + own for own in prompts(OWN, seed=4)]
    first = llm.generate([*asked, asked[2]], [*[GREEDY] * len(asked), DRAWN], cache=cache)
    assert all(output.ok for output in first)
    again = llm.generate(asked, GREEDY, cache=cache)
    assert tokens_of(first)[:-1] == tokens_of(again)
    turns = [
        prompt + list(output.completions[0].token_ids) + new
        for prompt, output, new in zip(asked, first, prompts(NEW, seed=5), strict=False)
    ]
    return tokens_of([*first, *llm.generate(turns, GREEDY, cache=cache)])


def talk_with_gaps(llm: LLM, cache: CacheUse = ANYBODY, *, holes: bool = False) -> Texts:
    """Turns of three conversations that begin alike, two at a time, beside a
    prompt that decodes; between them all lose their second and third block."""
    said: Texts = []
    (common, beside), asked = prompts((2 * BLOCK + 5, 20), seed=2), prompts(TURNS, seed=1)
    begun: set[str] = set()
    for first in range(0, len(asked), 2):
        names = NAMES[first : first + 2]
        news = [
            new if name in begun else common + new
            for name, new in zip(names, asked[first:], strict=False)
        ]
        begun.update(names)
        ids = [f"{name} {cache.is_off}" for name in (*names, f"beside {first}")]
        outputs = llm.generate([*news, beside], FIVE, conversation_id=ids, cache=cache)
        said += [output.completions[0].token_ids for output in outputs]
        if holes:
            make_holes(llm)
    return said


def make_holes(llm: LLM) -> None:
    stock = llm._running.engine._lifecycle.scheduler.ledger.cache.stock
    for holder in stock.holders:
        index = stock[holder]
        gone = [block for block in index if block.num_tokens in (2 * BLOCK, 3 * BLOCK)]
        stock.forget(holder, index.forget(gone))


@pytest.fixture(scope="module")
def plain(llama: str) -> tuple[Said, Texts]:
    """What the scripts come to without a cache."""
    with LLM(llama, **SHARED, prefix_cache="off") as llm:
        said = script(llm), talk_with_gaps(llm)
        assert llm.stats.num_cached_prompt_tokens == 0
    return said


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_every_family_says_the_same(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Windows, ALiBi and soft-caps know tokens by their positions."""
    # Else no layer of this one would see the holes.
    wide = {"sliding_window": 100} if family == "mistral" else {}
    options = {**SHARED, "prefix_cache": "on", "prompt_attention": "s"}
    with LLM(str(tiny_checkpoint(family, **wide)), **options) as llm:
        off = CacheUse(is_off=True)
        alone = script(llm, off), talk_with_gaps(llm, off)
        assert llm.stats.num_cached_prompt_tokens == 0
        assert (script(llm), talk_with_gaps(llm, holes=True)) == alone
        assert llm.stats.num_cached_prompt_tokens > 12 * 128 and llm.stats.num_gap_tokens > 0


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_of_keeping_kv_says_the_same(
    way: dict[str, Any], llama: str, plain: tuple[Said, Texts]
) -> None:
    options = {**SHARED, "prefix_cache": "on", **way}
    if way.get("kv_placement") == "gpu":
        del options["r_threads"]
    with LLM(llama, **options) as llm:
        assert (script(llm), talk_with_gaps(llm, holes=True)) == plain
        assert llm.stats.num_cached_prompt_tokens > 0
        assert llm.stats.num_gap_tokens > 0 or WITHOUT_GAPS & way.keys()


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_quantised_blocks_are_kept_as_they_are(kv_dtype: str, llama: str) -> None:
    """What is kept says the same each time, and is reused around a gap. (What is run in
    another batch is rounded otherwise, with or without a cache.)"""
    asked = [own + own for own in prompts((40, 90), seed=6)]
    with LLM(llama, **SHARED, kv_dtype=kv_dtype, prefix_cache="on") as llm:
        llm.generate(asked, GREEDY)
        kept = [tokens_of([llm.generate(prompt, GREEDY)[0] for prompt in asked]) for _ in range(3)]
        assert kept[0] == kept[1] == kept[2]
        assert llm.stats.num_cached_prompt_tokens == 3 * (79 + 176)
        assert len(talk_with_gaps(llm, holes=True)) == len(TURNS) + (len(TURNS) + 1) // 2
        assert llm.stats.num_gap_tokens > 0


def test_many_requests_run_a_common_beginning_once_on_each_r_worker(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    """Whoever goes to another one, since the first is busy, waits there, too."""
    path = str(tiny_checkpoint("llama", max_position_embeddings=2048))
    (common,) = prompts((256,), seed=8)
    asked = [common + own for own in prompts((32,) * 48, seed=9)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.05}
    with LLM(path, **options, prefix_cache="on", r_workers=2) as llm:
        outputs = llm.generate(asked, params)
        assert llm.stats.num_prompt_tokens <= 2 * 256 + 48 * 33
    assert sorted(output.num_cached_tokens for output in outputs)[:3] == [0, 0, 256]


@pytest.mark.parametrize("cache", ["off", {"salt": "x"}, None])
def test_what_is_no_cache_use_is_refused_at_the_call(llama: str, cache: Any) -> None:
    with LLM(llama, dtype="float32", kv_memory_gb=0.01) as llm:
        for ask in (llm.generate, llm.chat):
            asked: Any = [5, 6] if ask == llm.generate else [{"role": "user", "content": "a"}]
            with pytest.raises(RequestError, match="CacheUse, not"):
                ask(asked, cache=cache)
        (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=1))
        assert output.ok, "the engine goes on"


def test_an_empty_directory_name_is_not_the_current_one() -> None:
    with pytest.raises(ConfigError, match="cache_disk is empty"):
        EngineConfig.of("dir", cache_disk="", cache_disk_gb=1.0)
    with pytest.raises(ConfigError, match="conversations is empty"):
        Keeping(conversations="")


def test_auto_keeps_blocks_everywhere() -> None:
    alone: list[dict[str, Any]] = [
        {}, {"kv_placement": "gpu"}, {"split_tokens": 64}, {"r_partition": "heads"},
        {"kv_placement": "hybrid"}, {"replicas": 1, "r_workers": 2},
    ]  # fmt: skip
    for options in alone:
        config = EngineConfig.of("dir", prefix_cache="auto", **{"kv_placement": "r", **options})
        assert config.keeps_blocks, options


def test_outputs_tell_what_was_reused_and_private_requests_leave_nothing(llama: str) -> None:
    (prompt,) = prompts((40,), seed=2)
    with LLM(llama, **SHARED, prefix_cache="on") as llm:

        def cached(**use: Any) -> int:
            (output,) = llm.generate(prompt, GREEDY, cache=CacheUse(**use))
            return output.num_cached_tokens

        assert cached(is_off=True) == 0 == cached()
        assert cached() == 32 and cached(salt="a") == 0 and cached(salt="a") == 32
        assert cached(is_off=True) == 0
        stats = llm.stats
        assert stats.num_cached_prompt_tokens == 64


def test_what_is_only_kept_is_not_told_as_used(llama: str) -> None:
    with LLM(llama, **SHARED) as llm:
        asked = prompts((COMMON,), seed=3)
        llm.generate(asked, GREEDY)
        figures: list[EngineFigures] = []
        llm.service.call(lambda running: figures.append(running.engine.figures()))
        assert [each.kv_blocks_used for each in figures[0].r_workers] == [0]
        (again,) = llm.generate(asked, GREEDY)
        assert again.num_cached_tokens > 0

"""Kept blocks on the disks of several stages: a block is there where every stage
has its layers of it, and no token changes whatever one of them lacks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from disk_talks import Said, talk_in_turns, until_some_are_fetched

from examples import TRIES_ALL
from fastdecode import LLM
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.joined_moves import JoinedMoves
from fastdecode.wire.kv.kept import keys_of, words_of
from fastdecode.wire.kv.tiers import Stocked
from rworker.tiers.disk import slot_files

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "r_threads": 1,
    "block_size": 16,
    "kv_memory_gb": 0.0001,
    "max_num_sequences": 2,
    "prefix_cache": "on",
}
KEYS = [bytes([i]) * 16 for i in range(4)]
W = HolderId(1)


@pytest.fixture(scope="module")
def plain(llama: str) -> Said:
    with LLM(llama, **{**SMALL, "prefix_cache": "off"}) as llm:
        return talk_in_turns(llm)


def on_disks(directory: Path, **options: Any) -> dict[str, Any]:
    return {**SMALL, "cache_disk": str(directory), "cache_disk_gb": 0.001, **options}


WAYS: list[dict[str, Any]] = [{"pp": 2}, {"pp": 3, "r_workers": 2, "lanes": 3}]
MORE_WAYS: list[dict[str, Any]] = [{"pp": 2, "lanes": 2}, {"pp": 3}, {"pp": 2, "r_workers": 2}]


@pytest.mark.parametrize("way", WAYS + MORE_WAYS * TRIES_ALL, ids=str)
def test_what_was_on_the_stages_disks_says_the_same(
    way: dict[str, Any], tmp_path: Path, llama: str, plain: Said
) -> None:
    options = on_disks(tmp_path, **way)
    with LLM(llama, **options) as llm:
        assert all(one == plain for one in until_some_are_fetched(llm, lambda: talk_in_turns(llm)))
        counts = llm.stats.tiers
        assert counts.num_stored > 0 and counts.num_fetched > 0 and counts.num_failed == 0
    assert len(slot_files(tmp_path)) == way["pp"] * way.get("r_workers", 1)
    with LLM(llama, **options) as llm:  # found again
        assert llm.stats.tiers.num_found == 0  # until the first step takes news
        assert talk_in_turns(llm) == plain
        assert llm.stats.tiers.num_found > 0
        assert llm.stats.num_cached_prompt_tokens > 0
    with LLM(llama, **{**options, "pp_layers": "2,1" if way["pp"] == 2 else "1,1,1"}) as llm:
        assert talk_in_turns(llm) == plain
        assert (llm.stats.tiers.num_found > 0) == (way["pp"] == 3)  # of those layers


def test_blocks_that_one_stage_has_lost_are_given_up_in_the_others(
    tmp_path: Path, llama: str, plain: Said
) -> None:
    """Its files are gone: what the others still have would fill their disks."""
    options = on_disks(tmp_path, pp=2)
    with LLM(llama, **options) as llm:
        until_some_are_fetched(llm, lambda: talk_in_turns(llm))
    shutil.rmtree(slot_files(tmp_path)[0].parent)
    with LLM(llama, **options) as llm:
        talks = until_some_are_fetched(llm, lambda: talk_in_turns(llm))
        assert all(said == plain for said in talks)
        counts = llm.stats.tiers
        assert counts.num_found == 0 and counts.num_fetched > 0 and counts.num_failed == 0


FIRST, SECOND = HolderId(0), HolderId(5)


def stocked(*keys: bytes, num_slots: int = 9, is_last: bool = True) -> Stocked:
    return Stocked(3, num_slots, words_of(keys), words_of(keys)[:, 0].astype("i4") * 0 + 5, is_last)


def test_a_block_is_there_where_all_stages_have_it() -> None:
    moves = JoinedMoves(W, [FIRST, SECOND])
    assert not moves.take(SECOND, stocked(KEYS[0], KEYS[1], is_last=False))
    assert not moves.take(FIRST, stocked(KEYS[1], KEYS[2], num_slots=7))
    assert not moves.news
    dropped = moves.take(SECOND, stocked(KEYS[3]))
    (found,) = moves.news
    assert isinstance(found, Stocked) and keys_of(found.keys) == [KEYS[1]]
    assert (found.holder, found.num_slots) == (W, 7)
    assert dropped == {FIRST: {KEYS[2]}, SECOND: {KEYS[0], KEYS[3]}}

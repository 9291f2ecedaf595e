"""Blocks that were on disk meanwhile change no token, wherever they come back,
and whatever becomes of the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import prompts
from disk_talks import GREEDY, Said, talk_in_turns, until_some_are_fetched

from examples import TRIES_ALL
from fastdecode import LLM
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError
from fastdecode.core.model.checkpoint import WEIGHTS_FILE, open_checkpoint
from fastdecode.core.model.weights_hash import weights_hash
from fastdecode.engine.setup.reach import own_disk
from rworker.tiers import disk
from rworker.tiers.disk import read_slots, slot_files

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "r_threads": 1,
    "block_size": 16,
    "kv_memory_gb": 0.0002,  # 16 blocks
    "max_num_sequences": 2,
    "prefix_cache": "on",
}
WAYS: list[dict[str, Any]] = [
    {"prefill_chunk": 23},
    {"prompt_attention": "s"},
    {"r_workers": 2, "lanes": 2, "max_num_sequences": 4, "kv_memory_gb": 0.0001},
    {"r_workers": 2, "r_partition": "heads", "kv_memory_gb": 0.0001},
    {"kv_placement": "gpu"},
    {"kv_placement": "swap", "pp": 3, "max_num_sequences": 6},
    {"r_workers": 3, "split_tokens": 32, "prompt_attention": "s", "kv_memory_gb": 0.0001},
    {"swap_threshold": 0.9, "kv_dtype": "float16", "kv_memory_gb": 0.0001},
]
MORE_WAYS: list[dict[str, Any]] = [
    {"lanes": 2, "max_num_sequences": 4, "r_workers": 2,
     "kv_memory_gb": 0.0001},
    {"r_workers": 3, "kv_memory_gb": 0.0001, "prefill_chunk": 16},
    {"r_workers": 2, "r_partition": "heads", "lanes": 2, "kv_memory_gb": 0.0001},
    {"block_size": 32, "kv_memory_gb": 0.0003},
    {"split_tokens": 32, "prompt_attention": "r", "r_workers": 2, "kv_memory_gb": 0.0001},
]  # fmt: skip


def on_disk(directory: Path, **options: Any) -> dict[str, Any]:
    """Options of an engine with little memory, and a disk."""
    return {**SMALL, "cache_disk": str(directory), "cache_disk_gb": 0.001, **options}


@pytest.fixture(scope="module")
def plain(llama: str) -> Said:
    options = {**SMALL, "prefix_cache": "off"}
    with LLM(llama, **options) as llm:
        return talk_in_turns(llm)


@pytest.mark.parametrize("way", WAYS + MORE_WAYS * TRIES_ALL, ids=str)
def test_what_was_on_disk_says_the_same(
    way: dict[str, Any], tmp_path: Path, llama: str, plain: Said
) -> None:
    options = {**SMALL, "cache_disk": str(tmp_path), "cache_disk_gb": 0.001, **way}
    with LLM(llama, **options) as llm:
        first, *again = until_some_are_fetched(llm, lambda: talk_in_turns(llm))
        assert first == plain or "kv_dtype" in way
        assert all(said == first for said in again)
        counts = llm.stats.tiers
        assert counts.num_stored > 0 and counts.num_fetched > 0 and counts.num_failed == 0
    with LLM(llama, **options) as llm:  # found again
        assert talk_in_turns(llm) == first
        assert llm.stats.tiers.num_found > 0
        assert llm.stats.num_cached_prompt_tokens > 0


def test_head_shares_that_were_swapped_are_no_ones_blocks(
    tmp_path: Path, llama: str, plain: Said
) -> None:
    """Two R-workers' files with equal headers but for whose heads they hold."""
    heads = {"r_workers": 2, "r_partition": "heads"}
    options = on_disk(tmp_path, **heads, kv_memory_gb=0.0001)
    with LLM(llama, **options) as llm:
        assert talk_in_turns(llm) == plain
    one, other = slot_files(tmp_path)
    assert one.parent != other.parent
    one.rename(tmp_path / "moved"), other.rename(one), (tmp_path / "moved").rename(other)
    with LLM(llama, **options) as llm:
        assert talk_in_turns(llm) == plain
        assert llm.stats.tiers.num_found == 0


@pytest.mark.parametrize(("kv_dtype", "num_stages"), [("auto", 1), ("int8", 1), ("auto", 2)])
def test_what_was_in_host_memory_says_the_same(
    kv_dtype: str, num_stages: int, llama: str, plain: Said
) -> None:
    device = {**SMALL, "kv_placement": "gpu", "cache_memory_gb": 0.001, "kv_dtype": kv_dtype}
    device["pp"] = num_stages
    if num_stages == 2:
        device["kv_memory_gb"] = 0.0001
    if kv_dtype == "int8":
        device["kv_memory_gb"] = 0.00004
    with LLM(llama, **device) as llm:
        talks = until_some_are_fetched(llm, lambda: talk_in_turns(llm))
        counts = llm.stats.tiers
        assert counts.num_stored > 0 and counts.num_fetched > 0 and counts.num_failed == 0
    assert all(said == plain for said in talks) or kv_dtype == "int8"


def test_a_device_finds_no_blocks_of_r_workers(tmp_path: Path, llama: str, plain: Said) -> None:
    """The blocks are laid out differently, in files of their own."""
    for placement in ("r", "gpu", "r"):
        with LLM(llama, **on_disk(tmp_path), kv_placement=placement) as llm:
            assert talk_in_turns(llm) == plain
            num_found = llm.stats.tiers.num_found
    assert num_found > 0, "of the first run"
    assert len({file.parent for file in slot_files(tmp_path)}) == 2


def test_damaged_blocks_are_run_again(tmp_path: Path, llama: str, plain: Said) -> None:
    options = {**SMALL, "cache_disk": str(tmp_path), "cache_disk_gb": 0.001}
    with LLM(llama, **options) as llm:
        assert talk_in_turns(llm) == plain
    (file,) = slot_files(tmp_path)
    header = read_slots(file)
    os.close(header[0])
    data = bytearray(file.read_bytes())
    for at in range(header[1].shape.data_start(header[1].num_slots), len(data), 700):
        data[at] ^= 1
    file.write_bytes(data)
    with LLM(llama, **options) as llm:
        assert talk_in_turns(llm) == plain
        counts = llm.stats.tiers
        assert counts.num_found > 0 and counts.num_failed > 0
        assert 0 < counts.num_damaged <= counts.num_failed, "told is why"
        assert counts.num_unread == counts.num_unwritten == counts.num_late == 0


def test_one_damaged_block_is_run_again_alone_of_what_an_idle_engine_copied(
    tmp_path: Path, llama: str
) -> None:
    options = on_disk(tmp_path, swap_threshold=1.0, kv_memory_gb=0.001)
    (prompt,) = prompts((70,), seed=3)
    with LLM(llama, **options) as llm:
        (first,) = llm.generate([prompt], GREEDY, conversation_id="c")
    (file,) = slot_files(tmp_path)
    fd, header, entries, _ = read_slots(file)
    os.close(fd)
    slots = sorted(entries, key=lambda slot: entries[slot].num_tokens)
    assert [entries[slot].num_tokens for slot in slots] == [16, 32, 48, 64, 74]
    data = bytearray(file.read_bytes())
    data[header.shape.data_start(header.num_slots) + slots[3] * header.shape.slot_bytes] ^= 1
    file.write_bytes(data)
    with LLM(llama, **options) as llm:
        (again,) = llm.generate([prompt], GREEDY)
        assert again.completions == first.completions and llm.stats.tiers.num_damaged == 1
        assert again.num_cached_tokens == llm.stats.num_cached_prompt_tokens == 48


def test_a_fine_tune_with_equal_headers_finds_nothing(tmp_path: Path, llama: str) -> None:
    base = llama
    tuned = tmp_path / "tuned"
    shutil.copytree(base, tuned)
    weights = bytearray((tuned / WEIGHTS_FILE).read_bytes())
    weights[-4096:] = weights[-8192:-4096]
    (tuned / WEIGHTS_FILE).write_bytes(weights)
    assert open_checkpoint(base).model_hash == open_checkpoint(tuned).model_hash
    (tmp_path / "kept").mkdir(mode=0o700)
    options = {**SMALL, "cache_disk": str(tmp_path / "kept"), "cache_disk_gb": 0.001}
    with LLM(str(base), **options) as llm:
        talk_in_turns(llm, 2)
    with LLM(str(tuned), **options) as llm:
        said = talk_in_turns(llm, 2)
        assert llm.stats.tiers.num_found == 0
    with LLM(str(tuned), **{**SMALL, "prefix_cache": "off"}) as llm:
        assert talk_in_turns(llm, 2) == said


def test_what_a_hash_of_weights_is_of(tmp_path: Path, llama: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    known = tmp_path / "known"
    first = weights_hash(open_checkpoint(model), known)
    assert len(list(known.iterdir())) == 1
    assert weights_hash(open_checkpoint(model), known) == first
    weights = bytearray((model / WEIGHTS_FILE).read_bytes())
    weights[-1] ^= 1
    (model / WEIGHTS_FILE).write_bytes(weights)
    assert weights_hash(open_checkpoint(model), known) != first
    (next(known.iterdir())).write_text("{")
    assert weights_hash(open_checkpoint(model), known) != first


def test_a_disk_needs_room_for_every_r_worker_of_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = SimpleNamespace(f_bavail=10, f_frsize=10**9)
    monkeypatch.setattr(disk.os, "statvfs", lambda path: free)
    asked = {"cache_disk": str(tmp_path), "cache_disk_gb": 3.0}
    config = EngineConfig.of("dir", **asked, r_workers=3)
    assert own_disk(config) is not None
    with pytest.raises(ConfigError, match=r"for 6 R-worker\(s\)"):
        own_disk(config, num_engines=2)
    with pytest.raises(ConfigError, match=r"for 4 R-worker\(s\)"):
        own_disk(EngineConfig.of("dir", **asked, r_workers=3, spare_r_workers=1))


def test_a_disk_that_is_too_small_is_an_error_at_the_start(llama: str, tmp_path: Path) -> None:
    options = {**SMALL, "cache_disk": str(tmp_path)}
    with pytest.raises(ConfigError, match="belong together"):
        LLM(llama, **options)
    with pytest.raises(ConfigError, match="are free in"):
        LLM(llama, **options, cache_disk_gb=9e5)
    with pytest.raises(ConfigError, match="needs prefix_cache='on'"):
        EngineConfig.of("dir", prefix_cache="off", cache_disk="x", cache_disk_gb=1)
    with pytest.raises(ConfigError, match="is the host tier of KV on the device"):
        EngineConfig.of("dir", cache_memory_gb=1, kv_placement="r")
    with pytest.raises(ConfigError, match="each `fastdecode r-worker`"):
        EngineConfig.of(
            "dir", r_worker_addresses=("tcp://127.0.0.1:1",), cache_disk="x", cache_disk_gb=1
        )


# Stages: a block is there where every stage has its layers of it.

STAGES: list[dict[str, Any]] = [{"pp": 2}, {"pp": 3, "r_workers": 2, "lanes": 3}]
MORE_STAGES: list[dict[str, Any]] = [{"pp": 2, "lanes": 2}, {"pp": 3}, {"pp": 2, "r_workers": 2}]


@pytest.mark.parametrize("way", STAGES + MORE_STAGES * TRIES_ALL, ids=str)
def test_what_was_on_the_stages_disks_says_the_same(
    way: dict[str, Any], tmp_path: Path, llama: str, plain: Said
) -> None:
    options = on_disk(tmp_path, kv_memory_gb=0.0001, **way)
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
    """Remove the files of one stage: blocks of the others would fill their disks."""
    options = on_disk(tmp_path, kv_memory_gb=0.0001, pp=2)
    with LLM(llama, **options) as llm:
        until_some_are_fetched(llm, lambda: talk_in_turns(llm))
    shutil.rmtree(slot_files(tmp_path)[0].parent)
    with LLM(llama, **options) as llm:
        talks = until_some_are_fetched(llm, lambda: talk_in_turns(llm))
        assert all(said == plain for said in talks)
        counts = llm.stats.tiers
        assert counts.num_found == 0 and counts.num_fetched > 0 and counts.num_failed == 0

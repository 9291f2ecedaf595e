"""The KV cache on the S-worker's device has a replica in the host's memory. When the
device fails, sequences go on from it, and no token changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_talks import talk_in_turns
from replica_jobs import FORKED, GREEDY, Tokens, run
from simulated_engines import DeviceLosses
from trouble import Trouble, give

from examples import examples
from fastdecode import LLM
from fastdecode.core.errors import WorkerError
from fastdecode.engine.setup import greeting as replicas_setup
from fastdecode.engine.step.reached_device import ReachedDevice
from fastdecode.wire.waiting import look_until_found
from sworker.host_blocks import HostBlocks
from sworker.paged import PagedKV

ON_DEVICE: dict[str, Any] = {
    "kv_placement": "gpu", "r_workers": 1, "r_threads": None, "lanes": None, "device": "cpu",
    "prefix_cache": "off",
}  # fmt: skip
SMALL: dict[str, Any] = {
    "dtype": "float32", "kv_placement": "gpu", "device": "cpu", "block_size": 16,
    "kv_memory_gb": 0.0002, "max_num_sequences": 2, "prefix_cache": "on",
}  # fmt: skip
"""16 blocks."""
MANY = 1 << 30
NUM_SEEDS = 300


@pytest.fixture(scope="module")
def said(llama: str) -> Any:
    """The same of conversations."""
    with LLM(llama, **SMALL) as llm:
        return talk_in_turns(llm)


def crash_keeper(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The R-worker that keeps the replica crashes after so many layers that it computes."""
    give(monkeypatch, {"replica": lambda: Trouble(after)})


@pytest.mark.parametrize("does", ["shares blocks", "moves blocks"])
def test_a_device_that_fails_between_layers_changes_no_token(
    llama: str, said: Any, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """It copies a block that sequences share, before a step; or kept blocks to the host."""

    def fail(*args: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("the device is full")

    with LLM(llama, **{**SMALL, "prefix_cache": "off"}) as llm:
        forked = llm.generate([[7] * 21], FORKED)[0].completions
    options: dict[str, Any] = {**SMALL, "replicas": 1}
    if does == "moves blocks":
        options["cache_memory_gb"] = 0.001
        monkeypatch.setattr(HostBlocks, "copy", fail)
    else:
        monkeypatch.setattr(PagedKV, "copy_blocks", fail)
    with LLM(llama, **options) as llm:
        assert talk_in_turns(llm) == said
        completions = llm.generate([[7] * 21], FORKED)[0].completions
        assert [x.token_ids for x in completions] == [x.token_ids for x in forked]
        assert llm.stats.replicas is not None and len(llm.stats.replicas.failovers) == 1


def test_only_tokens_that_the_replica_lacks_run_again(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lacks none of an ended step: those of the step that fails are not cached."""
    devices: list[ReachedDevice] = []
    begin_step = ReachedDevice.begin_step

    def begin(device: ReachedDevice, message: Any) -> Any:
        devices.append(device)
        return begin_step(device, message)

    def has_caught_up() -> bool | None:
        with devices[-1]._changed:
            replicas = devices[-1]._transfers._replicas.values()
            return True if all(replica._copies[0].mirror.is_whole for replica in replicas) else None

    monkeypatch.setattr(ReachedDevice, "begin_step", begin)
    DeviceLosses(monkeypatch, 40, lambda: look_until_found(has_caught_up, 30.0))
    _, stats = run(llama, **ON_DEVICE)
    resumed = stats.resumed
    assert resumed.num_sequences >= 5 and resumed.num_tokens > 50
    assert resumed.num_tokens_lost == stats.num_recomputed == 0


@pytest.mark.parametrize("tier", ["host tier", "stages' host tiers", "disk", None])
def test_conversations_go_on_with_what_the_replica_keeps(
    llama: str, said: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tier: str | None
) -> None:
    options: dict[str, Any] = {"replicas": 1}
    if tier == "stages' host tiers":
        options |= {"pp": 2, "pp_layers": "2,1"}
    if tier in ("host tier", "stages' host tiers"):
        options["cache_memory_gb"] = 0.001
    elif tier == "disk":
        options |= {"cache_disk": str(tmp_path), "cache_disk_gb": 0.001}
    losses = DeviceLosses(monkeypatch, 60)
    with LLM(llama, **{**SMALL, **options}) as llm:
        assert talk_in_turns(llm) == said
        num_reused = llm.stats.num_cached_prompt_tokens
        assert talk_in_turns(llm) == said, "new requests start on the R-worker that took over"
        assert llm.stats.num_cached_prompt_tokens > num_reused
    assert losses.num_lost == 1


def test_a_lost_keeper_costs_the_replica_alone(
    llama: str, expected: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    _crash_while_it_copies(monkeypatch, 2)
    begin_step = ReachedDevice.begin_step

    def begin(device: ReachedDevice, message: Any) -> Any:
        if message.step == 12:
            has_none = look_until_found(lambda: not device._transfers._replicas or None, 30.0)
            assert has_none
        return begin_step(device, message)

    monkeypatch.setattr(ReachedDevice, "begin_step", begin)
    tokens, stats = run(llama, **ON_DEVICE)
    assert tokens == expected
    assert stats.replicas is not None and stats.replicas.unprotected_s > 0


def _crash_while_it_copies(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The R-worker that keeps the replica crashes after so many chunks that it writes."""
    left = after

    class Crashes(Trouble):
        def place(self, place: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise MemoryError("no more memory")
            super().place(place)

    give(monkeypatch, {"replica": lambda: Crashes(MANY)})


def test_the_job_ends_when_the_keeper_is_lost_after_the_device(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    DeviceLosses(monkeypatch, 20)
    crash_keeper(monkeypatch, 12)
    with LLM(llama, **{**SMALL, "replicas": 1}) as llm:
        outputs = llm.generate([[5] * 9], GREEDY)
        assert isinstance(outputs[0].error, WorkerError)
        assert "failed: OutOfMemoryError" in outputs[0].error.message


def test_a_mistake_is_no_failure_of_the_device(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(cache: PagedKV, *args: Any) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(PagedKV, "attend", wrong)
    with LLM(llama, **{**SMALL, "replicas": 1}) as llm, pytest.raises(KeyError):
        llm.generate([[5] * 9], GREEDY)


@pytest.mark.parametrize("seed", range(examples(NUM_SEEDS, share=50)))
def test_losses_at_drawn_moments_change_no_token(
    llama: str, expected: Tokens, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The device fails at a drawn layer; in some draws the replica had ended before that,
    or the R-worker that took over crashes later."""
    chance = random.Random(seed)
    losses = DeviceLosses(monkeypatch, chance.randrange(60))
    keeper = chance.choice(["lives", "lives", "lives", "crashes early", "crashes late"])
    if keeper == "crashes early":
        _crash_while_it_copies(monkeypatch, chance.randrange(8))
    elif keeper == "crashes late":
        crash_keeper(monkeypatch, chance.randrange(60))
    chosen: dict[str, Any] = {
        "prefill_chunk": chance.choice([4, 8, 32]), "block_size": chance.choice([16, 32]),
    }  # fmt: skip
    monkeypatch.setattr(replicas_setup, "LINK_BYTES", chance.choice([1 << 16, 1 << 26]))
    tokens, stats = run(llama, **{**ON_DEVICE, **chosen})
    assert stats.replicas is not None and losses.num_lost == 1
    if keeper == "lives":
        assert len(stats.replicas.failovers) == 1
    if keeper == "lives" or all(tokens):
        assert tokens == expected

"""KV of lanes that is swapped (``--kv-placement swap``): tokens are those of one stage, and
what is copied is what is needed, once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import prompts
from device_engine import device_engine, run
from mixed_requests import OPTIONS, mixed_requests, plain, tokens
from recorded_gpu import RecordedGpu, record_places

from fastdecode import LLM, SamplingParams
from fastdecode.core.holders import HolderId
from rworker.instructions import CopyBlocks
from sworker.paged import PagedKV
from sworker.swap.swapped import SwappedKV

Make = Callable[..., Path]
SWAPPED: dict[str, Any] = {
    "dtype": "float32", "kv_memory_gb": 0.01, "kv_placement": "swap", "pp": 3,
    "pp_layers": "1,1,1",
}  # fmt: skip


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    "elsewhere", [{"instances": ["prefill", "decode"]}, {"prompt_pp": 2}], ids=str
)
def test_a_lane_has_what_others_brought_next(
    elsewhere: dict[str, Any], kv_dtype: str, llama: str
) -> None:
    """One request after another: each prompt comes to blocks that the device still has, of
    the request before."""
    apart = {**elsewhere, "prefix_cache": "off", "block_size": 16, "kv_dtype": kv_dtype}
    with LLM(llama, **SWAPPED, **apart) as llm:
        together = tokens(llm, mixed_requests())
        assert [tokens(llm, [one])[0] for one in mixed_requests()] == together
        assert kv_dtype == "int8" or together == plain(llama)
        assert llm.stats.num_handed_over == 2 * len(together)
        assert not llm.stats.num_moved


def test_blocks_that_are_copied_on_the_host_are_old_on_the_device(llama: str) -> None:
    with LLM(llama, **SWAPPED, block_size=16) as llm:
        executor = llm._running._workers.hub.connections[0]._executor  # type: ignore[attr-defined]
        kv: SwappedKV = executor._lanes.kv
        kv.hosts[0].pool[:, :, :16] = 2.5
        slot = kv.slots[0]
        slot.lane, slot.is_here[:] = 0, True
        executor.copy_blocks(CopyBlocks(HolderId(0), np.array([0]), np.array([1])))
        assert (kv.hosts[0].pool[:, :, 16:32] == 2.5).all()
        assert slot.is_here[0] and not slot.is_here[1]


def test_what_forks_copy_for_themselves_goes_to_the_host_too(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three completions in each lane share a block that isn't full; with the
    lanes beside, none of them stays on the device."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True, n=9)
    asked = [(prompts((25,))[0], params)]
    with LLM(llama, **OPTIONS) as llm:
        alone = tokens(llm, asked)
    copied: list[int] = []
    copy_blocks = PagedKV.copy_blocks

    def copy(self: PagedKV, sources: Any, targets: Any) -> None:
        copied.append(len(targets))
        copy_blocks(self, sources, targets)

    monkeypatch.setattr(PagedKV, "copy_blocks", copy)
    with LLM(llama, **SWAPPED, block_size=16, max_num_sequences=9) as llm:
        assert tokens(llm, asked) == alone
        assert sum(copied) >= 3 * 2, "in three stages"


def test_what_forks_copy_has_room(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one of a block's tokens, for each of a lane's sequences."""
    rooms, stored = [], []
    make, leave = SwappedKV.__init__, SwappedKV.leave

    def made(self: SwappedKV, *args: Any, most_tokens: int, **more: Any) -> None:
        rooms.append(most_tokens)
        make(self, *args, most_tokens=most_tokens, **more)

    def left(self: SwappedKV, tokens: Any) -> None:
        stored.append(len(tokens))
        leave(self, tokens)

    monkeypatch.setattr(SwappedKV, "__init__", made)
    monkeypatch.setattr(SwappedKV, "leave", left)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=8, ignore_eos=True, n=9)
    asked = [(prompts((31,))[0], params)]
    with LLM(llama, **SWAPPED, block_size=16, max_num_sequences=9, max_step_tokens=10) as llm:
        tokens(llm, asked)
    assert len(rooms) == 3
    assert 10 < max(stored) <= min(rooms)


@dataclass
class Seen:
    """What one stage's swapped KV was asked for, and what a simple count makes of it."""

    swap: SwappedKV
    log: list[tuple[str, int]] = field(default_factory=list)
    needed: int = 0  # blocks that steps saw, of lanes that had left the device since
    stored: int = 0
    lately: list[int] = field(default_factory=list)

    def enter(self, lane: int, num_blocks: int) -> None:
        self.log.append(("enter", lane))
        assert lane not in self.lately[-2:], "three lanes take turns"
        self.needed += num_blocks
        self.lately.append(lane)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, Seen]:
    """Of each stage, once it is there; by the object that it is."""
    stages: dict[int, Seen] = {}
    enter, leave, prefetch = SwappedKV.enter, SwappedKV.leave, SwappedKV.prefetch

    def of(swap: SwappedKV) -> Seen:
        return stages.setdefault(id(swap), Seen(swap))

    def entered(self: SwappedKV, lane: int, past: Any) -> Any:
        of(self).enter(lane, len(past))
        return enter(self, lane, past)

    def left(self: SwappedKV, tokens: Any) -> None:
        of(self).stored += len(tokens)
        leave(self, tokens)

    def brought(self: SwappedKV, lane: int, blocks: Any) -> None:
        of(self).log.append(("bring", lane))
        prefetch(self, lane, blocks)

    monkeypatch.setattr(SwappedKV, "enter", entered)
    monkeypatch.setattr(SwappedKV, "leave", left)
    monkeypatch.setattr(SwappedKV, "prefetch", brought)
    return stages


def test_each_block_in_once_each_token_out_once(llama: str, seen: dict[int, Seen]) -> None:
    """Two sequences in each of three lanes, all of the same length."""
    num_prompt, num_tokens, block_size = 20, 30, 16
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    asked = [(prompt, params) for prompt in prompts((num_prompt,) * 6, seed=3)]
    options = {"block_size": block_size, "max_num_sequences": 6, "prefix_cache": "off"}
    with LLM(llama, **SWAPPED, **options) as llm:
        tokens(llm, asked)
        told = llm.stats.swap
    assert len(seen) == 3
    assert any(told is stage.swap.figures for stage in seen.values())
    # The last token that is drawn is never stored.
    lengths = range(num_prompt, num_prompt + num_tokens - 1)
    of_a_lane = sum(2 * -(-length // block_size) for length in lengths)
    for stage in seen.values():
        figures = stage.swap.figures
        unused = sum(int(slot.is_unused.sum()) for slot in stage.swap.slots)
        assert stage.needed == 3 * of_a_lane
        assert figures.num_blocks_in - figures.num_unused_blocks - unused == stage.needed
        assert figures.num_unused_blocks + unused <= 2 * 2 * 4, "of lanes that had ended"
        assert figures.num_late_blocks == 0
        assert figures.num_tokens_out == stage.stored == 6 * (num_prompt + num_tokens - 1)
        num_steps = sum(kind == "enter" for kind, _ in stage.log)
        assert figures.num_copies_out == figures.num_steps == num_steps >= 3 * num_tokens
        # Each lane is brought as soon as all of the one before it is queued.
        for place, (kind, lane) in enumerate(stage.log):
            if kind == "enter" and place > 3:
                assert stage.log[place - 1] == ("bring", lane)


class Abort(BaseException):
    pass


def on_recorded_gpu(
    path: Path, mistake: Callable[[SwappedKV], None], last_prefetch: int | None = None
) -> RecordedGpu:
    """Prompts in chunks, and tokens, of a whole engine's three lanes; after which
    its memory is somebody else's. ``last_prefetch``: aborted behind that one."""
    gpu = RecordedGpu()
    lent: list[SwappedKV] = []

    def see(attention: Any) -> None:
        swap: SwappedKV = attention.swap.kv
        lent.append(swap)
        if last_prefetch is not None:
            abort_behind(swap, last_prefetch)
        for slot in swap.slots:
            gpu.stays(slot.cache.pool)
        for host in swap.hosts:
            record_places(gpu, host)
        mistake(swap)

    how = {"kv_placement": "swap", "lanes": 3, "captures": True, "see": see}
    with (
        nullcontext() if last_prefetch is None else pytest.raises(Abort),
        device_engine(path, gpu, **how) as engine,
    ):
        run(engine, (3, 22, 11, 17, 9), 4)
    for slot in lent[0].slots:
        gpu.lend_again(slot.cache.pool)
    for host in lent[0].hosts:
        for part in host.parts:
            gpu.write(part.numpy(), "other pages")
    return gpu


def abort_behind(swap: SwappedKV, last_prefetch: int) -> None:
    prefetch = swap.prefetch

    def brought(lane: int, blocks: Any) -> None:
        prefetch(lane, blocks)
        if swap.figures.num_prefetches == last_prefetch:
            raise Abort

    swap.prefetch = brought  # type: ignore[method-assign]


def launched_before_it_is_there(swap: SwappedKV) -> None:
    swap.wait = lambda layer: None  # type: ignore[method-assign]


def overwritten_while_it_leaves(swap: SwappedKV) -> None:
    leave = swap.leave

    def left(slots: Any) -> None:
        leave(slots)
        for slot in swap.slots:
            slot.gathered = None

    swap.leave = left  # type: ignore[method-assign]


def given_back_while_it_is_copied(swap: SwappedKV) -> None:
    swap.close = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("mistake", [launched_before_it_is_there, overwritten_while_it_leaves])
def test_swap_mistakes_are_races(mistake: Any, tiny_checkpoint: Make) -> None:
    path = tiny_checkpoint("llama", num_hidden_layers=4)
    assert on_recorded_gpu(path, mistake).checker.races


def test_nothing_is_under_way_when_memory_is_given_back(tiny_checkpoint: Make) -> None:
    path = tiny_checkpoint("llama", num_hidden_layers=4)
    checker = on_recorded_gpu(path, lambda swap: None, last_prefetch=5).checker
    assert checker.num_accesses > 500
    assert checker.races == []
    races = on_recorded_gpu(path, given_back_while_it_is_copied, last_prefetch=5).checker.races
    assert any(race.startswith("memory that was given back") for race in races)
    assert any(race.startswith("other pages on host and aten::copy_") for race in races)

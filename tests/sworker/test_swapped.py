"""Swapped KV by itself: whatever lanes do, they find what they stored; what is
copied is what is missing; and nothing is read or written too early."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_gpu import RecordedGpu, record_places

from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker.paged import PagedKV
from sworker.swap import swapped
from sworker.swap.swapped import SwappedKV

CPU = torch.device("cpu")
NUM_LAYERS, BLOCK, NUM_BLOCKS = 3, 16, 6
SPEC = AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=8, scale=1.0)


@dataclass
class Lanes:
    """Lanes that store and read, beside what each ought to have."""

    num_lanes: int = 3
    dtype: DType = DType.FLOAT32
    gpu: Any = None
    num_layers: int = NUM_LAYERS
    most_tokens: int = 40
    found: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """What was read, and what ought to have been."""
    copied: int = 0  # blocks that a step needed and weren't there from the lane's last step

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(3)
        self.kv = KVSpec(self.num_layers, 2, 8, self.dtype, BLOCK)
        specs = [SPEC] * self.num_layers
        self.swap = SwappedKV(
            self.kv, specs, NUM_BLOCKS, self.num_lanes, CPU, self.gpu,
            most_tokens=self.most_tokens,
        )  # fmt: skip
        self.own = [PagedKV(self.kv, specs, NUM_BLOCKS, CPU) for _ in range(self.num_lanes)]
        self.lengths = [0] * self.num_lanes
        self.lately: list[int] = []
        for cache in [slot.cache for slot in self.swap.slots] + self.own:
            for memory in (cache.pool, cache.scales):
                if memory is not None and isinstance(self.gpu, RecordedGpu):
                    self.gpu.stays(memory)
        for host in self.swap.hosts if isinstance(self.gpu, RecordedGpu) else ():
            record_places(self.gpu, host)

    def past(self, lane: int) -> np.ndarray:
        """A lane's tokens fill blocks from its last to its first."""
        num_blocks = -(-self.lengths[lane] // BLOCK)
        return np.arange(NUM_BLOCKS - num_blocks, NUM_BLOCKS)

    def step(self, lane: int, num_new: int, next_lane: int | None = None) -> None:
        """A lane's step, after which another lane's KV is brought."""
        first = self.lengths[lane]
        num_new = min(num_new, NUM_BLOCKS * BLOCK - first)
        past = self.past(lane)
        if lane not in self.lately[-2:]:
            self.copied += len(past)
        places = np.arange(first, first + num_new)
        tokens = (NUM_BLOCKS - 1 - places // BLOCK) * BLOCK + places % BLOCK
        slots = torch.from_numpy(tokens)
        cache = self.swap.enter(lane, past)
        shape = (num_new, 2, 8)
        for layer in range(self.num_layers):
            self.swap.wait(layer)
            k, v = (torch.from_numpy(self.random.standard_normal(shape, np.float32)) for _ in "kv")
            places = torch.arange(first)
            past = (NUM_BLOCKS - 1 - places // BLOCK) * BLOCK + places % BLOCK
            own = self.own[lane]
            for mine, whole in ((cache.pool, own.pool), (cache.scales, own.scales)):
                if mine is not None and whole is not None:
                    self.found.append((mine[layer][:, past], whole[layer][:, past]))
            for each in (cache, self.own[lane]):
                each.store(layer, k, v, slots)
        self.lengths[lane] += num_new
        self.swap.leave(tokens)
        self.lately = [*(x for x in self.lately[-2:] if x != lane), lane]
        if next_lane is not None:
            self.swap.prefetch(next_lane, self.past(next_lane))

    def check(self) -> None:
        assert self.found
        for mine, own in self.found:
            torch.testing.assert_close(mine, own, rtol=0, atol=0)


def in_turns(lanes: Lanes, num_rounds: int = 4) -> Lanes:
    """Each stores a prompt, and then a token in each of its steps."""
    num_lanes = lanes.num_lanes
    for number in range(num_rounds):
        for lane in range(num_lanes):
            lanes.step(lane, 1 if number else 20 + lane, (lane + 1) % num_lanes)
    return lanes


def test_two_lanes_stay_where_they_are() -> None:
    lanes = in_turns(Lanes(2))
    lanes.check()
    assert lanes.swap.figures.num_blocks_in == 0
    assert lanes.swap.figures.num_tokens_out == sum(lanes.lengths)


def test_a_lane_that_was_not_foreseen_is_brought_late() -> None:
    lanes = in_turns(Lanes(4))
    lanes.step(2, 1, 1)  # 0 was brought in vain
    lanes.step(1, 1, 0)
    lanes.check()
    figures = lanes.swap.figures
    assert figures.num_late_blocks == figures.num_unused_blocks == 2


Steps = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 9), st.none() | st.integers(0, 3)), min_size=1
)


@given(Steps, st.sampled_from([DType.FLOAT32, DType.INT8]), st.booleans())
@settings(deadline=None)
def test_swapped_lanes_in_any_order(
    steps: list[tuple[int, int, int | None]], dtype: DType, on_gpu: bool
) -> None:
    gpu = RecordedGpu() if on_gpu else None
    with gpu or contextlib.nullcontext():
        lanes = Lanes(4, dtype, gpu=gpu)
        for lane, num_new, next_lane in steps:
            if lanes.lengths[lane] < NUM_BLOCKS * BLOCK:
                lanes.step(lane, num_new, next_lane)
    assert gpu is None or gpu.checker.races == []
    figures, unused = lanes.swap.figures, sum(int(x.is_unused.sum()) for x in lanes.swap.slots)
    for mine, own in lanes.found:
        torch.testing.assert_close(mine, own, rtol=0, atol=0)
    assert figures.num_tokens_out == sum(lanes.lengths)
    seen = figures.num_blocks_in - figures.num_unused_blocks - unused
    assert 0 <= figures.num_late_blocks <= seen


def recorded(
    mistake: Callable[[Lanes], None] = lambda lanes: None,
    most_tokens: int = 40,
    dtype: DType = DType.FLOAT32,
) -> Lanes:
    """Run lanes in turns, then one that was not prefetched, and one that has nothing yet."""
    with RecordedGpu() as gpu:
        lanes = Lanes(5, dtype, gpu=gpu, most_tokens=most_tokens)
        mistake(lanes)
        for number in range(4):
            for lane in range(4):
                lanes.step(lane, 1 if number else 20 + lane, (lane + 1) % 4)
        lanes.step(4, 3, 2)
        lanes.step(1, 1, 3)
        for lane, next_lane in ((3, 0), (0, 2), (3, 1)):
            lanes.step(lane, 1, next_lane)
    return lanes


def lent_again_while_it_leaves(lanes: Lanes) -> None:
    lanes.gpu.current_stream().wait_stream = lambda stream: None


def test_memory_is_taken_once_or_grows_when_nobody_uses_it() -> None:
    lanes = recorded()
    assert lanes.gpu.calls["room"] == 2, "what leaves, and blocks that come scattered"
    assert lanes.gpu.calls["pinned"] == 5 + 2, "each lane's, and what leaves each slot"
    grown = recorded(most_tokens=10)
    grown.check()
    assert grown.gpu.calls["room"] > 2
    assert grown.gpu.checker.races == []
    assert recorded(lent_again_while_it_leaves, most_tokens=10).gpu.checker.races


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks come in gathers, two at a time, however they lie."""
    monkeypatch.setattr(swapped, "MAX_RUNS", 0)
    monkeypatch.setattr(swapped, "SCATTERED_BYTES", 2 * 2 * BLOCK * 2 * 8 * 4)


@pytest.mark.usefixtures("gathers")
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.INT8])
def test_gathered_blocks_are_what_was_stored_and_no_races(dtype: DType) -> None:
    lanes = recorded(dtype=dtype)
    lanes.check()
    assert lanes.gpu.calls["aten::index_copy_"] > 0
    assert lanes.gpu.checker.races == [] and lanes.gpu.checker.unkept == []


def test_scattered_blocks_come_in_one_gather_a_layer() -> None:
    """Before: a copy for each run, K or V; two slicings each."""
    gpu, num_blocks = RecordedGpu(), 200
    kv = KVSpec(NUM_LAYERS, 2, 8, DType.BFLOAT16, BLOCK)
    with gpu:
        swap = SwappedKV(kv, [SPEC] * NUM_LAYERS, num_blocks, 3, CPU, gpu, most_tokens=9)
        swap.enter(0, np.empty(0, np.int64))
        gpu.calls.clear()
        swap.prefetch(1, np.arange(0, num_blocks, 2))
    assert gpu.calls["aten::index_select"] == gpu.calls["aten::index_copy_"] == NUM_LAYERS
    assert gpu.calls["aten::copy_"] == 0 and gpu.calls["upload"] == 1
    assert swap.figures.num_blocks_in == num_blocks // 2


def test_without_a_mapping_scattered_blocks_come_run_by_run() -> None:
    gpu = RecordedGpu()
    kv = KVSpec(NUM_LAYERS, 2, 8, DType.BFLOAT16, BLOCK)
    with gpu, mock.patch.object(gpu, "mapped", return_value=None):
        swap = SwappedKV(kv, [SPEC] * NUM_LAYERS, 20, 3, CPU, gpu, most_tokens=9)
        swap.enter(0, np.empty(0, np.int64))
        gpu.calls.clear()
        swap.prefetch(1, np.arange(0, 20, 2))
    assert gpu.calls["aten::copy_"] == 10 * 2 * NUM_LAYERS

"""The scheduler under every policy, over random traffic: lanes that finish in any order, early ends, forks, cancelled
requests and lost R-workers. Plans are carried out on the R-workers' real KV stores."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traffic import (
    BLOCK_SIZE,
    MAX_SEQUENCES,
    MAX_STEP_TOKENS,
    Harness,
    Requests,
    Store,
    options,
    play,
    relaxed,
    traffic,
)

from fastdecode.core.errors import CapacityError
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.options import COLD_STARTS, MODES

WORKER_BLOCKS = (12, 20)


@relaxed
@given(st.data(), traffic(forks=True), st.sampled_from(MODES), st.integers(1, 3), st.booleans())
def test_every_policy_serves_everyone_within_its_blocks(
    data: st.DataObject,
    requests: Requests,
    mode: str,
    num_lanes: int,
    lose: bool,
) -> None:
    scheduler = make_scheduler(options(mode, num_lanes), WORKER_BLOCKS, BLOCK_SIZE)
    harness = Harness(scheduler, [Store(blocks) for blocks in WORKER_BLOCKS], num_lanes)
    play(data, harness, requests, lose=lose)
    assert harness.num_suspended == 0


@relaxed
@given(st.data(), traffic(forks=True), st.integers(1, 2), st.sampled_from(COLD_STARTS), st.integers(150, 320))
def test_the_load_never_exceeds_its_limit_when_lengths_are_bounds(
    data: st.DataObject,
    requests: Requests,
    num_lanes: int,
    cold_start: str,
    load_limit: int,
) -> None:
    chosen = options(
        "stabilized", num_lanes, load_limit=load_limit, cold_start=cold_start, interval=8, learn_lengths=False
    )
    scheduler = make_scheduler(chosen, WORKER_BLOCKS, BLOCK_SIZE)
    limits = [control.limit for control in scheduler._lanes[0].admission._controls]  # type: ignore[attr-defined]
    assert sum(limits) * num_lanes <= load_limit
    harness = Harness(scheduler, [Store(blocks) for blocks in WORKER_BLOCKS], num_lanes, limits)
    play(data, harness, requests, lose=False)


@relaxed
@given(st.data(), traffic(forks=True), st.sampled_from(MODES), st.integers(1, 3), st.booleans())
def test_wrong_forecasts_cost_recomputation_and_nothing_else(
    data: st.DataObject,
    requests: Requests,
    mode: str,
    num_lanes: int,
    lose: bool,
) -> None:
    scheduler = make_scheduler(options(mode, num_lanes, length_quantile=0.1), WORKER_BLOCKS, BLOCK_SIZE)
    scheduler._lengths._min_observed = 1  # type: ignore[attr-defined]
    harness = Harness(scheduler, [Store(blocks) for blocks in WORKER_BLOCKS], num_lanes)
    harness.arrive(1, (1,), 1)
    harness.run_out()  # from now on, everyone is expected to end after one token
    play(data, harness, requests, lose=lose)


def test_the_latest_arrivals_are_suspended_and_resume_where_they_were() -> None:
    scheduler = make_scheduler(options("greedy", 1, length_quantile=0.1), (6,), BLOCK_SIZE)
    scheduler._lengths._min_observed = 1  # type: ignore[attr-defined]
    harness = Harness(scheduler, [Store(6)], 1)
    for length in (1, 9):  # what is expected of the others: 1 token, and 9 of those that get further
        harness.arrive(1, (length,), length)
    harness.run_out()
    for _ in range(3):
        harness.arrive(4, (12,), 12)  # 4 blocks each in the end, 1 at first
    suspended: list[int] = []
    while harness.live:
        plan = scheduler.plan(0)
        for start in plan.starts:
            resumed = start.sequence.sequence_id in suspended
            assert start.num_reserved_tokens == (start.sequence.max_cached_tokens if resumed else 4)
        suspended += [suspend.sequence.sequence_id for suspend in plan.suspends]
        harness._begin(0, plan)
        harness._complete(plan)
    assert suspended[0] == 4 and 2 not in suspended
    assert [harness.finished[i] for i in (2, 3, 4)] == [[1000 * i + k for k in range(12)] for i in (2, 3, 4)]
    assert list(harness.finished) == [0, 1, 2, 3, 4]


def test_a_sequence_above_a_given_limit_is_refused_by_name() -> None:
    scheduler = make_scheduler(options("stabilized", 1, load_limit=30), WORKER_BLOCKS, BLOCK_SIZE)
    harness = Harness(scheduler, [Store(blocks) for blocks in WORKER_BLOCKS], 1)
    with pytest.raises(CapacityError, match=r"grow to 31 cached.*load limit of 30 leaves.*--load-limit") as caught:
        scheduler.add([Sequence.of(0, Request("r", (1,) * 20, SamplingParams(), 12, seed=0), 0)])
    assert caught.value.code == "exceeds_load_limit"
    assert scheduler.num_waiting == 0
    assert harness.arrive(10, (5,), 5)


def test_a_limit_that_lanes_share_is_told_with_both_numbers() -> None:
    scheduler = make_scheduler(options("stabilized", 2, load_limit=50), (20,), BLOCK_SIZE)
    with pytest.raises(
        CapacityError, match="load limit of 50, shared out to 2 lanes, leaves it no more than 25 on any"
    ):
        scheduler.add([Sequence.of(0, Request("r", (1,) * 20, SamplingParams(), 12, seed=0), 0)])


def test_a_sequence_above_a_measured_limit_runs_alone() -> None:
    @dataclass(frozen=True)
    class Slow:
        def s_part_s(self, num_tokens: int) -> float:
            return 1.0

        def r_part_s(self, worker: int, load_tokens: int) -> float:
            return load_tokens / 10

    two_at_once = replace(options("stabilized", 1), max_num_sequences=2)
    scheduler = make_scheduler(two_at_once, (20,), BLOCK_SIZE, Slow())
    harness = Harness(scheduler, [Store(20)], 1)
    for length in (1, 1, 1, 1, 30):
        harness.arrive(length, (2,), 2)
    harness.run_out()
    assert harness.together == {(0, 1), (2, 3), (4,)}


def test_what_ends_early_makes_room_at_once() -> None:
    scheduler = make_scheduler(options("stabilized", 1, load_limit=20, cold_start="none"), (20,), BLOCK_SIZE)
    harness = Harness(scheduler, [Store(20)], 1, [20])
    harness.arrive(1, (3,), 20)
    harness.arrive(1, (20,), 20)
    first, second = harness.live.values()
    for step in range(3):
        harness.turn(0)
        harness.turn(0)
        assert (second.worker is None) and (first.sequence_id in harness.live) == (step < 2)
    harness.turn(0)
    assert second.worker == 0


def test_what_a_cancelled_prompt_had_booked_holds_nobody_up() -> None:
    scheduler = make_scheduler(options("greedy", 1), WORKER_BLOCKS, BLOCK_SIZE)
    harness = Harness(scheduler, [Store(blocks) for blocks in WORKER_BLOCKS], 1)
    for _ in range(2):
        harness.arrive(24, (1,), 1)
    harness.turn(0)
    harness.turn(0)
    for sequence in list(harness.live.values()):
        harness.cancel(sequence)
    harness.arrive(24, (1,), 1)
    assert harness.turn(0), "the only sequence starts at once"


def test_prompts_never_hold_up_decoding() -> None:
    scheduler = make_scheduler(options("greedy", 1), WORKER_BLOCKS, BLOCK_SIZE)
    harness = Harness(scheduler, [Store(blocks) for blocks in WORKER_BLOCKS], 1)
    harness.arrive(1, (12,), 12)
    harness.turn(0)
    harness.turn(0)
    for _ in range(3):
        harness.arrive(20, (2,), 2)
    for _ in range(5):
        plan = scheduler.plan(0)
        assert any(chunk.sequence.sequence_id == 0 and chunk.num_tokens == 1 for chunk in plan.chunks)
        prompts = [chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1]
        assert sum(prompts) <= MAX_STEP_TOKENS - MAX_SEQUENCES
        harness._begin(0, plan)
        harness._complete(plan)

"""The scheduler, with sequences that are split over R-workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_traffic import Requests, play, relaxed, traffic
from remembering_store import BLOCK_SIZE, Store
from schedule_choices import LongestLengths, options, without_headroom
from traffic import Harness

from fastdecode.core.errors import CapacityError
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.options import MODES

SPLIT_BLOCKS = (5, 8, 6)
SPLITS = st.sampled_from((4, 8, 12, 16))


@relaxed
@given(
    st.data(),
    traffic(forks=True),
    st.sampled_from(MODES),
    st.integers(1, 3),
    st.booleans(),
    SPLITS,
    st.booleans(),
)
def test_split_sequences_are_served_beyond_the_room_of_any_r_worker(
    data: st.DataObject,
    requests: Requests,
    mode: str,
    num_lanes: int,
    lose: bool,
    split_tokens: int,
    forecast: bool,
) -> None:
    chosen = options(
        mode, num_lanes, split_tokens=split_tokens, length_quantile=0.1 if forecast else None
    )
    scheduler = make_scheduler(chosen, SPLIT_BLOCKS, BLOCK_SIZE)
    scheduler._lengths._min_observed = 1  # type: ignore[attr-defined]
    harness = Harness(scheduler, [Store(blocks) for blocks in SPLIT_BLOCKS], num_lanes)
    harness.arrive(1, (1,), 1)
    harness.run_out()
    assert harness.arrive(24, (24,), 24), "47 tokens, in 12 blocks"
    play(data, harness, requests, lose=lose)
    assert forecast or harness.num_suspended == 0


@relaxed
@given(st.data(), traffic(forks=True), st.integers(1, 2), st.integers(60, 320), SPLITS)
def test_each_part_counts_as_load_where_it_is(
    data: st.DataObject, requests: Requests, num_lanes: int, load_limit: int, split_tokens: int
) -> None:
    chosen = options(
        "stabilized",
        num_lanes,
        load_limit=load_limit,
        split_tokens=split_tokens,
    )
    scheduler = make_scheduler(chosen, SPLIT_BLOCKS, BLOCK_SIZE, lengths=LongestLengths())
    limits = [control.limit for control in scheduler.lanes[0].admission._controls]  # type: ignore[attr-defined]
    harness = Harness(scheduler, [Store(blocks) for blocks in SPLIT_BLOCKS], num_lanes, limits)
    play(data, harness, requests, lose=False)


def test_parts_on_one_r_worker_are_weighed_together() -> None:
    chosen, lengths = options("stabilized", 1, load_limit=30, split_tokens=8), LongestLengths()
    scheduler = without_headroom(make_scheduler(chosen, (20,), BLOCK_SIZE, lengths=lengths))
    harness = Harness(scheduler, [Store(20)], 1, [30])
    assert not harness.arrive(20, (12,), 12), "31 tokens, in parts of 8, are above the limit of 30"
    assert harness.arrive(4, (13,), 13) and harness.arrive(4, (13,), 13)
    first, second = harness.live.values()
    harness.turn(0)
    assert first.residence.holders == (0, 0) and second.residence is None, (
        "16 tokens in the end; two are above the limit"
    )
    harness.run_out()


def test_what_load_limits_leave_no_room_for_is_refused_by_name() -> None:
    chosen = options("stabilized", 1, load_limit=100, split_tokens=64)
    scheduler = make_scheduler(chosen, (100,), BLOCK_SIZE)
    with pytest.raises(
        CapacityError, match=r"grow to 249 cached.*no more than 100 on all.*in parts of 64"
    ) as caught:
        scheduler.add([Sequence.of(0, Request("r", (1,) * 200, SamplingParams(), 50, seed=0), 0)])
    assert caught.value.code == "exceeds_load_limit"


def test_a_split_sequence_above_measured_limits_runs_alone() -> None:
    class Slow:
        def s_part_s(self, num_tokens: int) -> float:
            return 1.0

        def r_part_s(self, worker: int, load_tokens: int) -> float:
            return load_tokens / 10

    two_at_once = options("stabilized", 1, split_tokens=8, max_num_sequences=2)
    scheduler = make_scheduler(two_at_once, (10, 10), BLOCK_SIZE, Slow())
    harness = Harness(scheduler, [Store(10), Store(10)], 1)
    for length in (1, 1, 60):
        harness.arrive(length, (2,), 2)
    harness.run_out()
    assert harness.together == {(0, 1), (2,)}


def test_a_split_sequence_ends_once() -> None:
    """Early, and that is noted once, not once for each part."""
    chosen = options("stabilized", 1, split_tokens=8)
    scheduler = make_scheduler(chosen, (20, 20), BLOCK_SIZE, lengths=LongestLengths())
    headroom = scheduler.lanes[0].admission._headroom  # type: ignore[attr-defined]
    harness = Harness(scheduler, [Store(20), Store(20)], 1)
    harness.arrive(4, (1,), 24)
    harness.run_out()
    assert headroom._reached_end == 1 - 1 / 32
    assert headroom._peak == 8, "limits are an R-worker's"


def test_queries_of_all_parts_fit_into_a_message() -> None:
    """24 tokens in parts of 4: with 3 queries for closed parts on each of two
    R-workers, one such sequence runs."""
    scheduler = make_scheduler(
        options("greedy", 1, split_tokens=4, max_closed_rows=3), (20, 20), BLOCK_SIZE
    )
    harness = Harness(scheduler, [Store(20), Store(20)], 1)
    assert harness.arrive(20, (5,), 5) and harness.arrive(20, (5,), 5)
    while harness.live:
        assert scheduler.num_running <= 1
        chunks = harness.begin(0).chunks
        for worker in (0, 1):
            places = [
                chunk.sequence.residence.holders[: chunk.sequence.num_cached // 4]
                for chunk in chunks
            ]
            assert (
                sum(
                    chunk.num_tokens * at.count(worker)
                    for chunk, at in zip(chunks, places, strict=True)
                )
                <= 3
            )
        harness.complete(0)
    with pytest.raises(
        CapacityError, match=r"29 cached tokens, 8 parts of 4.*can go to 7 parts.*split_tokens"
    ):
        scheduler.add([Sequence.of(9, Request("r", (1,) * 20, SamplingParams(), 10, seed=0), 0)])

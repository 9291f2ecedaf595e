"""The scheduler under every policy, over random traffic: lanes that finish in
any order, early ends, forks, cancelled requests and lost R-workers. Plans are
carried out on the R-workers' real KV stores, also of sequences that are split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_traffic import Requests, play, relaxed, traffic
from remembering_store import BLOCK_SIZE, Store
from schedule_choices import (
    MAX_SEQUENCES,
    MAX_STEP_TOKENS,
    LongestLengths,
    options,
    without_headroom,
)
from traffic import Harness

from fastdecode.core.errors import CapacityError
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.schedule.life.sequences import SequenceState
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.options import MODES
from fastdecode.schedule.reserving.starts import OwnHolders

WORKER_BLOCKS = (12, 20)


SPLIT_BLOCKS = (5, 8, 6)
SPLITS = st.sampled_from((None, 4, 8, 12, 16))


@relaxed
@given(
    st.data(),
    traffic(forks=True),
    st.sampled_from(MODES),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1),
    SPLITS,
)
def test_scheduler_serves_all_requests(
    data: st.DataObject,
    requests: Requests,
    mode: str,
    num_lanes: int,
    forecast: bool,
    lose: bool,
    opening_steps: int,
    split_tokens: int | None,
) -> None:
    """Wrong forecasts and late answers cost recomputation only.

    A split sequence may be larger than any R-worker."""
    blocks = WORKER_BLOCKS if split_tokens is None else SPLIT_BLOCKS
    chosen = options(
        mode, num_lanes, length_quantile=0.1 if forecast else None, split_tokens=split_tokens
    )
    scheduler = make_scheduler(chosen, blocks, BLOCK_SIZE, opening_steps=opening_steps)
    scheduler._lengths._min_observed = 1  # type: ignore[attr-defined]
    late = st.sampled_from((True, True, False))
    harness = Harness(scheduler, [Store(each) for each in blocks], num_lanes)
    if opening_steps:
        harness.is_late = lambda: data.draw(late) if harness.num_arrived <= 12 else False
    harness.arrive(1, (1,), 1)
    harness.run_out()  # every later sequence is expected to end after one token
    if split_tokens is not None:
        assert harness.arrive(24, (24,), 24), "47 tokens, in 12 blocks"
    play(data, harness, requests, lose=lose)
    assert forecast or harness.num_suspended == 0


@relaxed
@given(st.data(), traffic(forks=True), st.integers(1, 2), st.integers(150, 320), SPLITS)
def test_load_is_within_its_limit_when_lengths_are_bounds(
    data: st.DataObject,
    requests: Requests,
    num_lanes: int,
    load_limit: int,
    split_tokens: int | None,
) -> None:
    blocks = WORKER_BLOCKS if split_tokens is None else SPLIT_BLOCKS
    chosen = options("stabilized", num_lanes, load_limit=load_limit, split_tokens=split_tokens)
    scheduler = make_scheduler(chosen, blocks, BLOCK_SIZE, lengths=LongestLengths())
    limits = [control.limit for control in scheduler.lanes[0].admission._controls]  # type: ignore[attr-defined]
    assert sum(limits) * num_lanes <= load_limit
    harness = Harness(scheduler, [Store(each) for each in blocks], num_lanes, limits)
    play(data, harness, requests, lose=False)


@relaxed
@given(st.data(), traffic(forks=True), st.integers(2, 3), st.integers(150, 320))
def test_a_lane_with_a_holder_of_its_own_has_all_of_its_load_there(
    data: st.DataObject, requests: Requests, num_lanes: int, load_limit: int
) -> None:
    chosen, blocks = options("stabilized", num_lanes, load_limit=load_limit), (80,) * num_lanes
    scheduler = make_scheduler(
        chosen, blocks, BLOCK_SIZE, lengths=LongestLengths(), places=OwnHolders()
    )
    limits = [load_limit // num_lanes] * num_lanes
    for lane in scheduler.lanes:
        assert lane.admission._controls[lane.index].limit == limits[0]  # type: ignore[attr-defined]
    harness = Harness(scheduler, [Store(each) for each in blocks], num_lanes, limits)
    play(data, harness, requests, lose=False)


def test_the_latest_arrivals_are_suspended_and_resume_where_they_were() -> None:
    scheduler = make_scheduler(options("greedy", 1, length_quantile=0.1), (6,), BLOCK_SIZE)
    scheduler._lengths._min_observed = 1  # type: ignore[attr-defined]
    harness = Harness(scheduler, [Store(6)], 1)
    for length in (1, 9):
        # What is expected of the others: 1 token, and 9 of those that get
        # further.
        harness.arrive(1, (length,), length)
    harness.run_out()
    for _ in range(3):
        harness.arrive(4, (12,), 12)  # 4 blocks each in the end, 1 at first
    suspended: list[int] = []
    places = {}
    while harness.live:
        harness.begin(0)
        for sequence_id, sequence in harness.live.items():
            residence, before = sequence.residence, places.get(sequence_id)
            if before is not None and (residence is None or residence.parts[0].part_id != before):
                suspended.append(sequence_id)
            if (
                residence is not None
                and residence.parts[0].part_id != before
                and not sequence.num_cached
            ):
                resumed = sequence_id in suspended
                assert residence.num_tokens == (sequence.max_cached_tokens if resumed else 4)
            places[sequence_id] = None if residence is None else residence.parts[0].part_id
        harness.complete(0)
    assert suspended[0] == 4 and 2 not in suspended
    assert [harness.finished[i] for i in (2, 3, 4)] == [
        [1000 * i + k for k in range(12)] for i in (2, 3, 4)
    ]
    assert list(harness.finished) == [0, 1, 2, 3, 4]


def test_a_sequence_above_a_given_limit_is_refused_by_name() -> None:
    scheduler = make_scheduler(options("stabilized", 1, load_limit=30), WORKER_BLOCKS, BLOCK_SIZE)
    harness = Harness(scheduler, [Store(blocks) for blocks in WORKER_BLOCKS], 1)
    with pytest.raises(
        CapacityError, match=r"grow to 31 cached.*load limit of 30 leaves.*load_limit"
    ) as caught:
        scheduler.add([Sequence.of(0, Request("r", (1,) * 20, SamplingParams(), 12, seed=0), 0)])
    assert caught.value.code == "exceeds_load_limit"
    assert len(scheduler.waiting) == 0
    assert harness.arrive(10, (5,), 5)


def test_a_limit_that_lanes_share_is_told_with_both_numbers() -> None:
    scheduler = make_scheduler(options("stabilized", 2, load_limit=50), (20,), BLOCK_SIZE)
    with pytest.raises(
        CapacityError,
        match="load limit of 50, shared out to 2 lanes, leaves it no more than 25 on any",
    ):
        scheduler.add([Sequence.of(0, Request("r", (1,) * 20, SamplingParams(), 12, seed=0), 0)])


class Slow:
    """Step times of R-workers that are in balance with an S-worker at ten tokens."""

    def s_part_s(self, num_tokens: int) -> float:
        return 1.0

    def r_part_s(self, worker: int, load_tokens: int) -> float:
        return load_tokens / 10


def test_a_sequence_above_a_measured_limit_runs_alone() -> None:
    two_at_once = options("stabilized", 1, max_num_sequences=2)
    scheduler = make_scheduler(two_at_once, (20,), BLOCK_SIZE, Slow())
    harness = Harness(scheduler, [Store(20)], 1)
    for length in (1, 1, 1, 1, 30):
        harness.arrive(length, (2,), 2)
    harness.run_out()
    assert harness.together == {(0, 1), (2, 3), (4,)}


def test_what_ends_early_makes_room_at_once() -> None:
    chosen = options("stabilized", 1, load_limit=20)
    scheduler = without_headroom(make_scheduler(chosen, (20,), BLOCK_SIZE))
    harness = Harness(scheduler, [Store(20)], 1, [20])
    harness.arrive(1, (3,), 20)
    harness.arrive(1, (20,), 20)
    first, second = harness.live.values()
    for step in range(3):
        harness.turn(0)
        harness.turn(0)
        assert (second.residence is None) and (first.sequence_id in harness.live) == (step < 2)
    harness.turn(0)
    assert second.residence is not None


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
        run = harness.begin(0)
        assert run is not None
        assert any(
            chunk.sequence.sequence_id == 0 and chunk.num_tokens == 1 for chunk in run.chunks
        )
        prompts = [chunk.num_tokens for chunk in run.chunks if chunk.num_tokens > 1]
        assert sum(prompts) <= MAX_STEP_TOKENS - MAX_SEQUENCES
        harness.complete(0)


def test_a_lane_steps_while_others_are_opened() -> None:
    scheduler = make_scheduler(options("greedy", 1), WORKER_BLOCKS, BLOCK_SIZE, opening_steps=1)
    late = [False, True]
    harness = Harness(
        scheduler, [Store(blocks) for blocks in WORKER_BLOCKS], 1, is_late=lambda: late.pop(0)
    )
    harness.arrive(3, (4,), 4)
    harness.turn(0)
    harness.turn(0)
    harness.arrive(3, (2,), 4)
    (first, second) = harness.live.values()
    run = harness.begin(0)
    assert run is not None and [chunk.sequence for chunk in run.chunks] == [first]
    assert harness.lifecycle.sequences.state(second.sequence_id) is SequenceState.RESERVING
    harness.complete(0)
    harness.answer()
    run = harness.begin(0)
    assert run is not None and [chunk.num_tokens for chunk in run.chunks] == [1, 3], (
        "as it was booked"
    )
    harness.complete(0)
    harness.run_out()
    assert not harness.lifecycle.sequences.counts.num_suspended


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

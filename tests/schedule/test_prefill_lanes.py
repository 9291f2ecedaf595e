"""Prompts in lanes of their own, over random traffic: they run there and nowhere
else, and all that decodes moves on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traffic import Requests, play, relaxed, traffic
from remembering_store import BLOCK_SIZE, Store
from schedule_choices import MAX_SEQUENCES, options, without_headroom
from traffic import Harness

from fastdecode.core.holders import HolderId
from fastdecode.core.sequence import Request, SamplingParams
from fastdecode.schedule.life import events
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.options import MODES
from fastdecode.schedule.prefill import PrefillBudget
from fastdecode.schedule.prefill_lanes import prefilled

WORKER_BLOCKS = (12, 20)


@dataclass(eq=False)
class ApartHarness(Harness):
    """Lanes from ``first_prompt_lane`` on are of prompts."""

    first_prompt_lane: int = 1
    under_way: dict[int, int] = field(default_factory=dict)
    """By lane: the prompt that takes several steps."""
    num_whole: int = 0
    """Sequences that started with nothing cached."""
    most_running: Counter[int] = field(default_factory=Counter)
    """By lane."""
    most_at_once: int = 0

    def _tell(self, event: events.Event, lane: int | None = None) -> list[events.Instruction]:
        left = super()._tell(event, lane)
        self.num_whole += sum(isinstance(one, events.Open) for one in left)
        self.most_at_once = max(self.most_at_once, self.scheduler.num_running)
        for each in self.scheduler.lanes:
            self.most_running[each.index] = max(self.most_running[each.index], len(each.running))
        return left

    def _members(self, lane: int) -> set[int]:
        running = self.scheduler.lanes[lane].running.values()
        of_prompts = lane >= self.first_prompt_lane
        return {
            run.sequence.sequence_id
            for run in running
            if run.sequence.sequence_id in self.live
            and not (of_prompts and run.sequence.num_uncached == 1)
        }

    def _check_run(self, lane: int, run: events.Run) -> None:
        super()._check_run(lane, run)
        if lane < self.first_prompt_lane:
            lane_size = -(-MAX_SEQUENCES // self.first_prompt_lane)
            assert len(self.scheduler.lanes[lane].running) <= lane_size
            assert all(chunk.num_tokens == 1 for chunk in run.chunks), "a prompt where others wait"
            return
        assert all(chunk.num_tokens > 1 for chunk in run.chunks), "a token among prompts"
        begun = [chunk.sequence for chunk in run.chunks if chunk.first]
        assert [one.sequence_id for one in begun] in ([], [self.under_way.get(lane)])
        parts = [chunk for chunk in run.chunks if chunk.num_tokens < chunk.sequence.num_uncached]
        assert len({*begun, *[chunk.sequence for chunk in parts]}) <= 1, "one room a lane"
        if parts:
            self.under_way[lane] = parts[0].sequence.sequence_id


@relaxed
@given(
    st.data(),
    traffic(forks=True),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([{}, {"length_quantile": 0.1}]),
    st.sampled_from([0, 1]),
    st.sampled_from(MODES),
)
def test_prompts_and_tokens_never_share_a_step(
    data: st.DataObject,
    requests: Requests,
    num_lanes: int,
    num_prompt_lanes: int,
    lose: bool,
    forecast: dict[str, float],
    opening_steps: int,
    mode: str,
) -> None:
    chosen = replace(options(mode, num_lanes, **forecast), num_prompt_lanes=num_prompt_lanes)
    scheduler = make_scheduler(chosen, WORKER_BLOCKS, BLOCK_SIZE, opening_steps=opening_steps)
    scheduler._lengths._min_observed = 1  # type: ignore[attr-defined]
    harness = ApartHarness(
        scheduler,
        [Store(blocks) for blocks in WORKER_BLOCKS],
        num_lanes + num_prompt_lanes,
        first_prompt_lane=num_lanes,
    )
    if opening_steps:
        harness.is_late = lambda: data.draw(st.booleans())
    play(data, harness, requests, lose=lose)


def fork(num_lanes: int, blocks: tuple[int, ...], num_forks: int, **more: object) -> ApartHarness:
    """A prompt whose answers are many, in lanes of which that of prompts is the quickest."""
    chosen = replace(options("greedy", num_lanes, **more), num_prompt_lanes=1)
    scheduler = make_scheduler(chosen, blocks, BLOCK_SIZE)
    harness = ApartHarness(
        scheduler, [Store(one) for one in blocks], num_lanes + 1, first_prompt_lane=num_lanes
    )
    assert harness.arrive(9, (5,) * num_forks, 5)
    for _ in range(60):
        for lane in [num_lanes] * 6 + [*range(num_lanes)]:
            harness.turn(lane)
    assert len(harness.finished) == num_forks and not harness.live
    return harness


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
def test_forks_share_a_prompt_and_all_lanes_that_decode(num_lanes: int) -> None:
    """The prompt is run once, and no lane has more of them than its share."""
    harness = fork(num_lanes, (200, 200), 6)
    assert harness.num_whole == 1
    decoding = [harness.most_running[lane] for lane in range(num_lanes)]
    assert decoding == [6 // num_lanes] * num_lanes


def test_who_can_never_be_a_fork_runs_the_prompt() -> None:
    """The others have ended, or have no room beside them while others have."""
    assert fork(2, (200,), 3, max_num_sequences=1).num_whole == 3
    whole_blocks = -(-(9 + 5 - 1) // BLOCK_SIZE)
    assert fork(2, (whole_blocks,), 3).num_whole == 3
    harness = fork(2, (whole_blocks, whole_blocks), 2)
    assert (harness.num_whole, harness.most_at_once) == (2, 2)


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_a_load_limit_holds_over_what_decodes(num_lanes: int) -> None:
    """Prompts run ahead, and wait for the others' load to fall before they decode."""
    limited = options("stabilized", num_lanes, load_limit=30 * num_lanes)
    chosen = replace(limited, num_prompt_lanes=1)
    scheduler = without_headroom(make_scheduler(chosen, (200,), BLOCK_SIZE))
    harness = ApartHarness(
        scheduler, [Store(200)], num_lanes + 1, first_prompt_lane=num_lanes, lane_limits=[30]
    )
    assert all(harness.arrive(10, (9,), 9) for _ in range(4 * num_lanes))
    num_prefilled = 0
    for _ in range(80):
        for lane in [num_lanes, *range(num_lanes)]:
            harness.turn(lane)
        num_prefilled = max(num_prefilled, len(prefilled(scheduler.lanes)))
    assert not harness.live and num_prefilled >= 2


def test_a_synchronized_batch_ends_before_the_next_one_decodes() -> None:
    """Prompts of the next one run in the meantime."""
    chosen = replace(options("synchronized", 1, max_num_sequences=6), num_prompt_lanes=1)
    scheduler = make_scheduler(chosen, (200,), BLOCK_SIZE)
    harness = ApartHarness(scheduler, [Store(200)], 2, first_prompt_lane=1)
    assert harness.arrive(4, (9,), 9)
    for _ in range(3):
        harness.turn(1)
        harness.turn(0)
    assert all(harness.arrive(4, (5,), 5) for _ in range(3))
    for _ in range(60):
        harness.turn(1)
        harness.turn(0)
    assert not harness.live
    together = [each for each in harness.together if len(each) > 1]
    assert together, "the second batch decodes together"
    assert all(0 not in each for each in together), "and not with the first one"


@pytest.mark.parametrize("num_left", [4, 8, 9])
def test_tokens_that_a_replica_lacks_run_in_a_lane_of_prompts(num_left: int) -> None:
    """A sequence that decoded decodes again once they have run there."""
    holder = HolderId(0)
    chosen = replace(options("greedy", 1), num_prompt_lanes=1)
    life = Lifecycle(make_scheduler(chosen, (40,), BLOCK_SIZE))

    def tell(event: events.Event) -> list[events.Instruction]:
        instructions = life.handle(event)
        life.check_invariants()
        for one in instructions:
            if isinstance(one, events.Open | events.Extend):
                instructions += tell(events.Opened(one.part.part_id))
        return instructions

    def step(lane: int) -> list[tuple[int, int]]:
        """What the lane's next step runs: first token and how many."""
        told = tell(events.LaneIdle(lane))
        runs = [one for one in told + tell(events.LaneReady(lane)) if isinstance(one, events.Run)]
        ran = [(chunk.first, chunk.num_tokens) for run in runs for chunk in run.chunks]
        for run in runs:
            drawing = [x.sequence for x in run.chunks if x.first + x.num_tokens == num_known()]
            tell(events.StepDone(lane, tuple(events.Drawn(sequence, 7) for sequence in drawing)))
        return ran

    def num_known() -> int:
        (record,) = life.sequences.by_sequence.values()
        return len(record.sequence.token_ids)

    tell(events.Submitted(Request("r", (5,) * 8, SamplingParams(), 6, seed=0)))
    assert [step(1), step(1), step(0), step(0)] == [[(0, 5)], [(5, 3)], [(8, 1)], [(9, 1)]]
    (order,) = tell(events.Interrupted(holder))
    assert isinstance(order, events.TakeOver)
    tell(events.TakenOver(holder, (num_left,)))
    ran = [each for _ in range(3) for each in step(1)]
    assert (ran[0][0], sum(num for _, num in ran)) == (num_left, 11 - num_left)
    assert step(0) == [(11, 1)] and not step(1)


@settings(max_examples=500, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 120)), min_size=1, max_size=15),
)
def test_prompts_keep_to_the_budget_and_get_on_in_every_step(
    max_step_tokens: int, max_chunk: int, prompts: list[tuple[int, int]]
) -> None:
    budget = PrefillBudget(max_step_tokens, max_chunk)
    booked: list[list[int]] = []  # each prompt's chunks that are still to come
    used = 0
    for num_steps, num_tokens in prompts:
        for _ in range(num_steps):
            used = sum(chunks.pop(0) for chunks in booked if chunks)
            assert used <= max_step_tokens
            budget.next_step()
        chunks = budget.chunks(num_tokens)
        now = sum(chunks[0] for chunks in booked if chunks)
        assert (chunks == ()) == (now == max_step_tokens)
        if chunks:
            assert sum(chunks) == num_tokens
            assert all(1 <= chunk <= max_chunk for chunk in chunks)
            # What load control counts on: never more cached than if the prompt
            # had grown by one token a step.
            cached = 0
            for step, chunk in enumerate(chunks):
                cached += chunk
                assert cached <= num_tokens - (len(chunks) - 1 - step)
            budget.book(chunks)
            booked.append(list(chunks))


def test_parts_on_several_r_workers_leave_longer_chunks() -> None:
    chunks = [
        PrefillBudget(40, 20, 6, 4).chunks(12, 12, parts=parts)
        for parts in ((0,) * 6, (0, 1, 2) * 2)
    ]
    assert chunks == [(2, 2, 1, 1, 1, 1, 1, 1, 1, 1), (4, 3, 1, 3, 1)]


def test_a_prompt_fills_what_the_others_leave() -> None:
    budget = PrefillBudget(100, 60)
    budget.book(budget.chunks(150))
    assert budget.chunks(90) == (40, 40, 10)
    budget.book((40, 40, 10))
    assert budget.chunks(1) == ()
    budget.next_step()
    assert budget.chunks(1) == ()
    budget.next_step()
    assert budget.chunks(100) == (60, 40)
    budget.clear()
    assert budget.chunks(61) == (60, 1)

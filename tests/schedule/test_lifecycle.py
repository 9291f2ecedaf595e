"""A lifecycle by itself: the instructions that it returns for each event."""

from __future__ import annotations

import pytest
from lifecycles import closing, end, lifecycle, step, tell
from remembering_store import BLOCK_SIZE

from fastdecode.core.errors import CapacityError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.sequence import COMING, Request, SamplingParams, Sequence
from fastdecode.schedule.holder_states import HolderState
from fastdecode.schedule.life import events
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.life.sequences import SequenceState
from fastdecode.wire.blocks import Close, Extend


def submit(
    life: Lifecycle, name: str, num_prompt_tokens: int = 3, max_tokens: int = 4, n: int = 1
) -> None:
    params = SamplingParams(n=n)
    tell(
        life, events.Submitted(Request(name, (5,) * num_prompt_tokens, params, max_tokens, seed=0))
    )


def opening(life: Lifecycle, lane: int) -> events.Ask:
    """The one part that is to be opened before the lane's next step."""
    (instruction,) = tell(life, events.LaneIdle(lane))
    assert isinstance(instruction, events.Ask)
    return instruction


FULL = {"peer": "r0", "code": CapacityError.default_code, "message": "full"}


def test_a_life_from_submission_to_its_end() -> None:
    life = lifecycle()
    submit(life, "a", max_tokens=2)
    asked = opening(life, 0)
    assert asked.part.num_tokens == 4 and life.sequences.state(0) is SequenceState.RESERVING  # type: ignore[arg-type]
    assert tell(life, events.LaneReady(0)) == [] == tell(life, events.LaneIdle(0)), (
        "nobody is asked twice"
    )
    assert tell(life, events.Opened(asked.part.part_id)) == []
    assert life.sequences.state(0) is SequenceState.RUNNING  # type: ignore[arg-type]
    assert step(life, 0) == [] == tell(life, events.LaneIdle(0))
    finish, close = step(life, 0)
    assert isinstance(finish, events.Finish) and finish.reason == "length"
    assert finish.sequence.token_ids == [5, 5, 5, 7, 7]
    assert close == closing(asked)
    assert life.sequences.state(0) is SequenceState.DONE  # type: ignore[arg-type]


def test_a_refusal_beside_others_waits_even_if_they_have_ended_by_now() -> None:
    """The answer was given while their blocks were taken."""
    life = lifecycle()
    submit(life, "a", max_tokens=1)
    first = opening(life, 0)
    tell(life, events.Opened(first.part.part_id))
    submit(life, "b")
    second = opening(life, 1)
    tell(life, events.LaneIdle(0))
    assert closing(first) in step(life, 0)
    assert tell(life, events.Refused(second.part.part_id, **FULL)) == []
    assert life.sequences.state(1) is SequenceState.REQUEUED  # type: ignore[arg-type]
    third = opening(life, 1)
    assert third.part.part_id not in (first.part.part_id, second.part.part_id), (
        "a late answer is nobody else's"
    )
    assert not life.grants.awaits(second.part.holder, second.part.part_id)
    (fail,) = tell(life, events.Refused(third.part.part_id, **FULL))
    assert isinstance(fail, events.Fail) and str(fail.error) == "r0 refused request b: full", (
        "nothing took its room"
    )


def test_who_is_refused_asks_again_when_something_was_freed() -> None:
    life = lifecycle()
    submit(life, "a", max_tokens=2)
    first = opening(life, 0)
    tell(life, events.Opened(first.part.part_id))
    (run,) = tell(life, events.LaneReady(0))
    submit(life, "b")
    second = opening(life, 1)
    tell(life, events.Refused(second.part.part_id, **FULL))
    tell(life, events.LaneReady(1))
    assert tell(life, events.LaneIdle(1)) == [], "not before"
    end(life, run)
    tell(life, events.LaneReady(1))
    assert isinstance(opening(life, 1), events.Ask)


def test_what_befalls_a_sequence_in_flight_is_carried_out_at_the_end_of_its_step() -> None:
    life = lifecycle((40, 40), split_tokens=8)
    submit(life, "long", num_prompt_tokens=6, max_tokens=8)
    opened = tell(life, events.LaneIdle(0))
    assert [x.part.holder for x in opened if isinstance(x, events.Ask)] == [0, 1]
    assert [
        (x.part.first_token, x.part.num_tokens) for x in opened if isinstance(x, events.Ask)
    ] == [(0, 8), (8, 5)]
    for x in opened:
        assert isinstance(x, events.Ask)
        tell(life, events.Opened(x.part.part_id))
    (run,) = tell(life, events.LaneReady(0))
    assert tell(life, events.Lost(HolderId(1))) == [] and life.sequences.counts.num_recomputed == 1
    assert life.sequences.is_on(HolderId(1)), "nobody may come in its place yet"
    assert tell(life, events.Cancelled("long")) == []
    assert end(life, run) == [closing(opened[0])]  # type: ignore[arg-type]
    assert not life.sequences.is_on(HolderId(1)) and not life.sequences.by_request


def test_who_is_opened_while_its_holder_is_lost_starts_elsewhere() -> None:
    life = lifecycle((40, 40), split_tokens=8)
    submit(life, "long", num_prompt_tokens=6, max_tokens=8)
    first, second = tell(life, events.LaneIdle(0))
    assert isinstance(first, events.Ask) and isinstance(second, events.Ask)
    assert tell(life, events.Lost(HolderId(1))) == [], (
        "the other part's answer is to come, and says whether it is to be closed"
    )
    assert tell(life, events.Opened(first.part.part_id)) == [closing(first)]
    tell(life, events.LaneReady(0))
    again = [x.part.holder for x in tell(life, events.LaneIdle(0)) if isinstance(x, events.Ask)]
    assert again == [0, 0]


def test_who_fits_nowhere_any_more_fails_unless_another_comes_in_time() -> None:
    for comes in (True, False):
        life = lifecycle((4, 40))
        submit(life, "long", num_prompt_tokens=20, max_tokens=20)
        tell(life, events.Lost(HolderId(1)))
        if comes:
            tell(life, events.Joined(HolderId(1), 40))
            assert opening(life, 0).part.holder == 1
        else:
            (fail,) = tell(life, events.LaneIdle(0))
            assert isinstance(fail, events.Fail) and isinstance(fail.error, WorkerError)


def test_who_outgrows_its_room_steps_when_it_has_more() -> None:
    life = lifecycle(length_quantile=0.1)
    life.scheduler._lengths._min_observed = 1  # type: ignore[attr-defined]
    submit(life, "short", num_prompt_tokens=1, max_tokens=1)
    tell(life, events.Opened(opening(life, 0).part.part_id))
    step(life, 0)
    for length in (3, 1):  # by now a sequence is expected to end after one token
        submit(life, f"long{length}", num_prompt_tokens=4, max_tokens=length)
    tell(life, events.Opened(opening(life, 0).part.part_id))
    step(life, 0)
    grow, *_ = tell(life, events.LaneIdle(0))
    assert isinstance(grow, events.Ask) and grow.part.num_tokens == 6
    assert tell(life, events.LaneReady(0)) == [], "it would write beyond its room"
    tell(life, events.Opened(grow.part.part_id))
    (run,) = tell(life, events.LaneReady(0))
    assert isinstance(run, events.Run) and len(run.chunks) == 1


def test_who_never_fits_leaves_nothing_behind() -> None:
    life = lifecycle((4,))
    with pytest.raises(CapacityError) as caught:
        submit(life, "long", num_prompt_tokens=20, max_tokens=20)
    assert caught.value.code == "exceeds_capacity", "a server's client is told that it never will"
    life.check_invariants()
    assert not life.sequences.by_request and not life.sequences.of_request("long")


def running(life: Lifecycle, name: str = "a", **more: int) -> tuple[Sequence, events.Ask]:
    """A sequence that has its room, and what was opened for it."""
    submit(life, name, **more)
    asked = opening(life, 0)
    tell(life, events.Opened(asked.part.part_id))
    (sequence,) = life.sequences.of_request(name)
    return sequence, asked


def go_ahead(life: Lifecycle, sequence: Sequence) -> list[events.Instruction]:
    """A step of lane 0 whose token is coming."""
    (run,) = tell(life, events.LaneReady(0))
    assert isinstance(run, events.Run)
    said = tell(life, events.StepDone(0, (), (sequence,)))
    return said + tell(life, events.LaneIdle(0))


def test_a_sequence_steps_on_with_a_token_that_is_coming() -> None:
    life = lifecycle()
    sequence, asked = running(life, max_tokens=3)
    assert go_ahead(life, sequence) == []
    assert (sequence.token_ids[-1], sequence.num_cached) == (COMING, 3)
    (run,) = tell(life, events.LaneReady(0))
    assert isinstance(run, events.Run) and run.chunks[0].num_tokens == 1
    assert tell(life, events.Came((events.Drawn(sequence, 8),))) == []
    assert sequence.token_ids == [5, 5, 5, 8]
    assert end(life, run) == [] and sequence.token_ids == [5, 5, 5, 8, 7]
    # Its last is coming: its cache is of no use any more.
    assert go_ahead(life, sequence) == [closing(asked)]
    assert life.sequences.state(sequence.sequence_id) is SequenceState.DONE
    assert tell(life, events.LaneReady(0)) == [] and life.scheduler.num_running == 0
    assert tell(life, events.Came((events.Drawn(sequence, 9),))) == [
        events.Finish(sequence, "length")
    ]
    assert sequence.token_ids == [5, 5, 5, 8, 7, 9] and not life.sequences.by_sequence


def test_a_token_that_was_the_last_after_all_is_told_at_once() -> None:
    """What runs with it runs for nothing, and its room is free after that."""
    life = lifecycle()
    sequence, asked = running(life, max_tokens=9)
    go_ahead(life, sequence)
    (run,) = tell(life, events.LaneReady(0))
    assert tell(life, events.Came((events.Drawn(sequence, 8, "stop"),))) == [
        events.Finish(sequence, "stop")
    ]
    assert life.sequences.wanted(run.chunks) == []  # type: ignore[union-attr]
    assert tell(life, events.StepDone(0, ())) == [closing(asked)]
    assert sequence.token_ids == [5, 5, 5, 8]


@pytest.mark.parametrize("max_tokens", [1, 9], ids=["its last", "not its last"])
def test_what_is_coming_may_never_come(max_tokens: int) -> None:
    life = lifecycle()
    sequence, asked = running(life, max_tokens=max_tokens)
    closed = go_ahead(life, sequence)
    closed += tell(life, events.Cancelled("a"))
    assert tell(life, events.Came((events.Drawn(sequence, 8),))) == []
    assert not life.sequences.by_sequence and not life.scheduler.waiting
    assert closed == [closing(asked)]


def test_nobody_starts_again_while_a_token_is_coming() -> None:
    life = lifecycle((40, 40))
    sequence, asked = running(life, max_tokens=9)
    go_ahead(life, sequence)
    assert tell(life, events.Lost(asked.part.holder)) == []
    assert tell(life, events.LaneIdle(0)) == [] and list(life.scheduler.waiting) == [sequence]
    tell(life, events.Came((events.Drawn(sequence, 8),)))
    (again,) = tell(life, events.LaneIdle(0))
    assert isinstance(again, events.Ask) and sequence.token_ids == [5, 5, 5, 8]


def test_who_comes_while_all_holders_are_taken_over_waits_for_one_that_opens_again() -> None:
    life = lifecycle(blocks=(40, 30))
    holders = [HolderId(0), HolderId(1)]
    for holder in holders:
        (asked,) = tell(life, events.Interrupted(holder))
        assert asked == events.TakeOver(holder, (), ())
    submit(life, "a", max_tokens=4)
    assert tell(life, events.LaneIdle(0)) == [], "no step begins"
    for holder in holders:
        assert tell(life, events.TakenOver(holder, ())) == []
    assert tell(life, events.LaneIdle(0)) == [], (
        "nobody has room, and nobody is told that none will have"
    )
    tell(life, events.Reopened(holders[1]))
    assert opening(life, 0).part.holder == holders[1]


# Another R-worker takes over a lost holder from a replica.

HOLDER = HolderId(0)
NUM_PARTS = 3


@pytest.fixture
def adopting() -> Lifecycle:
    """With one sequence, whose parts are all open on one holder."""
    made = lifecycle(split_tokens=2 * BLOCK_SIZE)
    submit(made, "r", NUM_PARTS * 2 * BLOCK_SIZE - 2, 2)
    opens = [x for x in tell(made, events.LaneIdle(0)) if isinstance(x, events.Ask)]
    assert [x.part.holder for x in opens] == [HOLDER] * NUM_PARTS
    for one in opens:
        tell(made, events.Opened(one.part.part_id))
    assert made.sequences.state(0) is SequenceState.RUNNING  # type: ignore[arg-type]
    return made


def taken_over(adopting: Lifecycle, found: tuple[int | None, ...]) -> list[events.Instruction]:
    """Lose the holder to an R-worker that has ``found`` tokens of each part."""
    (order,) = tell(adopting, events.Interrupted(HOLDER))
    assert isinstance(order, events.TakeOver) and len(order.parts) == NUM_PARTS
    return tell(adopting, events.TakenOver(HOLDER, found))


def test_a_sequence_goes_on_with_what_all_of_its_parts_have(adopting: Lifecycle) -> None:
    told = taken_over(adopting, (0, 0, 0))
    assert [type(one.message) for one in told if isinstance(one, events.Ask)] == [
        Extend
    ] * NUM_PARTS
    assert adopting.sequences.state(0) is SequenceState.RUNNING  # type: ignore[arg-type]
    assert not adopting.sequences.counts.num_recomputed
    assert adopting.adoptions.counts.num_sequences == 1


@pytest.mark.parametrize("found", [(None, None, None), (0, None, None), (None, 0, 0), (0, 0, None)])
def test_a_sequence_of_which_parts_are_missing_waits_again_once(
    adopting: Lifecycle, found: tuple[int | None, ...]
) -> None:
    told = taken_over(adopting, found)
    assert adopting.sequences.state(0) is SequenceState.REQUEUED  # type: ignore[arg-type]
    assert adopting.sequences.counts.num_recomputed == 1
    assert len(adopting.scheduler.waiting) == 1 and not adopting.adoptions
    assert all(isinstance(one, events.Ask) and isinstance(one.message, Close) for one in told)


def test_a_holder_goes_from_state_to_state(adopting: Lifecycle) -> None:
    cached, home = (0,) * NUM_PARTS, True
    for event, state in (
        (events.Interrupted(HOLDER), HolderState.ASKED),  # at once: no step is in flight
        (events.TakenOver(HOLDER, cached), HolderState.ADOPTED),
        (events.Reopened(HOLDER), HolderState.OPEN),
        (events.Leaving(HOLDER), HolderState.LEAVING),  # it owes answers about its parts
        (events.Interrupted(HOLDER), HolderState.ASKED),
        (events.TakenOver(HOLDER, cached, is_home=home), HolderState.OPEN),
        (events.Lost(HOLDER), HolderState.LOST),
        (events.Joined(HOLDER, 40), HolderState.OPEN),
    ):
        tell(adopting, event)
        assert adopting.holders[HOLDER] is state
        assert (adopting.holders.open == [HOLDER]) is (state is HolderState.OPEN)
        assert adopting.holders.are_lost is (state is HolderState.LOST)


def test_a_holder_that_serves_is_not_replaced(adopting: Lifecycle) -> None:
    taken_over(adopting, (0,) * NUM_PARTS)
    with pytest.raises(AssertionError, match="a holder that is adopted can't be asked"):
        adopting.holders.move(HOLDER, HolderState.ASKED)
    assert adopting.holders[HOLDER] is HolderState.ADOPTED

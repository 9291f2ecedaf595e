"""A lifecycle whose holder is lost and gone on with from a replica."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from remembering_store import BLOCK_SIZE
from schedule_choices import options

from fastdecode.core.holders import HolderId
from fastdecode.core.sequence import Request, SamplingParams
from fastdecode.schedule.holder_states import HolderState
from fastdecode.schedule.life.events import (
    Close,
    Extend,
    Instruction,
    Interrupted,
    Joined,
    LaneIdle,
    Leaving,
    Lost,
    Open,
    Opened,
    Reopened,
    Submitted,
    TakenOver,
    TakeOver,
)
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.life.sequences import SequenceRecord, SequenceState
from fastdecode.schedule.modes import make_scheduler

HOLDER = HolderId(0)
NUM_PARTS = 3


@pytest.fixture
def life() -> Lifecycle:
    """With one sequence, whose parts are all open on one holder."""
    choices = options("greedy", 2, split_tokens=2 * BLOCK_SIZE)
    made = Lifecycle(make_scheduler(choices, (40,), BLOCK_SIZE, opening_steps=1))
    num_tokens = NUM_PARTS * 2 * BLOCK_SIZE - 2
    tell(made, Submitted(Request("r", (5,) * num_tokens, SamplingParams(), 2, seed=0)))
    opens = [x for x in tell(made, LaneIdle(0)) if isinstance(x, Open)]
    assert [x.part.holder for x in opens] == [HOLDER] * NUM_PARTS
    for one in opens:
        tell(made, Opened(one.part.part_id))
    (only,) = made.sequences.by_sequence.values()
    assert only.state is SequenceState.RUNNING
    return made


def tell(life: Lifecycle, event: object) -> list[Instruction]:
    instructions = life.handle(event)  # type: ignore[arg-type]
    life.check_invariants()
    return instructions


def only(life: Lifecycle) -> SequenceRecord:
    (found,) = life.sequences.by_sequence.values()
    return found


def taken_over(life: Lifecycle, found: Sequence[int | None]) -> list[Instruction]:
    """The holder is lost, and whoever goes on for it has so many tokens of each part."""
    (order,) = tell(life, Interrupted(HOLDER))
    assert isinstance(order, TakeOver) and len(order.parts) == NUM_PARTS
    return tell(life, TakenOver(HOLDER, tuple(found)))


def test_a_sequence_goes_on_with_what_all_of_its_parts_have(life: Lifecycle) -> None:
    told = taken_over(life, [0, 0, 0])
    assert [type(one) for one in told] == [Extend] * NUM_PARTS
    assert only(life).state is SequenceState.RUNNING and not life.sequences.counts.num_recomputed
    assert life.adoptions.counts.num_sequences == 1


@pytest.mark.parametrize("found", [(None, None, None), (0, None, None), (None, 0, 0), (0, 0, None)])
def test_a_sequence_of_which_parts_are_missing_waits_again_once(
    life: Lifecycle, found: Sequence[int | None]
) -> None:
    told = taken_over(life, found)
    assert only(life).state is SequenceState.REQUEUED
    assert life.sequences.counts.num_recomputed == 1
    assert len(life.scheduler.waiting) == 1 and not life.adoptions
    assert not [one for one in told if not isinstance(one, Close)]


def test_a_holder_goes_from_state_to_state(life: Lifecycle) -> None:
    cached, home = (0,) * NUM_PARTS, True
    for event, state in (
        (Interrupted(HOLDER), HolderState.ASKED),  # at once: no step is in flight
        (TakenOver(HOLDER, cached), HolderState.ADOPTED),
        (Reopened(HOLDER), HolderState.OPEN),
        (Leaving(HOLDER), HolderState.LEAVING),  # it owes answers about its parts
        (Interrupted(HOLDER), HolderState.ASKED),
        (TakenOver(HOLDER, cached, is_home=home), HolderState.OPEN),
        (Lost(HOLDER), HolderState.LOST),
        (Joined(HOLDER, 40), HolderState.OPEN),
    ):
        tell(life, event)
        assert life.holders[HOLDER] is state
        assert (life.holders.open == [HOLDER]) is (state is HolderState.OPEN)
        assert life.holders.are_lost is (state is HolderState.LOST)


def test_a_holder_that_serves_is_not_replaced(life: Lifecycle) -> None:
    taken_over(life, [0] * NUM_PARTS)
    with pytest.raises(AssertionError, match="a holder that is adopted can't be asked"):
        life.holders.move(HOLDER, HolderState.ASKED)
    assert life.holders[HOLDER] is HolderState.ADOPTED

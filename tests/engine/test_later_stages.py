"""What the stages behind the first say, joined: a column's room is there once it
is in every stage, and a column is lost once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from fastdecode.core.clock import Clock
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.deadlines import Deadlines
from fastdecode.engine.fleet.pending import PendingReplies
from fastdecode.engine.fleet.pool import Placement, WorkerEvents
from fastdecode.engine.stages.later import LaterStages
from fastdecode.engine.stages.links import StageLinks
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.kv.kept import KEY_WORDS
from fastdecode.wire.kv.taking_over import MISSING, TakenOver, TakeOver
from fastdecode.wire.kv.tiers import Stocked, UseTier
from fastdecode.wire.messages import (
    Accepted,
    CloseSequence,
    ExtendSequence,
    Failed,
    OpenSequence,
    Refused,
)
from fastdecode.wire.stages import (
    ColumnInterrupted,
    ColumnLost,
    ColumnTakenOver,
    StageAnswer,
    StageDone,
    StageHello,
    StagePass,
    StageWelcome,
)

W = HolderId(1)


@dataclass
class Stages:
    """Two later stages, whose ends are here, and what the first one's own
    R-workers are told."""

    hub: InprocHub[Any, Any] = field(default_factory=InprocHub)
    told: list[Any] = field(default_factory=list)
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        ends = {
            stage: connect(self.hub, "the first stage", InprocHub(), f"stage {stage}")
            for stage in (1, 2)
        }
        self.ends: dict[int, Any] = {stage: there for stage, (_, there) in ends.items()}
        here: dict[int, Any] = {stage: here for stage, (here, _) in ends.items()}
        self.links = StageLinks(here, is_asked=False)
        deadlines = Deadlines(60.0, clock=self.clock)
        self.owed = PendingReplies(4, deadlines, lambda index: None)
        self.links.join(self.owed, 2)
        unasked = WorkerEvents(Placement(2), lambda index, lie: None)
        self.later = LaterStages(
            self.links, lambda holder, message: self.told.append(message), unasked
        )

    def say(self, stage: int, message: Any) -> None:
        """A stage says this, and the first one takes it in."""
        self.ends[stage].send(message)
        index, heard = self.hub.receive_any(1.0)
        self.links.take(2 + index, heard)  # behind its own R-workers of two columns
        self.later.listen()

    def heard(self, stage: int) -> Any:
        return self.ends[stage].poll()


def answer(sequence_id: int, code: str = "") -> StageAnswer:
    return StageAnswer(W, sequence_id, code, "no room" if code else "")


def done(stage: int, lost: list[int]) -> StageDone:
    return StageDone(stage, 0, 0, 0.0, 0.0, np.zeros(2, np.float32), np.array(lost, np.int32))


def a_pass() -> StagePass:
    none, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    x = np.zeros((1, 4), np.float32)
    return StagePass(0, 0, x, np.zeros(1, np.int64), none, none, one, one.astype(np.uint8), none)


def test_room_is_there_once_it_is_in_every_stage() -> None:
    stages = Stages()
    later = stages.later
    later.tell(W, OpenSequence(7, 100))
    assert stages.heard(1) == stages.heard(2) == OpenSequence(7, 100, W)
    stages.say(2, answer(7))
    assert later.joined((W, Accepted(7))) is None
    stages.say(1, answer(7))
    assert later.rooms.has_answers and later.rooms.next_answer() == (W, Accepted(7))
    later.tell(W, CloseSequence(7))  # which nobody answers
    assert stages.heard(1) == stages.heard(2) == CloseSequence(7, W)
    assert not later.rooms.has_answers


def test_who_gave_room_gets_it_back_when_another_stage_has_none() -> None:
    stages = Stages()
    later = stages.later
    later.tell(W, OpenSequence(7, 100))
    assert stages.heard(1) == stages.heard(2)
    stages.say(1, answer(7))
    stages.say(2, answer(7, "out_of_capacity"))
    joined = later.joined((W, Accepted(7)))
    assert joined == (W, Refused(7, "out_of_capacity", "no room"))
    assert stages.told == [CloseSequence(7)]
    assert (stages.heard(1), stages.heard(2)) == (CloseSequence(7, W), None)
    later.tell(W, ExtendSequence(7, 200))  # what is larger may stay so
    stages.say(1, answer(7))
    stages.say(2, answer(7, "out_of_capacity"))
    assert isinstance(later.joined((W, Accepted(7)))[1], Refused)  # type: ignore[index]
    assert len(stages.told) == 1


def test_a_column_is_lost_once_wherever_that_is_told() -> None:
    stages = Stages()
    later = stages.later
    later.tell(W, OpenSequence(7, 100))
    stages.say(1, ColumnLost(W, "worker_timeout", "it is silent"))
    (lost,) = later.take_lost()
    assert lost[0] == W and "stage 1: it is silent" in lost[1].message
    stages.say(2, answer(7))
    assert later.joined((W, Accepted(7))) is None and not later.rooms.has_answers
    stages.links.owed.expect(2, a_pass())
    stages.say(2, done(2, [0, W]))
    assert [column for column, _ in later.take_lost()] == [0]
    assert [one.stage for one in later.take_done()] == [2]


def stocked(column: int, is_last: bool = True) -> Stocked:
    no_keys = np.zeros((0, KEY_WORDS), np.int64)
    return Stocked(column, 4, no_keys, np.zeros(0, np.int32), is_last)


def test_nobody_waits_for_a_lower_tier_of_a_column_that_was_just_lost() -> None:
    """It is lost while the others start, and nobody has taken that in yet."""
    stages = Stages()
    stages.say(1, ColumnLost(W, "worker_lost", "its process has died"))
    for column in (0, W):
        stages.later.tell(HolderId(column), UseTier("0" * 64).of_column(column))
    stages.say(2, stocked(0))
    stages.say(2, stocked(W))
    assert stages.owed.any_owed
    stages.say(1, stocked(0))
    assert not stages.owed.any_owed


def test_what_is_moved_of_a_lost_column_is_not_waited_for() -> None:
    stages = Stages()
    stages.later.tell(W, UseTier("0" * 64))
    stages.say(1, ColumnLost(W, "worker_lost", "its process has died"))
    assert stages.owed.any_owed
    stages.later.take_lost()
    assert not stages.owed.any_owed
    stages.say(2, stocked(W))  # which it may say all the same


@pytest.mark.parametrize("is_last", [False, True])
def test_a_stage_that_tells_of_a_lower_tier_that_nobody_asked_for_is_lost(is_last: bool) -> None:
    stages = Stages()
    with pytest.raises(WorkerError, match=r"stage 1 is lost: .*Stocked, which nobody asked for"):
        stages.say(1, stocked(W, is_last))
    stages = Stages()
    stages.later.tell(W, UseTier("0" * 64))
    stages.say(1, stocked(W, is_last=False))
    stages.say(1, stocked(W))
    with pytest.raises(WorkerError, match=r"stage 1 is lost: .*Stocked, which nobody asked for"):
        stages.say(1, stocked(W, is_last))


def test_a_stage_may_tell_what_a_void_column_was_asked_for() -> None:
    """Another stage has lost it, and nobody has taken that in yet."""
    stages = Stages()
    stages.later.tell(W, UseTier("0" * 64))
    stages.links.owed.forget_jobs(1, W)
    stages.say(2, ColumnLost(W, "worker_lost", "its process has died"))
    stages.say(1, stocked(W, is_last=False))
    stages.say(1, stocked(W))
    assert not stages.owed.any_owed


def interrupted(stages: Stages, stage: int) -> None:
    """The stage's R-worker of the column is lost, and has a replica."""
    stages.later.losses.may_recover = True
    stages.say(stage, ColumnInterrupted(W, "worker_timeout", "it is silent"))
    assert [column for column, _ in stages.later.take_lost()] == [W]


def take_over(stages: Stages, *asked: int) -> None:
    """Of two sequences, at most 10 and 5 tokens."""
    counts = np.array([10, 5], np.int32)
    stages.later.take_over(W, TakeOver(0, np.array([7, 8]), counts), asked)
    for stage in asked:
        assert isinstance(stages.heard(stage), TakeOver)


def test_what_was_given_for_an_interrupted_column_is_given_back() -> None:
    stages = Stages()
    stages.later.tell(W, OpenSequence(7, 100))
    assert stages.heard(1) == stages.heard(2)
    stages.say(1, answer(7))
    interrupted(stages, 2)
    assert stages.heard(1) == CloseSequence(7, W)
    stages.say(2, answer(7, "column_lost"))
    assert stages.later.joined((W, Accepted(7))) is None
    assert stages.told == [CloseSequence(7)] and stages.heard(2) is None


def test_a_column_goes_on_with_what_every_stage_has() -> None:
    stages = Stages()
    interrupted(stages, 1)
    interrupted(stages, 2)
    take_over(stages, 1, 2)
    assert not stages.later.losses.void
    stages.say(1, ColumnTakenOver(W, np.array([8, 5], np.int32)))
    assert not stages.later.rooms.has_answers
    stages.say(2, ColumnTakenOver(W, np.array([9, MISSING], np.int32)))
    column, joined = stages.later.rooms.next_answer()  # type: ignore[misc]
    assert column == W and isinstance(joined, TakenOver)
    assert joined.num_tokens.tolist() == [8, MISSING]
    # What isn't there in one stage is nowhere.
    assert stages.told == [CloseSequence(8)]
    assert (stages.heard(1), stages.heard(2)) == (CloseSequence(8, W), None)


def test_a_column_that_is_lost_again_asks_all_again_that_have_been() -> None:
    """What they answer to the first time is void."""
    stages = Stages()
    interrupted(stages, 1)
    take_over(stages, 1)
    interrupted(stages, 2)
    assert stages.later.takings.unsettled(W) == {1}
    take_over(stages, 1, 2)
    stages.say(1, ColumnTakenOver(W, np.array([1, 1], np.int32)))
    stages.say(1, ColumnTakenOver(W, np.array([4, 4], np.int32)))
    stages.say(2, ColumnTakenOver(W, np.array([3, 5], np.int32)))
    _, joined = stages.later.rooms.next_answer()  # type: ignore[misc]
    assert isinstance(joined, TakenOver) and joined.num_tokens.tolist() == [3, 4]
    assert not stages.later.rooms.has_answers


def test_a_stage_that_has_more_than_it_was_asked_for_lies() -> None:
    stages = Stages()
    interrupted(stages, 1)
    take_over(stages, 1)
    with pytest.raises(WorkerError, match=r"stage 1 is lost: .*more tokens than were asked for"):
        stages.say(1, ColumnTakenOver(W, np.array([11, 5], np.int32)))


def test_a_step_may_take_a_stage_as_long_as_its_layers_may_take_r_workers() -> None:
    clock = [100.0]
    stages = Stages(clock=lambda: clock[0])
    hello = StageHello(1, "", 1, 2, 1, 0, 3, 4, 16, DType.FLOAT32, DType.FLOAT32)
    stages.later.greet({1: hello, 2: replace(hello, stage=2, num_layers=2)})
    stages.say(1, StageWelcome(1, (9, 9)))
    stages.say(2, StageWelcome(2, (9, 9)))
    stages.later.send(a_pass(), stages.later.token_stages)
    clock[0] += 3 * 60 - 1
    assert not stages.owed.overdue()
    clock[0] += 1
    assert [(index, "180 s" in reason) for index, reason in stages.owed.overdue()] == [(2, True)]
    stages.say(1, done(1, []))
    clock[0] += 2 * 60 - 1
    assert not stages.owed.overdue()
    clock[0] += 1
    assert [index for index, _ in stages.owed.overdue()] == [3]


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (ColumnLost(2, "gone", "it left"), "speaks of column 2, and there are 2"),
        (ColumnLost(-1, "gone", "it left"), "column -1"),
        (StageAnswer(1 << 40, 1, "", ""), "column 1099511627776"),
        (done(1, [5]), r"\[5\] of 2 columns lost"),
        (done(2, []), "as stage 2"),
        (replace(done(1, []), s_part_s=-1.0), "-1, 0 and"),
        (replace(done(1, []), round_trip_s=float("nan")), "0, nan and"),
        (replace(done(1, []), r_compute_s=np.full(2, np.inf, np.float32)), "inf"),
    ],
)
def test_what_a_stage_says_that_cannot_be(lie: Any, reason: str) -> None:
    with pytest.raises(WorkerError, match=f"stage 1 is lost: .*{reason}") as raised:
        Stages().say(1, lie)
    assert raised.value.code == "stage_lost"


@pytest.mark.parametrize("num_blocks", [(-1, 5), (5, 1 << 40)])
def test_a_stage_offers_what_cannot_be(num_blocks: tuple[int, ...]) -> None:
    hello = StageHello(1, "m", 1, 2, 1, 0, 1, 4, 16, DType.FLOAT32, DType.FLOAT32)
    with pytest.raises(ProtocolError, match="num_blocks"):
        hello.check(StageWelcome(1, num_blocks))


def test_a_stage_is_lost_by_its_name() -> None:
    stages = Stages()
    with pytest.raises(WorkerError, match=r"stage 2 .*nobody asked for"):
        stages.say(2, done(2, []))
    told = stages.links.loss(2, WorkerError("stage 2 is lost: its process has died")).message
    assert told.startswith("stage 2 is lost: its process has died. Without its layers"), told
    stages = Stages()
    stages.ends[1].send(Failed("stage 1", "out_of_capacity", "too little memory"))
    stages.ends[1].close()
    with pytest.raises(WorkerError, match="stage 1 failed: too little memory"):
        stages.later.tell(W, CloseSequence(7))

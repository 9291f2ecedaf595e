"""R-workers of later stages as members of columns: what the first stage sends them
over the links, and what stages relay of them."""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from state_machine import HELLO
from values import replace

from fastdecode.core.clock import Clock
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.resharing import GROUP, Resharing
from fastdecode.engine.stages.links import StageLinks
from fastdecode.engine.stages.pool import ColumnPool, ColumnReplacements, StagePool
from fastdecode.engine.stages.relay import ColumnRegreeting, Relay
from fastdecode.wire.blocks import (
    KEY_WORDS,
    Done,
    DropCache,
    Dropped,
    Inventory,
    Retain,
    TakeOver,
    UseTier,
    words_of,
)
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import (
    Accepted,
    Close,
    Extend,
    Failed,
    Open,
    Refused,
    Shutdown,
    Welcome,
)
from fastdecode.wire.stages import (
    ColumnLost,
    ColumnReady,
    ColumnTakenOver,
    ColumnVacant,
    ColumnWelcome,
    GreetColumn,
    PlaceColumn,
    StageAnswer,
    StageDone,
    StageHello,
    StagePass,
    StageWelcome,
)

V, W = HolderId(0), HolderId(1)
NONE_KEPT = np.zeros(0, np.uint8)
FULL = ("out_of_capacity", "no room")


@dataclass
class Stages:
    """A first stage of two columns, and two later stages."""

    hub: InprocHub[Any, Any] = field(default_factory=InprocHub)
    clock: Clock = time.monotonic
    shares_heads: bool = False  # the R-workers of each stage share the heads of the one column

    def __post_init__(self) -> None:
        names = ("r0", "r1", "stage 1", "stage 2")
        both = [connect(self.hub, "the first stage", InprocHub(), name) for name in names]
        self.ends: list[Any] = [there for _, there in both]
        here: list[Any] = [own for own, _ in both]
        self.links = StageLinks({1: here[2], 2: here[3]}, is_asked=False)
        layers = [range(2), range(2, 4), range(4, 6)]
        relayed = range(1, len(layers))
        self.members = StagePool(
            self.hub,
            60.0,
            clock=self.clock,
            stages=self.links,
            relayed=relayed,
            num_columns=1 if self.shares_heads else None,
        )
        self.fleet = ColumnPool(self.members, self.links, layers, shares_heads=self.shares_heads)
        self.later = self.fleet.later
        self.answers: deque[Any] = deque()

    def own(self, column: int, message: Any) -> None:
        """The first stage's R-worker of a column says this."""
        self._say(self.ends[column], message)

    def say(self, stage: int, message: Any) -> None:
        self._say(self.ends[1 + stage], message)

    def _say(self, end: Any, message: Any) -> None:
        end.send(message)
        received = self.fleet.receive(most_s=1.0)
        if received is not None:
            self.answers.append(received)

    def heard(self, stage: int) -> Any:
        return self.ends[1 + stage].poll()

    def heard_own(self, column: int) -> Any:
        return self.ends[column].poll()


def answer(sequence_id: int, *why: str) -> StageAnswer:
    return StageAnswer(W, sequence_id, *(why or ("", "")))


def done(stage: int, lost: list[int]) -> StageDone:
    return StageDone(stage, 0, 0, 0.0, 0.0, np.zeros(2, np.float32), np.array(lost, np.int32))


def a_pass() -> StagePass:
    none, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    x = np.zeros((1, 4), np.float32)
    return StagePass(0, 0, x, np.zeros(1, np.int64), none, none, one, one.astype(np.uint8), none)


def greet(stages: Stages) -> None:
    """The later stages are greeted, and answer."""
    blocks = (9,) * len(stages.fleet)
    hello = StageHello("", 1, len(blocks), 1, 0, 3, 4, 16, DType.FLOAT32, DType.FLOAT32)
    for stage in (1, 2):
        stages.ends[1 + stage].send(StageWelcome(stage, blocks))
    hellos = {1: hello, 2: replace(hello, stage=2, num_layers=2)}
    assert len(stages.later.greet(hellos, stages.fleet.receive)) == 2


def stocked(column: int, is_last: bool = True) -> Inventory:
    no_keys = np.zeros((0, KEY_WORDS), np.int64)
    return Inventory(column, 4, no_keys, np.zeros(0, np.int32), is_last)


def test_who_gave_room_gets_it_back_when_another_stage_has_none() -> None:
    stages = Stages()
    stages.fleet.send(W, Open(7, 100))
    assert stages.heard(1) == stages.heard(2)
    stages.say(1, answer(7))
    stages.say(2, answer(7, *FULL))
    stages.own(W, Accepted(7))
    assert stages.answers.popleft() == (W, Refused(7, *FULL))
    assert [stages.heard_own(W) for _ in range(2)] == [Open(7, 100), Close(7)]
    assert (stages.heard(1), stages.heard(2)) == (Close(7, W), None)
    stages.fleet.send(W, Extend(7, 200))  # what is larger may stay so
    stages.own(W, Accepted(7))
    stages.say(1, answer(7))
    stages.say(2, answer(7, *FULL))
    assert stages.answers.popleft() == (W, Refused(7, *FULL))
    assert [stages.heard_own(W) for _ in range(2)] == [Extend(7, 200), None]


def test_a_column_is_lost_once_wherever_that_is_told() -> None:
    stages = Stages()
    stages.fleet.send(W, Open(7, 100))
    stages.say(1, ColumnLost(W, "worker_timeout", "it is silent"))
    ((column, error),) = stages.fleet.take_losses()
    assert column == W and "stage 1: it is silent" in error.message
    stages.say(2, answer(7))
    stages.own(W, Accepted(7))
    assert not stages.answers and not stages.fleet.is_owed
    stages.say(2, ColumnLost(W, "worker_timeout", "it is silent, too"))
    assert not stages.fleet.take_losses() and list(stages.fleet.lost) == [W]
    assert len(stages.fleet.gone) == 2


def test_what_is_moved_of_a_lost_column_is_news_of_nobody() -> None:
    stages = Stages()
    for column in (V, W):
        stages.fleet.send(column, UseTier("0" * 64))
    stages.say(1, ColumnLost(W, "worker_lost", "its process has died"))
    stages.fleet.take_losses()
    for column in (V, W):
        stages.say(2, stocked(column))
        stages.own(column, stocked(column))
    assert stages.fleet.is_owed and not stages.fleet.moves
    stages.say(1, stocked(V))
    assert not stages.fleet.is_owed
    assert [news.holder for news in stages.fleet.take_moves()] == [V]


def test_what_a_column_was_asked_before_it_is_greeted_again_is_void() -> None:
    """Greetings too: a stage whose R-workers share the heads answers the last alone."""
    stages = Stages()
    stages.fleet.send(W, Open(7, 100))
    stages.say(1, ColumnLost(W, "worker_timeout", "it is silent"))
    stages.say(1, ColumnReady(W))
    stages.fleet.take_losses()
    group, member = stages.fleet.groups[W], stages.members.member(1, W)
    assert stages.members.has_replacement == {member: True}
    stages.members.revive(member)
    greet(stages)
    for _ in range(2):
        stages.fleet.send(W, HELLO)
    heard = [message for _ in range(4) if not isinstance(message := stages.heard(2), StageHello)]
    assert heard == [Open(7, 100, holder=W), GreetColumn(W, 1), GreetColumn(W, 2)]
    room = HELLO.kv.block_size, False
    stages.say(2, answer(7))
    stages.say(1, ColumnWelcome(W, 1, 3, *room, newcomers=("r7",)))
    stages.say(1, ColumnWelcome(W, 2, 4, *room))
    assert stages.members.take_newcomers() == ["stage 1: r7"], "it has come whatever is void"
    stages.own(W, Accepted(7))
    for num_blocks in (9, 8):
        stages.own(W, Welcome("r1", num_blocks, HELLO.kv.block_size, 1))
    assert group.welcome is None
    stages.say(2, ColumnWelcome(W, 2, 5, *room))
    assert group.welcome is not None and group.welcome.num_blocks == 4
    assert not stages.answers and not stages.fleet.is_owed and not stages.fleet.gone


def test_a_column_that_is_greeted_again_offers_no_more_than_before() -> None:
    """The rest is for its neighbour's replica."""
    stages = Stages()
    greet(stages)
    places: Any = SimpleNamespace(look=dict.fromkeys, admit=id, limit=id, timeout_s=1.0)
    replacements = ColumnReplacements(stages.fleet, HELLO, places, 60.0)
    replacements.limit({V: 7, W: 5})
    stages.fleet.lose(W, WorkerError("it left"))
    stages.fleet.take_losses()
    replacements.look([W])
    assert stages.heard_own(W).max_blocks == 5


def test_heads_are_shared_anew_though_no_answer_is_owed_when_a_stage_is_ready() -> None:
    """Only the search for replacements receives then."""
    stages = Stages(shares_heads=True)
    stages.fleet.send(GROUP, HELLO)
    for own in (V, W):
        stages.own(own, Welcome(f"r{own}", 9, HELLO.kv.block_size, 1))
    greet(stages)
    stages.say(1, ColumnLost(GROUP, "worker_lost", "it is gone"))
    assert [holder for holder, _ in stages.fleet.take_losses()] == [GROUP]
    resharing = Resharing(stages.fleet, HELLO, Deadlines(60.0, 60.0))
    assert not resharing.look([GROUP])
    assert isinstance(stages.heard(1), StageHello) and stages.heard(1) is None
    stages.ends[2].send(ColumnReady(GROUP))
    assert not stages.fleet.is_owed and not resharing.look([GROUP])
    assert stages.heard(1) == GreetColumn(GROUP, 1)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_stage_that_tells_of_a_lower_tier_that_nobody_asked_for_is_lost(is_last: bool) -> None:
    stages = Stages()
    with pytest.raises(WorkerError, match=r"stage 1 is lost: .*Inventory, which was not asked for"):
        stages.say(1, stocked(W, is_last))
    stages = Stages()
    stages.fleet.send(W, UseTier("0" * 64))
    stages.say(1, stocked(W, is_last=False))
    stages.say(1, stocked(W))
    with pytest.raises(WorkerError, match=r"stage 1 is lost: .*Inventory, which was not asked for"):
        stages.say(1, stocked(W, is_last))


def test_what_one_stage_couldnt_store_is_dropped_in_the_others() -> None:
    stages, key = Stages(), b"k" * 16
    keys = words_of([key])
    stages.fleet.send(W, Retain(5, keys, np.ones(1, np.int32)))
    assert isinstance(stages.heard(1), Retain) and isinstance(stages.heard(2), Retain)
    stages.own(W, Done(W, 5, words_of(()), 10, 0.5))
    stages.say(1, Done(W, 5, keys, 10, 0.5))
    stages.say(2, Done(W, 5, words_of(()), 10, 0.5))
    (news,) = stages.fleet.take_moves()
    assert news.holder == W and stages.heard(1) is None
    assert (stages.heard(2).keys == keys).all()


def test_answers_about_a_copy_that_is_given_up_are_of_the_r_worker_that_was_asked() -> None:
    """They come behind its own, and may come before or after the member is greeted again."""
    for is_greeted_first in (False, True):
        stages = Stages()
        members, group = stages.members, stages.fleet.groups[W]
        one, other = members.member(1, W), members.member(1, V)
        greet(stages)
        stages.say(1, ColumnLost(W, "gone", "it left"))
        stages.fleet.take_losses()
        members.placement.move(one, other)
        stages.fleet.resume(W)
        stages.fleet.send(W, Open(75, 100))
        stages.fleet.send(V, Open(76, 100))
        stages.fleet.give_up(W)
        members.placement.give_back(one)
        if is_greeted_first:
            members.revive(one)
            stages.fleet.send(W, HELLO)
        for column, sequence in ((W, 75), (V, 76)):
            stages.say(1, replace(answer(sequence), column=column))
        assert not members.pending.owes_answer(other)
        stages.say(2, replace(answer(76), column=V))
        stages.own(V, Accepted(76))
        assert stages.answers.pop() == (V, Accepted(76)) and not stages.answers
        assert group.loss is not None


def test_a_stage_that_says_what_cannot_be_is_let_go_and_not_one_that_is_gone() -> None:
    stages = Stages()
    with pytest.raises(WorkerError, match="not asked for"):
        stages.say(1, answer(7))
    stages.ends[3].close()
    with pytest.raises(WorkerError, match="stage 2 is lost"):
        stages.fleet.receive(most_s=1.0)
    stages.links.shut_down()
    assert isinstance(stages.heard(1), Shutdown)
    assert stages.links.gone == {2}


def test_a_member_that_the_first_stage_gives_up_is_given_up_there() -> None:
    stages = Stages()
    stages.members.lose(stages.members.member(2, W), WorkerError("it keeps a replica", code="x"))
    assert stages.heard(2) == ColumnLost(W, "x", "it keeps a replica")
    assert [column for column, _ in stages.fleet.take_losses()] == [W]


def test_a_stage_that_has_more_than_it_was_asked_for_lies() -> None:
    stages = Stages()
    stages.fleet.send(W, TakeOver(9, np.array([7, 8]), np.array([10, 5], np.int32)))
    with pytest.raises(WorkerError, match=r"stage 1 is lost: .*more tokens than were asked for"):
        stages.say(1, ColumnTakenOver(W, np.array([11, 5], np.int32), NONE_KEPT))


def test_a_step_may_take_a_stage_as_long_as_its_layers_may_take_r_workers() -> None:
    clock = [100.0]
    stages = Stages(clock=lambda: clock[0])
    owed = stages.members.pending
    greet(stages)
    stages.later.send(a_pass())
    clock[0] += 3 * 60 - 1
    assert not owed.overdue()
    clock[0] += 1
    assert [(index, "180 s" in reason) for index, reason in owed.overdue()] == [(2, True)]
    stages.say(1, done(1, []))
    assert [one.stage for one in stages.later.take_done()] == [1]
    clock[0] += 2 * 60 - 1
    assert not owed.overdue()
    clock[0] += 1
    assert [index for index, _ in owed.overdue()] == [3]


def test_a_stage_has_time_to_give_its_r_worker_up() -> None:
    clock = [100.0]
    stages = Stages(clock=lambda: clock[0])
    stages.fleet.send(W, Open(7, 100))
    stages.own(W, Accepted(7))
    clock[0] += 119
    assert not stages.members.pending.overdue()
    clock[0] += 1
    with pytest.raises(WorkerError, match=r"stage 1 is lost: .*hasn't answered for 120 s"):
        stages.fleet.receive(most_s=0.0)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (ColumnLost(2, "gone", "it left"), "speaks of column 2, and there are 2"),
        (ColumnLost(-1, "gone", "it left"), "column -1"),
        (StageAnswer(1 << 40, 1, "", ""), "column 1099511627776"),
        (Done(2, 1, words_of(()), 1, 0.0), "column 2"),
        (Inventory(-1, 1, words_of(()), np.zeros(0, np.int32), True), "column -1"),
        (Dropped(0, 2), "column 2"),
        (done(1, [5]), r"\[5\] of 2 columns lost"),
        (done(2, []), "as stage 2"),
        (replace(done(1, []), r_compute_s=np.full(2, np.inf, np.float32)), "inf"),
    ],
)
def test_what_a_stage_says_that_cannot_be(lie: Any, reason: str) -> None:
    with pytest.raises(WorkerError, match=f"stage 1 is lost: .*{reason}") as raised:
        Stages().say(1, lie)
    assert raised.value.code == "stage_lost"


def test_a_stage_offers_what_cannot_be() -> None:
    hello = StageHello("m", 1, 2, 1, 0, 1, 4, 16, DType.FLOAT32, DType.FLOAT32)
    with pytest.raises(ProtocolError, match="1 addresses"):
        hello.check(StageWelcome(1, (5, 5), 0, ("one",)))


def test_a_stage_is_lost_by_its_name() -> None:
    stages = Stages()
    stages.say(2, done(2, []))
    with pytest.raises(WorkerError, match=r"stage 2 .*not asked for"):
        stages.later.take_done()
    told = stages.links.loss(2, WorkerError("stage 2 is lost: its process has died")).message
    assert told.startswith("stage 2 is lost: its process has died. Without its layers"), told
    stages = Stages()
    stages.ends[2].send(Failed("stage 1", "out_of_capacity", "too little memory"))
    stages.ends[2].close()
    with pytest.raises(WorkerError, match="stage 1 failed: too little memory"):
        stages.fleet.send(W, Close(7))


class TestRelay:
    """The other end: a stage of two R-workers."""

    def setup_method(self) -> None:
        hub: InprocHub[Any, Any] = InprocHub()
        self.first_hub: InprocHub[Any, Any] = InprocHub()
        self.workers = [connect(hub, "stage 1", InprocHub(), f"r{i}")[1] for i in range(2)]
        here, self.first = connect(hub, "stage 1", self.first_hub, "the first stage")
        self.links = StageLinks({0: here}, is_asked=True)
        self.pool = StagePool(hub, 60.0, stages=self.links)
        self.relay = Relay(self.pool, self.links, session=5)

    def test_a_column_that_was_taken_over_is_lost_once_its_cache_is_dropped(self) -> None:
        """The step in flight would ask for a cache that is not there any more."""
        self.relay.obey(ColumnLost(W, "gone", "it left"))
        self.relay.obey(PlaceColumn(W, V))
        assert not self.pool.is_lost(W)
        self.relay.obey(DropCache(9, W, V))
        assert self.pool.is_lost(W) and not self.pool.is_lost(V)
        self.pool.send(W, Close(7))
        assert list(iter(self.workers[V].poll, None)) == [DropCache(5, W, V)]

    def test_it_is_reported_once_whether_a_lost_r_worker_has_a_replacement(self) -> None:
        waiting: dict[int, Any] = {}
        places: Any = SimpleNamespace(look=lambda lost: waiting, limit=id, timeout_s=1.0)
        self.relay = Relay(self.pool, self.links, 5, ColumnRegreeting(self.pool, HELLO, places))
        self.relay.obey(ColumnLost(W, "gone", "it left"))
        self.relay.pass_on(self.pool.take_losses())
        assert self.heard() == [ColumnLost(W, "gone", "it left")]
        waiting[W] = None
        assert (self.heard(), self.heard()) == ([ColumnReady(W)], [])
        waiting.clear()
        places.timeout_s = 0.0
        assert (self.heard(), self.heard()) == ([ColumnVacant(W)], [])
        self.relay.obey(GreetColumn(W, 1))
        assert self.heard() == [ColumnLost(W, "gone", "it left"), ColumnVacant(W)]

    def test_the_first_stage_learns_what_others_call_a_replacement(self) -> None:
        welcome = Welcome("r1", 9, HELLO.kv.block_size, 1)
        places: Any = SimpleNamespace(
            look=lambda lost: {W: welcome}, admit=id, limit=id, timeout_s=1.0
        )
        regreeting = ColumnRegreeting(self.pool, HELLO, places, {W: 9})
        self.relay = Relay(self.pool, self.links, 5, regreeting, ["first", "standby"])
        self.relay.obey(ColumnLost(W, "gone", "it left"))
        self.relay.pass_on(self.pool.take_losses())
        self.relay.obey(GreetColumn(W, 1))
        hello: Any = self.workers[W].poll()
        assert hello.max_blocks == 9
        self.workers[W].send(welcome)  # type: ignore[arg-type]
        received = self.pool.receive()
        assert received is not None
        self.relay.pass_on([received])
        *_, told = iter(self.first.poll, None)
        assert (told.num_blocks, told.address) == (9, "standby")

    def heard(self) -> list[Any]:
        """By the first stage, after the relay has passed on what there is."""
        self.relay.pass_on([])
        return list(iter(self.first.poll, None))

    @pytest.mark.parametrize(
        ("message", "reason"),
        [
            (Open(7, 100, holder=2), "there is no column 2: there are 2"),
            (PlaceColumn(0, -1), "there is no column -1"),
            (StageWelcome(1, ()), "sent StageWelcome"),
        ],
    )
    def test_what_the_first_stage_may_not_send(self, message: Any, reason: str) -> None:
        with pytest.raises(ProtocolError, match=re.escape(reason)):
            self.relay.obey(message)

"""A later stage between the first one and its own R-workers: what the first stage sends them, and
what they answer and report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, TypeAlias

from msgspec.structs import replace

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.groups import GroupPool, HolderPool
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.fleet.replacements import Replacements, limited
from fastdecode.engine.fleet.resharing import GROUP
from fastdecode.engine.stages.links import FromAnyStage, StageLinks
from fastdecode.engine.stages.pool import StagePool
from fastdecode.engine.step.pipeline import News
from fastdecode.wire.blocks import (
    Accepted,
    Done,
    DropCache,
    Inventory,
    Refused,
    Replicate,
    TakenOver,
    TakeOver,
)
from fastdecode.wire.messages import Hello, Room, Welcome
from fastdecode.wire.stages import (
    FIRST_STAGE,
    ColumnLost,
    ColumnReady,
    ColumnTakenOver,
    ColumnVacant,
    ColumnWelcome,
    GreetColumn,
    PlaceColumn,
    StageAnswer,
)
from fastdecode.wire.traits import THE_ONLY

Relayed: TypeAlias = Room | Replicate | TakeOver | DropCache
"""What the first stage sends a later one's R-worker."""


class ColumnRegreeting:
    """Greets a later stage's R-workers again, and the replacements of lost ones. Each R-worker has
    a column of its own.

    Args:
        places: R-workers that may replace a lost one.
        most_blocks: The most KV blocks of each. An R-worker without a number offers all it has.
    """

    forgets_answers = False  # R-workers still answer what they were asked before

    def __init__(
        self,
        pool: WorkerPool,
        hello: Hello,
        places: Replacements,
        most_blocks: Mapping[int, int] | None = None,
    ) -> None:
        self._pool = pool
        self._hello = hello
        self._places = places
        self._most_blocks = most_blocks or {}
        places.limit(self._most_blocks)

    def found(self) -> list[int]:
        """Return columns that are lost and may be greeted again."""
        return sorted(self._places.look(self._pool.gone.keys()))

    @property
    def is_over(self) -> bool:
        """True if no lost R-worker can be replaced any longer."""
        return not self._places.timeout_s

    def greet(self, column: HolderId) -> None:
        """Greet a column's R-worker, or the replacement of a lost one, if that waits."""
        if column in self._pool.gone and column in self._places.look([column]):
            self._places.admit(column)
            self._pool.revive(column)
        self._pool.send(column, limited(self._hello, self._most_blocks, column))

    def answered(self) -> None:
        """Note that the greeted R-workers have answered."""


class HeadsRegreeting:
    """Greets R-workers that share the heads of one column: the remaining ones, and replacements.

    Args:
        places: R-workers that may replace a lost one. None if there are none.
    """

    forgets_answers = True
    is_over = False
    """The remaining R-workers continue. Without any, the stage ends (``found``)."""

    def __init__(
        self, fleet: GroupPool, hello: Hello, deadlines: Deadlines, places: Replacements | None
    ) -> None:
        self._fleet = fleet
        self._members = fleet.members
        self._hello = hello
        self._deadlines = deadlines
        self._places = places

    def found(self) -> list[int]:
        """Return the column if it is lost and may be greeted again.

        Raises:
            WorkerError: If no R-worker is left, and no replacement may come.
        """
        gone = self._members.gone
        if self._places is not None:
            for place in self._places.look(list(gone)):
                self._places.admit(place)
                self._members.revive(HolderId(place))
        if len(gone) == self._members.num_workers:
            if self._places is None or not self._places.timeout_s:
                raise copy(next(iter(gone.values())))
            return []
        if GROUP not in self._fleet.lost:
            return []
        self.answered()  # or will never
        return [GROUP]

    def greet(self, column: HolderId) -> None:
        """Greet all members, which may have to compile kernels for other numbers of heads."""
        self._members.pending.deadlines = self._deadlines.while_greeting()
        self._fleet.revive(column)
        self._fleet.send(column, self._hello)

    def answered(self) -> None:
        self._members.pending.deadlines = self._deadlines


Regreeting: TypeAlias = ColumnRegreeting | HeadsRegreeting


class Relay:
    """Passes messages on, in their order.

    Args:
        regreeting: Greets R-workers again. None if lost ones have no replacements.
        addresses: What the R-workers that keep columns call each other, kept up to date. Empty if
            they do not reach each other.
    """

    def __init__(
        self,
        pool: HolderPool,
        links: StageLinks,
        session: int,
        regreeting: Regreeting | None = None,
        addresses: Sequence[str] = (),
    ) -> None:
        self._pool = pool
        assert isinstance(pool.members, StagePool)
        self._members = pool.members
        self._links = links
        self._session = session
        self._regreeting = regreeting
        self._addresses = addresses
        self._reported: dict[int, type[ColumnReady | ColumnVacant]] = {}
        """The latest report on each lost R-worker's replacement."""
        self._numbers: dict[int, int] = {}  # of each column's last greeting
        self._num_due: Counter[int] = Counter()  # greetings that R-workers have not answered

    @property
    def _gone(self) -> Mapping[int, WorkerError]:
        """The lost R-workers by their numbers, or their column where they share heads."""
        lost: Mapping[Any, WorkerError] = self._pool.lost
        return self._members.gone if self._pool is self._members else lost

    @property
    def forgets_answers(self) -> bool:
        """True if a column that is greeted again answers nothing that it was asked before."""
        return self._regreeting is not None and self._regreeting.forgets_answers

    @property
    def awaits_replacements(self) -> bool:
        return self._regreeting is not None and bool(self._gone)

    def obey(self, message: FromAnyStage) -> None:
        """Carry out a message of the first stage.

        Raises:
            ProtocolError: If it may not send that, or there is no such column.
        """
        match message:
            case PlaceColumn():
                holder, worker = self._checked(message.column), self._checked(message.worker)
                self._members.placement.place(holder, worker)
            case ColumnLost():
                error = WorkerError(message.message, code=message.code)
                worker = self._checked(message.column)
                if self._members.placement[worker] == worker:
                    self._pool.lose(worker, error)
            case GreetColumn():
                self._greet(self._checked(message.column), message.number)
            case _ if isinstance(message, Relayed):
                column, own = self._checked(message.holder), message
                if isinstance(own, DropCache):
                    cache, placement = self._checked(own.cache), self._members.placement
                    if cache != column and placement[cache] == placement[column]:
                        # It drops the cache of a lost column that it has taken over: steps in
                        # flight send it none of that column's rows.
                        placement.give_back(cache)
                if isinstance(own, TakeOver | DropCache):
                    own = replace(own, session=self._session)
                if self._pool is not self._members:  # each member has a name of its own
                    own = own.for_holder(THE_ONLY)
                self._pool.send(column, own)
            case _:
                raise ProtocolError(f"the first stage sent {type(message).__name__}")

    def pass_on(self, news: Iterable[News]) -> None:
        """Send the first stage what R-workers have answered and reported, and which are lost."""
        losses = []
        for column, answer in news:
            if isinstance(answer, Accepted | Refused):
                why = (answer.code, answer.message) if isinstance(answer, Refused) else ("", "")
                self._links.tell(FIRST_STAGE, StageAnswer(column, answer.sequence_id, *why))
            elif isinstance(answer, TakenOver):
                self._links.tell(
                    FIRST_STAGE, ColumnTakenOver(column, answer.num_tokens, answer.is_kept)
                )
            elif isinstance(answer, Welcome):
                self._take_welcome(column, answer)
            else:
                losses.append((column, answer))
        for moved in self._pool.take_moves():
            if isinstance(moved, Done | Inventory):
                self._links.tell(FIRST_STAGE, moved)
        for replicated in self._members.take_replications():
            self._links.tell(FIRST_STAGE, replicated)
        for column, error in losses:
            self._report_lost(column, error)
        if self._regreeting is not None and (gone := self._gone):
            ready = self._regreeting.found()
            self._report(ColumnReady, ready)
            if self._regreeting.is_over:
                self._report(ColumnVacant, gone.keys() - ready)

    def _report_lost(self, worker: int, error: WorkerError) -> None:
        self._reported.pop(worker, None)
        del self._num_due[worker]
        self._links.tell(FIRST_STAGE, ColumnLost(worker, error.code, error.message))

    def _report(self, what: type[ColumnReady | ColumnVacant], workers: Iterable[int]) -> None:
        """Report whether lost R-workers have replacements, unless that was the last report."""
        for worker in workers:
            if self._reported.get(worker) is not what:
                self._reported[worker] = what
                self._links.tell(FIRST_STAGE, what(worker))

    def _greet(self, column: HolderId, number: int) -> None:
        """Greet a column's R-worker, or its replacement, again. Without one, report the loss."""
        assert self._regreeting is not None
        self._reported.pop(column, None)
        self._numbers[column] = number
        forgets = self.forgets_answers or column in self._gone
        self._num_due[column] = 1 if forgets else self._num_due[column] + 1
        self._regreeting.greet(column)
        if (error := self._gone.get(column)) is not None:
            self._report_lost(column, error)

    def _take_welcome(self, column: HolderId, answer: Welcome) -> None:
        """Take in a column's answer to a greeting. Report the answer to the last one."""
        assert self._regreeting is not None
        self._num_due[column] -= 1
        if not self._num_due[column]:
            self._regreeting.answered()
            what = answer.num_blocks, answer.block_size, answer.has_tier
            address = self._addresses[column] if self._addresses else ""
            newcomers = tuple(self._members.take_newcomers())
            welcome = ColumnWelcome(column, self._numbers[column], *what, address, newcomers)
            self._links.tell(FIRST_STAGE, welcome)

    def _checked(self, column: int) -> HolderId:
        num_columns = len(self._members.own if self._pool is self._members else self._pool)
        if not 0 <= column < num_columns:
            raise ProtocolError(f"there is no column {column}: there are {num_columns}")
        return HolderId(column)

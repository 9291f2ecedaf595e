"""The stages behind the first, as the first one sees them: the R-workers of a
column are one holder, whose room is there once it is in every stage, and which
is lost once it is lost in one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.pending import job_of
from fastdecode.engine.fleet.pool import WorkerEvents
from fastdecode.engine.stages.links import FromAnyStage, StageLinks
from fastdecode.engine.stages.losses import ColumnLosses
from fastdecode.engine.stages.rooms import FIRST, ColumnRooms
from fastdecode.engine.stages.takings import ColumnTakings
from fastdecode.engine.stages.tiers import ColumnTiers, StageMoved, check
from fastdecode.wire.kv.reserving import Accepted, Refused, Reserving
from fastdecode.wire.kv.taking_over import TakenOver, TakeOver
from fastdecode.wire.kv.tiers import UseTier
from fastdecode.wire.messages import Answer, ToRWorker
from fastdecode.wire.stages import (
    ColumnInterrupted,
    ColumnLost,
    ColumnTakenOver,
    DropColumn,
    StageAnswer,
    StageDone,
    StageHello,
    StagePass,
    StageWelcome,
)

_LOST = "column_lost"
TellOwn: TypeAlias = Callable[[HolderId, ToRWorker], None]
"""Tells the first stage's R-worker of a column something; nobody, if it is lost."""


class LaterStages:
    """Tells stages of rooms and steps, and joins what they say.

    Args:
        links: to all of them.
        tell_own: tells the first stage's R-workers what isn't answered.
        unasked: what those say of what they have moved.
    """

    def __init__(self, links: StageLinks, tell_own: TellOwn, unasked: WorkerEvents) -> None:
        self._links = links
        self._tell_own = tell_own
        self.token_stages = tuple(x for x in links.later if x < links.first_prompt_stage)
        """Those behind the first that decode, or run all."""
        self.prompt_stages = tuple(x for x in links.later if x >= links.first_prompt_stage)
        """Those that run prompts only."""
        num_stages = 1 + len(self.token_stages)
        self.rooms = ColumnRooms(num_stages, self._tell)
        """What columns answer."""
        self.losses = ColumnLosses()
        """What is lost of them."""
        self.takings = ColumnTakings(num_stages, self._tell)
        """Columns that neighbours are asked to go on for."""
        self.tiers = ColumnTiers((FIRST, *self.token_stages), self._tell, unasked)
        """What they have moved to lower tiers, and back."""
        self._done: list[StageDone] = []
        self._welcomes: dict[int, StageWelcome] = {}
        self._num_layers: dict[int, int] = {}  # up to the end of each

    def greet(self, hellos: dict[int, StageHello]) -> None:
        """Tell stages what they are to be; ``welcomes`` are due."""
        num_layers = 0
        for stage, hello in hellos.items():
            self._links.send(stage, hello)
            num_layers += hello.num_layers
            self._num_layers[stage] = num_layers

    def welcomes(self, stages: Collection[int]) -> dict[int, StageWelcome] | None:
        """By stage, once all of these have answered."""
        answered = {stage: told for stage, told in self._welcomes.items() if stage in stages}
        return answered if len(answered) == len(stages) else None

    def tell(self, column: HolderId, message: ToRWorker) -> None:
        """The column's first R-worker has been told this: so are the others, if
        it concerns them."""
        if not message.in_every_stage:
            return
        if isinstance(message, Reserving):
            self.rooms.ask(column, message)
        self.tiers.ask(column, message)
        job = job_of(message)
        for stage in self.token_stages:
            if job is not None and stage not in self.losses.stages_of(column):
                self._links.owed.begin(stage, column, job)
            own = message.of_stage(stage) if isinstance(message, UseTier) else message
            self._links.send(stage, own.for_holder(column))

    def send(self, message: StagePass, stages: Sequence[int]) -> None:
        """A step leaves for stages, all of which have to report on it. Each
        layer of theirs, and of those before them, may take its R-workers as long
        as any answer may."""
        for stage in stages:
            self._links.owed.expect(stage, message, self._num_layers.get(stage, 1))
        self._links.tell(stages[0], message)

    def joined(self, received: tuple[HolderId, Answer] | None) -> tuple[HolderId, Answer] | None:
        """What the first stage's own R-worker of a column has said, or nobody
        of those, as the whole column's answer; None: there is none yet."""
        self.listen()
        if received is None:
            return self.rooms.next_answer()
        holder, answer = received
        if isinstance(answer, (Accepted, Refused)):
            self.rooms.answer(FIRST, holder, answer)
            return self.rooms.next_answer()
        if isinstance(answer, TakenOver):
            self._taken_over(FIRST, holder, answer)
            return self.rooms.next_answer()
        return received

    def take_lost(self) -> list[tuple[HolderId, WorkerError]]:
        """Columns that are lost, and why; each is told once, but for what
        ``losses`` says."""
        lost = self.losses.take()
        for column, (_, own) in lost.items():
            self.rooms.forget(column, own=own)
            self.takings.forget(column, own=own)
            self.tiers.forget(column)
            if column in self.losses.over:  # nobody waits for what it works at
                for stage in self.token_stages:
                    self._links.owed.forget_jobs(stage, column)
        return [(column, error) for column, (error, _) in lost.items()]

    def take_over(self, column: HolderId, message: TakeOver, stages: Collection[int]) -> None:
        """Have neighbours go on for a column, in these stages; the first one's
        has been asked, if it is among them."""
        self.losses.go_on(column)
        self.takings.ask(column, message, stages)
        for stage in stages:
            if stage != FIRST:
                self._links.send(stage, message.for_holder(column))

    def drop(self, column: HolderId, stages: Iterable[int]) -> None:
        """Nobody there need go on for a column any more."""
        for stage in stages:
            self._links.tell(stage, DropColumn(column))

    def take_done(self) -> list[StageDone]:
        """What stages have reported of steps; told once."""
        done, self._done = self._done, []
        return done

    def listen(self) -> None:
        """Take in what stages have said."""
        for stage, message in self._links.take_heard():
            if isinstance(message, (ColumnLost, ColumnInterrupted)):
                error = WorkerError(f"stage {stage}: {message.message}", code=message.code)
                is_kept = isinstance(message, ColumnInterrupted)
                self.losses.r_workers[stage, message.column] = error
                self._links.owed.forget_jobs(stage, message.column)
                self._lose(stage, message.column, error, is_kept=is_kept)
            elif isinstance(message, StageMoved):
                self._move(stage, message)
            else:
                self._links.answered(stage, message)
                self._take(stage, message)

    def _move(self, stage: int, news: StageMoved) -> None:
        """
        Raises:
            WorkerError: nobody asked for that, or it can't be.
        """
        try:
            check(news, self._links.num_columns)
        except ProtocolError as lie:
            raise self._links.loss(stage, lie) from None
        if self._links.owed.take_moved(stage, news):
            self.tiers.take(stage, news)
        elif not {news.holder} & (self.losses.over | self.losses.void.keys()):
            text = f"it sent {type(news).__name__}, which nobody asked for"
            raise self._links.loss(stage, ProtocolError(text))

    def _take(self, stage: int, answer: FromAnyStage) -> None:
        """
        Raises:
            WorkerError: that isn't what a stage may say.
        """
        match answer:
            case StageAnswer():
                self.rooms.answer(stage, HolderId(answer.column), _answer(answer))
            case ColumnTakenOver():
                self._taken_over(stage, HolderId(answer.column), TakenOver(answer.num_tokens))
            case StageDone():
                for column in () if self.losses.may_recover else answer.lost.tolist():
                    text = f"stage {stage} has lost its R-worker of column {column}"
                    self._lose(stage, column, WorkerError(text, code=_LOST), is_kept=False)
                self._done.append(answer)
            case StageWelcome():
                self._welcomes[stage] = answer
            case _:
                raise self._links.loss(stage, ProtocolError(f"it sent {type(answer).__name__}"))

    def _taken_over(self, stage: int, column: HolderId, answer: TakenOver) -> None:
        try:
            joined = self.takings.answer(stage, column, answer)
        except ProtocolError as lie:
            if stage != FIRST:
                raise self._links.loss(stage, lie) from None
            joined = answer  # whoever asked finds out what is wrong with it
        if joined is not None:
            self.rooms.give(column, joined)

    def _lose(self, stage: int, number: int, error: WorkerError, *, is_kept: bool) -> None:
        column = HolderId(number)
        if not self.losses.lose(stage, column, error, is_kept=is_kept) and is_kept:
            self.drop(column, [stage])

    def _tell(self, stage: int, column: HolderId, message: ToRWorker) -> None:
        if stage == FIRST:
            self._tell_own(column, message)
        else:
            self._links.tell(stage, message.for_holder(column))


def _answer(answer: StageAnswer) -> Accepted | Refused:
    if not answer.code:
        return Accepted(answer.sequence_id)
    return Refused(answer.sequence_id, answer.code, answer.message)

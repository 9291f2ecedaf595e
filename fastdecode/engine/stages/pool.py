"""The R-workers of a pipeline: those of this stage, and, in the first stage, those of later ones,
which it reaches over the links between stages.

In the first stage, a column is a cache group: its R-worker in every stage is a member. Messages to
a member of a later stage, its answers and its reports use that stage's link
(``fastdecode.wire.stages``).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from msgspec import structs

from fastdecode.core.clock import Clock
from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import Shard
from fastdecode.engine.fleet.groups import CacheGroup, GroupPool
from fastdecode.engine.fleet.pool import RHub, WorkerPool
from fastdecode.engine.fleet.replacements import Replacements, limited
from fastdecode.engine.fleet.resharing import share_out_heads
from fastdecode.engine.stages.links import FromAnyStage, StageLinks
from fastdecode.wire.blocks import Accepted, DropCache, Dropped, Refused, TakenOver
from fastdecode.wire.messages import Answer, FromRWorker, Hello, ToRWorker, Welcome
from fastdecode.wire.stages import (
    ColumnLost,
    ColumnReady,
    ColumnTakenOver,
    ColumnVacant,
    ColumnWelcome,
    GreetColumn,
    OfMember,
    PlaceColumn,
    StageAnswer,
    stage_name,
)

_NUM_ANSWERS: Final = 2
"""A relayed answer may take the time of two: the stage has to give its R-worker up before the
first stage gives the stage up."""


class StagePool(WorkerPool):
    """The R-workers of a stage. Losing another stage raises WorkerError immediately.

    Args:
        stages: The other stages, which the hub's last connections are to.
        relayed: The stages whose R-workers this one reaches over their links.
        num_columns: None for the number of R-workers that are connected here.
        num_keepers: How many of each stage's last R-workers only keep replicas: no columns.
    """

    def __init__(
        self,
        hub: RHub,
        timeout_s: float,
        silence_s: float = math.inf,
        clock: Clock = time.monotonic,
        absent: Mapping[int, WorkerError] | None = None,
        *,
        stages: StageLinks,
        relayed: Sequence[int] = (),
        num_columns: int | None = None,
        num_keepers: int = 0,
    ) -> None:
        self._num_own: Final = len(hub.connections) - len(stages)
        self._num_each: Final = self._num_own if num_columns is None else num_columns
        """R-workers of each stage, as the first one knows them."""
        self.num_columns: Final = self._num_each - num_keepers
        self._stages = stages
        self._relayed = tuple(relayed)
        self._first_relayed = len(hub.connections)
        self._placed: dict[HolderId, int] = {}
        """Members of later stages that their stage knows at another R-worker than their own."""
        self.has_replacement: dict[HolderId, bool] = {}
        """Of lost members of later stages: whether a replacement waits there (True), or none
        comes any more (False). Of others neither was reported."""
        self._greetings: Counter[HolderId] = Counter()  # of members of later stages
        self._void: set[HolderId] = set()
        """Members of later stages that have not answered the last greeting. What they send until
        then answers earlier messages."""
        self.addresses: dict[HolderId, str] = {}
        """What the R-workers that keep later stages' members call each other."""
        num_relayed = len(self._relayed) * self._num_each
        places = range(self.num_columns, self._num_each)
        self._keepers = [self.member(stage, i) for stage in (0, *self._relayed) for i in places]
        super().__init__(
            hub,
            timeout_s,
            silence_s,
            clock,
            absent,
            num_others=len(stages),
            num_relayed=num_relayed,
            keepers=self._keepers,
        )
        stages.join(self.pending, self._num_own, self.num_columns)

    def member(self, stage: int, column: int) -> HolderId:
        """Return the member that is a stage's R-worker of a column."""
        if not stage:
            return HolderId(column)
        place = self._relayed.index(stage)
        return HolderId(self._first_relayed + place * self._num_each + column)

    def begin_greeting(self, members: Iterable[HolderId]) -> None:
        """Prepare for greeting members again: what later stages' members were asked before is
        void, and may never be answered."""
        for member in members:
            if not self.is_here(member):
                self.pending.forget(self.placement[member])
                for place in self._beside(member):
                    self.pending.forget_about(place, member)
                self._greetings[member] += 1
                self._void.add(member)

    @property
    def own(self) -> list[HolderId]:
        """The R-workers of this stage, by their first holders; keepers are the last."""
        return [HolderId(index) for index in range(self._num_own)]

    def revive(self, holder: HolderId, *, has_cache: bool = True) -> None:
        self.has_replacement.pop(holder, None)
        super().revive(holder, has_cache=has_cache)

    def take_losses(self) -> list[tuple[HolderId, WorkerError]]:
        """Return the losses. R-workers that only keep replicas are among them: the first stage
        knows each as a member."""
        lost = [(x, self.gone[x]) for x in self._keepers if x in self._untold]
        return [*super().take_losses(), *lost]

    def revive_elsewhere(self, holders: Iterable[HolderId]) -> bool:
        lost = [x for x in holders if not self.is_here(x) and self.is_lost(x)]
        if not all(map(self.has_replacement.get, lost)):
            return False
        for member in lost:
            self.revive(member)
        return True

    def origin(self, index: int) -> tuple[int, int]:
        """Return the stage of an R-worker, and its number there: at first, its column."""
        if index < self._num_own:
            return 0, index
        place, column = divmod(index - self._first_relayed, self._num_each)
        return self._relayed[place], column

    def send(self, holder: HolderId, message: ToRWorker) -> None:
        if self.is_here(holder):
            super().send(holder, message)
            return
        index = self.placement[holder]
        if index in self.gone:
            return
        named = message.for_holder(holder)
        self.pending.ask(index, named, holder, _NUM_ANSWERS)
        stage, column = self.origin(holder)
        if self._placed.get(holder, holder) != index:
            self._placed[holder] = index
            self._stages.tell(stage, PlaceColumn(column, self.origin(index)[1]))
        self._stages.tell(stage, self._places(named, holder, column))

    def lose(self, holder: HolderId, error: FastDecodeError) -> None:
        index = self.placement[holder]
        if index >= self._first_relayed and index not in self.gone:
            stage, column = self.origin(index)
            self._stages.tell(stage, ColumnLost(column, error.code, error.message))
        super()._lose(index, error)

    def _lose(self, index: int, error: FastDecodeError) -> None:
        if index in self.gone:
            return
        if index >= self._first_relayed:
            # The stage watches its R-workers: it is the one that doesn't answer, or lies.
            raise self._stages.loss(self.origin(index)[0], error)
        if index >= self._num_own:
            raise self._stages.loss(self._stages.stages[index - self._num_own], error)
        super()._lose(index, error)

    def _taken(self, index: int, message: FromRWorker) -> tuple[HolderId, Answer] | None:
        if not self._num_own <= index < self._first_relayed:
            return super()._taken(index, message)
        said = cast(FromAnyStage, message)
        stage = self._stages.take(index, said)
        if self._stages.is_asked or not isinstance(
            said, ColumnLost | ColumnReady | ColumnVacant | OfMember
        ):
            self._stages.heard.append((stage, said))
        elif isinstance(said, ColumnLost):
            member = self._member_of(stage, said.column)
            self.has_replacement.pop(member, None)
            error = WorkerError(f"{stage_name(stage)}: {said.message}", code=said.code)
            super()._lose(member, error)
        elif isinstance(said, ColumnReady | ColumnVacant):
            member = self.member(stage, said.column)
            self.has_replacement[member] = isinstance(said, ColumnReady)
        else:
            return self._take_relayed(stage, said)
        return None

    def _take_relayed(self, stage: int, said: OfMember) -> tuple[HolderId, Answer] | None:
        """Take an answer, or a report, of a later stage's R-worker.

        Raises:
            WorkerError: If the stage sends what can't be true.
        """
        if stage not in self._relayed:
            raise self._stages.loss(stage, ProtocolError(f"it sent {type(said).__name__}"))
        column = said.holder if hasattr(said, "holder") else said.column
        member = self._member_of(stage, column)
        if isinstance(said, ColumnWelcome):
            self._newcomers += [f"{stage_name(stage)}: {each}" for each in said.newcomers]
        if member in self._void:
            if not isinstance(said, ColumnWelcome) or said.number != self._greetings[member]:
                return None
            self._void.remove(member)
        return super()._taken(self._asked(member), self._in_members(stage, member, said))

    def _asked(self, member: HolderId) -> int:
        """Return the place of the R-worker that was asked about a later stage's member, which it
        may have kept only then."""
        places = self._beside(member) if self.placement.has_moved else ()
        owes = (place for place in places if self.pending.num_about(place, member))
        return next(owes, self.placement[member])

    def _beside(self, member: HolderId) -> list[HolderId]:
        """Return all places of the stage of a later stage's member."""
        stage, _ = self.origin(member)
        return [self.member(stage, column) for column in range(self._num_each)]

    def _member_of(self, stage: int, column: int) -> HolderId:
        if 0 <= column < self._num_each:
            return self.member(stage, column)
        text = f"speaks of column {column}, and there are {self._num_each}"
        raise self._stages.loss(stage, ProtocolError(text))

    def _in_members(self, stage: int, member: HolderId, said: OfMember) -> FromRWorker:
        """Return the message with members' names in place of columns'."""
        match said:
            case StageAnswer():
                if said.code:
                    return Refused(said.sequence_id, said.code, said.message)
                return Accepted(said.sequence_id)
            case ColumnTakenOver():
                return TakenOver(said.num_tokens, said.is_kept)
            case ColumnWelcome():
                self.addresses[member] = said.address
                return Welcome(
                    self._name(member), said.num_blocks, said.block_size, 1, said.has_tier
                )
            case Dropped():
                return Dropped(member, self._member_of(stage, said.cache))
        return structs.replace(said, holder=member)

    def _places(self, message: ToRWorker, member: HolderId, column: int) -> ToRWorker:
        """Return the message with columns' names in place of members'."""
        if isinstance(message, Hello):  # the stage has made its own
            return cast(ToRWorker, GreetColumn(column, self._greetings[member]))
        if isinstance(message, DropCache):
            message = structs.replace(message, cache=self.origin(message.cache)[1])
        return cast(ToRWorker, cast(Any, message).for_holder(column))

    def _name(self, index: int) -> str:
        if index < self._first_relayed:
            return super()._name(index)
        stage, column = self.origin(index)
        return f"stage {stage}'s R-worker of column {column}"

    def _heard_s(self, index: int) -> float | None:
        if index < self._first_relayed:
            return super()._heard_s(index)
        return self._stages.heard_s(self.origin(index)[0])


class ColumnPool(GroupPool):
    """The columns of the first stage. Each is a holder, with an R-worker of every stage.

    Where R-workers share out the heads, this stage's R-workers and the group of each other stage
    are members of one column.

    Args:
        layers: The layers of each stage.
    """

    def __init__(
        self,
        members: StagePool,
        stages: StageLinks,
        layers: Sequence[range],
        *,
        shares_heads: bool = False,
    ) -> None:
        shards = [
            {members.member(stage, column): Shard(layers=x) for stage, x in enumerate(layers)}
            for column in range(members.num_columns)
        ]
        if shares_heads:
            (_, own), *others = shards[0].items()
            elsewhere = dict(others)

            def share_out(pool: WorkerPool, hello: Hello) -> dict[HolderId, Shard]:
                shared = share_out_heads(pool, hello)  # by R-workers of this stage
                here = {x: replace(own, heads=shard.heads) for x, shard in shared.items()}
                return {**here, **elsewhere}

            super().__init__(members, [elsewhere], share_out)
        else:
            super().__init__(members, shards)
        self.of_stages: Final = members  # all members; later stages' are among them
        self.later: Final = stages  # the stages behind this one

    def _begin(self, group: CacheGroup, hello: Hello) -> None:
        # The first greeting goes to this stage's members; each later stage does its own.
        group.greets_all = self.later.are_welcome
        if group.greets_all:
            self.of_stages.begin_greeting(group.shards)
        super()._begin(group, hello)


class ColumnReplacements:
    """Greets a lost column again in every stage, once its lost members have been replaced, each in
    its own stage (``Replacements``).

    A lost column is only greeted when no sequence is on it. No stage has a step on it in flight
    then, so its R-workers may forget what they have.

    Args:
        places: R-workers that may replace these.
    """

    def __init__(
        self, fleet: ColumnPool, hello: Hello, places: Replacements, timeout_s: float
    ) -> None:
        self._fleet = fleet
        self._hello = hello
        self._places = places
        self._timeout_s = timeout_s
        self._greeting: set[HolderId] = set()
        self._most_blocks: Mapping[int, int] = {}

    @property
    def timeout_s(self) -> float:
        """How long to keep looking. 0 if a member of each lost column can't be replaced."""
        groups = (self._fleet.groups[holder] for holder in self._fleet.lost)
        return 0.0 if all(map(self._is_vacant, groups)) else self._timeout_s

    def limit(self, num_blocks: Mapping[int, int]) -> None:
        """Set the most KV blocks of replacements, and of the remaining members."""
        self._most_blocks = num_blocks
        self._places.limit(num_blocks)

    def look(self, lost: Collection[int]) -> dict[int, Welcome]:
        if not self._fleet.later.are_welcome:
            return {}  # the job begins
        if len(self._fleet.lost) == len(self._fleet):
            self._fleet.look()  # no step waits for answers meanwhile
        for holder in map(HolderId, lost):
            group = self._fleet.groups[holder]
            if group.broken is not None:
                self._greeting.discard(holder)
            if holder not in self._greeting and self._let_in(group):
                self._greeting.add(holder)
                self._fleet.send(holder, limited(self._hello, self._most_blocks, holder))
        found = {holder: self._fleet.groups[holder].welcome for holder in self._greeting}
        return {holder: welcome for holder, welcome in found.items() if welcome is not None}

    def admit(self, worker: int) -> None:
        self._greeting.discard(HolderId(worker))

    def _is_vacant(self, group: CacheGroup) -> bool:
        members = self._fleet.of_stages
        lost = filter(members.is_lost, group.shards)
        has_places = bool(self._places.timeout_s)
        may_come = (
            has_places if members.is_here(x) else members.has_replacement.get(x, True) for x in lost
        )
        return not all(may_come)

    def _let_in(self, group: CacheGroup) -> bool:
        """Let in a column's replacements. Return False if a lost member of it has none."""
        members = self._fleet.of_stages
        here = [x for x in group.shards if members.is_here(x) and members.is_lost(x)]
        if not set(here) <= self._places.look(here).keys():
            return False
        if not members.revive_elsewhere(group.shards):
            return False
        for member in here:
            self._places.admit(member)
            members.revive(member)
        return True

"""After a loss, with replicas: a neighbour takes over the lost R-worker's cache,
and gives it back to a replacement once that has a copy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import ClassVar

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId
from fastdecode.engine.extensions import EngineState
from fastdecode.engine.fleet.replacements import Replacements
from fastdecode.engine.fleet.replicas import Replicas
from fastdecode.engine.recovery import Recovery
from fastdecode.schedule.holder_states import HolderState
from fastdecode.schedule.life.events import Event, Interrupted, Leaving, Lost, Reopened, TakeOver
from fastdecode.wire.blocks import TakenOver


class ReplicaRecovery(Recovery):
    """Recovers from replicas what can be, and the rest as ``Recovery`` does.

    Args:
        state, replacements, clock: see ``Recovery``.
        replicas: that neighbours keep.
    """

    instructions: ClassVar = (TakeOver,)
    answers: ClassVar = (TakenOver,)

    def __init__(
        self,
        state: EngineState,
        replicas: Replicas,
        replacements: Replacements | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(state, replacements, clock)
        self._replicas = replicas
        state.stats.replicas = replicas.figures
        replicas.hand_over_to(replacements)

    def lose(self, holder: HolderId) -> Lost | Interrupted:
        """See ``Recovery``."""
        is_kept = self._replicas.lose(holder, is_used=self._is_used(holder))
        return Interrupted(holder) if is_kept else super().lose(holder)

    def _is_used(self, holder: HolderId) -> bool:
        """Whether sequences are on a holder, or conversations go on there."""
        cache = self._state.lifecycle.scheduler.ledger.cache
        return self._sequences.is_on(holder) or cache.is_awaited(holder)

    def do(self, order: TakeOver) -> Iterable[Event]:
        """Have a neighbour take over; it may be lost meanwhile, too."""
        if not self._replicas.take_over(order):
            yield super().lose(order.holder)

    def take(self, holder: HolderId, answer: TakenOver) -> Iterable[Event]:
        """The neighbour reports what it has. It may be asked once more."""
        taken = self._replicas.taken_over(holder, answer)
        return () if taken is None else (taken,)

    def news(self) -> Iterable[Event]:
        """Takeovers of which nothing is left, caches that are given back, and
        replacements that have joined; then the ring is closed again."""
        self._replicas.take_news(self._state.num_launched - 1)
        yield from self._emptied()
        yield from map(Reopened, self._reopened())
        yield from self._returned()
        self._count_newcomers()
        self._replicas.mend(super()._vacant, may_return=self._replacements is not None)

    @property
    def _vacant(self) -> list[HolderId]:
        """See ``Recovery``. Rings are closed without holders that are greeted again."""
        return [holder for holder in super()._vacant if not self._replicas.is_in_ring(holder)]

    def _emptied(self) -> Iterator[Event]:
        """Holders that neighbours took over, and that nobody uses any more: from now
        on they are lost, and may be replaced."""
        adopted = self._replicas.adopted
        if not adopted or self._state.lifecycle.adoptions:
            return
        empty = [
            holder
            for holder in adopted
            if not self._is_used(holder) and not self._replicas.is_leaving(holder)
        ]
        for holder in empty:
            self._replicas.emptied(holder)
        yield from map(super().lose, empty)

    def _reopened(self) -> list[HolderId]:
        """Holders that neighbours took over and where sequences may start again: there
        are no others, or conversations go on there."""
        replicas, cache = self._replicas, self._state.lifecycle.scheduler.ledger.cache
        adopted = self._holders.having(HolderState.ADOPTED)
        return [x for x in adopted if x in replicas.reopened() or cache.is_awaited(x)]

    def _returned(self) -> Iterator[Event]:
        """Replacements of lost holders; and of holders that neighbours took over,
        once the replacement has a copy."""
        replicas, vacant = self._replicas, self._vacant
        if self._replacements is None or not (vacant or replicas.adopted):
            return
        leaving: list[HolderId] = []
        if not self._state.lifecycle.adoptions:
            leaving = replicas.leaving(self._is_used)
        joined = [*self._given_up(), *self._joined(vacant)]
        yield from map(Leaving, leaving)
        yield from joined


def recovery_of(
    state: EngineState,
    replicas: Replicas | None,
    replacements: Replacements | None,
    clock: Clock = time.monotonic,
) -> Recovery:
    """With replicas, or without."""
    if replicas is None:
        return Recovery(state, replacements, clock)
    return ReplicaRecovery(state, replicas, replacements, clock)

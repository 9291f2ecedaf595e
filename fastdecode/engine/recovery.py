"""After a loss: the sequences of lost R-workers are recomputed, and replacements
join.

Nothing here waits. While all are lost, ``Recovery`` says for how long there is
no use in looking again (``pause_s``); the thread that steps the engine waits, and
serves its inbox meanwhile.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Iterator
from copy import copy

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId
from fastdecode.engine.extensions import EngineState, Extension
from fastdecode.engine.fleet.replacements import Replacements
from fastdecode.schedule.holder_states import HolderState
from fastdecode.schedule.life.events import Event, Interrupted, Joined, Lost

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
"""Between two looks while nobody is there; the longer, the longer it has been so."""
_LOOK_AWAY_S = 2 * _LONGEST_PAUSE_S
"""When nobody has looked for so long, there was nothing to run."""


class Recovery(Extension):
    """Decides what follows a loss, and admits replacements. Every engine has one.

    Args:
        state: of the engine.
        replacements: who may come; None: nobody.
        clock: seconds.
    """

    def __init__(
        self,
        state: EngineState,
        replacements: Replacements | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._state = state
        self._fleet = state.fleet
        self._sequences = state.lifecycle.sequences
        self._holders = state.lifecycle.holders
        self._replacements = replacements
        self._clock = clock
        self._looked_s = self._since_s = -math.inf
        self.pause_s = 0.0
        """While all are lost: for how long there is no use in looking again."""
        self._count_newcomers()  # that came before the engine was made

    def lose(self, holder: HolderId) -> Lost | Interrupted:
        """A holder is gone. What follows: ``Lost`` for good, or ``Interrupted``
        until its replica takes over."""
        return Lost(holder, self._is_sure_to_return)

    @property
    def idle_pause_s(self) -> float:
        """See ``Extension``. What is left of a lost holder may be all that others wait for."""
        return _FIRST_PAUSE_S if self._holders.returning else 0.0

    def news(self) -> Iterable[Event]:
        """Replacements that have joined, once no sequence is on the lost ones."""
        if self._replacements is not None and (vacant := self._vacant):
            yield from (*self._given_up(), *self._joined(vacant))

    @property
    def _is_sure_to_return(self) -> bool:
        """Whether what is left of a lost holder is going to be one again."""
        return self._replacements is not None and self._replacements.timeout_s == math.inf

    def _given_up(self) -> Iterator[Event]:
        """Lost holders of which nothing is left, though something was."""
        if self._holders.returning and not self._is_sure_to_return:
            yield from map(Lost, sorted(self._holders.returning))

    @property
    def _vacant(self) -> list[HolderId]:
        """Lost holders on which no sequence is any more: no step on them is in flight."""
        lost = self._holders.having(HolderState.LOST)
        return [holder for holder in lost if not self._sequences.is_on(holder)]

    def is_stranded(self) -> bool:
        """Whether all are lost, and replacements may come: nothing can run until
        they have. Only time counts in which somebody asked.

        Raises:
            WorkerError: all are lost for good: why the first of them was.
        """
        if not self._holders.are_lost:
            self.pause_s = 0.0
            return False
        self._note_stranded()
        return True

    def _note_stranded(self) -> None:
        now = self._clock()
        if not self.pause_s or now - self._looked_s > _LOOK_AWAY_S:
            self._since_s = now
        self._looked_s = now
        if not self._may_come(now - self._since_s):
            reasons = (self._fleet.gone or self._fleet.lost).values()
            raise copy(next(iter(reasons)))
        self.pause_s = min(max(_FIRST_PAUSE_S, 2 * self.pause_s), _LONGEST_PAUSE_S)

    def _may_come(self, stranded_s: float) -> bool:
        """Whether a replacement may still come, when all have been lost for so long."""
        if self._replacements is None:
            return False
        timeout_s = self._replacements.timeout_s
        if not stranded_s and 0 < timeout_s < math.inf:
            logger.warning(
                "every R-worker is lost: trying to reach one, for %g s (worker_timeout_s)",
                timeout_s,
            )
        return stranded_s < timeout_s or bool(self._replacements.look(self._vacant))

    def _joined(self, vacant: Collection[HolderId]) -> Iterator[Event]:
        """Admit the replacements of these holders."""
        assert self._replacements is not None
        for index, welcome in self._replacements.look(vacant).items():
            if (holder := HolderId(index)) in vacant:
                self._replacements.admit(holder)
                self._fleet.revive(holder)
                yield Joined(holder, welcome.num_blocks)
        self._count_newcomers()

    def _count_newcomers(self) -> None:
        """Count the R-workers that have replaced lost ones since the last call."""
        for name in self._fleet.members.take_newcomers():
            self._state.stats.num_rejoined += 1
            logger.warning("%s has replaced an R-worker that was lost", name)

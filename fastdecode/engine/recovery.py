"""After a loss: who comes in a lost R-worker's place, and when nobody can.

Nothing here waits. While all are lost, ``Recovery`` says for how long there is
no use in looking again (``pause_s``); whoever runs the steps waits, and does
meanwhile what others want.
"""

from __future__ import annotations

import logging
import math
import time
from copy import copy

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.engine.fleet.heads.replicas import GroupReplicas
from fastdecode.engine.fleet.replacements import Replacements
from fastdecode.engine.fleet.replicas import Replicas
from fastdecode.engine.stages.replicas import ColumnReplicas
from fastdecode.schedule.life.events import (
    Interrupted,
    Joined,
    Leaving,
    Lost,
    Reopened,
    TakenOver,
    TakeOver,
)
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.wire.kv.taking_over import TakenOver as TakenOverAnswer

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5
"""Between two looks while nobody is there; the longer, the longer it has been so."""
_LOOK_AWAY_S = 2 * _LONGEST_PAUSE_S
"""When nobody has looked for so long, there was nothing to run."""


class Recovery:
    """Keeps count of the holders that are lost, and lets in those that come in
    their place.

    Args:
        fleet: the holders.
        replacements: who may come; None: nobody.
        clock: seconds.
        replicas: that neighbours keep; None: they keep none.
    """

    def __init__(
        self,
        fleet: Fleet,
        replacements: Replacements | None = None,
        clock: Clock = time.monotonic,
        replicas: Replicas | GroupReplicas | ColumnReplicas | None = None,
    ) -> None:
        self._fleet = fleet
        self.replicas = replicas
        self._replacements = replacements
        self._clock = clock
        self._looked_s = self._since_s = -math.inf
        self.pause_s = 0.0
        """While all are lost: for how long there is no use in looking again."""
        self._lost: dict[HolderId, WorkerError] = {}
        if replicas is not None:
            replicas.hand_over_to(replacements)

    def lose(
        self, holder: HolderId, error: WorkerError, lifecycle: Lifecycle
    ) -> Lost | Interrupted:
        """The holder is gone, for good or until its neighbour goes on for it:
        what has happened."""
        is_used = lifecycle.lives.is_on(holder)
        if self.replicas is not None and self.replicas.lose(holder, is_used=is_used):
            return Interrupted(holder)
        self._lost[holder] = error
        return Lost(holder)

    def take_over(self, order: TakeOver) -> Lost | None:
        """Have another R-worker go on for a holder. It may be lost meanwhile, too."""
        assert self.replicas is not None
        if self.replicas.take_over(order):
            return None
        self._lost[order.holder] = self._fleet.lost[order.holder]
        return Lost(order.holder)

    def taken_over(self, holder: HolderId, answer: TakenOverAnswer) -> TakenOver | None:
        """That one has said what it has; None: it is to say so once more, or
        didn't say that, and is lost."""
        assert self.replicas is not None
        try:
            return self.replicas.taken_over(holder, answer)
        except ProtocolError as lie:
            name = self._fleet.peer(holder)
            self._fleet.lose(holder, ProtocolError(f"{name} {lie.message}"))
            return None

    def emptied(self, lifecycle: Lifecycle) -> list[Lost]:
        """Those that neighbours went on for, and of which nothing is left: from
        now on they are lost, and others may come in their place."""
        if self.replicas is None or not self.replicas.adopted or lifecycle.adoptions:
            return []
        empty = [
            holder
            for holder in self.replicas.adopted
            if not lifecycle.lives.is_on(holder) and not self.replicas.is_leaving(holder)
        ]
        for holder in empty:
            self.replicas.emptied(holder)
            self._lost[holder] = self._fleet.lost[holder]
        return [Lost(holder) for holder in empty]

    def is_stranded(self) -> bool:
        """Whether all are lost, and others may come in their place: nothing can
        run until they have. Only time counts in which somebody asked.

        Raises:
            WorkerError: all are lost for good: why the first of them was.
        """
        if len(self._lost) < len(self._fleet):
            self.pause_s = 0.0
            return False
        now = self._clock()
        if not self.pause_s or now - self._looked_s > _LOOK_AWAY_S:
            self._since_s = now
        self._looked_s = now
        if not self._may_come(now - self._since_s):
            raise copy(next(iter(self._lost.values())))
        self.pause_s = min(max(_FIRST_PAUSE_S, 2 * self.pause_s), _LONGEST_PAUSE_S)
        return True

    def _may_come(self, stranded_s: float) -> bool:
        """Whether anybody may still come, when all have been lost for so long."""
        if self._replacements is None:
            return False
        timeout_s = self._replacements.timeout_s
        if not stranded_s and 0 < timeout_s < math.inf:
            logger.warning(
                "every R-worker is lost: trying to reach one, for %g s (worker_timeout_s)",
                timeout_s,
            )
        return stranded_s < timeout_s or bool(self._replacements.look(self._lost))

    def joined(self, lifecycle: Lifecycle) -> list[Joined | Leaving | Reopened]:
        """Let in those that have come in the place of lost holders, once no
        sequence remembers those; and have those take over that neighbours went
        on for, once they have caught up; or where nobody comes, and all are gone
        on for, have others start there."""
        if isinstance(self.replicas, ColumnReplicas):
            return [Reopened(column) for column in self.replicas.reopened()]
        adopted = () if self.replicas is None else self.replicas.adopted
        if self._replacements is None or not (self._lost or adopted):
            return []
        found = self._replacements.look([*self._lost, *adopted])
        joined: list[Joined | Leaving | Reopened] = []
        replicas = self.replicas
        if replicas is not None and not lifecycle.adoptions:
            joined += map(Leaving, replicas.leaving(found, lifecycle.lives.is_on))
        for index, welcome in found.items():
            holder = HolderId(index)
            if holder in self._lost and not lifecycle.lives.is_on(holder):
                self._replacements.admit(holder)
                self._fleet.revive(holder)
                del self._lost[holder]
                logger.warning(
                    "%s has joined in the place of one that was lost", self._fleet.peer(holder)
                )
                if replicas is not None:
                    replicas.joined()
                joined.append(Joined(holder, welcome.num_blocks))
        return joined

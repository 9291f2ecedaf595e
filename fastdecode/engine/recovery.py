"""After a loss: who comes in a lost R-worker's place, and when nobody can."""

from __future__ import annotations

import logging
from copy import copy
from typing import TYPE_CHECKING

from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.schedule.life.events import Joined
from fastdecode.schedule.life.lifecycle import Lifecycle

if TYPE_CHECKING:
    from fastdecode.engine.fleet.workers import Newcomers

logger = logging.getLogger(__name__)


class Recovery:
    """Keeps count of the holders that are lost, and lets in those that come in
    their place.

    Args:
        fleet: the holders.
        replacements: who may come; None: nobody.
    """

    def __init__(self, fleet: Fleet, replacements: Newcomers | None = None) -> None:
        self._fleet = fleet
        self._replacements = replacements
        self._lost: dict[HolderId, WorkerError] = {}

    def lose(self, holder: HolderId, error: WorkerError) -> None:
        """The holder is gone."""
        self._lost[holder] = error

    @property
    def is_stranded(self) -> bool:
        """Whether all are lost, and others wait to come in their place: nothing
        can run until they have.

        Raises:
            WorkerError: all are lost for good: why the first of them was.
        """
        if len(self._lost) < len(self._fleet):
            return False
        if self._replacements is None or not self._replacements.await_any(self._lost):
            raise copy(next(iter(self._lost.values())))
        return True

    def joined(self, lifecycle: Lifecycle) -> list[Joined]:
        """Let in those that have come in the place of lost holders, once no
        sequence remembers those."""
        if self._replacements is None or not self._lost:
            return []
        joined = []
        for index, welcome in self._replacements.look(self._lost).items():
            holder = HolderId(index)
            if not lifecycle.lives.is_on(holder):
                self._replacements.admit(holder)
                self._fleet.revive(holder)
                del self._lost[holder]
                logger.warning(
                    "%s has joined in the place of one that was lost", self._fleet.peer(holder)
                )
                joined.append(Joined(holder, welcome.num_blocks))
        return joined

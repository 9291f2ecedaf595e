"""Columns that neighbours go on for: as many tokens of a sequence are there as
every stage has of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.holders import HolderId
from fastdecode.engine.stages.rooms import FIRST, Tell
from fastdecode.wire.kv.taking_over import MISSING, TakenOver, TakeOver
from fastdecode.wire.messages import CloseSequence


@dataclass
class _Taking:
    message: TakeOver
    due: set[int]
    """Stages that are to answer."""
    counts: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    """By stage."""
    is_void: bool = False
    """The column was lost again meanwhile."""


class ColumnTakings:
    """Joins what the stages answer whose R-worker of a column is lost. Each
    answers every time that it is asked.

    Args:
        num_stages: the first included.
        tell: has R-workers close what isn't there in every stage.
    """

    def __init__(self, num_stages: int, tell: Tell) -> None:
        self._num_stages = num_stages
        self._tell = tell
        self._takings: dict[HolderId, deque[_Taking]] = {}
        self._unsettled: dict[HolderId, set[int]] = {}

    def unsettled(self, column: HolderId) -> set[int]:
        """Stages that were asked when the column was lost again: they may have
        less of it than the others."""
        return self._unsettled.get(column, set())

    def ask(self, column: HolderId, message: TakeOver, stages: Collection[int]) -> None:
        """These stages are asked; the others have all of the column."""
        self._unsettled.pop(column, None)
        self._takings.setdefault(column, deque()).append(_Taking(message, set(stages)))

    def forget(self, column: HolderId, *, own: bool) -> None:
        """It is lost again; ``own``: in the first stage, whose R-worker answers
        nothing any more."""
        for taking in self._takings.get(column, ()):
            if not taking.is_void:
                taking.is_void = True
                asked = taking.due | taking.counts.keys()
                self._unsettled.setdefault(column, set()).update(asked)
            if own:
                taking.due.discard(FIRST)

    def answer(self, stage: int, column: HolderId, answer: TakenOver) -> TakenOver | None:
        """A stage has answered. The column's answer, once all have.

        Raises:
            ProtocolError: that can't be; what is wrong, to be said behind the
                name of whoever gave it.
        """
        takings = self._takings.get(column, deque())
        taking = next((each for each in takings if stage in each.due), None)
        if taking is None:
            return None  # the column was lost again meanwhile
        taking.message.check(answer)
        taking.due.discard(stage)
        taking.counts[stage] = answer.num_tokens
        if taking.due:
            return None
        takings.remove(taking)
        return None if taking.is_void else self._joined(column, taking)

    def _joined(self, column: HolderId, taking: _Taking) -> TakenOver:
        least = np.minimum.reduce(list(taking.counts.values()))
        for place in np.flatnonzero(least == MISSING).tolist():
            sequence_id = int(taking.message.sequence_ids[place])
            for stage in range(self._num_stages):
                counts = taking.counts.get(stage)
                if counts is None or counts[place] != MISSING:
                    self._tell(stage, column, CloseSequence(sequence_id))
        return TakenOver(least)

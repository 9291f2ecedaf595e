"""Rooms in columns: there once every stage's R-worker has given its own, and
given back where one has none, or is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from fastdecode.core.holders import HolderId
from fastdecode.wire.kv.reserving import Accepted, Refused, Reserving
from fastdecode.wire.messages import Answer, ToRWorker

FIRST: Final = 0
"""The first stage's number."""
Tell: TypeAlias = Callable[[int, HolderId, ToRWorker], None]
"""Tells a stage's R-worker of a column something that isn't answered; nobody, if
that one is lost."""


@dataclass
class _Asked:
    """Room that the stages were asked for."""

    message: Reserving
    due: set[int]
    """Stages that are to answer."""
    answers: dict[int, Accepted | Refused] = field(default_factory=dict)
    """By stage."""
    is_void: bool = False
    """The column was lost somewhere meanwhile."""


class ColumnRooms:
    """Joins what the stages answer that were asked for rooms. Each answers all
    that it was asked about a sequence, in that order.

    Args:
        num_stages: the first included.
        tell: undoes what was accepted.
    """

    def __init__(self, num_stages: int, tell: Tell) -> None:
        self._stages = range(num_stages)
        self._tell = tell
        self._asked: dict[tuple[HolderId, int], deque[_Asked]] = {}
        self._answers: deque[tuple[HolderId, Answer, _Asked | None]] = deque()

    def ask(self, column: HolderId, message: Reserving) -> None:
        """All stages are asked for this."""
        asked = self._asked.setdefault((column, message.sequence_id), deque())
        asked.append(_Asked(message, set(self._stages)))

    @property
    def has_answers(self) -> bool:
        """Whether there is one for ``next_answer``."""
        return bool(self._answers)

    def next_answer(self) -> tuple[HolderId, Answer] | None:
        """What a whole column has answered."""
        return self._answers.popleft()[:2] if self._answers else None

    def give(self, column: HolderId, answer: Answer) -> None:
        """An answer of a whole column, which was joined elsewhere."""
        self._answers.append((column, answer, None))

    def forget(self, column: HolderId, *, own: bool) -> None:
        """It is lost in some stage: what it was asked for is void, and what
        others have given for it is given back. ``own``: in the first stage,
        whose R-worker answers nothing any more; later stages answer for
        theirs."""
        for answer in [each for each in self._answers if each[0] == column]:
            self._answers.remove(answer)
            if answer[2] is not None:
                self._undo(column, answer[2])
        for key in [key for key in self._asked if key[0] == column]:
            for asked in self._asked[key]:
                if not asked.is_void:
                    asked.is_void = True
                    self._undo(column, asked)
                if own:
                    asked.due.discard(FIRST)
            self._clean(key)

    def answer(self, stage: int, column: HolderId, answer: Accepted | Refused) -> None:
        """One stage's answer: the column's is there once all stages' are."""
        key = column, answer.sequence_id
        asked = next((each for each in self._asked.get(key, ()) if stage in each.due), None)
        if asked is None:
            return  # it was asked before it was lost
        asked.due.discard(stage)
        asked.answers[stage] = answer
        if asked.is_void:
            self._give_back(stage, column, asked)
        elif not asked.due:
            joined = asked.message.join([asked.answers[i] for i in sorted(asked.answers)])
            if isinstance(joined, Refused):
                self._undo(column, asked)
            self._answers.append((column, joined, asked))
        self._clean(key)

    def _clean(self, key: tuple[HolderId, int]) -> None:
        """What all have answered isn't awaited any more."""
        self._asked[key] = deque(each for each in self._asked[key] if each.due)
        if not self._asked[key]:
            del self._asked[key]

    def _undo(self, column: HolderId, asked: _Asked) -> None:
        """Some stage has no room: those that gave theirs get it back."""
        for stage in list(asked.answers):
            self._give_back(stage, column, asked)

    def _give_back(self, stage: int, column: HolderId, asked: _Asked) -> None:
        undo = asked.message.undo()
        if undo is not None and isinstance(asked.answers.pop(stage), Accepted):
            self._tell(stage, column, undo)

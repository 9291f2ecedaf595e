"""The answers that peers owe, and until when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.deadlines import Deadlines
from fastdecode.wire.messages import Answer, FromRWorker, ToRWorker


@dataclass(frozen=True)
class _Due:
    """An answer that is owed."""

    since_s: float
    holder: HolderId
    kinds: tuple[type[Answer], ...]


class OwedAnswers:
    """Of each peer, by its index. A peer answers in the order in which it was
    asked.

    Args:
        num_peers: how many.
        deadlines: how long a peer may take, and be silent. It may be replaced
            at any time.
        heard_s: when a peer last gave a sign of life; None: it gives none.
    """

    def __init__(
        self, num_peers: int, deadlines: Deadlines, heard_s: Callable[[int], float | None]
    ) -> None:
        self.deadlines = deadlines
        self._heard_s = heard_s
        self._due: list[deque[_Due]] = [deque() for _ in range(num_peers)]

    def __len__(self) -> int:
        """Of how many peers this is kept."""
        return len(self._due)

    def ask(self, index: int, message: ToRWorker, holder: HolderId) -> None:
        """A peer is about to be asked about a holder."""
        if message.answers:
            self._due[index].append(_Due(self.deadlines.clock(), holder, message.answers))

    def take(self, index: int, answer: FromRWorker) -> HolderId | None:
        """A peer has answered. About which holder; None: it doesn't owe that."""
        due = self._due[index]
        return due.popleft().holder if due and isinstance(answer, due[0].kinds) else None

    def forget(self, index: int) -> None:
        """A peer owes nothing any more."""
        self._due[index].clear()

    def is_owed_by(self, index: int) -> bool:
        """Whether a peer owes anything."""
        return bool(self._due[index])

    @property
    def any_owed(self) -> bool:
        """Whether any peer owes anything."""
        return any(self._due)

    def wait_s(self) -> float:
        """How long to wait for answers until the first peer may have to be
        given up. Somebody must owe one; ``deadlines.end_look`` after the wait."""
        now = self.deadlines.begin_look()
        until_s = min(self._end(index)[0] for index, due in enumerate(self._due) if due)
        return self.deadlines.wait_s(now, until_s)

    def overdue(self) -> list[tuple[int, str]]:
        """The peers that have to be given up, and why."""
        now = self.deadlines.clock()
        ends = [(index, *self._end(index)) for index, due in enumerate(self._due) if due]
        return [(index, reason) for index, end_s, reason in ends if end_s <= now]

    def _end(self, index: int) -> tuple[float, str]:
        return self.deadlines.end(self._due[index][0].since_s, self._heard_s(index))

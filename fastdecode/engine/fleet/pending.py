"""What workers owe, and until when: answers to what they were asked, and reports on transfers in
the background (blocks that move between tiers, prompts that are fetched)."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import Done, Fetch, Inventory, MoveNews, Progress, Retain
from fastdecode.wire.messages import ToRWorker

GREETING_TIMEOUT_S: Final = 300.0
"""Shortest time-out for the answer to ``Hello``: an R-worker compiles kernels first."""
GREETING_SILENCE_S: Final = 5.0
"""Shortest silence time-out until then: the compiler shares a core with the thread that gives
signs of life."""
_LOOK_AWAY_S: Final = 1.0
"""After a longer pause between two looks, signs of life may have arrived and not been read."""
_MOST_WAIT_S: Final = 60.0  # longest wait, even if nothing is overdue
_OPENING: Final = -1  # in place of a job's number: the lower tier is being opened


@dataclass
class Deadlines:
    """When a peer that owes an answer is given up. Only time in which the S-worker looked
    counts."""

    timeout_s: float  # of an answer
    silence_s: float = math.inf
    """Longest time without a sign of life, where connections report signs."""
    clock: Clock = time.monotonic  # seconds, as ``Connection.heard_s`` has them
    _looked_s: float = -math.inf
    _looking_since_s: float = -math.inf

    def while_greeting(self) -> Deadlines:
        """Return the deadlines until an R-worker has answered ``Hello``."""
        return self.at_least(GREETING_TIMEOUT_S, GREETING_SILENCE_S)

    def at_least(self, timeout_s: float, silence_s: float) -> Deadlines:
        """Return the same, but not shorter than these."""
        timeout_s, silence_s = max(self.timeout_s, timeout_s), max(self.silence_s, silence_s)
        return replace(self, timeout_s=timeout_s, silence_s=silence_s)

    def begin_look(self) -> float:
        """Begin to wait for answers, and to read signs of life. Return the time."""
        now = self.clock()
        if now - self._looked_s > _LOOK_AWAY_S:
            self._looking_since_s = now
        return now

    def end_look(self) -> None:
        self._looked_s = self.clock()

    def end(self, since_s: float, heard_s: float | None, num_answers: int = 1) -> tuple[float, str]:
        """Return when a peer that was asked at ``since_s`` has to be given up, and why.
        ``num_answers``: Answers of other peers that it needs first, one after the other."""
        timeout_s = self.timeout_s * num_answers
        overdue_s = since_s + timeout_s
        silent_s, reason = self.silent_end(since_s, heard_s)
        if silent_s < overdue_s:
            return silent_s, reason
        return overdue_s, f"hasn't answered for {timeout_s:g} s (worker_timeout_s)"

    def silent_end(self, since_s: float, heard_s: float | None) -> tuple[float, str]:
        """Return when a peer without a time-out is given up because it is silent, and why."""
        if heard_s is None:
            return math.inf, ""
        silent_s = max(heard_s, self._looking_since_s, since_s) + self.silence_s
        return silent_s, f"has given no sign of life for {self.silence_s:g} s (worker_silence_s)"


def _job_of(message: ToRWorker | MoveNews) -> int:
    """Return the number of the transfer that a message asks for, or reports on."""
    return message.job if isinstance(message, Retain | Fetch | Progress | Done) else _OPENING


@dataclass(eq=False)
class _Due:
    """An answer that is owed."""

    since_s: float
    holder: HolderId
    message: Any  # what it is the answer to
    num_answers: int  # answers that the peer needs of others before it can give its own


class PendingReplies:
    """What each peer owes, by its index. A peer answers in the order in which it was asked.

    Args:
        deadlines: How long a peer may take, and be silent. They may be replaced at any time.
        heard_s: Returns when a peer last gave a sign of life, or None if it gives none.
    """

    def __init__(
        self, num_peers: int, deadlines: Deadlines, heard_s: Callable[[int], float | None]
    ) -> None:
        self.deadlines = deadlines
        self.heard_s: Final = heard_s
        self.due: Final[list[deque[_Due]]] = [deque() for _ in range(num_peers)]
        """Answers of each peer that are owed, the next one first."""
        self.jobs: Final[list[dict[int, float]]] = [{} for _ in range(num_peers)]
        """Start times of each peer's transfers, by number."""

    @contextlib.contextmanager
    def within(self, deadlines: Deadlines) -> Iterator[None]:
        usual, self.deadlines = self.deadlines, deadlines
        try:
            yield
        finally:
            self.deadlines = usual

    def ask(self, index: int, message: Any, holder: HolderId, num_answers: int = 1) -> None:
        """Note that a peer is about to be asked about a holder. ``num_answers``: See
        ``Deadlines.end``."""
        if message.answers:
            due = _Due(self.deadlines.clock(), holder, message, num_answers)
            self.due[index].append(due)
        elif message.is_transfer:
            self.jobs[index][_job_of(message)] = self.deadlines.clock()

    def take_any(self, index: int, answer: Any) -> bool:
        """Take the answer of a peer that may answer in any order. Return False if it doesn't owe
        that."""
        due = self.due[index]
        found = next((one for one in due if isinstance(answer, one.message.answers)), None)
        if found is not None:
            due.remove(found)
        return found is not None

    def take_report(self, index: int, news: MoveNews) -> bool:
        """Take a peer's report on a transfer. Return False if it has no such job."""
        job, jobs = _job_of(news), self.jobs[index]
        if job not in jobs:
            return False
        if isinstance(news, Done) or (isinstance(news, Inventory) and news.is_last):
            del jobs[job]
        return True

    def forget(self, index: int) -> None:
        self.due[index].clear()
        self.jobs[index].clear()

    def forget_about(self, index: int, holder: HolderId) -> None:
        self.due[index] = deque(one for one in self.due[index] if one.holder != holder)

    def owes_answer(self, index: int) -> bool:
        """Return True if a peer owes an answer, besides reports on transfers."""
        return bool(self.due[index])

    def has_transfers(self, index: int) -> bool:
        return bool(self.jobs[index])

    def num_about(self, index: int, holder: HolderId) -> int:
        return sum(one.holder == holder for one in self.due[index])

    def wait_s(self, most_s: float = math.inf) -> float:
        """Return how long to wait for answers until the first peer may have to be given up, at
        most ``most_s``. Call ``deadlines.end_look`` after the wait."""
        now = self.deadlines.begin_look()
        if most_s <= 0.0:  # hot, once per answer: don't look at every peer
            return 0.0
        first_s = min([due[0].since_s for due in self.due if due], default=math.inf)
        first_s = min([first_s, *[since_s for jobs in self.jobs for since_s in jobs.values()]])
        # Added, as in ``Deadlines.end``: a difference may be rounded the other way.
        until_s = first_s + min(self.deadlines.timeout_s, self.deadlines.silence_s)
        if until_s == math.inf:  # no peer owes anything, or it may take for ever
            return most_s
        if until_s <= now:  # some have given signs of life since, or may take longer
            until_s = min(end_s for _, end_s, _ in self._ends())
        # Not longer than the silence: a peer may give its first sign, and fall silent, meanwhile.
        return min(most_s, max(0.0, min(until_s - now, self.deadlines.silence_s)), _MOST_WAIT_S)

    def overdue(self) -> list[tuple[int, str]]:
        """Return the peers that have to be given up, and why."""
        now = self.deadlines.clock()
        return [(index, reason) for index, end_s, reason in self._ends() if end_s <= now]

    def _ends(self) -> list[tuple[int, float, str]]:
        """Return when each peer that owes something has to be given up, and why."""
        deadlines, ends = self.deadlines, []
        for index, (due, jobs) in enumerate(zip(self.due, self.jobs, strict=True)):
            if due:
                since_s, num_answers = due[0].since_s, due[0].num_answers
                ends.append((index, *deadlines.end(since_s, self.heard_s(index), num_answers)))
            elif jobs:  # a disk may take its time
                since_s = min(jobs.values())
                ends.append((index, *deadlines.silent_end(since_s, self.heard_s(index))))
        return ends

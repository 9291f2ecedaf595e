"""What workers owe: answers to what they were asked, and reports on transfers that
they work at in the background (blocks that move between tiers, prompts that are
fetched); and until when."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import (
    Done,
    Fetch,
    Inventory,
    MoveNews,
    Progress,
    Pull,
    Pulled,
    Retain,
)
from fastdecode.wire.messages import FromRWorker, ToRWorker, Welcome
from fastdecode.wire.traits import unasked

GREETING_TIMEOUT_S: Final = 300.0
"""An R-worker may take so long, at least, to answer ``Hello``: it compiles kernels."""
GREETING_SILENCE_S: Final = 5.0
"""And be silent so long, at least, before it does: a compiler shares its core
with the thread that gives signs."""
_LOOK_AWAY_S: Final = 1.0
"""After a pause of so long between two looks, signs of life may have come and wait to be read."""


@dataclass
class Deadlines:
    """When a peer that owes an answer has to be given up. Only time counts in
    which the S-worker looked.

    Args:
        timeout_s: how long an answer may take.
        silence_s: how long a peer may give no sign of life, where connections
            report signs of life.
        clock: seconds, as ``Connection.heard_s`` has them.
    """

    timeout_s: float
    silence_s: float = math.inf
    clock: Clock = time.monotonic
    _looked_s: float = -math.inf
    _looking_since_s: float = -math.inf

    def while_greeting(self) -> Deadlines:
        """The deadlines until an R-worker has answered ``Hello``."""
        return self.at_least(GREETING_TIMEOUT_S, GREETING_SILENCE_S)

    def at_least(self, timeout_s: float, silence_s: float) -> Deadlines:
        """The same, but not shorter than these."""
        timeout_s, silence_s = max(self.timeout_s, timeout_s), max(self.silence_s, silence_s)
        return replace(self, timeout_s=timeout_s, silence_s=silence_s)

    def begin_look(self) -> float:
        """The S-worker begins to wait for answers, and reads signs of life. Returns the time."""
        now = self.clock()
        if now - self._looked_s > _LOOK_AWAY_S:
            self._looking_since_s = now
        return now

    def end_look(self) -> None:
        """The wait is over."""
        self._looked_s = self.clock()

    def wait_s(self, now: float, until_s: float) -> float:
        """How long to wait at a time. Not longer than the silence: a peer may
        give its first sign, and fall silent, meanwhile."""
        return max(0.0, min(until_s - now, self.silence_s))

    def end(self, since_s: float, heard_s: float | None, num_answers: int = 1) -> tuple[float, str]:
        """When a peer has to be given up, and why.

        Args:
            since_s: when it was asked.
            heard_s: when it last gave a sign of life; None: it gives none.
            num_answers: of others, one after the other, that it needs itself.
        """
        timeout_s = self.timeout_s * num_answers
        overdue_s = since_s + timeout_s
        silent_s, reason = self.silent_end(since_s, heard_s)
        if silent_s < overdue_s:
            return silent_s, reason
        return overdue_s, f"hasn't answered for {timeout_s:g} s (worker_timeout_s)"

    def silent_end(self, since_s: float, heard_s: float | None) -> tuple[float, str]:
        """The same of one that may take as long as it likes, if it isn't silent."""
        if heard_s is None:
            return math.inf, ""
        silent_s = max(heard_s, self._looking_since_s, since_s) + self.silence_s
        return silent_s, f"has given no sign of life for {self.silence_s:g} s (worker_silence_s)"


_OPENING: Final = -1  # in place of a job's number: the lower tier is being opened


class PendingTransfers:
    """Transfers under way, by their numbers, of each worker, by its index.

    Args:
        num_peers: how many.
        clock: seconds.
    """

    def __init__(self, num_peers: int, clock: Clock) -> None:
        self._clock = clock
        self._of: list[dict[int, float]] = [{} for _ in range(num_peers)]  # begun when

    @property
    def any_owed(self) -> bool:
        """Whether any peer has one."""
        return any(self._of)

    @property
    def first_since_s(self) -> float:
        """When the oldest of all was begun; infinity: there is none."""
        return min([s for jobs in self._of for s in jobs.values()], default=math.inf)

    def since_s(self, index: int) -> float | None:
        """When a peer's oldest one was begun; None: it has none."""
        return min(self._of[index].values(), default=None)

    def begin(self, index: int, job: int) -> None:
        """A peer has a job, and tells when it is over."""
        self._of[index][job] = self._clock()

    def take(self, index: int, news: MoveNews, number: int | None = None) -> bool:
        """A peer tells of a job; whether it was to. ``number``: under which the
        job was begun, if that isn't its own."""
        number, jobs = number_of(news) if number is None else number, self._of[index]
        if number not in jobs:
            return False
        if isinstance(news, Done | Pulled) or (isinstance(news, Inventory) and news.is_last):
            del jobs[number]
        return True

    def forget(self, index: int, which: Callable[[int], bool] = lambda job: True) -> None:
        """A peer has none of these any more."""
        self._of[index] = {job: s for job, s in self._of[index].items() if not which(job)}


def job_of(message: ToRWorker) -> int:
    """The number of the job that a message asks for which is a transfer."""
    match message:
        case Retain() | Fetch():
            return message.job
        case Pull():
            return _pull(message.sequence_id)
    return _OPENING


def number_of(news: MoveNews) -> int:
    """Of the job that a report is about."""
    match news:
        case Progress() | Done():
            return news.job
        case Pulled():
            return _pull(news.sequence_id)
        case Inventory():
            return _OPENING


def _pull(sequence: int) -> int:
    """What is fetched for a sequence, in the place of a job's number."""
    return _OPENING - 1 - sequence


_MOST_WAIT_S: Final = 60.0  # then it is looked again, though nothing is overdue


@dataclass(eq=False)
class _Due:
    """An answer that is owed."""

    since_s: float
    holder: HolderId
    kinds: tuple[type[Any], ...]
    message: ToRWorker | None = None
    """To which it is the answer, where an R-worker owes it."""
    num_answers: int = 1
    """That the peer needs of others before it can give it."""


class PendingReplies:
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
        self.heard_s: Final = heard_s
        """See ``Args``."""
        self._due: list[deque[_Due]] = [deque() for _ in range(num_peers)]
        self.transfers: Final = PendingTransfers(num_peers, lambda: self.deadlines.clock())
        """What they work at meanwhile."""

    def __len__(self) -> int:
        """Of how many peers this is kept."""
        return len(self._due)

    @contextlib.contextmanager
    def within(self, deadlines: Deadlines) -> Iterator[None]:
        """Meanwhile peers have these deadlines."""
        usual, self.deadlines = self.deadlines, deadlines
        try:
            yield
        finally:
            self.deadlines = usual

    def ask(self, index: int, message: ToRWorker, holder: HolderId) -> None:
        """A peer is about to be asked about a holder."""
        if message.answers:
            due = _Due(self.deadlines.clock(), holder, message.answers, message)
            self._due[index].append(due)
        elif message.is_transfer:
            self.transfers.begin(index, job_of(message))

    def allow(self, index: int, num_answers: int) -> None:
        """What a peer owes last may take as long as so many answers."""
        self._due[index][-1].num_answers = num_answers

    def ask_for(
        self,
        index: int,
        kinds: tuple[type[Any], ...],
        holder: HolderId,
        num_answers: int = 1,
    ) -> None:
        """A peer is going to be asked for an answer of one of these kinds.
        ``num_answers``: that it needs of others for it, one after the other."""
        now_s = self.deadlines.clock()
        self._due[index].append(_Due(now_s, holder, kinds, num_answers=num_answers))

    def take(self, index: int, answer: FromRWorker) -> HolderId:
        """A peer has answered. About which holder.

        Raises:
            ProtocolError: it doesn't owe that, or it can't be the answer to what
                it was asked; to be said behind its name.
        """
        due = self._due[index]
        if not due or due[0].message is None:
            raise ProtocolError(unasked(answer))
        due[0].message.check(answer)
        if isinstance(answer, Welcome):  # what it was to move before is forgotten
            self.transfers.forget(index)
        return due.popleft().holder

    def take_any(self, index: int, answer: Any) -> bool:
        """A peer that needn't answer in order has answered. False: it doesn't
        owe that."""
        due = self._due[index]
        found = next((one for one in due if isinstance(answer, one.kinds)), None)
        if found is not None:
            due.remove(found)
        return found is not None

    def forget(self, index: int) -> None:
        """A peer owes nothing any more."""
        self._due[index].clear()
        self.transfers.forget(index)

    def forget_about(self, index: int, holder: HolderId) -> None:
        """A peer owes no answer about a holder any more."""
        self._due[index] = deque(one for one in self._due[index] if one.holder != holder)

    def owes_answer(self, index: int) -> bool:
        """Whether a peer owes an answer, besides reports on transfers."""
        return bool(self._due[index])

    def num_about(self, index: int, holder: HolderId) -> int:
        """How many answers a peer owes about a holder."""
        return sum(one.holder == holder for one in self._due[index])

    @property
    def any_owed(self) -> bool:
        """Whether any peer owes anything."""
        return any(self._due) or self.transfers.any_owed

    def wait_s(self, most_s: float = math.inf) -> float:
        """How long to wait for answers until the first peer may have to be
        given up, and ``most_s`` at most; ``deadlines.end_look`` after the wait."""
        now = self.deadlines.begin_look()
        if most_s <= 0.0:  # once an answer: don't ask every peer
            return 0.0
        until_s = self._first_end_s
        if until_s == math.inf:  # no peer owes anything, or it may take for ever
            return most_s
        if until_s <= now:  # some have given signs of life since, or may take longer
            until_s = min(end_s for _, end_s, _ in self._ends())
        return min(most_s, self.deadlines.wait_s(now, until_s), _MOST_WAIT_S)

    def overdue(self) -> list[tuple[int, str]]:
        """The peers that have to be given up, and why."""
        now = self.deadlines.clock()
        if self._first_end_s > now:
            return []
        return [(index, reason) for index, end_s, reason in self._ends() if end_s <= now]

    @property
    def _first_end_s(self) -> float:
        """No peer has to be given up before. Added, as in ``Deadlines.end``: a
        difference may be rounded the other way."""
        first_s = min([due[0].since_s for due in self._due if due], default=math.inf)
        first_s = min(first_s, self.transfers.first_since_s)
        return first_s + min(self.deadlines.timeout_s, self.deadlines.silence_s)

    def _ends(self) -> list[tuple[int, float, str]]:
        """When each peer that owes something has to be given up, and why."""
        deadlines, ends = self.deadlines, []
        for index, due in enumerate(self._due):
            if due:
                since_s, num_answers = due[0].since_s, due[0].num_answers
                ends.append((index, *deadlines.end(since_s, self.heard_s(index), num_answers)))
            elif (begun_s := self.transfers.since_s(index)) is not None:  # a disk may take its time
                ends.append((index, *deadlines.silent_end(begun_s, self.heard_s(index))))
        return ends

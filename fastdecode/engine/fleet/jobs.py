"""What peers work at beside what they answer, and tell when it is over: blocks
that move between tiers, and what is fetched for sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from fastdecode.core.clock import Clock
from fastdecode.wire.kv.exporting import MoveNews, Pull, Pulled
from fastdecode.wire.kv.tiers import FetchBlocks, Fetching, Moved, Stocked, StoreBlocks, UseTier
from fastdecode.wire.messages import ToRWorker

_OPENING: Final = -1
"""In the place of a job's number: the lower tier is being opened."""


class OwedJobs:
    """Of each peer, by its index.

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
        if isinstance(news, Moved | Pulled) or (isinstance(news, Stocked) and news.is_last):
            del jobs[number]
        return True

    def forget(self, index: int, which: Callable[[int], bool] = lambda job: True) -> None:
        """A peer has none of these any more."""
        self._of[index] = {job: s for job, s in self._of[index].items() if not which(job)}


def job_of(message: ToRWorker) -> int | None:
    """The number of the job that a message asks for, if it asks for one."""
    match message:
        case StoreBlocks() | FetchBlocks():
            return message.job
        case UseTier():
            return _OPENING
        case Pull():
            return _pull(message.sequence_id)
    return None


def number_of(news: MoveNews) -> int:
    """Of the job that is told of."""
    match news:
        case Fetching() | Moved():
            return news.job
        case Pulled():
            return _pull(news.sequence_id)
        case Stocked():
            return _OPENING


def _pull(sequence: int) -> int:
    """What is fetched for a sequence, in the place of a job's number."""
    return _OPENING - 1 - sequence

"""Sequences that start with kept blocks which are being fetched.

Such a sequence holds its room, and **joins** when the blocks are there, or due
in time: when every layer will have come, by what the fetch has taken so far,
before the sequence's first step attends it, by what such steps take lately. As
forecast, nobody else in the step waits then. It takes an answer of the holder to
join, so a sequence asks before the step under way in its lane is over, whose end
is foreseen, too: asked between two steps, it would miss the next one.

Should the rest come later all the same, the holder's answer to that layer comes
later; should it not come, the sequence starts again without it, and what its step
has come to is believed by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

from fastdecode.schedule.cache.stock import Stock
from fastdecode.schedule.life.sequences import SequenceRecord, SequenceState
from fastdecode.schedule.plan import Chunk, Start, num_in_prompts
from fastdecode.wire.blocks import Done, Progress, keys_of


@dataclass(frozen=True)
class Pace:
    """Of a fetch."""

    share: float
    """Of the layers, the first ones, which are there."""
    a_group: float
    """The share that comes at once, at most."""
    seconds: float
    """That it took for those that are there."""

    def comes_in_time(self, step_s: float, until_step_s: float = 0.0) -> bool:
        """Whether every layer is there when a step attends it, if the others
        take as long each.

        Args:
            step_s: that the step takes; each layer as long.
            until_step_s: until it begins.
        """
        all_s = self.seconds / self.share
        passed_s = self.seconds + until_step_s
        if passed_s >= all_s:
            return True
        num_more = int(until_step_s / all_s / self.a_group)
        share = self.share + num_more * self.a_group
        # The next group, and the last one: those between are between.
        next_s = all_s * min(share + self.a_group, 1.0) - passed_s
        is_next = next_s <= step_s * share
        return is_next and all_s - passed_s <= step_s * (1.0 - min(self.a_group, 1.0 - share))


Awaiting: TypeAlias = tuple[SequenceRecord, Start]
"""A sequence, and as which it starts."""


@dataclass(frozen=True)
class Outcome:
    """What comes of news of a job."""

    ready: tuple[Awaiting, ...] = ()
    """They join, or their blocks are all there."""
    failed: tuple[Awaiting, ...] = ()
    """They have to start again."""


class Restores:
    """See the module.

    Args:
        stock: the blocks, and the jobs that fetch them.
        joins_early: sequences join before all of their blocks are there.
    """

    def __init__(self, stock: Stock, *, joins_early: bool = True) -> None:
        self._stock = stock
        self._joins_early = joins_early
        self._awaiting: dict[int, list[SequenceRecord]] = {}  # by job
        self._fetching: dict[int, Pace] = {}  # by job
        self._ends_s: dict[int, float] = {}  # by lane: of the step under way
        self._beside: set[int] = set()  # lanes whose step began while somebody waited
        self.was_beside = False
        """Whether somebody waited for what is fetched while the step ran that was over last."""

    def __bool__(self) -> bool:
        """Whether anybody starts with what is being fetched."""
        return bool(self._awaiting)

    def begin_step(self, lane: int, chunks: Seq[Chunk]) -> None:
        """A lane's step begins; it is foreseen when it is over."""
        if self:
            self._beside.add(lane)
        if self._stock.has_lower:
            took_s = self._stock.rates.under_way_s(num_in_prompts(chunks))
            self._ends_s[lane] = self._stock.now_s() + took_s

    def end_step(self, lane: int) -> None:
        """It is over."""
        self._ends_s.pop(lane, None)
        self.was_beside = bool(self) or lane in self._beside
        self._beside.discard(lane)

    def begin(self, life: SequenceRecord, start: Start) -> None:
        """A sequence starts with blocks that are coming."""
        life.fetching, life.awaits = start, set(start.awaits)
        for job in start.awaits:
            self._awaiting.setdefault(job, []).append(life)

    def hear(self, event: Progress | Done) -> Outcome:
        """News of a job; nothing comes of that of a holder that was lost meanwhile."""
        if event.job not in self._stock.jobs:
            return Outcome()
        if isinstance(event, Progress):
            return self._come_further(event)
        failed = keys_of(event.missing)
        self._stock.end_job(event.job, failed, event.num_bytes, event.seconds)
        self._stock.counts.count_faults(*event.faults)
        return self._over(event.job, failed)

    def _come_further(self, event: Progress) -> Outcome:
        """More of a job's layers are there."""
        before = self._fetching.get(event.job)
        share = event.num_there / event.num_layers
        a_group = share if before is None else before.a_group
        self._fetching[event.job] = Pace(share, a_group, event.seconds)
        lives = self._awaiting.get(event.job, ())
        awaiting = [(life, life.fetching) for life in lives if life.fetching is not None]
        return Outcome(tuple([one for one in awaiting if self._joins(*one)]))

    def _over(self, job: int, bad: Seq[bytes]) -> Outcome:
        """Return what comes of a job that is over. ``bad``: keys of what it did not fetch."""
        self._fetching.pop(job, None)
        ready: list[Awaiting] = []
        failed: list[Awaiting] = []
        for life in self._awaiting.pop(job, ()):
            start = life.fetching
            if start is None or job not in life.awaits:
                continue
            life.awaits.discard(job)
            has_all = all(set(bad).isdisjoint(keys) for keys in start.kept)
            if not has_all:
                life.stop_awaiting()
                failed += [(life, start)] if life.pending is None else []
            elif life.awaits:
                ready += [(life, start)] if self._joins(life, start) else []
            else:
                ready += [(life, start)] if life.state is SequenceState.FETCHING else []
                life.stop_awaiting()
        return Outcome(tuple(ready), tuple(failed))

    def forget_lost(self) -> None:
        """Jobs may be gone, with a holder; sequences that were on it are dealt with."""
        jobs = self._stock.jobs
        self._awaiting = {job: lives for job, lives in self._awaiting.items() if job in jobs}
        self._fetching = {job: told for job, told in self._fetching.items() if job in jobs}

    def _joins(self, life: SequenceRecord, start: Start) -> bool:
        """Whether a sequence joins now."""
        may_join = (
            self._joins_early and life.state is SequenceState.FETCHING and life.pending is None
        )
        if not may_join or not self._is_due(life, start):
            return False
        self._stock.counts.num_joined += 1
        return True

    def _is_due(self, life: SequenceRecord, start: Start) -> bool:
        """Whether all that it waits for comes in time."""
        step_s = self._stock.rates.step_s(start.num_first_tokens)
        now_s = self._stock.now_s()
        until_step_s = max(0.0, self._ends_s.get(life.lane, now_s) - now_s)
        told = [self._fetching.get(job) for job in life.awaits]
        return step_s is not None and all(
            one is not None and one.comes_in_time(step_s, until_step_s) for one in told
        )

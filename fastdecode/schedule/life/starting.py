"""Sequences that start: what each begins with, and the fetched blocks that it waits for.

A sequence that waits holds its room, and **joins** when the blocks have arrived, or are due in
time: when every layer will have come, by what the fetch has taken so far, before the sequence's
first step attends it, by what such steps take lately. As forecast, no other sequence waits then.
To join takes an answer of the holder, so a sequence asks before the step under way in its lane is
over, whose end is foreseen, too: asked between two steps, it would miss the next one.

If the rest comes later all the same, the holder answers that layer later. If it does not come, the
sequence starts again without it, and no result of its step counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace

from fastdecode.core.sequence import shifted
from fastdecode.schedule.life.endings import Endings
from fastdecode.schedule.life.events import Ask
from fastdecode.schedule.life.handing import Handing
from fastdecode.schedule.life.sequences import PendingAction, SequenceRecord, SequenceState
from fastdecode.schedule.plan import Chunk, Start, num_in_prompts
from fastdecode.wire.blocks import Done, Open, Progress, words_of


@dataclass(frozen=True)
class Pace:
    """Progress of a fetch."""

    share: float
    """Share of the layers, the first ones, that have arrived."""
    a_group: float
    """Largest share of the layers that comes at once."""
    seconds: float
    """Time that they took."""

    def comes_in_time(self, step_s: float, until_step_s: float = 0.0) -> bool:
        """Return True if every layer is there when a step attends it, at the pace so far.

        Args:
            step_s: seconds of the step, shared evenly by its layers.
            until_step_s: seconds until it begins.
        """
        all_s = self.seconds / self.share
        passed_s = self.seconds + until_step_s
        if passed_s >= all_s:
            return True
        num_more = int(until_step_s / all_s / self.a_group)
        share = self.share + num_more * self.a_group
        # If the next group and the last one come in time, so do those between.
        next_s = all_s * min(share + self.a_group, 1.0) - passed_s
        is_next = next_s <= step_s * share
        return is_next and all_s - passed_s <= step_s * (1.0 - min(self.a_group, 1.0 - share))


Awaiting: TypeAlias = tuple[SequenceRecord, Start]
"""A sequence, and its start."""


class Starting:
    """See the module.

    Args:
        joins_early: sequences join before all of their blocks have arrived.
    """

    def __init__(self, endings: Endings, handing: Handing, *, joins_early: bool = True) -> None:
        self._endings, self._handing = endings, handing
        self._table, self._grants, self._out = endings.table, endings.grants, endings.out
        self._stock = endings.scheduler.ledger.cache.stock
        self._joins_early = joins_early
        self._awaiting: dict[int, list[SequenceRecord]] = {}  # by job
        self._paces: dict[int, Pace] = {}  # by job
        self._ends_s: dict[int, float] = {}  # by lane: of the step under way
        self._beside: set[int] = set()  # lanes whose step began while some sequence waited
        self.was_beside = False
        """True if a sequence waited for blocks while the last step ran."""

    def begin_step(self, lane: int, chunks: Seq[Chunk]) -> None:
        """Foresee when a lane's step, which begins, is over."""
        if self._awaiting:
            self._beside.add(lane)
        if self._stock.has_lower:
            took_s = self._stock.rates.under_way_s(num_in_prompts(chunks))
            self._ends_s[lane] = self._stock.now_s() + took_s

    def end_step(self, lane: int) -> None:
        self._ends_s.pop(lane, None)
        self.was_beside = bool(self._awaiting) or lane in self._beside
        self._beside.discard(lane)

    def start(self, life: SequenceRecord, start: Start) -> None:
        """Open a sequence that has its place, or let it wait for blocks."""
        sequence = life.sequence
        if not start.awaits:
            self._handing.started(life)
        if start.parent is None and not start.is_handed:
            self._table.counts.num_cached_prompt_tokens += start.num_shared_tokens
            self._table.counts.num_gap_tokens += len(start.gap)
            if not life.is_counted:
                sequence.num_reused = min(start.num_shared_tokens, sequence.num_prompt_tokens)
        life.is_counted = True
        num_leading = start.num_shared_tokens - len(start.behind_gap)
        self._table.cache(life, num_leading, start.behind_gap)
        sequence.residence = start.residence
        if not start.awaits:
            self._open(life, start)
            return
        self._table.move(life, SequenceState.FETCHING)
        self.wait(life, start)

    def wait(self, life: SequenceRecord, start: Start) -> None:
        """Let a sequence wait for the jobs that it starts with."""
        life.fetching, life.awaits = start, set(start.awaits)
        for job in start.awaits:
            self._awaiting.setdefault(job, []).append(life)

    def hear(self, event: Progress | Done) -> None:
        """Open sequences that wait for a job, or start them again without what did not come. News
        of a holder that was lost meanwhile has no effect."""
        if event.job not in self._stock.jobs:
            return
        if isinstance(event, Progress):
            for life, start in self.joining(event):
                self._open(life, start)
            return
        missing = self._stock.end_job(event)
        self._paces.pop(event.job, None)
        ready: list[Awaiting] = []
        for life, start in self._waiting_for(event.job):
            if event.job not in life.awaits:
                continue
            life.awaits.discard(event.job)
            if not all(missing.isdisjoint(keys) for keys in start.kept):
                life.stop_awaiting()
                if life.pending is None:
                    self._start_again(life, start)
            elif life.awaits:
                ready += [(life, start)] if self._joins(life, start) else []
            else:
                ready += [(life, start)] if life.state is SequenceState.FETCHING else []
                life.stop_awaiting()
                self._handing.started(life)
        self._awaiting.pop(event.job, None)
        for life, start in ready:
            self._open(life, start)

    def joining(self, event: Progress) -> list[Awaiting]:
        """Return the sequences that join with more of a job's layers."""
        before = self._paces.get(event.job)
        share = event.num_there / event.num_layers
        a_group = share if before is None else before.a_group
        self._paces[event.job] = Pace(share, a_group, event.seconds)
        return [one for one in self._waiting_for(event.job) if self._joins(*one)]

    def forget_lost(self) -> None:
        """Forget jobs that a lost holder had. Sequences that were on it are dealt with."""
        jobs = self._stock.jobs
        self._awaiting = {job: lives for job, lives in self._awaiting.items() if job in jobs}
        self._paces = {job: pace for job, pace in self._paces.items() if job in jobs}

    def _waiting_for(self, job: int) -> Iterator[Awaiting]:
        for life in self._awaiting.get(job, ()):
            if life.fetching is not None:
                yield life, life.fetching

    def _joins(self, life: SequenceRecord, start: Start) -> bool:
        """Return True if all that a sequence waits for comes in time."""
        if not self._joins_early or life.state is not SequenceState.FETCHING or life.pending:
            return False
        step_s = self._stock.rates.step_s(start.num_first_tokens)
        now_s = self._stock.now_s()
        until_step_s = max(0.0, self._ends_s.get(life.lane, now_s) - now_s)
        paces = [self._paces.get(job) for job in life.awaits]
        is_due = step_s is not None and all(
            pace is not None and pace.comes_in_time(step_s, until_step_s) for pace in paces
        )
        self._stock.counts.num_joined += is_due
        return is_due

    def _open(self, life: SequenceRecord, start: Start) -> None:
        """Ask holders for a sequence's room. All that it starts with has arrived, or is due."""
        self._table.move(life, SequenceState.RESERVING)
        parent = start.parent
        for index, part in enumerate(start.residence.parts):
            self._grants.ask(life, part)
            num_shared = min(start.num_shared_tokens - part.first_token, part.num_tokens)
            opened = Open(part.part_id, part.num_tokens)
            if parent is not None and parent.residence is not None and num_shared > 0:
                parent_id = parent.residence.parts[index].part_id
                opened = replace(opened, num_tokens=num_shared, parent_id=parent_id)
            elif parent is None and num_shared > 0:
                gap = shifted(start.gap, -part.first_token)
                opened = replace(
                    opened,
                    num_tokens=num_shared + len(gap),
                    keys=words_of(start.kept[index]),
                    gap_start=gap.start,
                    gap_stop=gap.stop,
                )
            self._out.append(Ask(part, opened))

    def _start_again(self, life: SequenceRecord, start: Start) -> None:
        if not start.is_handed:
            self._table.counts.num_cached_prompt_tokens -= start.num_shared_tokens
            self._table.counts.num_gap_tokens -= len(start.gap)
        life.sequence.num_reused, life.is_counted = 0, life.sequence.num_generated > 0
        self._handing.started(life, has_failed=True)
        self._table.set_pending(life, PendingAction.REQUEUE)
        self._endings.settle(life)

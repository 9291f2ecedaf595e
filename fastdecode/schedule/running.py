"""Running sequences, with what was promised to them, and their lanes."""

from __future__ import annotations

import sys
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Final

from fastdecode.core.holders import HolderId, Residence
from fastdecode.core.sequence import Sequence
from fastdecode.schedule.admission.load_control import MicroBatch
from fastdecode.schedule.admission.policies import Admission
from fastdecode.schedule.plan import Chunk
from fastdecode.schedule.prefill import PrefillBudget

NOT_BOOKED: Final = sys.maxsize
"""Stands for the first step of a sequence that has none booked: later than any."""


@dataclass(eq=False)
class RunningSequence:
    sequence: Sequence
    projected: MicroBatch
    """Its load from its start, or from when it outlived what was projected first."""
    prefill: deque[int]
    """Chunks that are still booked."""
    first_step: int
    """Step of its lane in which these begin. ``NOT_BOOKED`` if there was no room: it can't step."""
    until: int
    """Tokens that it may have cached before it needs more room, or another projection."""
    is_open: bool = False
    """All of its room was granted."""
    is_fetching: bool = False
    """True while it waits for cached blocks, before its room is asked for."""
    decode: Chunk = field(init=False)

    def __post_init__(self) -> None:
        self.decode = Chunk(self.sequence, 1)

    @property
    def residence(self) -> Residence:
        assert self.sequence.residence is not None
        return self.sequence.residence

    @property
    def holders(self) -> tuple[HolderId, ...]:
        return self.residence.holders

    def next_prompt_chunks(self) -> tuple[Chunk, ...]:
        """Return what runs of its prompt in the next step. Some is booked."""
        sequence, num_tokens = self.sequence, self.prefill.popleft()
        num_filling = min(num_tokens, len(sequence.gap))
        if not 0 < num_filling < num_tokens:
            return (Chunk(sequence, num_tokens),)
        rest = num_tokens - num_filling
        return Chunk(sequence, num_filling), Chunk(sequence, rest, is_behind_gap=True)


@dataclass(eq=False)
class Lane:
    admission: Admission
    budget: PrefillBudget
    step: int = -1
    """The lane's own count of steps."""
    is_planned: bool = False
    """True if its next step is planned, and has not begun."""
    running: dict[int, RunningSequence] = field(default_factory=dict)
    """Running sequences by id, in order of their start."""
    reserved_tokens: Counter[HolderId] = field(default_factory=Counter)
    index: int = 0

    @property
    def due(self) -> list[RunningSequence]:
        """Sequences that were to run in its present step."""
        step = self.step
        return [run for run in self.running.values() if run.first_step <= step]

    @property
    def outgrown(self) -> list[RunningSequence]:
        """Sequences that need more room, or another projection, for their next token."""
        runs = self.running.values()
        return [x for x in runs if x.sequence.num_cached >= x.until and not x.prefill and x.is_open]

    @property
    def num_next_tokens(self) -> int:
        """Most tokens that its next step runs, once that is planned."""
        due = self.due
        return sum([run.prefill[0] if run.prefill else 1 for run in due])

    def enter(self, run: RunningSequence, residence: Residence) -> None:
        first, *others = loads(residence, run.projected)
        self.admission.add(*first)
        for holder, load in others:
            self.admission.prolong(holder, load)
        for part in residence.parts:
            self.reserved_tokens[part.holder] += part.num_tokens
        self.running[run.sequence.sequence_id] = run

    def leave(self, run: RunningSequence, at: int) -> None:
        """Remove a sequence from the lane's step ``at`` on."""
        del self.running[run.sequence.sequence_id]
        (holder, load), *others = loads(run.residence, run.projected)
        self.admission.end(holder, load, at)
        for holder, load in others:
            self.admission.unload(holder, load, at)
        for part in run.residence.parts:
            self.reserved_tokens[part.holder] -= part.num_tokens

    def prolong(self, run: RunningSequence, projected: MicroBatch) -> None:
        """Replace the projection of a sequence that has outlived it."""
        run.projected = projected
        for holder, load in loads(run.residence, projected):
            self.admission.prolong(holder, load)

    def postpone(self, run: RunningSequence, steps: int) -> None:
        """Put off what was projected of a sequence."""
        for holder, load in loads(run.residence, run.projected):
            self.admission.unload(holder, load, self.step)
        self.prolong(run, replace(run.projected, start=run.projected.start + steps))


def loads(residence: Residence, projected: MicroBatch) -> list[tuple[HolderId, MicroBatch]]:
    """Return the holder and the load of each part of a sequence."""
    if len(residence.parts) == 1:
        return [(residence.parts[0].holder, projected)]
    return [
        (part.holder, projected.part(part.first_token, part.num_tokens)) for part in residence.parts
    ]


def arrival(run: RunningSequence) -> int:
    return run.sequence.sequence_id


def cached_at_end(sequence: Sequence, num_generated: int) -> int:
    """Count the tokens that a sequence has cached at its end. The last one never is."""
    return sequence.num_prompt_tokens + num_generated - 1

"""What runs under a ``ContinuousScheduler``: sequences, with what was promised to them, and the lanes they are in."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TypeAlias

from fastdecode.core.sequence import Sequence
from fastdecode.schedule.admission import Admission
from fastdecode.schedule.load_control import MicroBatch
from fastdecode.schedule.prefill import PrefillBudget
from fastdecode.schedule.scheduler import Chunk


@dataclass(eq=False)
class Run:
    """A running sequence, and what was promised to it."""

    sequence: Sequence
    workers: tuple[int, ...]
    """Of each part; one where it is whole."""
    num_reserved_tokens: int
    projected: MicroBatch
    """Its load from its start, or from when it outlived what was projected first."""
    prefill: deque[int]
    """Chunks that are still booked."""
    decode: Chunk

    def next_chunk(self) -> Chunk:
        return Chunk(self.sequence, self.prefill.popleft()) if self.prefill else self.decode


Planned: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], MicroBatch]
"""Of a sequence that starts: its prefill's chunks, the R-worker of each part, its load."""


@dataclass(eq=False)
class Lane:
    admission: Admission
    budget: PrefillBudget
    step: int = -1
    """The lane's own count of steps."""
    running: dict[int, Run] = field(default_factory=dict)
    """By sequence_id, in order of their start."""
    reserved_tokens: Counter[int] = field(default_factory=Counter)
    """By R-worker."""


def arrival(run: Run) -> int:
    return run.sequence.sequence_id


def cached_at_end(sequence: Sequence, num_generated: int) -> int:
    """Tokens that a sequence has cached when it ends with so many generated: the last one never is."""
    return sequence.num_prompt_tokens + num_generated - 1

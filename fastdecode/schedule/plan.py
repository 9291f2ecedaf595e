"""Sequences that wait and that run, and what a scheduler plans for the next step of a lane: which
of them are suspended, enlarged and started before it, and which run in it.

A sequence is **waiting**, then **running** in one lane, then over. There is a plan for each step of
a lane, so requests join and leave the running batch at every step (continuous batching).
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from fastdecode.core.holders import HolderId, Residence
from fastdecode.core.sequence import NOTHING, Sequence
from fastdecode.schedule.admission.load_control import MicroBatch
from fastdecode.schedule.admission.policies import Admission
from fastdecode.schedule.prefill import PrefillBudget
from fastdecode.wire.blocks import Fetch, Forget, Name, Retain

NOT_BOOKED: Final = sys.maxsize
"""Stands for the first step of a sequence that has none booked: later than any."""
Order = Callable[[Sequence], tuple[int, ...]]


@dataclass(frozen=True)
class Start:
    """A sequence starts: empty, or as a fork that shares a prefix of a running sibling's tokens."""

    sequence: Sequence
    residence: Residence
    """Its room. A fork's first parts are where the parent's are."""
    parent: Sequence | None = None
    num_shared_tokens: int = 0
    """Tokens of it that are not run again."""
    kept: tuple[tuple[bytes, ...], ...] = ()
    """Keys of the cached blocks that its first parts start with. Empty for a fork."""
    gap: range = NOTHING
    """Missing tokens among those of the cached blocks. Only a whole sequence has a gap."""
    awaits: frozenset[int] = frozenset()
    """Jobs that fetch some of the blocks. No part is opened before they are due."""
    num_first_tokens: int = 1
    """Tokens that its first step runs."""
    is_handed: bool = False
    """It starts with blocks that other engines keep, and not as a fork."""

    @property
    def behind_gap(self) -> range:
        """Tokens of cached blocks behind the gap."""
        num_held = self.num_shared_tokens + len(self.gap)
        return range(self.gap.stop, num_held) if self.gap else NOTHING


@dataclass(frozen=True)
class Send:
    """Send a holder a message about cached blocks, which it does not answer."""

    holder: HolderId
    message: Name | Forget | Retain | Fetch


@dataclass(frozen=True)
class Chunk:
    """The next uncached tokens of a running sequence. A step that fills a gap and continues behind
    it has two chunks of the sequence, in this order."""

    sequence: Sequence
    num_tokens: int
    is_behind_gap: bool = False
    """True for the second of two."""

    @property
    def first(self) -> int:
        """Its first token, before its step is over."""
        sequence = self.sequence
        return sequence.behind_gap.stop if self.is_behind_gap else sequence.num_cached

    @property
    def num_in_prompt(self) -> int:
        """Tokens of it in the prompt, before its step is over."""
        return min(self.num_tokens, max(0, self.sequence.num_prompt_tokens - self.first))


def num_in_prompts(chunks: Iterable[Chunk]) -> int:
    """Count a step's tokens of prompts, before it is over. A sequence that decodes has its whole
    prompt cached."""
    return sum(
        [
            chunk.num_in_prompt
            for chunk in chunks
            if chunk.sequence.num_cached < len(chunk.sequence.request.prompt_token_ids)
        ]
    )


@dataclass(frozen=True)
class LanePlan:
    """What precedes a lane's next step, in this order."""

    suspends: tuple[Sequence, ...] = ()
    """Running sequences that give their blocks back and wait again, to be recomputed."""
    grows: tuple[tuple[Sequence, Residence], ...] = ()
    """Running sequences that outgrow their room, and where they are with a larger last part."""
    starts: tuple[Start, ...] = ()


class WaitingQueue:
    """Waiting sequences in the order in which they start: those that have run before, then the new
    ones. To arrive, leave and look for a sequence takes O(log n) comparisons.

    Args:
        order: unique key of a sequence, constant while it waits. See ``Admission.order``.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        # Sorted. An insertion or a removal moves 8 bytes for each sequence behind it.
        self._interrupted: list[Sequence] = []
        self._new: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._interrupted) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._interrupted
        yield from self._new

    @property
    def head(self) -> Sequence:
        """Return the sequence that starts next."""
        return self._interrupted[0] if self._interrupted else self._new[0]

    @property
    def has_head_run(self) -> bool:
        """True if the head has run before."""
        return bool(self._interrupted)

    def arrive(self, sequences: Iterable[Sequence]) -> None:
        """Queue new sequences."""
        for sequence in sequences:
            if self._new and self._order(sequence) < self._order(self._new[-1]):
                insort(self._new, sequence, key=self._order)
            else:
                self._new.append(sequence)

    def come_back(self, sequence: Sequence) -> None:
        """Queue a sequence that has run at its old place."""
        insort(self._interrupted, sequence, key=self._order)

    def pop(self) -> None:
        """Remove the head, which starts."""
        del (self._interrupted or self._new)[0]

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Raises: ValueError: If it does not wait."""
        for queue in (self._interrupted, self._new):
            place = bisect_left(queue, self._order(sequence), key=self._order)
            if place < len(queue) and queue[place] is sequence:
                del queue[place]
                return
        raise ValueError(f"sequence {sequence.sequence_id} doesn't wait")

    def check_invariants(self) -> None:
        for queue in (self._interrupted, self._new):
            places = [self._order(sequence) for sequence in queue]
            assert places == sorted(set(places)), "the queue is out of order"


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

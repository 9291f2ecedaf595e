"""Which sequences step, which start: the interface that the engine asks of every policy.

A sequence is **waiting**, then **running** in one lane, then **finished**. For each step of a lane the engine asks for
a plan, carries it out whole, and tells the scheduler which sequences finished; requests therefore join and leave the
running batch at every step (continuous batching).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from fastdecode.core.sequence import Sequence


@dataclass(frozen=True)
class Start:
    """A sequence starts on an R-worker: empty, or as a fork that shares a prefix of a running sibling's tokens. Where
    it is split, it starts on all its ``workers``, of which ``worker`` is the first."""

    sequence: Sequence
    worker: int
    parent: Sequence | None = None
    num_shared_tokens: int = 0
    num_reserved_tokens: int | None = None
    """Room that R-workers set aside; None: for all that the sequence may ever cache."""


@dataclass(frozen=True)
class Suspend:
    """A running sequence gives its blocks back and waits again, its tokens kept, to be recomputed when it starts anew,
    which may be in the same plan. The sequence knows nothing any more of where its blocks are; ``worker`` says it."""

    sequence: Sequence
    worker: int


@dataclass(frozen=True)
class Extend:
    """A running sequence outgrows what its R-worker has set aside for it: enlarge that to ``num_reserved_tokens``."""

    sequence: Sequence
    num_reserved_tokens: int


@dataclass(frozen=True)
class Chunk:
    """The next ``num_tokens`` uncached tokens of a running sequence."""

    sequence: Sequence
    num_tokens: int


@dataclass(frozen=True)
class StepPlan:
    """One step: what is freed, enlarged and started before it, in this order, and what runs in it."""

    starts: tuple[Start, ...]
    chunks: tuple[Chunk, ...]
    suspends: tuple[Suspend, ...] = ()
    extends: tuple[Extend, ...] = ()


class Scheduler(Protocol):
    """What the engine asks of a policy."""

    def add(self, sequences: Iterable[Sequence]) -> None:
        """The sequences of one request join the queue, in order.

        Raises:
            CapacityError: no R-worker could ever hold one of them; none was added.
        """

    def plan(self, lane: int) -> StepPlan:
        """The lane's next step. Its starts count as running from now on; the engine carries out the plan whole.

        The plan of a lane that has nothing to do has no chunks. While sequences are unfinished, a plan for each lane in
        turn gives at least one chunk, or some lane's step is in flight.
        """

    def finish(self, sequence: Sequence) -> None:
        """The sequence, waiting or running, is over; what it held is free."""

    def requeue(self, sequence: Sequence) -> None:
        """A running sequence has lost its cache: it waits again, at its old place in the queue, to be recomputed.

        Raises:
            CapacityError: no R-worker that is left could ever hold it; it waits all the same, until it is finished.
        """

    def lose_worker(self, worker: int) -> list[Sequence]:
        """Start nothing on this R-worker any more; its running sequences are requeued by the engine, one by one.

        Returns:
            The waiting sequences that no R-worker that is left could ever hold.
        """

    def regain_worker(self, worker: int, num_blocks: int) -> None:
        """An empty R-worker with so many KV blocks is there in the place of a lost one, of which nothing runs any
        more."""

    def is_possible(self, sequence: Sequence) -> bool:
        """Whether some R-worker, were it empty, could hold all that the sequence may ever cache."""

    def regroup(self, num_lanes: int) -> None:
        """From now on there are so many lanes, among which the running sequences are shared out anew. No lane's step
        is in flight. Prompts keep the room that was booked for them, so for a few steps a lane may run more tokens than
        it should.
        """

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

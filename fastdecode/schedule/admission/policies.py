"""When may the head of a lane's queue start, and on which R-worker? The
policies that ``--schedule`` chooses among.

=================  =============================================================
``Greedy``         whenever there is room
``Synchronized``   a full batch at once; the next one when all of it has ended
                   (what the paper compares with)
``FixedF``         a micro-batch every F steps (FastDecode, section
                   "Sequence-level load-stabilizing schedule")
``Stabilized``     as soon as the projected load of an R-worker stays within its
                   limit (the same section, Algorithm 1); in
                   ``fastdecode.schedule.admission.stabilized``
``ByForecast``     stabilized while that is forecast to pay, else greedy; in
                   ``fastdecode.schedule.admission.by_forecast``
=================  =============================================================

Room for its KV blocks, among the running sequences and in the step's prefill
budget is needed whatever the policy; the scheduler sees to that. With nothing
running in its lane, every policy lets the head start: waiting would gain
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol, TypeAlias

from fastdecode.core.sequence import Sequence
from fastdecode.schedule.admission.load_control import FixedInterval, MicroBatch

Earlier: TypeAlias = Seq[tuple[int, MicroBatch]]
NOTHING_EARLIER: Earlier = ()


class Admission(Protocol):
    """One lane's policy. Sequences are micro-batches of one."""

    def order(self, sequence: Sequence) -> tuple[int, ...]:
        """Whose is least starts first of those that have never run."""
        return (sequence.sequence_id,)

    def check_possible(self, sizes: Seq[int]) -> None:
        """Raises CapacityError if a sequence whose parts may have so many
        cached tokens each could never start."""

    def begin_step(self, step: int, num_running: int, num_startable: int, num_waiting: int) -> None:
        """A step is being planned; of ``num_waiting`` sequences that all lanes
        share, at most ``num_startable`` could start in it."""

    def choose(
        self,
        batch: MicroBatch,
        workers: Seq[int],
        earlier: Earlier = NOTHING_EARLIER,
        *,
        alone: bool = True,
    ) -> int | None:
        """Where the sequence may start in this step, among the R-workers that
        have room for it, those with most first; None: not yet.

        Args:
            batch: the sequence; where sequences are split, one part of it.
            earlier: its parts that have been placed by now: (R-worker, load) of
                each.
            alone: it may also go where it exceeds a limit and nothing else
                runs.
        """

    def add(self, worker: int, batch: MicroBatch) -> None:
        """The sequence starts. Of a split one this tells the first part, and
        ``prolong`` the others."""

    def prolong(self, worker: int, batch: MicroBatch) -> None:
        """A running sequence has come to the end of its projection, and goes on as ``batch``."""

    def end(self, worker: int, batch: MicroBatch, at: int) -> None:
        """The sequence is over, or suspended: from step ``at`` on it has no
        load. Of a split one this tells the first part, and ``unload`` the
        others."""

    def unload(self, worker: int, batch: MicroBatch, at: int) -> None:
        """From step ``at`` on a part has no load any more."""


class Greedy(Admission):
    """Start whenever there is room."""

    def check_possible(self, sizes: Seq[int]) -> None:
        pass

    def begin_step(self, step: int, num_running: int, num_startable: int, num_waiting: int) -> None:
        pass

    def choose(
        self,
        batch: MicroBatch,
        workers: Seq[int],
        earlier: Earlier = NOTHING_EARLIER,
        *,
        alone: bool = True,
    ) -> int | None:
        return workers[0] if workers else None

    def add(self, worker: int, batch: MicroBatch) -> None:
        pass

    def prolong(self, worker: int, batch: MicroBatch) -> None:
        pass

    def end(self, worker: int, batch: MicroBatch, at: int) -> None:
        pass

    def unload(self, worker: int, batch: MicroBatch, at: int) -> None:
        pass


class Synchronized(Greedy):
    """Start as many sequences as there is room for, and no more until all of them have ended."""

    def __init__(self) -> None:
        self._num_left = 0
        """Of the present batch, sequences that are still to start."""

    def begin_step(self, step: int, num_running: int, num_startable: int, num_waiting: int) -> None:
        if num_running == 0:
            self._num_left = num_startable

    def choose(
        self,
        batch: MicroBatch,
        workers: Seq[int],
        earlier: Earlier = NOTHING_EARLIER,
        *,
        alone: bool = True,
    ) -> int | None:
        if not workers:
            self._num_left = 0  # the batch is as full as it gets
        return workers[0] if self._num_left > 0 else None

    def add(self, worker: int, batch: MicroBatch) -> None:
        self._num_left -= 1


class FixedF(Greedy):
    """Start at most M sequences every F steps. They may start in later steps of
    those F if prefill holds them up."""

    def __init__(self, interval: FixedInterval) -> None:
        self._interval = interval
        self._next_step = 0
        self._num_left = 0

    def begin_step(self, step: int, num_running: int, num_startable: int, num_waiting: int) -> None:
        if num_startable and (step >= self._next_step or num_running == 0):
            self._num_left = self._interval.num_sequences
            self._next_step = step + self._interval.interval

    def choose(
        self,
        batch: MicroBatch,
        workers: Seq[int],
        earlier: Earlier = NOTHING_EARLIER,
        *,
        alone: bool = True,
    ) -> int | None:
        return workers[0] if workers and self._num_left > 0 else None

    def add(self, worker: int, batch: MicroBatch) -> None:
        self._num_left -= 1

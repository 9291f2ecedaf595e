"""When the head of a lane's queue may start, and on which R-worker: the policies that
``--schedule`` chooses among.

=================  ==========================================================================
``Admission``      greedy: whenever there is room
``Synchronized``   a full batch at once; the next one when all of it has ended (what the paper
                   compares with)
``FixedF``         a micro-batch every F steps (FastDecode, section "Sequence-level
                   load-stabilizing schedule")
``Stabilized``     as soon as the projected load of an R-worker stays within its limit (the same
                   section, Algorithm 1)
``ByForecast``     stabilized while that is forecast to pay, else greedy
=================  ==========================================================================

Room for KV blocks, among the running sequences and in the step's prefill budget is needed under
every policy; the scheduler sees to that. With nothing running in its lane, every policy lets the
head start: waiting would gain nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TypeAlias

from fastdecode.core.sequence import Sequence
from fastdecode.schedule.admission.load_control import FixedInterval, MicroBatch

Earlier: TypeAlias = Seq[tuple[int, MicroBatch]]
NOTHING_EARLIER: Earlier = ()


class Admission:
    """One lane's policy: sequences, which are micro-batches of one, start while there is room.
    Other policies override what they need."""

    follows_steps = False
    """True if ``begin_step`` is due in steps for which no sequence waits, too."""

    def order(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the key of a sequence that has never run. The least starts first."""
        return (sequence.sequence_id,)

    def check_possible(self, sizes: Seq[int]) -> None:
        """Raise CapacityError if a sequence whose parts may have these cached tokens could never
        start."""

    def begin_step(self, step: int, num_running: int, num_startable: int, num_waiting: int) -> None:
        """Note that a step is planned. At most ``num_startable`` of the ``num_waiting`` sequences
        that all lanes share could start in it."""

    def choose(
        self,
        batch: MicroBatch,
        workers: Seq[int],
        earlier: Earlier = NOTHING_EARLIER,
        *,
        alone: bool = True,
    ) -> int | None:
        """Return where a sequence may start in this step. None if it has to wait.

        Args:
            batch: the sequence, or a part of a split one.
            workers: R-workers with room for it, those with most first.
            earlier: R-worker and load of its parts that are placed already.
            alone: it may also go where it exceeds a limit and nothing else runs.
        """
        return workers[0] if workers else None

    def add(self, worker: int, batch: MicroBatch) -> None:
        """Note that a sequence starts, or the first part of one. ``prolong`` gets other parts."""

    def prolong(self, worker: int, batch: MicroBatch) -> None:
        """Continue a running sequence as ``batch`` at the end of its projection."""

    def end(self, worker: int, batch: MicroBatch, at: int) -> None:
        """Take a sequence's load, or its first part's, from step ``at`` on: it is over, or
        suspended. ``unload`` gets other parts."""

    def unload(self, worker: int, batch: MicroBatch, at: int) -> None:
        """Take a part's load from step ``at`` on."""


class Synchronized(Admission):
    """Start as many sequences as there is room for, and no more until all of them have ended."""

    def __init__(self) -> None:
        self._num_left = 0
        """Sequences of the present batch that are still to start."""

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


class FixedF(Admission):
    """Start at most M sequences every F steps. They may start in later steps of those F if prefill
    holds them up."""

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

"""When may the head of a lane's queue start, and on which R-worker? The policies that ``--schedule`` chooses among.

=================  ===============================================================================================
``Greedy``         whenever there is room
``Synchronized``   a full batch at once; the next one when all of it has ended (what the paper compares with)
``FixedF``         a micro-batch every F steps (FastDecode, section "Sequence-level load-stabilizing schedule")
``Stabilized``     as soon as the projected load of an R-worker stays within its limit (the same section, Algorithm 1)
=================  ===============================================================================================

Room for its KV blocks, among the running sequences and in the step's prefill budget is needed whatever the policy; the
scheduler sees to that. With nothing running in its lane, every policy lets the head start: waiting would gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from fastdecode.core.errors import CapacityError
from fastdecode.schedule.headroom import Headroom
from fastdecode.schedule.load_control import FixedInterval, LoadControl, MicroBatch, ramped_limit


class Admission(Protocol):
    """One lane's policy. Sequences are micro-batches of one."""

    def check_possible(self, num_tokens: int) -> None:
        """Raises CapacityError if a sequence that may have so many cached tokens could never start."""

    def begin_step(self, step: int, num_running: int, num_startable: int) -> None:
        """A step is being planned; at most ``num_startable`` sequences could start in it."""

    def choose(self, batch: MicroBatch, workers: Seq[int]) -> int | None:
        """Where the sequence may start in this step, among the R-workers that have room for it, those with most first;
        None: not yet."""

    def add(self, worker: int, batch: MicroBatch) -> None:
        """The sequence starts."""

    def prolong(self, worker: int, batch: MicroBatch) -> None:
        """A running sequence has come to the end of its projection, and goes on as ``batch``."""

    def end(self, worker: int, batch: MicroBatch, at: int) -> None:
        """The sequence is over, or suspended: from step ``at`` on it has no load."""


class Greedy:
    """Start whenever there is room."""

    def check_possible(self, num_tokens: int) -> None:
        pass

    def begin_step(self, step: int, num_running: int, num_startable: int) -> None:
        pass

    def choose(self, batch: MicroBatch, workers: Seq[int]) -> int | None:
        return workers[0] if workers else None

    def add(self, worker: int, batch: MicroBatch) -> None:
        pass

    def prolong(self, worker: int, batch: MicroBatch) -> None:
        pass

    def end(self, worker: int, batch: MicroBatch, at: int) -> None:
        pass


class Synchronized(Greedy):
    """Start as many sequences as there is room for, and no more until all of them have ended."""

    def __init__(self) -> None:
        self._num_left = 0
        """Of the present batch, sequences that are still to start."""

    def begin_step(self, step: int, num_running: int, num_startable: int) -> None:
        if num_running == 0:
            self._num_left = num_startable

    def choose(self, batch: MicroBatch, workers: Seq[int]) -> int | None:
        if not workers:
            self._num_left = 0  # the batch is as full as it gets
        return workers[0] if self._num_left > 0 else None

    def add(self, worker: int, batch: MicroBatch) -> None:
        self._num_left -= 1


class FixedF(Greedy):
    """Start at most M sequences every F steps. They may start in later steps of those F if prefill holds them up."""

    def __init__(self, interval: FixedInterval) -> None:
        self._interval = interval
        self._next_step = 0
        self._num_left = 0

    def begin_step(self, step: int, num_running: int, num_startable: int) -> None:
        if num_startable and (step >= self._next_step or num_running == 0):
            self._num_left = self._interval.num_sequences
            self._next_step = step + self._interval.interval

    def choose(self, batch: MicroBatch, workers: Seq[int]) -> int | None:
        return workers[0] if workers and self._num_left > 0 else None

    def add(self, worker: int, batch: MicroBatch) -> None:
        self._num_left -= 1


class ColdStart(Protocol):
    """Spreads the starts of a lane that was empty."""

    def begin_step(self, step: int, num_running: int, num_startable: int) -> None: ...

    def allows(self, batch: MicroBatch, peak: int, limit: int) -> bool:
        """Whether a sequence may start now, on top of the projected ``peak`` of all R-workers under ``limit``."""

    def add(self, batch: MicroBatch) -> None:
        """A sequence starts."""


class RampedStart:
    """Raise the limit over as many steps as the first sequence takes."""

    def __init__(self) -> None:
        self._since = 0
        self._num_steps = 0

    def begin_step(self, step: int, num_running: int, num_startable: int) -> None:
        if num_running == 0:
            self._since, self._num_steps = step, 0

    def allows(self, batch: MicroBatch, peak: int, limit: int) -> bool:
        age = batch.start - self._since
        if peak == 0 or age >= self._num_steps:
            return True
        return peak + batch.peak <= ramped_limit(limit, age, self._num_steps)

    def add(self, batch: MicroBatch) -> None:
        self._num_steps = self._num_steps or batch.num_steps


class PacedStart:
    """Start M sequences every F steps, until the first of them would have ended."""

    def __init__(self, interval: FixedInterval) -> None:
        self._pace = FixedF(interval)
        self._num_steps = interval.target_length
        self._since = 0

    def begin_step(self, step: int, num_running: int, num_startable: int) -> None:
        if num_running == 0:
            self._since = step
        self._pace.begin_step(step, num_running, num_startable)

    def allows(self, batch: MicroBatch, peak: int, limit: int) -> bool:
        return batch.start - self._since >= self._num_steps or self._pace.choose(batch, (0,)) is not None

    def add(self, batch: MicroBatch) -> None:
        self._pace.add(0, batch)


# Steps between two looks at the step times.
RECALIBRATE_EVERY = 64


class Stabilized:
    """Load control for each R-worker: start on the one whose projected peak is lowest, relative to its limit, among
    those where the load stays within the limit until the sequence ends.

    A sequence that is longer than a limit starts where nothing else runs, and then runs there alone.

    Args:
        limits: W_lim of each R-worker for this lane, in tokens.
        measure_limits: gives the limits anew, now and then; None: they are fixed, and sequences above the highest of
            them are refused.
        cold_start: how an empty lane fills; None: at once.
        headroom: leave room for the sequences that start later, always. An empty lane then fills evenly by itself, and
            stays even; without it, equal lengths drift into convoys.
    """

    def __init__(
        self,
        limits: Seq[int],
        *,
        measure_limits: Callable[[], Seq[int]] | None = None,
        cold_start: ColdStart | None = None,
        headroom: bool = True,
    ) -> None:
        self._controls = [LoadControl(limit) for limit in limits]
        self._measure_limits = measure_limits
        self._cold_start = cold_start
        self._headroom = Headroom() if headroom else None

    def check_possible(self, num_tokens: int) -> None:
        most = max(control.limit for control in self._controls)
        if self._measure_limits is None and num_tokens > most:
            raise CapacityError(
                f"the sequence may grow to {num_tokens} cached tokens, but the load limit leaves a lane no more than "
                f"{most} on any R-worker: lower max_tokens, or raise the load limit (--load-limit)",
                code="exceeds_load_limit",
            )

    def begin_step(self, step: int, num_running: int, num_startable: int) -> None:
        for control in self._controls:
            control.forget_before(step)
        if self._measure_limits is not None and step % RECALIBRATE_EVERY == 0:
            for control, limit in zip(self._controls, self._measure_limits(), strict=True):
                control.limit = limit
        if self._cold_start is not None:
            self._cold_start.begin_step(step, num_running, num_startable)

    def choose(self, batch: MicroBatch, workers: Seq[int]) -> int | None:
        if self._cold_start is not None:
            peak = sum(control.peak() for control in self._controls)
            if not self._cold_start.allows(batch, peak, sum(control.limit for control in self._controls)):
                return None
        by_load = sorted(workers, key=lambda worker: self._controls[worker].peak() / self._controls[worker].limit)
        return next((worker for worker in by_load if self._fits(batch, self._controls[worker])), None)

    def add(self, worker: int, batch: MicroBatch) -> None:
        self.prolong(worker, batch)
        if self._headroom is not None:
            self._headroom.started(batch)
        if self._cold_start is not None:
            self._cold_start.add(batch)

    def prolong(self, worker: int, batch: MicroBatch) -> None:
        control = self._controls[worker]
        control.add(batch.num_sequences, batch.target_length, batch.start, first_length=batch.first_length)

    def end(self, worker: int, batch: MicroBatch, at: int) -> None:
        if self._headroom is not None:
            self._headroom.ended(early=at <= batch.end)
        control = self._controls[worker]
        control.end(batch.num_sequences, batch.target_length, batch.start, at, first_length=batch.first_length)

    def _fits(self, batch: MicroBatch, control: LoadControl) -> bool:
        if batch.peak > control.limit:
            return not control
        start = control.earliest_start(
            batch.num_sequences, batch.target_length, batch.start, first_length=batch.first_length
        )
        if start > batch.start or self._headroom is None:
            return start == batch.start
        return control.fits(batch, self._headroom.limit_for(batch, control.limit))

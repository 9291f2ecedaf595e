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


# Steps between two looks at the step times, once they are known.
RECALIBRATE_EVERY = 64


class Stabilized:
    """Load control for each R-worker: start on the one whose projected peak is lowest, relative to its limit, among
    those where the load stays within the limit until the sequence ends.

    A sequence that is longer than a limit starts where nothing else runs, and then runs there alone.

    Args:
        capacity: tokens that each R-worker holds.
        batch_size: most sequences of the lane: B.
        limits: W_lim of each R-worker for this lane, in tokens; sequences above the highest of them are refused.
        balance: gives instead the load at which each R-worker is as busy as the S-worker, anew now and then; None while
            that is unknown. Until then it is the mean load of a full batch whose starts are spread evenly, the paper's
            B·S/2. Balance is sought at the mean load, so the limit is half a sequence more: B·(S + F)/2 when one starts
            every F = S/B steps.
        cold_start: how an empty lane fills; None: at once.
        headroom: leave room for the sequences that start later, always. An empty lane then fills evenly by itself, and
            stays even; without it, equal lengths drift into convoys.
    """

    def __init__(
        self,
        capacity: Seq[int],
        batch_size: int,
        *,
        limits: Seq[int] | None = None,
        balance: Callable[[], Seq[int] | None] = lambda: None,
        cold_start: ColdStart | None = None,
        headroom: bool = True,
    ) -> None:
        self._capacity = capacity
        self._batch_size = batch_size
        self._controls = [LoadControl(max(1, limit)) for limit in limits or capacity]
        self._are_given = limits is not None
        self._balance = balance
        self._is_balanced = False
        self._cold_start = cold_start
        self._headroom = Headroom() if headroom else None
        # Of the sequences that have started: how many, the steps that they take, and their lengths summed over those.
        self._num_started = self._num_steps = self._token_steps = 0

    def check_possible(self, num_tokens: int) -> None:
        most = max(control.limit for control in self._controls)
        if self._are_given and num_tokens > most:
            raise CapacityError(
                f"the sequence may grow to {num_tokens} cached tokens, but the load limit leaves a lane no more than "
                f"{most} on any R-worker: lower max_tokens, or raise the load limit (--load-limit)",
                code="exceeds_load_limit",
            )

    def begin_step(self, step: int, num_running: int, num_startable: int) -> None:
        for control in self._controls:
            control.forget_before(step)
        if not self._is_balanced or step % RECALIBRATE_EVERY == 0:
            self._set_limits()
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
        self._num_started += 1
        self._num_steps += batch.num_steps
        self._token_steps += batch.num_steps * (batch.first_length + batch.target_length) // 2
        if not self._is_balanced:
            self._set_limits()
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

    def _set_limits(self) -> None:
        if self._are_given:
            return
        loads = self._balance()
        self._is_balanced = loads is not None
        if loads is None:
            mean_length = self._token_steps / max(1, self._num_steps) or max(self._capacity)
            share = min(1.0, self._batch_size * mean_length / max(1, sum(self._capacity)))
            loads = [int(share * tokens) for tokens in self._capacity]
        half = self._num_steps // max(1, 2 * self._num_started)
        for control, load, most in zip(self._controls, loads, self._capacity, strict=True):
            control.limit = max(1, min(load + half, most))

    def _fits(self, batch: MicroBatch, control: LoadControl) -> bool:
        if batch.peak > control.limit:
            return not control
        start = control.earliest_start(
            batch.num_sequences, batch.target_length, batch.start, first_length=batch.first_length
        )
        if start > batch.start or self._headroom is None:
            return start == batch.start
        return control.fits(batch, self._headroom.limit_for(batch, control.limit))

"""The paper's schedule for real traffic: load control over several R-workers (FastDecode, arXiv
2403.11421, section "Sequence-level load-stabilizing schedule").

Lanes do not share steps. Each has a load control and a limit of its own at every R-worker. So no
lane, and no R-worker, ever exceeds its limit, whichever lane runs faster.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from fastdecode.core.errors import CapacityError, Given
from fastdecode.schedule.admission.headroom import Headroom
from fastdecode.schedule.admission.load_control import LoadControl, MicroBatch
from fastdecode.schedule.admission.policies import NOTHING_EARLIER, Admission, Earlier

# Steps between two looks at the step times, once they are known.
RECALIBRATE_EVERY = 64


class Stabilized(Admission):
    """Load control for each R-worker. A sequence starts on the one whose projected peak is lowest,
    relative to its limit, among those where the load stays within the limit until its end.

    A sequence that is longer than a limit starts where nothing else runs, and then runs there
    alone. The parts of a split one that are on the same R-worker are weighed together.

    Args:
        capacity: tokens that each R-worker holds.
        batch_size: most sequences of the lane: B.
        limits: W_lim of each R-worker for this lane, in tokens. Sequences above the highest of them
            are refused.
        limited: source of ``limits``, for people.
        balance: gives instead the load at which each R-worker is as busy as the S-worker. None
            while that is unknown. The limits are never less than the mean load of a full batch
            whose starts are spread evenly, the paper's B·S/2: with fewer sequences the S-worker
            would read its weights more often, and R-workers would be no faster. Balance is sought
            at the mean load, so the limit is half a sequence more: B·(S + F)/2 when one starts
            every F = S/B steps.
        headroom: leave room for later sequences. An empty lane then fills evenly by itself, and
            stays even. Without it, equal lengths drift into convoys.
    """

    follows_steps = True

    def __init__(
        self,
        capacity: Seq[int],
        batch_size: int,
        *,
        limits: Seq[int] | None = None,
        limited: str = "",
        balance: Callable[[], Seq[int] | None] = lambda: None,
        headroom: bool = True,
    ) -> None:
        self._capacity = capacity
        self._batch_size = batch_size
        self._controls = [LoadControl(max(1, limit)) for limit in limits or capacity]
        self._are_given = limits is not None
        self._limited = limited
        self._balance = balance
        self._balanced: Seq[int] | None = None
        self._headroom = Headroom() if headroom else None
        # Sequences that have started, the steps that they take, and the sum of their lengths.
        self._num_started = self._num_steps = self._token_steps = 0

    def check_possible(self, sizes: Seq[int]) -> None:
        part = sizes[0]
        limits = [control.limit for control in self._controls]
        most, where = max(limits), "on any R-worker"
        if len(sizes) > 1:
            # As many full parts as the limits leave room for, and a last one in
            # the most that these leave.
            most = sum(limit // part for limit in limits) * part + max(
                limit % part for limit in limits
            )
            where = f"on all R-workers together, in parts of {part}"
        if self._are_given and sum(sizes) > most:
            raise CapacityError(
                f"the sequence may grow to {sum(sizes)} cached tokens, but {self._limited} leaves "
                f"it no more than {most} {where}: lower max_tokens, or raise ",
                Given("load_limit"),
                code="exceeds_load_limit",
            )

    def begin_step(self, step: int, num_running: int, num_startable: int, num_waiting: int) -> None:
        for control in self._controls:
            control.forget_before(step)
        if not self._are_given and (self._balanced is None or step % RECALIBRATE_EVERY == 0):
            self._balanced = self._balance()
            self._set_limits()

    def choose(
        self,
        batch: MicroBatch,
        workers: Seq[int],
        earlier: Earlier = NOTHING_EARLIER,
        *,
        alone: bool = True,
    ) -> int | None:
        own = {worker: [part for at, part in earlier if at == worker] for worker in workers}
        by_load = sorted(
            workers, key=lambda worker: self._controls[worker].peak() / self._controls[worker].limit
        )
        fitting = (w for w in by_load if self._fits(batch, self._controls[w], own[w], alone=alone))
        return next(fitting, None)

    def add(self, worker: int, batch: MicroBatch) -> None:
        self._controls[worker].add(batch)
        self._num_started += 1
        self._num_steps += batch.num_steps
        # Half a token less than at the ends of steps: S/2 on the way from nothing to S.
        self._token_steps += batch.num_steps * (batch.first_length + batch.target_length - 1) // 2
        if not self._are_given:
            self._set_limits()
        if self._headroom is not None:
            self._headroom.started(batch)

    def prolong(self, worker: int, batch: MicroBatch) -> None:
        self._controls[worker].add(batch)

    def end(self, worker: int, batch: MicroBatch, at: int) -> None:
        if self._headroom is not None:
            self._headroom.ended(early=at <= batch.end)
        self.unload(worker, batch, at)

    def unload(self, worker: int, batch: MicroBatch, at: int) -> None:
        self._controls[worker].end(batch, at)

    def _set_limits(self) -> None:
        loads = full_batch = self._full_batch()
        if self._balanced is not None:
            raised = max(1.0, sum(full_batch) / sum(self._balanced)) if self._num_started else 1.0
            loads = [int(raised * load) for load in self._balanced]
        half = self._num_steps // max(1, 2 * self._num_started)
        for control, load, most in zip(self._controls, loads, self._capacity, strict=True):
            control.limit = max(1, min(load + half, most))

    def _full_batch(self) -> list[int]:
        """Return the mean load of a full batch whose starts are spread evenly, by memory."""
        mean_length = self._token_steps / max(1, self._num_steps) or max(self._capacity)
        share = min(1.0, self._batch_size * mean_length / max(1, sum(self._capacity)))
        return [int(share * tokens) for tokens in self._capacity]

    def _fits(
        self, batch: MicroBatch, control: LoadControl, own: Seq[MicroBatch], *, alone: bool
    ) -> bool:
        """``own``: earlier parts of the same sequence, on the same R-worker."""
        peak = batch.peak + sum(part.peak for part in own)  # all at their common end
        if peak > control.limit:
            # A split sequence that given limits leave room for elsewhere waits for that.
            empty = (
                not any(self._controls)
                if self._are_given and batch.most is not None
                else not control
            )
            return alone and empty
        control = control.with_also(own)
        start = control.earliest_start(batch)
        if start > batch.start or self._headroom is None:
            return start == batch.start
        return control.fits(batch, self._headroom.limit_for(batch, control.limit, peak))

"""KV on the S-worker's own device (``--kv-placement gpu``, ``swap``): an R-worker whose cache is
on that device, and attention in that cache.

The R-worker decides as all do (``rworker.state``), and works at once, in the sender's thread; its
executor has the cache (``torch_executor``). The S-worker attends in that cache: no message
carries q, k and v. It cannot attend while the S-part computes, so one lane is enough.

A device may fail where it makes room for a step, or attends a layer: it is out of memory, or
refuses a kernel. Where its caches have replicas the step continues without its rows, as every
step does whose R-worker is lost, and later steps at the R-workers that take over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import Holder, HolderId
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.step.batch import StepBatch
from fastdecode.engine.step.remote import AttentionPlan, Begun, StepRecord
from fastdecode.engine.step.swapped import SwappedLanes
from fastdecode.engine.step.torch_executor import AttendPaged, TorchExecutor
from fastdecode.wire.messages import BeginStep
from fastdecode.wire.transport import closed_error
from rworker.blocks.appending import Appended
from rworker.blocks.kv_store import KVStore
from rworker.cache_state import CacheState
from rworker.inline import WORKER, InlineConnection
from rworker.state import RWorkerState
from sworker.failures import is_failure
from sworker.paged import PagedKV
from sworker.step_tables import StepInputs, StepTables
from sworker.whole import WholeSteps, run_step
from sworker.worker import Pass, SWorker


class DeviceWorker(InlineConnection):
    """The R-worker whose cache is on the S-worker's device. It works in the S-worker's
    thread, and decides as every R-worker does; the S-worker attends in its cache.

    Args:
        kv_bytes: memory for K and V; as many blocks as fit are offered.
        name: For people. By default it is made of its device.
    """

    def __init__(self, executor: TorchExecutor, kv_bytes: int, name: str | None = None) -> None:
        name = name or f"the KV cache on {executor.device}"
        state = RWorkerState(
            name,
            kv_bytes=max(1, kv_bytes),
            num_threads=torch.get_num_threads(),
            has_tier=executor.has_tier,
            is_padded=False,
        )
        super().__init__(state, executor)
        self.peer = name
        self._state, self._executor = state, executor
        self.device, self.gpu = executor.device, executor.gpu

    @property
    def cache(self) -> PagedKV:
        """K and V; of lanes that are swapped, while a step of the lane is under way."""
        return self._executor.caches[self._state.cache_of(WORKER).holder]

    def keep_on_host(self, s_worker: SWorker) -> None:
        """Where kept blocks go to the host's memory: S-workers that act as one copy theirs
        together."""
        memories = self._executor.memories
        for holder in memories:
            memories[holder] = s_worker.keep_on_host(memories[holder])

    def begin_step(self, begin: BeginStep) -> tuple[StepTables, CacheState, AttendPaged]:
        """Make room for a step's tokens.

        Returns:
            Where they go, by rows in the order of ``begin``'s sequences (decoded ones, later
            chunks, first chunks); the cache's books; and a call that attends in the cache.
        """
        self.work()
        if not self.is_open:
            raise closed_error(self.peer, by_peer=True)
        own = self._state.cache_of(WORKER, begin.holder)
        store = own.books.store
        appended = own.books.begin_step(begin)
        attend = self._executor.begin_step(own.holder, begin, appended, store)
        return _tables(begin, appended, store), own.books, attend

    def end_step(self, begin: BeginStep) -> None:
        """All layers of a step are done, or queued on the device."""
        own = self._state.cache_of(WORKER, begin.holder)
        self._executor.end_step(own.holder)
        own.books.steps.finish(begin.lane, begin.step)

    def fail(self) -> None:
        """The device has failed: its caches are gone, and their memory is free."""
        self.close()
        self._executor.drop_all()


def _tables(begin: BeginStep, appended: Appended, store: KVStore) -> StepTables:
    total = begin.num_past + begin.num_new
    is_decoded = begin.num_new == 1
    is_first = ~is_decoded & (begin.num_past == 0)
    num_decoded, num_first = int(is_decoded.sum()), int(is_first.sum())
    ends, first = np.cumsum(begin.num_new, dtype=np.int64), np.zeros(1, np.int32)
    later = tuple(
        (
            slice(int(ends[i] - begin.num_new[i]), int(ends[i])),
            store.slots(begin.sequence_ids[i : i + 1], first, total[i : i + 1]),
        )
        for i in range(num_decoded, len(ends) - num_first)
    )
    first_row = int(ends[-1] - begin.num_new[is_first].sum())
    starts = ends[is_first] - begin.num_new[is_first] - first_row
    return StepTables(
        slots=appended.slots,
        tables=store.block_tables(begin.sequence_ids[:num_decoded]),
        context_lens=np.ascontiguousarray(total[:num_decoded], np.int32),
        later=later,
        first_rows=slice(first_row, int(ends[-1])),
        first_starts=tuple(starts.tolist()),
        copy_sources=appended.copy_sources,
        copy_targets=appended.copy_targets,
    )


class DeviceStep:
    """A step's rows whose KV is on the device.

    Args:
        batch: The step, of these rows alone.
        record: Gets times, and the holder if it is lost.
        fail: Called with what the device raises when it attends. If None, that is raised.
    """

    def __init__(
        self,
        worker: DeviceWorker,
        batch: StepBatch,
        record: StepRecord,
        fail: Callable[[Exception], object] | None = None,
    ) -> None:
        (self.span,) = batch.spans
        self._worker, self._batch, self._record, self._fail = worker, batch, record, fail
        self._tables, self._books, self._attend = worker.begin_step(self.span.begin)
        self.paged = self._tables.upload(worker.device, worker.gpu)

    @torch.inference_mode()
    def run(self, s_worker: SWorker, whole: WholeSteps | None) -> Pass:
        """Run all layers. ``whole``: runs decode steps as one graph."""
        feed, inputs = self._batch.feed, self.inputs
        run = partial(run_step, s_worker, whole, inputs, self.paged, self.attend, feed)
        forward = s_worker.run_through(run, inputs)
        if self.span.holder not in self._record.lost:
            self._worker.end_step(self.span.begin)
        return forward

    @property
    def inputs(self) -> StepInputs:
        """What S-workers that act as one are sent of the step."""
        lane = self.span.begin.lane
        return StepInputs(lane, self._batch.rows, self._tables, self._batch.hidden)

    def note_attended(self, layer: int | None) -> None:
        """Note in the cache's books that a layer is attended. None if all are, or will be."""
        steps, begin = self._books.steps, self.span.begin
        if layer is None:
            steps.finish(begin.lane, begin.step)
        else:
            steps.finish_layer(begin.lane, steps.due(begin.lane, begin.step, layer))

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> Tensor:
        """Attend one layer, however steps run. Rows of a device that has failed are zeros."""
        record, holder = self._record, self.span.holder
        if holder in record.lost:
            return torch.zeros_like(q)
        started = time.perf_counter()
        try:
            o = self._attend(layer, q, k, v, self.paged, place)
        except Exception as error:
            if self._fail is None:
                raise
            self._fail(error)
            record.lost.add(holder)
            return torch.zeros_like(q)
        # On a GPU nothing waits for the end of a layer to take its time.
        if q.device.type == "cpu":
            seconds = time.perf_counter() - started
            record.r_s[holder] += seconds
            record.in_s_part_s += seconds
        return o


class DeviceAttention:
    """Begins steps whose KV is on the device: all of a step, or a lane that is swapped.

    Args:
        workers: The caches, by their holders.
        s_worker: Its decode steps are captured now, as a whole, if it captures graphs.
        swap: Brings lanes' caches. None if all are on the device.
    """

    def __init__(
        self,
        workers: Seq[DeviceWorker],
        fleet: HolderPool,
        device: Holder,
        s_worker: SWorker,
        swap: SwappedLanes | None = None,
    ) -> None:
        self.fleet, self.swap, self._workers = fleet, swap, workers
        self.holders: Seq[Holder] = (device,) * len(workers)
        self.plan: AttentionPlan | None = None
        """Steps on R-workers that have replicas, once the device has failed. None if a failure
        ends the engine."""
        self.has_failed = False
        self.whole: WholeSteps | None = None
        """Runs decode steps as one graph. None if they run layer by layer."""
        if swap is not None:
            swap.share(s_worker)
            return
        (worker,) = workers
        self.whole = whole_steps(s_worker, worker)
        if self.whole is not None:
            with s_worker.together():
                self.whole.prepare()
        worker.keep_on_host(s_worker)

    def begin(self, batch: StepBatch, s_worker: SWorker) -> tuple[StepRecord, Begun]:
        """Begin a step. See ``Attention``."""
        if self.plan is not None:
            if not self.has_failed and not all(x.is_open for x in self._workers):
                self._give_up()  # it failed between two steps
            if self.has_failed:
                return self.plan.begin(batch, s_worker)
        record, worker = StepRecord(batch.spans), self._workers[batch.spans[0].holder]
        try:
            step = DeviceStep(worker, batch, record, self._fail)
        except Exception as error:
            plan = self._fail(error)
            return plan.begin(batch, s_worker)
        return record, Begun(forward=step.run(s_worker, self.whole))

    def _fail(self, error: Exception) -> AttentionPlan:
        """Give up all caches of the device, which has failed. Return the plan of later steps.

        Raises:
            Exception: ``error``, if it is a mistake, or there are no replicas.
        """
        if self.plan is None or not is_failure(error):
            raise error
        self._give_up()
        for index, worker in enumerate(self._workers):
            text = f"{worker.peer} failed: {type(error).__name__}: {error}"
            self.fleet.lose(HolderId(index), WorkerError(text, code="device_failed"))
        return self.plan

    def _give_up(self) -> None:
        """Free the device's memory. Caches that are not lost yet are found closed."""
        self.has_failed = True
        for worker in self._workers:
            worker.close()
        self._workers[0].fail()


def whole_steps(s_worker: SWorker, worker: DeviceWorker) -> WholeSteps | None:
    """Return what runs decode steps in fixed memory, and give the cache the model's sinks.
    None if there are no kernels for it, or steps run without graphs."""
    graphs, cache = s_worker.graphs, worker.cache
    has_kernels = s_worker.attend_in(cache)
    if graphs is None or not has_kernels:
        return None
    return WholeSteps(graphs, cache, s_worker.spec.max_model_len)

"""KV on the S-worker's own device (``--kv-placement gpu``): an R-worker whose cache is
there, and another maker of ``attend``.

The R-worker decides as all do (``rworker.state``), and works at once, in the sender's
thread; its executor has the cache (``torch_executor``). The S-worker attends in that
cache: no message carries q, k and v. It cannot attend while the S-part computes, so
one lane is enough.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import Holder, HolderId
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.torch_executor import TorchExecutor
from fastdecode.wire.messages import AttendResult, BeginStep
from fastdecode.wire.transport import closed_error
from rworker.blocks.appending import Appended
from rworker.blocks.kv_store import KVStore
from rworker.cache_state import CacheState
from rworker.inline import WORKER, InlineConnection
from rworker.state import RWorkerState
from sworker.device import Gpu
from sworker.paged import PagedKV
from sworker.step_tables import StepInputs, StepTables
from sworker.whole import WholeSteps, run_step
from sworker.worker import AttendLayer, Pass, SWorker


class DeviceWorker(InlineConnection):
    """The R-worker whose cache is on the S-worker's device. It works in the S-worker's
    thread, and decides as every R-worker does; the S-worker attends in its cache.

    Args:
        executor: has the cache.
        kv_bytes: memory for K and V; as many blocks as fit are offered.
        name: for people; None: by its device.
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

    @property
    def device(self) -> torch.device:
        """Where its cache is."""
        return self._executor.device

    @property
    def gpu(self) -> Gpu | None:
        """The device's driver, in place of torch's."""
        return self._executor.gpu

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

    def begin_step(self, begin: BeginStep) -> BegunStep:
        """Make room for a step's tokens, and say where they go. Rows stand in
        the order of ``begin``'s sequences: decoded ones, later chunks, first
        chunks."""
        self.work()
        if not self.is_open:
            raise closed_error(self.peer, by_peer=True)
        own = self._state.cache_of(WORKER, begin.holder)
        store = own.books.store
        appended = own.books.begin_step(begin)
        self._executor.begin_step(own.holder, begin, appended, store)
        tables = _tables(begin, appended, store)
        return BegunStep(tables, own.books, self._executor.caches[own.holder])

    def end_step(self, begin: BeginStep) -> None:
        """All layers of a step are done, or queued on the device."""
        self._state.cache_of(WORKER, begin.holder).books.steps.finish(begin.lane, begin.step)

    def fail(self) -> None:
        """The device has failed: its caches are gone, and their memory is free."""
        self.close()
        self._executor.drop_all()


@dataclass(frozen=True, eq=False)
class BegunStep:
    """A step for which a ``DeviceWorker`` has made room."""

    tables: StepTables
    books: CacheState
    cache: PagedKV


def _tables(begin: BeginStep, appended: Appended, store: KVStore) -> StepTables:
    total = begin.num_past + begin.num_new
    is_decoded = begin.num_new == 1
    is_first = ~is_decoded & (begin.num_past == 0)
    num_decoded, num_first = int(is_decoded.sum()), int(is_first.sum())
    ends = np.cumsum(begin.num_new, dtype=np.int64)
    later = tuple(
        (
            slice(int(ends[i] - begin.num_new[i]), int(ends[i])),
            _slots(store, begin.sequence_ids[i], total[i]),
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


def _slots(store: KVStore, sequence_id: int, num_tokens: int) -> NDArray[np.int64]:
    """Of a sequence's first tokens, [num_tokens]."""
    first, count = np.zeros(1, np.int32), np.array([num_tokens], np.int32)
    return store.slots(np.array([sequence_id], np.int64), first, count)


class LocalAttention:
    """Makes a lane's ``attend`` of every step; see ``fastdecode.engine.step.remote.Attention``.

    Args:
        s_worker: whose decode steps are captured now, as a whole, if it
            captures graphs.
    """

    def __init__(
        self, connection: DeviceWorker, fleet: HolderPool, device: Holder, s_worker: SWorker
    ) -> None:
        self.fleet = fleet
        self.holders = (device,)
        self.connections = (connection,)
        self.whole = whole_steps(s_worker, connection)
        """Runs decode steps as one graph; None: they run layer by layer."""
        if self.whole is not None:
            with s_worker.together():
                self.whole.prepare()
        connection.keep_on_host(s_worker)

    def begin(self, batch: StepBatch) -> LocalStep:
        (connection,) = self.connections
        return LocalStep(connection, batch, self.whole)


def whole_steps(s_worker: SWorker, connection: DeviceWorker) -> WholeSteps | None:
    """What runs decode steps in fixed memory; None: there are no kernels for it, or
    steps run without graphs. The cache gets the model's sinks."""
    graphs, cache = s_worker.graphs, connection.cache
    has_kernels = s_worker.attend_in(cache)
    if graphs is None or not has_kernels:
        return None
    return WholeSteps(graphs, cache, s_worker.spec.max_model_len)


class LocalStep:
    """One lane's step on the device: all of it at once, or attended as soon as
    it is scattered; see ``fastdecode.engine.step.remote.LaneAttention``."""

    def __init__(
        self, connection: DeviceWorker, batch: StepBatch, whole: WholeSteps | None = None
    ) -> None:
        (span,) = batch.spans
        self.batch = batch
        self._connection = connection
        self._begin, self._holder = span.begin, span.holder
        begun = connection.begin_step(span.begin)
        self._tables, self._books, self._cache = begun.tables, begun.books, begun.cache
        self._paged = self._tables.upload(connection.device, connection.gpu)
        self._whole = whole
        self.attend: AttendLayer = self._attend
        """Attends one layer, however steps run."""
        self._o = torch.empty(0)
        self._is_timed = self._cache.pool.device.type == "cpu"
        self.computed_s = {span.holder: 0.0}
        """Zero on a GPU, where nobody waits for the end of a layer to take its time."""
        self.sent_s: Seq[float] = ()
        self.lost: Collection[HolderId] = ()

    def run_through(self, s_worker: SWorker) -> Pass | None:
        """See ``LaneAttention``."""
        inputs = self._inputs()
        run = partial(
            run_step, s_worker, self._whole, inputs, self._paged, self.attend, self.batch.feed
        )
        forward = s_worker.run_through(run, inputs)
        if not self.lost:
            self._end()
        return forward

    def _end(self) -> None:
        """All layers are done, or queued on the device."""
        self._connection.end_step(self._begin)

    def _inputs(self) -> StepInputs:
        return StepInputs(self._begin.lane, self.batch.rows, self._tables, self.batch.hidden)

    def scatter(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> bool:
        steps, lane = self._books.steps, self._begin.lane
        steps.finish_layer(lane, steps.due(lane, self._begin.step, layer))
        self._o = self.attend(layer, q, k, v, place)
        return True

    def _attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> Tensor:
        started = time.perf_counter()
        o = self._cache.attend(layer, q, k, v, self._paged, place)
        if self._is_timed:
            self.computed_s[self._holder] += time.perf_counter() - started
        return o

    @property
    def r_compute_s(self) -> dict[HolderId, float]:
        return self.computed_s

    @property
    def in_s_part_s(self) -> float:
        return self.computed_s[self._holder]

    def dispatch(self) -> bool:
        return True

    def wait_for_copy(self) -> None:
        pass

    def deliver(self, holder: HolderId, result: AttendResult) -> None:
        raise ProtocolError(
            f"the KV cache on the S-worker's device got an answer for layer {result.layer}"
        )

    def lose(self, holder: HolderId) -> None:
        """See ``LaneAttention``. Only a device that has a replica is lost alone."""
        if holder == self._holder:
            self.lost = (holder,)

    @property
    def ready(self) -> bool:
        return True

    num_awaited = 0

    @property
    def settled(self) -> bool:
        return True

    def take(self) -> Tensor:
        return self._o

"""KV on both sides (``--kv-placement hybrid``): a step whose rows are partly the
device's and partly R-workers'.

A step of which all rows are on one side is that side's own (``local``,
``remote``). Of one that has both, what R-workers attend is sent first, and the
device attends its rows while that is on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from torch import Tensor

from fastdecode.core.holders import Holder, HolderId, HolderKind
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.engine.step.layout import HolderSpan, StepBatch
from fastdecode.engine.step.local import LocalConnection, LocalStep
from fastdecode.engine.step.remote import AttentionPlan, LaneAttention, RemoteStep
from fastdecode.wire.messages import AttendResult
from sworker.device import Event, Gpu, gpu_of
from sworker.worker import TIMED_LAYERS, DeviceTimer, Pass, SWorker

_MOST_AHEAD = 2
"""Layers of a step that may be queued on a GPU while it computes another:
other lanes' come behind them."""


@dataclass(frozen=True)
class MixedAttention:
    """Makes ``LaneAttention`` of rows on either side.

    Args:
        plan: on R-workers. Its holders are all holders.
        connection: to the cache on the device.
        gpu: the device's driver, in place of the one that torch has.
    """

    plan: AttentionPlan
    connection: LocalConnection
    gpu: Gpu | None = None

    @property
    def fleet(self) -> Fleet:
        return self.plan.fleet

    @property
    def holders(self) -> Seq[Holder]:
        return self.plan.holders

    def prepare(self, num_lanes: int) -> None:
        """See ``AttentionPlan``."""
        self.plan.prepare(num_lanes)

    def begin(self, batch: StepBatch) -> LaneAttention:
        """See ``fastdecode.engine.step.remote.Attention``."""
        on_device = [span for span in batch.spans if self._is_device(span)]
        if not on_device:
            return self.plan.begin(batch)
        gpu = self.gpu or gpu_of(self.plan.device)
        if len(on_device) == len(batch.spans):
            return HomeStep(self.connection, batch, gpu)
        away = tuple(span for span in batch.spans if not self._is_device(span))
        remote = self.plan.begin(_only(batch, away))
        home = HomeStep(self.connection, _only(batch, tuple(on_device)), gpu)
        return MixedStep(home, remote, on_device[0].rows)

    def _is_device(self, span: HolderSpan) -> bool:
        return self.holders[span.holder].kind is HolderKind.DEVICE


class HomeStep(LocalStep):
    """A step on the device beside lanes that are elsewhere. A GPU isn't given
    more of its layers at a time than it needs to be busy."""

    def __init__(self, connection: LocalConnection, batch: StepBatch, gpu: Gpu | None) -> None:
        super().__init__(connection, batch)
        self._gpu = gpu
        self._queued: deque[Event] = deque()
        self._timer = DeviceTimer(gpu, every=TIMED_LAYERS)

    def run_through(self, s_worker: SWorker) -> Pass | None:
        """See ``LaneAttention``."""
        return None

    def scatter(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> None:
        """See ``LaneAttention``."""
        with self._timer:
            super().scatter(layer, q, k, v, place)
        if self._gpu is not None:
            self._queued.append(self._gpu.current_stream().record_event())

    def lose(self, holder: HolderId) -> None:
        """An R-worker, which has nothing of this step."""

    @property
    def ready(self) -> bool:
        """See ``LaneAttention``."""
        while self._queued and self._queued[0].query():
            self._queued.popleft()
        return len(self._queued) <= _MOST_AHEAD

    @property
    def r_compute_s(self) -> dict[HolderId, float]:
        """See ``LaneAttention``; the device's attention, on a GPU as well."""
        on_gpu_s = self._timer.seconds()
        return {holder: seconds + on_gpu_s for holder, seconds in self.computed_s.items()}


class MixedStep:
    """A step with rows on both sides; see ``LaneAttention``.

    Args:
        home: the device's rows, of a batch that has no others.
        remote: R-workers'.
        rows: the device's, among all.
    """

    def __init__(self, home: HomeStep, remote: RemoteStep, rows: slice) -> None:
        self._home = home
        self._remote = remote
        self._rows = rows

    def run_through(self, s_worker: SWorker) -> Pass | None:
        return None

    @property
    def batch(self) -> StepBatch:
        """Of both sides."""
        remote = self._remote.batch
        return replace(remote, spans=(*remote.spans, *self._home.batch.spans))

    @property
    def sent_s(self) -> Seq[float]:
        return self._remote.sent_s

    @property
    def r_compute_s(self) -> dict[HolderId, float]:
        return {**self._remote.r_compute_s, **self._home.r_compute_s}

    @property
    def in_s_part_s(self) -> float:
        return self._home.in_s_part_s

    @property
    def lost(self) -> Collection[HolderId]:
        return self._remote.lost

    def scatter(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> None:
        self._remote.scatter(layer, q, k, v, place)
        rows = self._rows
        self._home.scatter(layer, q[rows], k[rows], v[rows])

    def dispatch(self) -> bool:
        return self._remote.dispatch()

    def wait_for_copy(self) -> None:
        self._remote.wait_for_copy()

    def deliver(self, holder: HolderId, result: AttendResult) -> None:
        self._remote.deliver(holder, result)

    def lose(self, holder: HolderId) -> None:
        self._remote.lose(holder)

    @property
    def ready(self) -> bool:
        return self._remote.ready and self._home.ready

    @property
    def num_awaited(self) -> int:
        return self._remote.num_awaited

    @property
    def settled(self) -> bool:
        return self._remote.settled

    def take(self) -> Tensor:
        """The layer's o [T, Hq, D], the device's rows put in their place."""
        o = self._remote.take()
        o[self._rows] = self._home.take()
        return o


def _only(batch: StepBatch, spans: tuple[HolderSpan, ...]) -> StepBatch:
    """The batch, as those see it that attend these spans: rows stay where they are."""
    local = tuple(
        span
        for span in batch.local
        if any(one.rows.start <= span.rows.start < one.rows.stop for one in spans)
    )
    return replace(batch, spans=spans, local=local)

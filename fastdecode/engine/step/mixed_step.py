"""KV on both sides (``--kv-placement hybrid``): a step whose rows are partly the
device's and partly R-workers'.

A step of which all rows are on one side is that side's own (``local``,
``remote``); the device's runs as one graph while no sequence is away, and in
slices of some layers while one is. Of a step that has both, what R-workers
attend is sent first, and the device attends its rows while that is on its way.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import Enum

from torch import Tensor

from fastdecode.core.holders import Holder, HolderId, HolderKind
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.step.layout import HolderSpan, StepBatch
from fastdecode.engine.step.local import DeviceWorker, LocalStep
from fastdecode.engine.step.remote import AttentionPlan, LaneAttention, RemoteStep
from fastdecode.wire.messages import AttendResult
from sworker.device import Event, Gpu, gpu_of
from sworker.whole import SlicedPass, WholeSteps
from sworker.worker import TIMED_LAYERS, DeviceTimer, Pass, SWorker

DEVICE_LANE = 0
_MOST_AHEAD, _SLICES_AHEAD = 2, 1
"""Layers, or slices, of a step that may be queued on a GPU while it computes
another: other lanes' come behind them."""
_TIMED_FIRST, _TIMED_EVERY = 4, 32
"""Of the home lane's steps these run layer by layer, to time attention."""
_KEPT = 0.8
"""Of what was known of that, at the next time."""


class DeviceLane:
    """How decode steps of the home lane run: what is known from one to the next.

    While no sequence is away they run as with all KV on the device, as one graph.
    While some are, slice by slice, so that lanes that are away come between. Now
    and then one runs layer by layer, which times its attention: within a graph
    nobody can.

    Args:
        whole: runs them in fixed memory; None: there are no kernels for it, or
            no graphs, and all steps run layer by layer.
    """

    def __init__(self, whole: WholeSteps | None = None) -> None:
        self.whole = whole
        self._away: weakref.WeakSet[RemoteStep] = weakref.WeakSet()  # in flight
        self._begun_away = self._was_away = False
        self._num_steps = 0
        self._timed: tuple[DeviceTimer, int] | None = None
        self._token_s = 0.0

    def goes_away(self, step: RemoteStep) -> None:
        """A step that R-workers attend has begun."""
        self._away.add(step)
        self._begun_away = True

    def next_way(self) -> StepMode:
        """That of the step that begins."""
        # Between two steps of an away lane none is in flight: one step's length
        # more, and it would wait for all layers of this one.
        is_away = self._begun_away or bool(self._away)
        is_alone = not is_away and not self._was_away
        self._was_away, self._begun_away = is_away, False
        if self.whole is None:
            return StepMode.LAYERED
        self._num_steps += 1
        is_timed = self._num_steps <= _TIMED_FIRST or self._num_steps % _TIMED_EVERY == 0
        return StepMode.LAYERED if is_timed else StepMode.WHOLE if is_alone else StepMode.SLICED

    def time(self, timer: DeviceTimer, num_tokens: int) -> None:
        """A step begins whose attention to so many cached tokens is timed."""
        self._timed = timer, num_tokens

    def attention_s(self, num_tokens: int) -> float:
        """Seconds that the device takes to attend so many cached tokens in all
        layers, by what was timed."""
        if self._timed is not None:
            timer, timed_tokens = self._timed
            if seconds := timer.seconds():
                keep = _KEPT if self._token_s else 0.0
                self._token_s = self._token_s * keep + seconds / timed_tokens * (1 - keep)
                self._timed = None
        return self._token_s * num_tokens


class StepMode(Enum):
    """How a step of the home lane runs."""

    WHOLE = "as one graph"
    SLICED = "some layers at a time"
    LAYERED = "layer by layer"


@dataclass(frozen=True)
class MixedAttention:
    """Makes ``LaneAttention`` of rows on either side.

    Args:
        plan: on R-workers. Its holders are all holders.
        connection: to the cache on the device.
        gpu: the device's driver, in place of the one that torch has.
        home: how the home lane's steps run.
    """

    plan: AttentionPlan
    connection: DeviceWorker
    gpu: Gpu | None = None
    home: DeviceLane = field(default_factory=DeviceLane)

    @property
    def fleet(self) -> HolderPool:
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
        gpu = self.gpu or gpu_of(self.plan.device)
        if len(on_device) == len(batch.spans):
            return DeviceStep(self.connection, batch, gpu, self.home, self.home.next_way())
        away = tuple(span for span in batch.spans if not self._is_device(span))
        remote = self.plan.begin(_only(batch, away) if on_device else batch)
        self.home.goes_away(remote)
        if not on_device:
            return remote
        home = DeviceStep(self.connection, _only(batch, tuple(on_device)), gpu, self.home)
        return MixedStep(home, remote, on_device[0].rows)

    def _is_device(self, span: HolderSpan) -> bool:
        return self.holders[span.holder].kind is HolderKind.DEVICE


class DeviceStep(LocalStep):
    """A step on the device beside lanes that are elsewhere. A GPU isn't given
    more of its layers at a time than it needs to be busy."""

    def __init__(
        self,
        connection: DeviceWorker,
        batch: StepBatch,
        gpu: Gpu | None,
        home: DeviceLane,
        way: StepMode = StepMode.LAYERED,
    ) -> None:
        super().__init__(connection, batch, home.whole)
        self._gpu = gpu
        self._home = home
        self._way = (
            way if home.whole is not None and home.whole.takes(self._paged) else StepMode.LAYERED
        )
        (span,) = batch.spans
        self._load_tokens = span.counts.load_tokens
        self._queued: deque[Event] = deque()
        self._timer = DeviceTimer(gpu, every=TIMED_LAYERS)
        decodes = self._paged.only_decodes and self._load_tokens
        if self._way is StepMode.LAYERED and decodes and home.whole is not None:
            home.time(self._timer, self._load_tokens)

    def run_through(self, s_worker: SWorker) -> Pass | None:
        """See ``LaneAttention``. The whole step, or the first slice of it."""
        whole, lane = self._whole, self._begin.lane
        if whole is None or self._way is StepMode.LAYERED:
            return None
        if self._way is StepMode.WHOLE:
            forward = super().run_through(s_worker)
            assert forward is not None
            forward.attended_s = self._attention_s
            return forward
        self._books.steps.finish(lane, self._begin.step)
        batch = self.batch
        sliced = SlicedPass(
            s_worker, whole, lane, self._inputs().rows, self._paged, batch.feed, batch.hidden
        )
        sliced.attended_s = self._attention_s
        return sliced

    def scatter(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> bool:
        """See ``LaneAttention``."""
        if self._way is StepMode.SLICED:
            assert place is not None
            self._o = place  # attended with the slice
        else:
            with self._timer:
                super().scatter(layer, q, k, v, place)
        if self._gpu is not None:
            self._queued.append(self._gpu.current_stream().record_event())
        return True

    @property
    def ready(self) -> bool:
        """See ``LaneAttention``."""
        while self._queued and self._queued[0].query():
            self._queued.popleft()
        return len(self._queued) <= (_SLICES_AHEAD if self._way is StepMode.SLICED else _MOST_AHEAD)

    @property
    def r_compute_s(self) -> dict[HolderId, float]:
        """See ``LaneAttention``; the device's attention, on a GPU as well."""
        on_gpu_s = self._attention_s()
        return {holder: seconds + on_gpu_s for holder, seconds in self.computed_s.items()}

    def _attention_s(self) -> float:
        """Seconds of the GPU, as timed or, within graphs, as foreseen."""
        if self._way is StepMode.LAYERED:
            return self._timer.seconds()
        return self._home.attention_s(self._load_tokens)


class MixedStep:
    """A step with rows on both sides; see ``LaneAttention``.

    Args:
        home: the device's rows, of a batch that has no others.
        remote: R-workers'.
        rows: the device's, among all.
    """

    def __init__(self, home: DeviceStep, remote: RemoteStep, rows: slice) -> None:
        self._home = home
        self._remote = remote
        self._rows = rows
        self._place: Tensor | None = None

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
    ) -> bool:
        is_sent = self._remote.scatter(layer, q, k, v, place)
        rows, self._place = self._rows, place
        mine = None if place is None else place[rows]
        self._home.scatter(layer, q[rows], k[rows], v[rows], mine)
        return is_sent

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
        o, mine = self._remote.take(), self._home.take()
        if o is not self._place:  # else they were written there
            o[self._rows] = mine
        return o


def _only(batch: StepBatch, spans: tuple[HolderSpan, ...]) -> StepBatch:
    """The batch, as those see it that attend these spans: rows stay where they are."""
    local = tuple(
        span
        for span in batch.local
        if any(one.rows.start <= span.rows.start < one.rows.stop for one in spans)
    )
    return replace(batch, spans=spans, local=local)

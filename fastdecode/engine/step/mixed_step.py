"""KV on both sides (``--kv-placement hybrid``): a step whose rows are partly the
device's and partly R-workers'.

A step of which all rows are on one side is that side's own (``device``,
``remote``); the device's runs as one graph while no sequence is away, and in
slices of some layers while one is. Of a step that has both, what R-workers
attend is sent first, and the device attends its rows while that is on its way.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from fastdecode.core.holders import HolderKind
from fastdecode.engine.step.batch import HolderSpan, StepBatch
from fastdecode.engine.step.device import DeviceStep, DeviceWorker
from fastdecode.engine.step.remote import AttentionPlan, Begun, RemotePart, StepRecord
from sworker.device import Event, Gpu, gpu_of
from sworker.whole import SlicedPass, WholeSteps
from sworker.worker import TIMED_LAYERS, UNTIMED, DeviceTimer, SWorker, Timer

DEVICE_LANE = 0
_MOST_AHEAD, _SLICES_AHEAD = 2, 1
"""Layers, or slices, of a step that may be queued on a GPU while it computes
another: other lanes' come behind them."""
_TIMED_FIRST, _TIMED_EVERY = 4, 32
"""Which of the home lane's steps run layer by layer, to time attention."""
_KEPT = 0.8  # weight of earlier times when attention is timed again


class DeviceLane:
    """How decode steps of the home lane run: what is known from one to the next.

    While no sequence is away they run as with all KV on the device, as one graph. While some are,
    slice by slice, so that lanes that are away run in between. Now and then a step runs layer by
    layer to time its attention, which is impossible within a graph.

    Args:
        whole: Runs them in fixed memory. None without kernels or graphs for that: then all steps
            run layer by layer.
    """

    def __init__(self, whole: WholeSteps | None = None) -> None:
        self.whole = whole
        self._away: weakref.WeakSet[RemotePart] = weakref.WeakSet()  # in flight
        self._begun_away = self._was_away = False
        self._num_steps = 0
        self._timed: tuple[Timer, int] | None = None
        self._token_s = 0.0

    def goes_away(self, step: RemotePart) -> None:
        """Note that a step has begun that R-workers attend."""
        self._away.add(step)
        self._begun_away = True

    def next_way(self) -> StepMode:
        """Choose the mode of the step that begins."""
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

    def time(self, timer: Timer, num_tokens: int) -> None:
        """Note that a step begins whose attention to ``num_tokens`` cached tokens is timed."""
        self._timed = timer, num_tokens

    def attention_s(self, num_tokens: int) -> float:
        """Return the seconds that the device takes to attend ``num_tokens`` cached tokens in
        all layers, by what was timed."""
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


@dataclass
class MixedAttention:
    """Begins steps of rows on either side.

    Args:
        plan: On R-workers. Its holders are all holders.
        connection: To the cache on the device.
        home: How the home lane's steps run.
    """

    plan: AttentionPlan
    connection: DeviceWorker
    home: DeviceLane = field(default_factory=DeviceLane)

    def __post_init__(self) -> None:
        self.fleet, self.holders = self.plan.fleet, self.plan.holders

    def begin(self, batch: StepBatch, s_worker: SWorker) -> tuple[StepRecord, Begun]:
        """Begin a step. See ``Attention``."""
        kinds = [self.holders[span.holder].kind for span in batch.spans]
        own = [x for x, kind in zip(batch.spans, kinds, strict=True) if kind is HolderKind.DEVICE]
        away = [x for x in batch.spans if x not in own]
        if not away:
            return self._begin_at_home(batch, s_worker)
        record, begun = self.plan.begin(_only(batch, away) if own else batch, s_worker, own)
        assert begun.remote is not None
        self.home.goes_away(begun.remote)
        if not own:
            return record, begun
        part = self._part(_only(batch, own), record, StepMode.LAYERED, own[0].rows)
        return record, begun._replace(parts=(*begun.parts, part))

    def _begin_at_home(self, batch: StepBatch, s_worker: SWorker) -> tuple[StepRecord, Begun]:
        record, mode = StepRecord(batch.spans), self.home.next_way()
        part = self._part(batch, record, mode)
        step, whole, mode = part.step, self.home.whole, part.mode
        if whole is None or mode is StepMode.LAYERED:
            return record, Begun((part,))
        if mode is StepMode.WHOLE:
            forward = step.run(s_worker, whole)
            begun = Begun(forward=forward)
        else:
            step.note_attended(None)
            lane = step.span.begin.lane
            forward = SlicedPass(
                s_worker, whole, lane, batch.rows, step.paged, batch.feed, batch.hidden
            )
            begun = Begun((part,), forward)
        forward.attended_s = part.attention_s
        return record, begun

    def _part(
        self, batch: StepBatch, record: StepRecord, mode: StepMode, rows: slice | None = None
    ) -> DevicePart:
        step = DeviceStep(self.connection, batch, record)
        gpu = self.plan.gpu or gpu_of(self.plan.device)
        return DevicePart(step, record, self.home, mode, gpu, rows)


class DevicePart:
    """The device's rows of a step beside lanes that are elsewhere. A GPU isn't given more of
    its layers at a time than it needs to be busy. See ``AttentionPart``.

    Args:
        mode: How the step runs; layer by layer if it has prompts.
        rows: The device's, among all. None if it has all.
    """

    def __init__(
        self,
        step: DeviceStep,
        record: StepRecord,
        home: DeviceLane,
        mode: StepMode,
        gpu: Gpu | None,
        rows: slice | None,
    ) -> None:
        whole, paged = home.whole, step.paged
        self.step, self._gpu, self._rows = step, gpu, rows
        self.mode = mode if whole is not None and whole.takes(paged) else StepMode.LAYERED
        load_tokens = step.span.load_tokens
        self._queued: deque[Event] = deque()
        self._timer = UNTIMED if gpu is None else DeviceTimer(gpu, every=TIMED_LAYERS)
        self._o = torch.empty(0)
        self._place: Tensor | None = None
        decodes = paged.only_decodes and load_tokens
        if self.mode is StepMode.LAYERED and decodes and whole is not None:
            home.time(self._timer, load_tokens)
        is_layered = self.mode is StepMode.LAYERED
        # As timed or, within graphs, as foreseen. It must not keep this part, which has the record.
        self.attention_s: Callable[[], float] = (
            self._timer.seconds if is_layered else partial(home.attention_s, load_tokens)
        )
        record.gpu_s[step.span.holder] = self.attention_s

    def scatter(self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None) -> None:
        """Attend a layer, unless its slice has done so."""
        if self.mode is StepMode.SLICED:
            assert place is not None
            self._o = place
        else:
            self._place = place
            if (rows := self._rows) is not None:
                q, k, v = q[rows], k[rows], v[rows]
                place = None if place is None else place[rows]
            self.step.note_attended(layer)
            with self._timer:
                self._o = self.step.attend(layer, q, k, v, place)
        if self._gpu is not None:
            self._queued.append(self._gpu.current_stream().record_event())

    def ready(self) -> bool:
        """Return True if the GPU has little left to do."""
        while self._queued and self._queued[0].query():
            self._queued.popleft()
        most = _SLICES_AHEAD if self.mode is StepMode.SLICED else _MOST_AHEAD
        return len(self._queued) <= most

    def take(self, o: Tensor | None) -> Tensor:
        """Put the device's rows in their place in o [T, Hq, D]."""
        if o is None:
            return self._o
        if o is not self._place:  # else they were written there
            o[self._rows] = self._o
        return o


def _only(batch: StepBatch, spans: Seq[HolderSpan]) -> StepBatch:
    """Return the batch as those see it that attend these spans: rows stay where they are."""
    local = tuple(
        span
        for span in batch.local
        if any(one.rows.start <= span.rows.start < one.rows.stop for one in spans)
    )
    return replace(batch, spans=tuple(spans), local=local)

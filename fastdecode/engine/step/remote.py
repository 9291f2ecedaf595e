"""Attention over holders for one lane's step: scatter q, k, v; attend prompt
chunks here meanwhile; gather o.

``RemoteStep`` belongs to one step of one lane. Layer by layer its caller
``scatter``\\ s, hands it every answer that arrives for the lane (``deliver``),
and takes ``o`` when the step is ``ready``. It never waits: waiting is the
pipeline's business, which has other lanes to run.

A holder may be lost in the middle of a step, which ``lose`` tells. Rows are
independent of each other, so the step goes on with zeros for that holder's
rows, whose results are then thrown away; the other rows notice nothing, and
nothing has to be rolled back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import Holder, HolderId
from fastdecode.core.spec import AttentionSpec
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.step.device_prefill import DevicePrefillChunks, DevicePrompts
from fastdecode.engine.step.layout import HolderSpan, LocalSpan, StepBatch
from fastdecode.engine.step.parts import ClosedPartMerge
from fastdecode.wire.messages import Attend, AttendResult
from sworker.buffers import (
    LENT_LAYERS,
    Share,
    Staged,
    Staging,
    as_tensor,
    make_staging,
    to_device,
)
from sworker.device import Gpu, gpu_of
from sworker.dtypes import CARRIERS
from sworker.prefill import as_cached, local_causal_attention, merge_attention
from sworker.sinks import add_sinks
from sworker.worker import Pass, SWorker

# While an R-worker only stores a prompt's K and V, the S-worker computes ahead
# of it by this many layers at most.
MAX_OWED_ANSWERS = LENT_LAYERS - 1


class LaneAttention(Protocol):
    """Attention for one step of one lane, layer by layer: ``scatter``, until
    ``ready``, then ``take``."""

    def run_through(self, s_worker: SWorker) -> Pass | None:
        """Where nobody else is needed: run the whole step, all layers of it.
        None: it goes layer by layer, as below."""

    @property
    def batch(self) -> StepBatch:
        """The step, as holders see it."""

    @property
    def sent_s(self) -> Seq[float]:
        """When each layer's q, k and v had been sent, on ``time.perf_counter``."""

    @property
    def r_compute_s(self) -> dict[HolderId, float]:
        """Holder → seconds that it computed."""

    @property
    def in_s_part_s(self) -> float:
        """Seconds of that in which the S-worker's own thread computed."""

    @property
    def lost(self) -> Collection[HolderId]:
        """Holders that were lost before they had answered everything."""

    def scatter(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> bool:
        """Take a layer's q [T, Hq, D], k and v [T, Hkv, D], which may still be
        on their way to the host. ``place``: where o [T, Hq, D] may be put, the
        same in every layer. Returns whether nothing is left for ``dispatch``."""

    def dispatch(self) -> bool:
        """Send the oldest layer that was scattered and not sent, if it has come
        to the host. False: it hasn't; True: sent, or nothing was left to
        send."""

    def wait_for_copy(self) -> None:
        """Wait until that layer has come to the host."""

    def deliver(self, holder: HolderId, result: AttendResult) -> None:
        """Take in a holder's answer."""

    def lose(self, holder: HolderId) -> None:
        """The holder will answer nothing any more."""

    @property
    def ready(self) -> bool:
        """Whether ``take`` may be called."""

    @property
    def num_awaited(self) -> int:
        """R-workers whose answers the layer awaits."""

    @property
    def settled(self) -> bool:
        """Whether the step may end."""

    def take(self) -> Tensor:
        """The layer's o [T, Hq, D]."""


class Attention(Protocol):
    """Makes ``LaneAttention``: on R-workers (``AttentionPlan``) or on the
    S-worker's device (``LocalAttention``)."""

    @property
    def fleet(self) -> HolderPool: ...

    @property
    def holders(self) -> Seq[Holder]:
        """What they are, by their ids."""

    def begin(self, batch: StepBatch) -> LaneAttention:
        """A step begins: make room for its tokens where their K and V will be."""


@dataclass(frozen=True)
class AttentionPlan:
    """What every step of one engine has in common, with the KV cache on R-workers."""

    specs: Seq[AttentionSpec]
    """One a layer."""
    kv_dtype: DType
    fleet: HolderPool
    device: torch.device
    """The S-worker's."""
    holders: Seq[Holder]
    """By their ids."""
    gpu: Gpu | None = None
    """The device's driver, in place of the one that torch has."""
    slot_bytes: int = 0
    """Most that q, k and v of a layer take."""
    _staging: dict[int, Staging] = field(default_factory=dict)  # by lane
    sinks: Seq[Tensor] | None = None
    """Of each layer, float32 [Hq]; see ``sworker.sinks``."""
    prompts: DevicePrompts | None = None
    """On the device, until they are done; None: R-workers attend what they hold
    of them."""

    def begin(self, batch: StepBatch) -> RemoteStep:
        held = None if self.prompts is None else self.prompts.begin(batch)
        is_whole = not batch.local and not batch.closed
        if is_whole and held is None and self.sinks is None:
            return RemoteStep(self, batch)
        seen = batch if held is None else held.batch
        if self.sinks is not None:
            spans = (replace(x, begin=structs.replace(x.begin, want_lse=True)) for x in seen.spans)
            seen = replace(seen, spans=tuple(spans))
        return MergingStep(self, seen, held)

    def prepare(self, num_lanes: int) -> None:
        """Take the memory of so many lanes, which may stop the device, before
        anybody waits for it."""
        for lane in range(num_lanes):
            self.staging(lane)

    def staging(self, lane: int) -> Staging:
        """A lane's memory on the way to R-workers and back."""
        if lane not in self._staging:
            self._staging[lane] = make_staging(self.gpu or gpu_of(self.device), self.slot_bytes)
        return self._staging[lane]


class RemoteStep:
    """One lane's step on holders that attend all of their rows."""

    in_s_part_s = 0.0

    def __init__(self, plan: AttentionPlan, batch: StepBatch) -> None:
        self._plan, self.batch = plan, batch
        self._spans = {span.holder: span for span in batch.spans}
        self._lost: set[HolderId] = set()
        self._layer = -1
        self._awaited: set[HolderId] = set()
        """Holders without whose answers the layer isn't ready."""
        self._o = torch.empty(0)
        self._unsent: deque[tuple[int, Staged]] = deque()
        self.r_compute_s = dict.fromkeys(self._spans, 0.0)
        self.sent_s: list[float] = []
        self._staging = plan.staging(batch.spans[0].begin.lane)
        self._staging.begin_step(self._shares())
        for span in batch.spans:
            plan.fleet.send(span.holder, span.begin)

    def _shares(self) -> list[Share]:
        return [Share(x.query_rows, (), x.rows, x.query_rows) for x in self.batch.spans]

    def run_through(self, s_worker: SWorker) -> Pass | None:
        """See ``LaneAttention``."""
        return None

    def scatter(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> bool:
        """Send a layer's q [T, Hq, D], k and v [T, Hkv, D] on their way. See
        ``LaneAttention``."""
        self._layer = layer
        self._awaited = self._spans.keys() - self._lost
        self._o = self._staging.begin_layer(q.shape, q.dtype, place)
        self._unsent.append((layer, self._staging.send(q, k, v)))
        self.dispatch()
        return not self._unsent

    def dispatch(self) -> bool:
        """See ``LaneAttention``."""
        if not self._unsent:
            return True
        layer, staged = self._unsent[0]
        if not staged.done:
            return False
        self._unsent.popleft()
        for span, shipment in zip(self.batch.spans, staged.shipments, strict=True):
            begin = span.begin
            self._plan.fleet.send(span.holder, Attend(begin.step, begin.lane, layer, *shipment))
        self.sent_s.append(time.perf_counter())
        return True

    def wait_for_copy(self) -> None:
        """See ``LaneAttention``."""
        if self._unsent:
            self._unsent[0][1].wait()

    def deliver(self, holder: HolderId, result: AttendResult) -> None:
        """Take in a holder's answer to the layer.

        Raises:
            ProtocolError: it isn't the answer that was due.
        """
        span = self._spans[holder] if holder in self._awaited else None
        due = None if span is None else (span.begin.step, self._layer)
        if span is None or (result.step, result.layer) != due:
            raise self._not_due(holder, result, due)
        self._awaited.discard(holder)
        self.r_compute_s[holder] += result.compute_s
        rows = span.query_rows
        self._check_arrays(span, rows.stop - rows.start, result)
        if self._staging.is_home and rows == slice(0, self._o.shape[0]):
            # Lent until the lane's next Attend: o is used by then.
            self._o = self._staging.lend(result.o, self._o.dtype)
        else:
            self._staging.receive(result.o, self._o, rows)

    def _not_due(
        self, holder: HolderId, result: AttendResult, due: tuple[int, int | None] | None
    ) -> ProtocolError:
        return ProtocolError(
            f"{self._plan.fleet.peer(holder)} answered for step {result.step}, layer "
            f"{result.layer}, where (step, layer) {due} was due: are both ends of the same version?"
        )

    def _check_arrays(self, span: HolderSpan, num_rows: int, result: AttendResult) -> None:
        """Raises ProtocolError."""
        shape, dtype = (num_rows, *self._o.shape[1:]), CARRIERS[self._o.dtype]
        try:
            result.check_arrays(shape, dtype, want_lse=span.begin.want_lse)
        except ProtocolError as lie:
            raise ProtocolError(f"{self._plan.fleet.peer(span.holder)} {lie.message}") from None

    def lose(self, holder: HolderId) -> None:
        """See ``LaneAttention``."""
        if holder in self._spans:
            self._lost.add(holder)
            self._awaited.discard(holder)

    @property
    def lost(self) -> Collection[HolderId]:
        """See ``LaneAttention``."""
        return self._lost

    @property
    def ready(self) -> bool:
        """Whether every row of the layer's o is there, and no holder is too far
        behind with storing."""
        return not self._awaited

    @property
    def num_awaited(self) -> int:
        """See ``LaneAttention``."""
        return len(self._awaited)

    @property
    def settled(self) -> bool:
        """Whether every holder has answered everything: the step may end."""
        return not self._awaited

    def take(self) -> Tensor:
        """The layer's o [T, Hq, D]; zeros in the rows of holders that are lost.
        Only when ``ready``."""
        self._staging.join()
        if self._lost:
            self._zero_lost()
        return self._o

    def _zero_lost(self) -> None:
        if len(self._spans) == 1:
            self._o = torch.zeros_like(self._o)  # lent memory is never written
        for holder in self._lost:
            self._o[self._spans[holder].rows] = 0


@dataclass(eq=False)
class _HolderStep:
    """A holder's part of a step: what it answers in every layer, worked out once."""

    span: HolderSpan
    later: LocalSpan | None
    """Later prompt chunks among the rows whose queries it attends."""
    answered_rows: slice = field(init=False)
    """Rows whose o is the holder's own, before closed parts are merged."""
    num_own: int = field(init=False)
    """Rows of the span with queries."""
    num_queries: int = field(init=False)
    """The same, and the rows of closed parts."""
    may_owe: int = field(init=False)
    """Layers that it may be behind with its answers, in which it only stores."""
    last_layer: int = -1
    """The last layer that it has answered, like all before it: their q, k and v are no
    longer lent."""
    early: set[int] = field(default_factory=set)
    """Of a holder that only stores: layers that it has answered before an earlier one. Its
    members answer in any order."""

    def __post_init__(self) -> None:
        queries = self.span.query_rows
        end = queries.stop if self.later is None else self.later.rows.start
        self.answered_rows = slice(queries.start, end)
        self.num_own = queries.stop - queries.start
        self.num_queries = self.num_own + sum(len(part.rows) for part in self.span.closed)
        self.may_owe = 0 if self.num_queries else MAX_OWED_ANSWERS

    def owed(self, result: AttendResult) -> int:
        """Of a holder that only stores: the answer's layer if it is owed, or else one that is."""
        is_owed = result.layer > self.last_layer and result.layer not in self.early
        return result.layer if is_owed else self.last_layer + 1

    def take(self, layer: int) -> None:
        """It has answered this layer."""
        self.early.add(layer)
        while self.last_layer + 1 in self.early:
            self.last_layer += 1
            self.early.remove(self.last_layer)


class MergingStep(RemoteStep):
    """A step of which the S-worker attends rows too, or several holders the same rows.

    Args:
        held: rows that the device attends in a cache of its own; None: none.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        batch: StepBatch,
        held: DevicePrefillChunks | None = None,
    ) -> None:
        self._holders = {x.holder: _HolderStep(x, _later_chunks(batch, x)) for x in batch.spans}
        super().__init__(plan, batch)
        self._held = held
        self._local_lse: dict[int, Tensor] = {}
        has_closed = any(span.closed for span in batch.spans)
        self._closed = ClosedPartMerge(batch, plan.device, plan.gpu) if has_closed else None
        self._lse: Tensor | None = None
        """Where there are sinks, float32 [T, Hq] of what o holds by now."""
        self._may_lend = self._closed is None and self._staging.is_home

    def _shares(self) -> list[Share]:
        return [_share(part) for part in self._holders.values()]

    def scatter(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
    ) -> bool:
        """As ``RemoteStep``; attend the prompt chunks' own tokens here."""
        is_sent = super().scatter(layer, q, k, v, place)
        self._awaited = {
            holder
            for holder, part in self._holders.items()
            if layer - part.last_layer > part.may_owe and holder not in self._lost
        }
        if self._plan.sinks is not None:
            # Rows that the device's own cache attends have had their sinks.
            self._lse = torch.full(q.shape[:2], torch.inf, device=q.device)
        if self._held is not None:
            self._held.run(layer, q, k, v, self._o)
        spec = self._plan.specs[layer]
        for local in self.batch.local:
            part, lse = self._attend_locally(local, spec, q, k, v)
            self._o[local.rows] = part
            if local.merge:
                assert lse is not None
                self._local_lse[local.rows.start] = lse
            elif self._lse is not None and lse is not None:
                self._lse[local.rows] = lse
        return is_sent

    def deliver(self, holder: HolderId, result: AttendResult) -> None:
        """Take in the next layer's answer, or any layer's of a holder that only stores.

        Raises:
            ProtocolError: it isn't the answer that was due.
        """
        part = self._holders.get(holder)
        layer = None if part is None else part.owed(result) if part.may_owe else part.last_layer + 1
        due = None if part is None else (part.span.begin.step, layer)
        if part is None or (result.step, result.layer) != due or result.layer > self._layer:
            raise self._not_due(holder, result, due)
        if part.may_owe:
            part.take(result.layer)
        else:
            part.last_layer += 1
        self.r_compute_s[holder] += result.compute_s
        if self._layer - part.last_layer <= part.may_owe:
            self._awaited.discard(holder)
        if part.num_queries:
            self._take_in(part, result)

    def _take_in(self, part: _HolderStep, result: AttendResult) -> None:
        """Raises ProtocolError."""
        span = part.span
        self._check_arrays(span, part.num_queries, result)
        if self._closed is not None:
            result = self._closed.arrive(span, result, self._o.dtype)
        if part.num_own:
            self._merge_in(part, result)

    @property
    def settled(self) -> bool:
        """See ``LaneAttention``."""
        return all(
            holder in self._lost or part.last_layer == self._layer
            for holder, part in self._holders.items()
        )

    def take(self) -> Tensor:
        """See ``LaneAttention``."""
        super().take()
        if self._closed is not None:
            self._closed.merge_into(self._o, self._lse)
        if self._lse is not None and self._plan.sinks is not None:
            self._o = self._o.clone() if self._may_lend else self._o
            add_sinks(self._o, self._lse, self._plan.sinks[self._layer])
        return self._o

    def _attend_locally(
        self, local: LocalSpan, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        rows = local.rows
        # Attend to K and V as the cache will hold them, so that where a prompt
        # is cut leaves no trace.
        k_seen, v_seen = (as_cached(x[rows], self._plan.kv_dtype) for x in (k, v))
        return local_causal_attention(
            q[rows], k_seen, v_seen, local.starts, spec,
            want_lse=local.merge or self._lse is not None,
        )  # fmt: skip

    def _merge_in(self, part: _HolderStep, result: AttendResult) -> None:
        """Copy a holder's o to its rows, merging the later chunks' with what was attended here."""
        later, rows = part.later, part.answered_rows
        if self._lse is not None:
            assert result.lse is not None
            own = np.ascontiguousarray(result.lse[: rows.stop - rows.start])
            self._lse[rows] = to_device(torch.from_numpy(own), self._o.device, self._plan.gpu)
        if later is None and self._may_lend and rows == slice(0, self._o.shape[0]):
            # Lent until the lane's next Attend: o is used by then.
            self._o = self._staging.lend(result.o, self._o.dtype)
            return
        # Decode rows come before the later chunks, which end the span's query rows.
        split = rows.stop - rows.start
        if split:
            self._staging.receive(result.o[:split], self._o, rows)
        if later is None:
            return
        assert result.lse is not None
        theirs = as_tensor(result.o[split:], self._o.dtype)
        their_lse = torch.from_numpy(np.ascontiguousarray(result.lse[split:]))
        remote, remote_lse = (
            to_device(x, self._o.device, self._plan.gpu) for x in (theirs, their_lse)
        )
        self._o[later.rows], lse = merge_attention(
            self._o[later.rows], self._local_lse[later.rows.start], remote, remote_lse
        )
        if self._closed is not None:
            self._closed.lse[later.rows] = lse
        if self._lse is not None:
            self._lse[later.rows] = lse


def _share(part: _HolderStep) -> Share:
    span = part.span
    closed = tuple(closed.rows for closed in span.closed)
    return Share(span.query_rows, closed, span.rows, part.answered_rows)


def _later_chunks(batch: StepBatch, span: HolderSpan) -> LocalSpan | None:
    """The span of later prompt chunks among the rows whose queries a holder attends."""
    queries = span.query_rows
    return next(
        (x for x in batch.local if x.merge and queries.start <= x.rows.start < queries.stop), None
    )

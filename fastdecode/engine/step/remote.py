"""Attention for one lane's step: what its parts have in common, and the part that R-workers
attend. q, k and v go out, o comes back.

A part never waits: waiting is the pipeline's business, which has other lanes to run.

A holder may be lost in the middle of a step. Rows are independent of each other, so the
step continues with zeros for that holder's rows, whose results are then thrown away; the
other rows notice nothing, and nothing has to be rolled back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from msgspec import structs
from torch import Tensor

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import Holder, HolderId
from fastdecode.core.spec import AttentionSpec
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.step.batch import HolderSpan, StepBatch
from fastdecode.engine.step.merge import Merge
from fastdecode.engine.step.prompts import DevicePrefill, PromptPart
from fastdecode.wire.messages import Attend, AttendResult
from sworker.buffers import LENT_LAYERS, Share, Staged, Staging, make_staging
from sworker.device import Gpu, gpu_of
from sworker.dtypes import CARRIERS
from sworker.worker import Pass, SWorker

# While an R-worker only stores a prompt's K and V, the S-worker computes ahead
# of it by this many layers at most.
MAX_OWED_ANSWERS = LENT_LAYERS - 1


class StepRecord:
    """What the parts of one step note: times, and which holders were lost.

    Args:
        spans: The step's rows as holders see them.
    """

    def __init__(self, spans: Iterable[HolderSpan]) -> None:
        self.spans = tuple(spans)
        self.r_s: dict[HolderId, float] = {span.holder: 0.0 for span in self.spans}
        """Seconds that each holder has computed."""
        self.gpu_s: dict[HolderId, Callable[[], float]] = {}
        """Seconds that a GPU has attended for a holder, beyond ``r_s``."""
        self.in_s_part_s = 0.0
        """Seconds of ``r_s`` in which the S-worker's own thread computed."""
        self.round_trip_s = math.inf
        """The shortest way of a layer to an R-worker and back, without its compute."""
        self.sent_s: list[float] = []
        """When q, k and v of each layer were sent, on ``time.perf_counter``."""
        self.lost: set[HolderId] = set()
        """Holders that were lost before the step was over."""

    @property
    def r_compute_s(self) -> dict[HolderId, float]:
        """Seconds that each holder has attended, on a GPU too."""
        return {x: s + self.gpu_s[x]() if x in self.gpu_s else s for x, s in self.r_s.items()}


class HostCopy(Protocol):
    """Data on its way to the host."""

    @property
    def done(self) -> bool:
        """True if they are on the host."""

    def wait(self) -> None:
        """Wait until they are."""


class AttentionPart(Protocol):
    """Attends some rows of one step."""

    def scatter(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None
    ) -> Leaving | None:
        """Take a layer's q [T, Hq, D], k and v [T, Hkv, D] of all rows.

        Args:
            place: Where o [T, Hq, D] may be put, the same in every layer.

        Returns:
            What is to be sent once it is on the host. None if nothing is.
        """

    def ready(self) -> bool:
        """Return True if ``take`` may be called."""

    def take(self, o: Tensor | None) -> Tensor:
        """Write this part's rows into the layer's o [T, Hq, D]. The first part gets None, and
        gives o."""


class Begun(NamedTuple):
    """A step for which holders have made room."""

    parts: tuple[AttentionPart, ...] = ()
    forward: Pass | None = None
    """Runs the step, or slices of it, without ``scatter``. None if the caller begins it."""
    remote: RemotePart | None = None
    """The part that R-workers answer."""


class Attention(Protocol):
    """Begins steps where KV is: on R-workers, on the S-worker's device, or on both."""

    @property
    def fleet(self) -> HolderPool: ...

    @property
    def holders(self) -> Seq[Holder]:
        """The kinds of holders, by their ids."""

    def begin(self, batch: StepBatch, s_worker: SWorker) -> tuple[StepRecord, Begun]:
        """Begin a step: make room for the K and V of its tokens."""


@dataclass(frozen=True)
class AttentionPlan:
    """What every step of one engine has in common, with the KV cache on R-workers."""

    specs: Seq[AttentionSpec]
    """What each layer attends."""
    kv_dtype: DType
    fleet: HolderPool
    device: torch.device
    """The S-worker's."""
    holders: Seq[Holder]
    """What they are, by their ids."""
    gpu: Gpu | None = None
    """The device's driver, in place of the one that torch has."""
    slot_bytes: int = 0
    """Most that q, k and v of a layer take."""
    _staging: dict[int, Staging] = field(default_factory=dict)  # by lane
    sinks: Seq[Tensor] | None = None
    """Attention sinks of each layer, float32 [Hq]. See ``sworker.prefill``."""
    prompts: DevicePrefill | None = None
    """Keeps prompts on the device until they are done. None if R-workers attend what they
    hold of them."""

    def begin(
        self, batch: StepBatch, s_worker: SWorker, beside: Seq[HolderSpan] = ()
    ) -> tuple[StepRecord, Begun]:
        """Begin a step. ``beside``: Spans that are attended elsewhere, and in the step's record."""
        if not batch.local and not batch.closed and self.sinks is None:
            record = StepRecord((*batch.spans, *beside))
            remote = RemotePart(self, batch, record)
            return record, Begun((remote,), remote=remote)
        return self._begin_shared(batch, beside)

    def _begin_shared(self, batch: StepBatch, beside: Seq[HolderSpan]) -> tuple[StepRecord, Begun]:
        """Begin a step some rows of which others attend, too, or alone."""
        held = None if self.prompts is None else self.prompts.begin(batch)
        batch = batch if held is None else held.batch
        if self.sinks is not None:
            spans = [replace(x, begin=structs.replace(x.begin, want_lse=True)) for x in batch.spans]
            batch = replace(batch, spans=tuple(spans))
        record, merge = StepRecord((*batch.spans, *beside)), None
        if batch.closed or self.sinks is not None or any(local.merge for local in batch.local):
            merge = Merge(batch, self.device, self.gpu, self.sinks)
        remote = RemotePart(self, batch, record, merge)
        prompts = PromptPart(self.specs, self.kv_dtype, batch.local, remote, merge, held)
        parts = (remote, prompts) if merge is None else (remote, merge, prompts)
        return record, Begun(parts, remote=remote)

    def prepare(self, num_lanes: int) -> None:
        """Take the memory of ``num_lanes`` lanes, which may stop the device, before
        anything waits for it."""
        for lane in range(num_lanes):
            self.staging(lane)

    def staging(self, lane: int) -> Staging:
        """Return a lane's memory on the way to R-workers and back."""
        if lane not in self._staging:
            self._staging[lane] = make_staging(self.gpu or gpu_of(self.device), self.slot_bytes)
        return self._staging[lane]


class _Storing:
    """What a holder has answered that only stores. It may be behind with its answers."""

    def __init__(self) -> None:
        self.last_layer = -1
        """The last layer that it has answered, like all before it. Their q, k and v are not
        lent any more."""
        self._early: set[int] = set()
        """Layers that it has answered before an earlier one. Its members answer in any order."""

    def due(self, layer: int) -> int:
        """Return ``layer`` if its answer is owed, otherwise a layer whose answer is."""
        is_owed = layer > self.last_layer and layer not in self._early
        return layer if is_owed else self.last_layer + 1

    def take(self, layer: int) -> None:
        """Note the answer of a layer."""
        self._early.add(layer)
        while self.last_layer + 1 in self._early:
            self.last_layer += 1
            self._early.remove(self.last_layer)


class RemotePart:
    """The rows of one step that R-workers store or attend. See ``AttentionPart``.

    Args:
        merge: Merges rows that others attend too.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        batch: StepBatch,
        record: StepRecord,
        merge: Merge | None = None,
    ) -> None:
        self._plan, self.record, self._merge = plan, record, merge
        self._own = batch.spans  # a mixed step's record has others, too
        self._spans = {span.holder: span for span in batch.spans}
        self._num_queries = {x.holder: int(x.begin.num_queries.sum()) for x in batch.spans}
        self._storing = {x: _Storing() for x, number in self._num_queries.items() if not number}
        self.may_be_behind = bool(self._storing)  # the layer may be ready though no answer has come
        self._layer = -1
        self.awaited: set[HolderId] = set()
        """Holders without whose answers the layer is not ready."""
        self.o = torch.empty(0)
        """[T, Hq, D] of the layer, as far as it has arrived."""
        self._num_unsent = 0
        self._staging = plan.staging(batch.spans[0].begin.lane)
        shares = []
        for span in batch.spans:
            closed = tuple(closed.rows for closed in span.closed)
            answered = span.query_rows if merge is None else merge.answered_rows(span)
            shares.append(Share(span.query_rows, closed, span.rows, answered))
        self._staging.begin_step(shares)
        for span in batch.spans:
            plan.fleet.send(span.holder, span.begin)

    def scatter(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None
    ) -> Leaving | None:
        """Send a layer's q, k and v on their way. See ``AttentionPart``."""
        self._layer = layer
        self.awaited = {*self._spans} - self.record.lost
        if self._storing:
            for holder, storing in self._storing.items():
                if layer - storing.last_layer <= MAX_OWED_ANSWERS:
                    self.awaited.discard(holder)
        self.o = self._staging.begin_layer(q.shape, q.dtype, place)
        staged = self._staging.send(q, k, v)
        self._num_unsent += 1
        if self._num_unsent > 1 or not staged.done:
            return Leaving(self, layer, staged)
        self.send(layer, staged)
        return None

    def send(self, layer: int, staged: Staged) -> None:
        """Send each holder its rows of a layer, which is on the host. Call in the order of
        layers."""
        self._num_unsent -= 1
        send = self._plan.fleet.send
        for span, shipment in zip(self._own, staged.shipments, strict=True):
            begin = span.begin
            send(span.holder, Attend(begin.step, begin.lane, layer, *shipment))
        self.record.sent_s.append(time.perf_counter())

    def answered(self, holder: HolderId, result: AttendResult) -> bool:
        """Take in a holder's answer: to the layer, or to any if the holder only stores.

        Returns:
            True if no other answer is awaited.

        Raises:
            ProtocolError: If it is not the answer that was due.
        """
        if holder in self._storing:
            return self._stored(holder, result)
        span = self._spans.get(holder) if holder in self.awaited else None
        if span is None or (result.step, result.layer) != (span.begin.step, self._layer):
            raise self._not_due(span, holder, result, self._layer)
        o, shape = self.o, (self._num_queries[holder], *self.o.shape[1:])
        is_plain = result.lse is None and not span.begin.want_lse
        if not is_plain or result.o.shape != shape or result.o.dtype != CARRIERS[o.dtype]:
            try:
                result.check_arrays(shape, CARRIERS[o.dtype], want_lse=span.begin.want_lse)
            except ProtocolError as lie:
                raise ProtocolError(f"{self._plan.fleet.peer(holder)} {lie.message}") from None
        self.record.r_s[holder] += result.compute_s
        if self._merge is not None:
            self._take_in(self._merge, span, result)
        elif self._staging.is_home and span.query_rows == slice(0, o.shape[0]):
            # Lent until the lane's next Attend: o is used by then.
            self.o = self._staging.lend(result.o, o.dtype)
        else:
            self._staging.receive(result.o, o, span.query_rows)
        self.awaited.discard(holder)
        return not self.awaited

    def _stored(self, holder: HolderId, result: AttendResult) -> bool:
        span, storing = self._spans[holder], self._storing[holder]
        layer = min(self._layer, storing.due(result.layer))
        if (result.step, result.layer) != (span.begin.step, layer):
            raise self._not_due(span, holder, result, layer)
        self.record.r_s[holder] += result.compute_s
        storing.take(layer)
        if self._layer - storing.last_layer <= MAX_OWED_ANSWERS:
            self.awaited.discard(holder)
        return not self.awaited

    def _not_due(
        self, span: HolderSpan | None, holder: HolderId, result: AttendResult, layer: int
    ) -> ProtocolError:
        due = None if span is None else (span.begin.step, layer)
        return ProtocolError(
            f"{self._plan.fleet.peer(holder)} answered for step {result.step}, layer "
            f"{result.layer}, where (step, layer) {due} was due: are both ends of the same version?"
        )

    def _take_in(self, merge: Merge, span: HolderSpan, result: AttendResult) -> None:
        rows = merge.answered_rows(span)
        if rows.start < rows.stop:
            self._staging.receive(result.o[: rows.stop - rows.start], self.o, rows)
        if result.lse is not None:
            merge.arrive(span, result, self.o)

    def ready(self) -> bool:
        """Return True if all rows of the layer's o are here, and no holder is too far behind
        with storing."""
        return not self.awaited

    @property
    def settled(self) -> bool:
        """True if every holder has answered everything: the step may end."""
        behind = [x for x, storing in self._storing.items() if storing.last_layer < self._layer]
        return not self.awaited and self.record.lost.issuperset(behind)

    def take(self, o: Tensor | None) -> Tensor:
        """Give the layer's o [T, Hq, D], with zeros in the rows of lost holders."""
        self._staging.join()
        if self.record.lost and (lost := self.record.lost & self._spans.keys()):
            self._clear(lost)
        return self.o

    def _clear(self, lost: set[HolderId]) -> None:
        if len(self._spans) == 1:
            self.o = torch.zeros_like(self.o)  # lent memory is never written
        for holder in lost:
            self.o[self._spans[holder].rows] = 0


class Leaving(NamedTuple):
    """A layer's q, k and v on their way to the host, for ``RemotePart.send``."""

    part: RemotePart
    layer: int
    staged: Staged

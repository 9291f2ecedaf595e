"""``attend`` over R-workers: scatter q, k, v; attend prompt chunks here meanwhile; gather o.

A step's rows are laid out so that what each R-worker gets is contiguous and nothing is gathered by index: rows are
sorted by R-worker, and within one worker's span the sequences whose queries it attends come first::

    rows    | decode, later prompt chunks | first chunks | decode, later … | first chunks |
            |<----- q to worker 0 ------->|              |<- q to worker 1>|
            |<------------ k, v to worker 0 ------------>|<----- k, v to worker 1 ------->|

Three kinds of row follow from how many tokens a sequence brings and has (see ``fastdecode.wire.messages``):

=================  ============================  ============================  ======================
sequence brings    the R-worker attends          the S-worker attends          o is
=================  ============================  ============================  ======================
1 token            past and the token            nothing                       the R-worker's
a first chunk      nothing (it stores k, v)      the chunk, causally           the S-worker's
a later chunk      the past                      the chunk, causally           both, merged by lse
=================  ============================  ============================  ======================
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.spec import AttentionSpec
from fastdecode.schedule.scheduler import Chunk
from fastdecode.wire.messages import (
    Activations,
    Attend,
    AttendResult,
    BeginStep,
    Failed,
    FromRWorker,
    ToRWorker,
)
from fastdecode.wire.transport import Connection
from sworker.prefill import local_causal_attention, merge_attention

RConnection: TypeAlias = Connection[ToRWorker, FromRWorker]

# While an R-worker only stores a prompt's K and V, the S-worker computes ahead of it by this many layers at most.
MAX_OWED_ANSWERS = 4


@dataclass(frozen=True)
class WorkerSpan:
    """The rows of one step that belong to one R-worker."""

    worker: int
    begin: BeginStep
    rows: slice
    """All rows: k and v."""
    query_rows: slice
    """The leading rows whose q the R-worker attends."""


@dataclass(frozen=True)
class LocalSpan:
    """Consecutive rows that the S-worker attends: prompt chunks, one after another."""

    rows: slice
    starts: tuple[int, ...]
    """First row of each chunk, relative to the span, and the span's length last."""
    merge: bool
    """Later chunks: merge with what the R-worker says of their past."""


@dataclass(frozen=True)
class StepBatch:
    """One step's rows: T tokens of N sequences, in the order above."""

    chunks: tuple[Chunk, ...]
    token_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    spans: tuple[WorkerSpan, ...]
    local: tuple[LocalSpan, ...]
    last_rows: np.ndarray  # int64 [N] the row of each chunk's last token

    @classmethod
    def build(cls, chunks: Seq[Chunk], *, step: int, lane: int = 0) -> StepBatch:
        """Lay out a plan's chunks. Every sequence has its R-worker."""
        ordered = tuple(sorted(chunks, key=_layout_key))
        lengths = np.array([chunk.num_tokens for chunk in ordered], np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        past = np.array([chunk.sequence.num_cached for chunk in ordered], np.int32)
        tokens: list[int] = []
        for chunk in ordered:
            first = chunk.sequence.num_cached
            tokens += chunk.sequence.token_ids[first : first + chunk.num_tokens]
        row_starts = ends - lengths
        positions = np.arange(len(tokens)) - np.repeat(row_starts - past, lengths)
        spans: list[WorkerSpan] = []
        local: list[LocalSpan] = []
        first = 0
        for worker, group in itertools.groupby(ordered, key=lambda chunk: chunk.sequence.worker):
            assert worker is not None
            members = list(group)
            part = slice(first, first + len(members))
            first = part.stop
            spans.append(_worker_span(worker, members, lengths[part], past[part], row_starts[part], step, lane))
            local += _local_spans(members, row_starts[part], lengths[part])
        return cls(ordered, np.array(tokens, np.int64), positions, tuple(spans), tuple(local), ends - 1)


def _kind(chunk: Chunk) -> int:
    """0: attended by the R-worker alone; 1: a later chunk; 2: a first chunk."""
    if chunk.num_tokens == 1:
        return 0
    return 1 if chunk.sequence.num_cached else 2


def _layout_key(chunk: Chunk) -> tuple[int, int]:
    assert chunk.sequence.worker is not None
    return chunk.sequence.worker, _kind(chunk)


def _worker_span(
    worker: int,
    chunks: list[Chunk],
    lengths: np.ndarray,
    past: np.ndarray,
    row_starts: np.ndarray,
    step: int,
    lane: int,
) -> WorkerSpan:
    kinds = np.array([_kind(chunk) for chunk in chunks])
    queries = np.where(kinds == 2, 0, lengths).astype(np.int32)
    begin = BeginStep(
        step=step,
        lane=lane,
        sequence_ids=np.array([chunk.sequence.sequence_id for chunk in chunks], np.int64),
        num_past=past.copy(),
        num_new=lengths.copy(),
        num_queries=queries,
        num_visible=np.where(kinds == 0, past + lengths, past).astype(np.int32),
        want_lse=bool((kinds == 1).any()),
    )
    first = int(row_starts[0])
    return WorkerSpan(worker, begin, slice(first, first + int(lengths.sum())), slice(first, first + int(queries.sum())))


def _local_spans(chunks: list[Chunk], row_starts: np.ndarray, lengths: np.ndarray) -> list[LocalSpan]:
    spans = []
    for kind in (1, 2):
        members = [i for i, chunk in enumerate(chunks) if _kind(chunk) == kind]
        if members:
            first, last = int(row_starts[members[0]]), members[-1]
            end = int(row_starts[last] + lengths[last])
            starts = (*(int(row_starts[i]) - first for i in members), end - first)
            spans.append(LocalSpan(slice(first, end), starts, merge=kind == 1))
    return spans


@dataclass
class RemoteAttention:
    """An ``attend`` whose KV lives on R-workers.

    Use: ``begin(batch)``, then as ``attend`` through every layer in order, then ``finish()``.
    """

    connections: Seq[RConnection]
    specs: Seq[AttentionSpec]
    """One a layer."""
    activation_dtype: DType
    kv_dtype: torch.dtype
    timeout_s: float
    _batch: StepBatch | None = None
    _owed: dict[int, deque[int]] = field(default_factory=dict)
    """Worker → layers whose answer hasn't been received."""
    _r_compute_s: dict[int, float] = field(default_factory=dict)
    _wait_s: float = 0.0

    def begin(self, batch: StepBatch) -> None:
        self._batch = batch
        self._owed = {span.worker: deque() for span in batch.spans}
        self._r_compute_s = {span.worker: 0.0 for span in batch.spans}
        self._wait_s = 0.0
        for span in batch.spans:
            self.connections[span.worker].send(span.begin)

    def finish(self) -> tuple[float, float]:
        """Collect what the workers still owe. Returns the step's (wait_s, r_compute_s): the S-worker's idle wait, and
        the busiest R-worker's compute."""
        assert self._batch is not None
        for span in self._batch.spans:
            self._collect(span, at_most_owed=0)
        self._batch = None
        return self._wait_s, max(self._r_compute_s.values(), default=0.0)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] → o [T, Hq, D]."""
        assert self._batch is not None
        batch, spec = self._batch, self.specs[layer]
        q_host, k_host, v_host = self._to_host(q), self._to_host(k), self._to_host(v)
        for span in batch.spans:
            begin = span.begin
            message = Attend(
                begin.step, begin.lane, layer, q_host[span.query_rows], k_host[span.rows], v_host[span.rows]
            )
            self.connections[span.worker].send(message)
        o = torch.empty_like(q)
        local_lse: dict[int, Tensor] = {}
        for local in batch.local:
            part, lse = self._attend_locally(local, spec, q, k, v)
            o[local.rows] = part
            if local.merge:
                assert lse is not None
                local_lse[local.rows.start] = lse
        self._gather(layer, batch, o, local_lse)
        return o

    def _attend_locally(
        self, local: LocalSpan, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        rows = local.rows
        # Attend to K and V as the cache will hold them, so that where a prompt is cut leaves no trace.
        k_seen, v_seen = (x[rows].to(self.kv_dtype).to(x.dtype) for x in (k, v))
        return local_causal_attention(q[rows], k_seen, v_seen, local.starts, spec, want_lse=local.merge)

    def _gather(self, layer: int, batch: StepBatch, o: Tensor, local_lse: dict[int, Tensor]) -> None:
        for span in batch.spans:
            self._owed[span.worker].append(layer)
            queries = span.query_rows
            if queries.start == queries.stop:
                # The worker only stores: go on, and collect its answers when they are due or too many.
                self._collect(span, at_most_owed=MAX_OWED_ANSWERS)
                continue
            result = self._collect(span, at_most_owed=0)
            assert result is not None
            remote = self._to_device(result.o, o)
            later = next((x for x in batch.local if x.merge and queries.start <= x.rows.start < queries.stop), None)
            if later is None:
                o[queries] = remote
                continue
            # Decode rows come before the later chunks, which end the span's query rows.
            assert result.lse is not None and later.rows.stop == queries.stop
            split = later.rows.start - queries.start
            o[queries.start : later.rows.start] = remote[:split]
            remote_lse = torch.from_numpy(result.lse[split:]).to(o.device)
            o[later.rows], _ = merge_attention(o[later.rows], local_lse[later.rows.start], remote[split:], remote_lse)

    def _collect(self, span: WorkerSpan, *, at_most_owed: int) -> AttendResult | None:
        """Receive answers until the worker owes at most so many; the last one received."""
        owed, result = self._owed[span.worker], None
        while len(owed) > at_most_owed:
            result = self._receive(span, owed.popleft())
            self._r_compute_s[span.worker] += result.compute_s
        return result

    def _receive(self, span: WorkerSpan, layer: int) -> AttendResult:
        connection = self.connections[span.worker]
        started = time.perf_counter()
        answer = connection.receive(self.timeout_s)
        self._wait_s += time.perf_counter() - started
        if isinstance(answer, Failed):
            raise WorkerError(f"R-worker {answer.worker} failed: {answer.message}", code=answer.code)
        begin = span.begin
        due = (begin.step, begin.lane, layer)
        if not isinstance(answer, AttendResult) or (answer.step, answer.lane, answer.layer) != due:
            raise ProtocolError(
                f"R-worker {connection.peer} answered {type(answer).__name__} where the o of step {begin.step}, "
                f"lane {begin.lane}, layer {layer} was due: are both ends of the same version?"
            )
        return answer

    def _to_host(self, x: Tensor) -> Activations:
        x = x.contiguous().cpu()
        array: Activations = (x if x.dtype == torch.float32 else x.view(torch.uint16)).numpy()
        return array

    def _to_device(self, array: Activations, like: Tensor) -> Tensor:
        host = torch.from_numpy(array)
        return (host if like.dtype == torch.float32 else host.view(like.dtype)).to(like.device)

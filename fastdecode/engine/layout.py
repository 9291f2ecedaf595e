"""One step's rows, laid out so that what each R-worker gets is a contiguous slice and nothing is gathered by index.

Rows are sorted by R-worker, and within one worker's span the sequences whose queries it attends come first::

    rows    | decode, later prompt chunks | first chunks | decode, later … | first chunks |
            |<----- q to worker 0 ------->|              |<- q to worker 1>|
            |<------------ k, v to worker 0 ------------>|<----- k, v to worker 1 ------->|

Three kinds of row follow from how many tokens a sequence brings and has (see ``fastdecode.wire.messages``):

=================  ============================  ============================  ======================
sequence brings    the R-worker attends          the S-worker attends          o is
=================  ============================  ============================  ======================
1 token            past and the token            nothing                       the R-worker's
a later chunk      the past                      the chunk, causally           both, merged by lse
a first chunk      nothing (it stores k, v)      the chunk, causally           the S-worker's
=================  ============================  ============================  ======================

Where R-workers attend prompts (``prompts_on_r``: the S-part runs on a CPU, too), every row is of the first kind: an
R-worker attends past and chunk, causally, and the S-worker nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from fastdecode.schedule.scheduler import Chunk
from fastdecode.wire.messages import BeginStep


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
    def build(cls, chunks: Seq[Chunk], *, step: int, lane: int = 0, prompts_on_r: bool = False) -> StepBatch:
        """Lay out a plan's chunks. Every sequence has its R-worker."""
        kind_of = _on_r if prompts_on_r else _kind
        ordered = tuple(sorted(chunks, key=lambda chunk: (chunk.sequence.worker, kind_of(chunk))))
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
            kinds = np.array([kind_of(chunk) for chunk in members])
            spans.append(_worker_span(worker, members, kinds, lengths[part], past[part], row_starts[part], step, lane))
            local += _local_spans(kinds, row_starts[part], lengths[part])
        return cls(ordered, np.array(tokens, np.int64), positions, tuple(spans), tuple(local), ends - 1)


def _kind(chunk: Chunk) -> int:
    """0: attended by the R-worker alone; 1: a later chunk; 2: a first chunk."""
    if chunk.num_tokens == 1:
        return 0
    return 1 if chunk.sequence.num_cached else 2


def _on_r(chunk: Chunk) -> int:
    return 0


def _worker_span(
    worker: int,
    chunks: list[Chunk],
    kinds: np.ndarray,
    lengths: np.ndarray,
    past: np.ndarray,
    row_starts: np.ndarray,
    step: int,
    lane: int,
) -> WorkerSpan:
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


def _local_spans(kinds: np.ndarray, row_starts: np.ndarray, lengths: np.ndarray) -> list[LocalSpan]:
    spans = []
    for kind in (1, 2):
        members = np.flatnonzero(kinds == kind)
        if members.size:
            first, last = int(row_starts[members[0]]), members[-1]
            end = int(row_starts[last] + lengths[last])
            starts = (*(int(row_starts[i]) - first for i in members), end - first)
            spans.append(LocalSpan(slice(first, end), starts, merge=kind == 1))
    return spans

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

Of a **split** sequence, the R-worker in this table is that of its last part, where k and v go. Its queries also go to
the R-workers of its closed parts, as **guests**: gathered by index, behind the rows of whom is at home there. What
guests are told is merged into the rows by log-sum-exp. A chunk doesn't go beyond a part.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.sequence import part_id
from fastdecode.schedule.scheduler import Chunk
from fastdecode.wire.messages import BeginStep


@dataclass(frozen=True)
class Guests:
    """Rows of sequences of which an R-worker has the same part: the second of each, say."""

    part: int
    rows: NDArray[np.int64]  # [G], none twice


@dataclass(frozen=True)
class WorkerSpan:
    """The rows of one step that belong to one R-worker."""

    worker: int
    begin: BeginStep
    rows: slice
    """All rows: k and v."""
    query_rows: slice
    """The leading rows whose q the R-worker attends."""
    guests: tuple[Guests, ...] = ()
    """Whose q comes behind those: rows of sequences with closed parts here."""


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
    def build(
        cls,
        chunks: Seq[Chunk],
        *,
        step: int,
        lane: int = 0,
        prompts_on_r: bool = False,
        window: int | None = None,
    ) -> StepBatch:
        """Lay out a plan's chunks. Every sequence has its R-workers. ``window``: tokens that any layer sees at most."""
        keys = [(_home(chunk), 0 if prompts_on_r else _kind(chunk)) for chunk in chunks]
        order = sorted(range(len(keys)), key=lambda i: (*keys[i], chunks[i].num_tokens > 1))
        ordered = tuple([chunks[i] for i in order])
        kinds = np.array([keys[i][1] for i in order])
        lengths = np.array([chunk.num_tokens for chunk in ordered], np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        past = np.array([chunk.sequence.num_cached for chunk in ordered], np.int32)
        tokens: list[int] = []
        for chunk in ordered:
            first = chunk.sequence.num_cached
            tokens += chunk.sequence.token_ids[first : first + chunk.num_tokens]
        row_starts = ends - lengths
        positions = np.arange(len(tokens)) - np.repeat(row_starts - past, lengths)
        ids = np.array([chunk.sequence.sequence_id for chunk in ordered], np.int64)
        split = [i for i, chunk in enumerate(ordered) if chunk.sequence.parts is not None]
        guests = _guests(ordered, row_starts, split, window) if split else {}
        for i in split:
            ids[i], past[i] = _last_part(ordered[i])
        spans: list[WorkerSpan] = []
        local: list[LocalSpan] = []
        first = 0
        for worker, group in itertools.groupby([keys[i][0] for i in order]):
            part = slice(first, first + len(list(group)))
            first = part.stop
            columns = ids[part], kinds[part], lengths[part], past[part], row_starts[part]
            span = _worker_span(worker, *columns, step, lane)
            spans.append(_with_guests(span, guests.pop(worker)) if worker in guests else span)
            local += _local_spans(kinds[part], row_starts[part], lengths[part])
        for worker, here in guests.items():  # nobody is at home there
            spans.append(_with_guests(_empty_span(worker, step, lane), here))
        return cls(ordered, np.array(tokens, np.int64), positions, tuple(spans), tuple(local), ends - 1)


def _kind(chunk: Chunk) -> int:
    """0: attended by the R-worker alone; 1: a later chunk; 2: a first chunk."""
    if chunk.num_tokens == 1:
        return 0
    return 1 if chunk.sequence.num_cached else 2


def _home(chunk: Chunk) -> int:
    """The R-worker that stores the chunk."""
    sequence = chunk.sequence
    if sequence.parts is not None:
        return sequence.parts.workers[sequence.parts.fill(sequence.num_cached)[0]]
    assert sequence.worker is not None
    return sequence.worker


def _worker_span(
    worker: int,
    ids: np.ndarray,
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
        sequence_ids=ids.copy(),
        num_past=past.copy(),
        num_new=lengths.copy(),
        num_queries=queries,
        num_visible=np.where(kinds == 0, past + lengths, past).astype(np.int32),
        want_lse=bool((kinds == 1).any() or (ids >= part_id(0, 1)).any()),
    )
    first = int(row_starts[0])
    return WorkerSpan(worker, begin, slice(first, first + int(lengths.sum())), slice(first, first + int(queries.sum())))


@dataclass(frozen=True)
class _Guest:
    """A closed part of a sequence that steps."""

    part: int
    sequence_id: int
    num_tokens: int
    num_beyond: int
    rows: NDArray[np.int64]
    """The chunk's."""


def _last_part(chunk: Chunk) -> tuple[int, int]:
    """Where a chunk of a split sequence goes: the part's id, and its tokens so far."""
    sequence = chunk.sequence
    assert sequence.parts is not None
    part, num_tokens = sequence.parts.fill(sequence.num_cached)
    return part_id(sequence.sequence_id, part), num_tokens


def _guests(
    chunks: tuple[Chunk, ...], row_starts: np.ndarray, split: list[int], window: int | None
) -> dict[int, list[_Guest]]:
    """By R-worker. Parts that not even a chunk's first token sees anything of have none."""
    guests: dict[int, list[_Guest]] = defaultdict(list)
    for i in split:
        sequence, num_tokens = chunks[i].sequence, chunks[i].num_tokens
        assert sequence.parts is not None
        rows = np.arange(row_starts[i], row_starts[i] + num_tokens)
        part_tokens = sequence.parts.num_tokens
        seen = 0 if window is None else max(0, sequence.num_cached + 1 - window)  # the first token that is
        for part in range(seen // part_tokens, sequence.parts.fill(sequence.num_cached)[0]):
            num_beyond = sequence.num_cached + num_tokens - (part + 1) * part_tokens
            guest = _Guest(part, sequence.sequence_id, part_tokens, num_beyond, rows)
            guests[sequence.parts.workers[part]].append(guest)
    return guests


def _with_guests(span: WorkerSpan, guests: list[_Guest]) -> WorkerSpan:
    begin, guests = span.begin, sorted(guests, key=attrgetter("part"))
    ids = np.array([part_id(guest.sequence_id, guest.part) for guest in guests], np.int64)
    counts = [(guest.num_tokens, len(guest.rows), guest.num_beyond) for guest in guests]
    num_tokens, num_rows, num_beyond = np.array(counts, np.int32).T.copy()
    nothing = np.zeros_like(num_tokens)
    begin = replace(
        begin,
        sequence_ids=np.concatenate((begin.sequence_ids, ids)),
        num_past=np.concatenate((begin.num_past, num_tokens)),
        num_new=np.concatenate((begin.num_new, nothing)),
        num_queries=np.concatenate((begin.num_queries, num_rows)),
        num_visible=np.concatenate((begin.num_visible, num_tokens)),
        num_beyond=np.concatenate((np.zeros_like(begin.num_new), num_beyond)),
        want_lse=True,
    )
    by_part = itertools.groupby(guests, key=attrgetter("part"))
    rows = tuple(Guests(part, np.concatenate([guest.rows for guest in members])) for part, members in by_part)
    return replace(span, begin=begin, guests=rows)


def _empty_span(worker: int, step: int, lane: int) -> WorkerSpan:
    """Of an R-worker that stores nothing in this step."""
    none = np.zeros(0, np.int32)
    begin = BeginStep(step, lane, np.zeros(0, np.int64), none, none, none, none)
    return WorkerSpan(worker, begin, slice(0, 0), slice(0, 0))


def _local_spans(kinds: np.ndarray, row_starts: np.ndarray, lengths: np.ndarray) -> list[LocalSpan]:
    spans = []
    for kind in (1, 2):
        members = np.flatnonzero(kinds == kind).tolist()
        if members:
            first, last = int(row_starts[members[0]]), members[-1]
            end = int(row_starts[last] + lengths[last])
            starts = (*(int(row_starts[i]) - first for i in members), end - first)
            spans.append(LocalSpan(slice(first, end), starts, merge=kind == 1))
    return spans

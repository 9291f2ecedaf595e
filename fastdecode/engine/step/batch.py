"""One step's rows, laid out so that what each holder gets is a contiguous slice
and nothing is gathered by index.

Rows are sorted by holder, and within one holder's span the sequences whose
queries it attends come first::

    rows    | decode, later prompt chunks | first chunks | decode, later … | first chunks |
            |<----- q to holder 0 ------->|              |<- q to holder 1>|
            |<------------ k, v to holder 0 ------------>|<----- k, v to holder 1 ------->|

Three kinds of row follow from how many tokens a sequence brings and has (see
``fastdecode.wire.messages``):

===============  ========================  ====================  ===================
sequence brings  the holder attends        the S-worker attends  o is
===============  ========================  ====================  ===================
1 token          past and the token        nothing               the holder's
a later chunk    the past                  the chunk, causally   both, merged by lse
a first chunk    nothing (it stores k, v)  the chunk, causally   the S-worker's
===============  ========================  ====================  ===================

Rows of a holder that attends prompts are all of the first kind: it attends past
and chunk, causally, and the S-worker nothing.

A sequence that fills a gap in this step, and continues behind it, has two
chunks. Where they stand among the rows doesn't matter: holders append all of a
layer's K and V before they attend, and the S-worker attends each chunk to itself.

Of a sequence with several parts, the holder in this table is that of the part
that grows, where k and v go. Its queries also go to the holders of its **closed
parts**: gathered by index, behind the rows whose sequences grow there. What is
said to them is merged into the rows by log-sum-exp. A chunk doesn't go beyond a
part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import Holder, HolderId, Part
from fastdecode.core.spec import first_seen
from fastdecode.schedule.plan import Chunk
from fastdecode.wire.messages import BeginStep
from fastdecode.wire.stages import ASKS, CLOSED_FIELDS, DRAWS, StagePass
from sworker.buffers import Feed

# Kinds of row, in the order in which they stand in a span.
DECODE, WITH_PAST, LATER, FIRST = range(4)
NUM_KINDS = 4


@dataclass(frozen=True)
class ClosedRows:
    """Rows of sequences of which a holder has the same closed part: the second of each, say."""

    part: int
    """Which, counted from 0."""
    rows: NDArray[np.int64]  # [G], none twice


@dataclass(frozen=True)
class HolderSpan:
    """The rows of one step that belong to one holder."""

    holder: HolderId
    begin: BeginStep
    rows: slice
    """All rows: k and v."""
    query_rows: slice
    """The leading rows whose q the holder attends."""
    load_tokens: int = 0
    """Cached tokens that it attends to; of a prompt's chunk, the tokens of its past."""
    num_prompt_tokens: int = 0
    """Prompt tokens that it stores, or that its closed parts attend."""
    closed: tuple[ClosedRows, ...] = ()
    """Their q comes behind ``query_rows``: rows of sequences with closed parts here."""


@dataclass(frozen=True)
class LocalSpan:
    """Consecutive rows that the S-worker attends: prompt chunks, one after another."""

    rows: slice
    starts: tuple[int, ...]
    """First row of each chunk, relative to the span, and the span's length last."""
    merge: bool
    """Later chunks: merge with what the holder says of their past."""


class Columns(NamedTuple):
    """Chunks in the order of their rows, as arrays [N]."""

    holders: NDArray[np.int64]
    kinds: NDArray[np.int64]
    part_ids: NDArray[np.int64]
    first_tokens: NDArray[np.int32]
    """First tokens of the parts that the chunks go to."""
    past: NDArray[np.int32]
    """Tokens in the parts that the chunks go to."""
    lengths: NDArray[np.int32]
    starts: NDArray[np.int64]
    """First rows."""

    @classmethod
    def of_pass(cls, passed: StagePass, holders: Seq[Holder]) -> Columns:
        """Raises ProtocolError: they aren't in the order of their rows."""
        past, lengths, first_tokens = passed.num_past, passed.num_new, passed.first_tokens
        if first_tokens is None:
            first_tokens = np.zeros_like(past)
        if first_tokens.shape != past.shape or int(first_tokens.min()) < 0:
            raise ProtocolError("a step came whose sequences have parts that can't be")
        attends_prompts = np.array([holder.attends_prompts for holder in holders])
        kinds = np.where(past + first_tokens > 0, LATER, FIRST)
        kinds[attends_prompts[passed.columns]] = WITH_PAST
        kinds[lengths == 1] = DECODE
        if (np.diff(passed.columns.astype(np.int64) * NUM_KINDS + kinds) < 0).any():
            raise ProtocolError("a step came whose rows aren't in order")
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        of_holders = passed.columns.astype(np.int64)
        return cls(of_holders, kinds, passed.sequence_ids, first_tokens, past, lengths, starts)


def _span(holder: HolderId, columns: Columns, step: int, lane: int) -> HolderSpan:
    kinds, lengths, past = columns.kinds, columns.lengths, columns.past
    queries = np.where(kinds == FIRST, 0, lengths).astype(np.int32)
    visible = np.where(kinds <= WITH_PAST, past + lengths, past).astype(np.int32)
    begin = BeginStep(
        step=step,
        lane=lane,
        sequence_ids=columns.part_ids,
        num_past=past,
        num_new=lengths,
        num_queries=queries,
        num_visible=visible,
        want_lse=bool((kinds == LATER).any() or columns.first_tokens.any()),
    )
    num_rows = int(lengths.sum())
    num_decoding = int((kinds == DECODE).sum())
    first = int(columns.starts[0])
    return HolderSpan(
        holder,
        begin,
        slice(first, first + num_rows),
        slice(first, first + int(queries.sum())),
        # What a first chunk has is nothing, and one that decodes also attends to its own token.
        load_tokens=int(past.sum()) + num_decoding,
        num_prompt_tokens=num_rows - num_decoding,
    )


def _local_spans(columns: Columns) -> list[LocalSpan]:
    spans = []
    for kind in (LATER, FIRST):
        members = np.flatnonzero(columns.kinds == kind).tolist()
        if members:
            first, last = int(columns.starts[members[0]]), members[-1]
            end = int(columns.starts[last] + columns.lengths[last])
            starts = (*(int(columns.starts[i]) - first for i in members), end - first)
            spans.append(LocalSpan(slice(first, end), starts, merge=kind == LATER))
    return spans


@dataclass(frozen=True)
class ClosedPart:
    """A closed part of a sequence that steps."""

    holder: HolderId
    part: int
    """Which, counted from 0."""
    part_id: int
    num_tokens: int
    num_beyond: int
    first_row: int
    """The chunk's, of ``num_rows``."""
    num_rows: int

    @property
    def rows(self) -> NDArray[np.int64]:
        """The chunk's."""
        return np.arange(self.first_row, self.first_row + self.num_rows)


@dataclass(frozen=True)
class StepBatch:
    """One step's rows: T tokens of N sequences, in the order above."""

    chunks: tuple[Chunk, ...]
    token_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    spans: tuple[HolderSpan, ...]
    local: tuple[LocalSpan, ...]
    last_rows: np.ndarray  # int64 [N] the row of each chunk's last token
    draws: np.ndarray  # bool [N] whether that is the sequence's last, so that its next one is drawn
    num_decoding: int
    """Sequences that bring one token."""
    feed: Feed | None = None
    """Token ids that only the device knows, ``COMING`` above."""
    asks: NDArray[np.bool_] | None = None
    """[N] chunks of which the logits of all rows are wanted. None if there are no such chunks."""
    hidden: Tensor | None = None
    """[T, hidden], on the host: the output of the stages before. Only the first stage
    knows chunks and token ids."""
    closed: tuple[ClosedPart, ...] = ()
    """Closed parts that rows attend, by holder and part."""

    @property
    def rows(self) -> Tensor:
        """Token ids and positions, int64 [2, T], on the host."""
        return torch.from_numpy(np.stack((self.token_ids, self.positions)))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of chunks that bring more than one."""
        return len(self.token_ids) - self.num_decoding

    @property
    def asked_rows(self) -> NDArray[np.int64]:
        """The rows of chunks that ``asks`` names."""
        assert self.asks is not None
        lengths = np.diff(self.last_rows, prepend=-1)
        return np.flatnonzero(np.repeat(self.asks, lengths))

    @classmethod
    def build(
        cls,
        chunks: Seq[Chunk],
        holders: Seq[Holder],
        *,
        step: int,
        lane: int = 0,
        window: int | None = None,
    ) -> StepBatch:
        """Lay out a plan's chunks. Every sequence has its residence.

        Args:
            holders: what they are, by their ids.
            window: tokens that any layer sees at most.
        """
        keys, ordered, homes = zip(*_placed(chunks, holders), strict=True)
        firsts = [x.first if x.is_behind_gap else x.sequence.num_cached for x in ordered]
        pieces = [
            chunk.sequence.token_ids[first : first + chunk.num_tokens]
            for chunk, first in zip(ordered, firsts, strict=True)
        ]
        held, kinds = np.divmod(np.array(keys, np.int64), NUM_KINDS)
        part_ids = np.array([part.part_id for part in homes], np.int64)
        first_tokens = np.array([part.first_token for part in homes], np.int32)
        num_cached = np.array(firsts, np.int32)
        lengths = np.array([chunk.num_tokens for chunk in ordered], np.int32)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        past = num_cached - first_tokens
        num_known = np.array([len(chunk.sequence.token_ids) for chunk in ordered])
        # A part that begins later comes behind a closed one.
        closed = _closed_parts(ordered, starts, window) if first_tokens.any() else ()
        return cls._of(
            Columns(held, kinds, part_ids, first_tokens, past, lengths, starts),
            step,
            lane,
            closed,
            chunks=ordered,
            token_ids=np.array(list(itertools.chain.from_iterable(pieces)), np.int64),
            draws=num_cached + lengths == num_known,
        )

    @classmethod
    def passed_on(cls, passed: StagePass, holders: Seq[Holder], hidden: Tensor) -> StepBatch:
        """As the stage before has laid it out.

        Raises:
            ProtocolError: If no stage lays it out like that.
        """
        columns = Columns.of_pass(passed, holders)
        num_rows = int(columns.lengths.sum())
        closed = _closed_of_pass(passed, num_rows, len(holders))
        asks = (passed.draws & ASKS) != 0
        return cls._of(
            columns,
            passed.step,
            passed.lane,
            closed,
            chunks=(),
            token_ids=np.zeros(num_rows, np.int64),
            draws=(passed.draws & DRAWS) != 0,
            asks=asks if asks.any() else None,
            hidden=hidden,
        )

    @classmethod
    def _of(
        cls, columns: Columns, step: int, lane: int, closed: tuple[ClosedPart, ...], **others: Any
    ) -> StepBatch:
        """Lay out chunks for each holder that has some. ``others``: Fields that don't follow from
        where rows are."""
        spans: list[HolderSpan] = []
        local: list[LocalSpan] = []
        has_prompts = bool((columns.kinds > WITH_PAST).any())
        ids, firsts = np.unique(columns.holders, return_index=True)
        ends = (*firsts[1:], len(columns.holders))
        for holder, first, end in zip(ids.tolist(), firsts, ends, strict=True):
            members = Columns(*[column[first:end] for column in columns])
            spans.append(_span(HolderId(holder), members, step, lane))
            local += _local_spans(members) if has_prompts else ()
        if closed:
            spans = _with_closed_parts(spans, closed)
        starts, lengths = columns.starts, columns.lengths
        num_rows, num_cached = starts[-1] + lengths[-1], columns.past + columns.first_tokens
        return cls(
            positions=np.arange(num_rows) - np.repeat(starts - num_cached, lengths),
            spans=tuple(spans),
            local=tuple(local),
            last_rows=starts + lengths - 1,
            num_decoding=int((columns.kinds == DECODE).sum()),
            closed=closed,
            **others,
        )


def _placed(chunks: Seq[Chunk], holders: Seq[Holder]) -> list[tuple[int, Chunk, Part]]:
    """Return the chunks in the order of their rows: by holder, then by kind of row. With each, a
    key of both, and the part that it goes to."""
    placed: list[tuple[int, Chunk, Part]] = []
    for chunk in chunks:
        sequence = chunk.sequence
        residence = sequence.residence
        assert residence is not None
        parts = residence.parts
        part = parts[0] if len(parts) == 1 else parts[residence.index_of(sequence.num_cached)]
        if chunk.num_tokens == 1:
            kind = DECODE
        elif holders[part.holder].attends_prompts:
            kind = WITH_PAST
        else:
            kind = LATER if chunk.first else FIRST
        placed.append((part.holder * NUM_KINDS + kind, chunk, part))
    return sorted(placed, key=itemgetter(0))


def _closed_parts(
    chunks: tuple[Chunk, ...], starts: NDArray[np.int64], window: int | None
) -> tuple[ClosedPart, ...]:
    """Parts that not even a chunk's first token sees anything of aren't among them."""
    closed: list[ClosedPart] = []
    for chunk, start in zip(chunks, starts, strict=True):
        residence = chunk.sequence.residence
        assert residence is not None
        if len(residence.parts) == 1:
            continue
        num_cached, num_rows = chunk.sequence.num_cached, chunk.num_tokens
        seen = first_seen(num_cached, window)
        for index, part in enumerate(residence.parts[: residence.index_of(num_cached)]):
            if part.end > seen:
                beyond = num_cached + num_rows - part.end
                where = (part.holder, index, part.part_id)
                closed.append(ClosedPart(*where, part.num_tokens, beyond, int(start), num_rows))
    return tuple(sorted(closed, key=_BY_PART)) if closed else ()


def _closed_of_pass(passed: StagePass, num_rows: int, num_holders: int) -> tuple[ClosedPart, ...]:
    """Raises ProtocolError: no step has such closed parts."""
    if passed.closed is None or passed.closed_ids is None:
        return ()
    shape = len(passed.closed_ids), len(CLOSED_FIELDS)
    if passed.closed.shape != shape or not shape[0] or int(passed.closed.min()) < 0:
        raise ProtocolError("a step came with closed parts that can't be")
    closed = tuple(
        ClosedPart(HolderId(holder), part, part_id, *numbers)
        for part_id, (holder, part, *numbers) in zip(
            passed.closed_ids.tolist(), passed.closed.tolist(), strict=True
        )
    )
    are_there = all(
        one.holder < num_holders
        and one.num_tokens > 0 < one.num_rows
        and one.first_row + one.num_rows <= num_rows
        for one in closed
    )
    if not are_there or list(closed) != sorted(closed, key=_BY_PART):
        raise ProtocolError("a step came with closed parts that can't be")
    return closed


_BY_PART: Final = attrgetter("holder", "part", "first_row")


def _with_closed_parts(spans: list[HolderSpan], closed: Seq[ClosedPart]) -> list[HolderSpan]:
    """The spans, and the closed parts that their holders have, or others."""
    begin = spans[0].begin
    by_holder = {
        holder: list(parts) for holder, parts in itertools.groupby(closed, attrgetter("holder"))
    }
    spans = [
        _with_closed(span, by_holder.pop(span.holder)) if span.holder in by_holder else span
        for span in spans
    ]
    none = np.zeros(0, np.int32)
    for holder, parts in by_holder.items():  # nothing grows there
        nothing = BeginStep(begin.step, begin.lane, np.zeros(0, np.int64), none, none, none, none)
        spans.append(_with_closed(HolderSpan(holder, nothing, slice(0, 0), slice(0, 0)), parts))
    return spans


def _with_closed(span: HolderSpan, closed: list[ClosedPart]) -> HolderSpan:
    """The span, and the closed parts that the holder has."""
    ids = np.array([part.part_id for part in closed], np.int64)
    columns = [(part.num_tokens, part.num_rows, part.num_beyond) for part in closed]
    num_tokens, num_rows, num_beyond = np.array(columns, np.int32).T.copy()
    begin, nothing = span.begin, np.zeros_like(num_tokens)
    begin = structs.replace(
        begin,
        sequence_ids=np.concatenate((begin.sequence_ids, ids)),
        num_past=np.concatenate((begin.num_past, num_tokens)),
        num_new=np.concatenate((begin.num_new, nothing)),
        num_queries=np.concatenate((begin.num_queries, num_rows)),
        num_visible=np.concatenate((begin.num_visible, num_tokens)),
        num_beyond=np.concatenate((np.zeros_like(begin.num_new), num_beyond)),
        want_lse=True,
    )
    by_part = itertools.groupby(closed, key=attrgetter("part"))
    rows = tuple(
        ClosedRows(part, np.concatenate([one.rows for one in members])) for part, members in by_part
    )
    return replace(
        span,
        begin=begin,
        load_tokens=span.load_tokens + int(num_tokens.sum()),
        num_prompt_tokens=span.num_prompt_tokens + int(num_rows[num_rows > 1].sum()),
        closed=rows,
    )

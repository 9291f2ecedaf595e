"""The rows of a step by holder: what each gets of q, k and v, and what the
S-worker attends. ``fastdecode.engine.step.layout`` has the picture."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import Holder, HolderId, Part
from fastdecode.schedule.plan import Chunk
from fastdecode.wire.messages import BeginStep
from fastdecode.wire.stages import StagePass

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
class HolderCounts:
    """What a step asks of one holder."""

    load_tokens: int
    """Cached tokens that it attends to; of a prompt's chunk, those of its past."""
    num_prompt_tokens: int
    """That it stores, or that its closed parts attend."""


@dataclass(frozen=True)
class HolderSpan:
    """The rows of one step that belong to one holder."""

    holder: HolderId
    begin: BeginStep
    rows: slice
    """All rows: k and v."""
    query_rows: slice
    """The leading rows whose q the holder attends."""
    counts: HolderCounts
    closed: tuple[ClosedRows, ...] = ()
    """Whose q comes behind those: rows of sequences with closed parts here."""


@dataclass(frozen=True)
class LocalSpan:
    """Consecutive rows that the S-worker attends: prompt chunks, one after another."""

    rows: slice
    starts: tuple[int, ...]
    """First row of each chunk, relative to the span, and the span's length last."""
    merge: bool
    """Later chunks: merge with what the holder says of their past."""


@dataclass(frozen=True)
class Columns:
    """Chunks in the order of their rows, as arrays [N]."""

    holders: NDArray[np.int64]
    kinds: NDArray[np.int64]
    part_ids: NDArray[np.int64]
    first_tokens: NDArray[np.int32]
    """Of the parts that the chunks go to."""
    past: NDArray[np.int32]
    """Tokens that those parts have."""
    lengths: NDArray[np.int32]
    starts: NDArray[np.int64]
    """First rows."""

    @classmethod
    def of(cls, chunks: Seq[Chunk], homes: Seq[Part], keys: Seq[int]) -> Columns:
        holders, kinds = np.divmod(np.array(keys, np.int64), NUM_KINDS)
        first_tokens = np.array([part.first_token for part in homes], np.int32)
        lengths = np.array([chunk.num_tokens for chunk in chunks], np.int32)
        return cls(
            holders,
            kinds,
            part_ids=np.array([part.part_id for part in homes], np.int64),
            first_tokens=first_tokens,
            past=np.array([chunk.first for chunk in chunks], np.int32) - first_tokens,
            lengths=lengths,
            starts=np.cumsum(lengths, dtype=np.int64) - lengths,
        )

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

    @property
    def num_rows(self) -> int:
        return int(self.starts[-1] + self.lengths[-1])

    @property
    def last_rows(self) -> NDArray[np.int64]:
        """Of each chunk."""
        rows: NDArray[np.int64] = self.starts + self.lengths - 1
        return rows

    @property
    def num_decoding(self) -> int:
        return int((self.kinds == DECODE).sum())

    def lay_out(self, step: int, lane: int) -> tuple[list[HolderSpan], list[LocalSpan]]:
        """What each holder gets, and what the S-worker attends."""
        spans: list[HolderSpan] = []
        local: list[LocalSpan] = []
        for holder, members in self.by_holder():
            spans.append(_span(holder, members, step, lane))
            local += _local_spans(members)
        return spans, local

    def by_holder(self) -> Iterable[tuple[HolderId, Columns]]:
        """Each holder's chunks."""
        ids, firsts = np.unique(self.holders, return_index=True)
        for holder, first, end in zip(
            ids.tolist(), firsts, (*firsts[1:], len(self.holders)), strict=True
        ):
            members = slice(first, end)
            yield (
                HolderId(holder),
                Columns(
                    self.holders[members],
                    self.kinds[members],
                    self.part_ids[members],
                    self.first_tokens[members],
                    self.past[members],
                    self.lengths[members],
                    self.starts[members],
                ),
            )


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
    # What a first chunk has is nothing, and one that decodes also attends to its own token.
    counts = HolderCounts(int(past.sum()) + num_decoding, num_rows - num_decoding)
    first = int(columns.starts[0])
    return HolderSpan(
        holder,
        begin,
        slice(first, first + num_rows),
        slice(first, first + int(queries.sum())),
        counts,
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

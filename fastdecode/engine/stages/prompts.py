"""Steps of prompts on stages of their own: what the first stage does of them, and
how a prompt stage attends.

Such steps have lanes of their own, behind those of tokens. Their K and V are only
stored by R-workers, so a prompt stage attends its chunks itself. A prompt that
takes several steps keeps K and V of its earlier chunks here until it is done, in
the lane's **room** for one prompt: the scheduler begins no second such prompt in a
lane before the first is done. What is cached of a prompt and isn't in the room, its
**past**, is fetched from R-workers layer by layer: kept blocks that it begins with,
and what is left of one whose R-worker was lost. A split sequence's past is in several
parts, each at an R-worker of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import Holder, HolderId
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.step.attention import Attention, Begun, StepRecord
from fastdecode.engine.step.batch import HolderSpan, LocalSpan, StepBatch
from fastdecode.engine.step.device_memory import DeviceMemory
from fastdecode.engine.step.prompts import HeldChunks
from fastdecode.engine.step.remote import AttentionPlan, RemotePart
from fastdecode.wire.blocks import (
    MAX_CHUNK_BYTES,
    ChunkForm,
    FetchChunk,
    PastTokens,
    StoreChunk,
)
from rworker.stream.chunks import ChunkShape, layout_of
from sworker.paged import PagedKV, Prompt
from sworker.worker import SWorker


class LanePrompts:
    """Prompts under way on a prompt stage, at most one in a lane.

    Args:
        cache: on the stage's device; holds them and nothing else.
        first_lane: the first of prompts.
        most_tokens: of a prompt.
    """

    def __init__(self, cache: PagedKV, first_lane: int, most_tokens: int) -> None:
        self._cache = cache
        self._first_lane = first_lane
        self._most_tokens = most_tokens
        self._rooms: dict[int, tuple[frozenset[int], int]] = {}
        """By lane: the parts of a sequence, by their ids, and its tokens there."""

    def begin(self, batch: StepBatch) -> tuple[HeldChunks, Past | None] | None:
        """Begin a step. Return None if all of its prompts begin and end with it.

        Returns:
            The prompt that takes several steps, or begins behind what is cached, and
            what is still to be fetched.

        Raises:
            ProtocolError: If no first stage runs prompts like that.
        """
        lane = batch.spans[0].begin.lane
        base = (lane - self._first_lane) * self._most_tokens
        if not 0 <= base < self._cache.num_slots:
            raise ProtocolError(f"lane {lane} isn't one of prompts")
        under_way = [
            (span, index) for span in batch.spans for index in self._under_way(batch, span)
        ]
        if len(under_way) > 1:
            raise ProtocolError(f"{len(under_way)} prompts at a time are under way in lane {lane}")
        if not under_way:
            return None
        ((span, index),) = under_way
        begin = span.begin
        new = int(begin.num_new[index])
        first = span.rows.start + int(begin.num_new[:index].sum())
        rows, past = slice(first, first + new), int(batch.positions[first])
        parts = _parts(batch, span, index, rows)
        num_here = self._note(lane, frozenset(part.sequence_id for part in parts), past, new)
        slots = torch.arange(base, base + past + new, device=self._cache.pool.device)
        stored = ((rows, slots[past:]),)
        later: tuple[tuple[Prompt, ...], ...] = ()
        if past:
            # No row sees tokens before the first part that is named.
            later = ((Prompt(rows, slots[parts[0].tokens.start :]),),)
            batch = _attended_here(batch, span)
        missing = [x for part in parts if (x := part.behind(num_here)).tokens]
        lacking = Past(self._cache, span.holder, missing, slots) if missing else None
        return HeldChunks(batch, self._cache, stored, later, ()), lacking

    def _under_way(self, batch: StepBatch, span: HolderSpan) -> list[int]:
        """Which of a holder's sequences were begun before, or don't end here."""
        num_new = span.begin.num_new[span.begin.num_new > 0]  # closed parts are behind them
        if (num_new < 2).any():
            raise ProtocolError("a step of prompts has a row that decodes")
        first = int(np.searchsorted(batch.last_rows, span.rows.start))
        draws = batch.draws[first : first + len(num_new)]
        past = batch.positions[span.rows.start + np.cumsum(num_new) - num_new]
        under_way: list[int] = np.flatnonzero((past > 0) | ~draws).tolist()
        return under_way

    def _note(self, lane: int, part_ids: frozenset[int], past: int, new: int) -> int:
        """A lane's prompt goes on, or begins. How many of the tokens before it are in
        the room; more may be, of a step that counts no more."""
        there, num_there = self._rooms.get(lane, (frozenset(), 0))
        num_here = min(past, num_there) if there & part_ids else 0
        if past + new > self._most_tokens:
            raise ProtocolError(f"a prompt of {past + new} tokens; {self._most_tokens} is the most")
        self._rooms[lane] = part_ids, past + new
        return num_here


def _attended_here(batch: StepBatch, span: HolderSpan) -> StepBatch:
    """The step, as its holders see it: none attends anything, and what goes on
    from an earlier step, the only one of its kind, isn't attended to itself alone."""
    own = _without_closed(span)
    nothing = np.zeros_like(own.begin.num_queries)
    begin = structs.replace(own.begin, num_queries=nothing, want_lse=False)
    own = replace(own, begin=begin, query_rows=slice(span.rows.start, span.rows.start))
    growing = [one for one in batch.spans if one.rows.start < one.rows.stop]
    spans = tuple(own if one is span else _without_closed(one) for one in growing)
    local: tuple[LocalSpan, ...] = tuple(one for one in batch.local if not one.merge)
    return replace(batch, spans=spans, local=local, closed=())


def _without_closed(span: HolderSpan) -> HolderSpan:
    """The span without closed parts, which no holder attends."""
    if not span.closed:
        return span
    begin, own = span.begin, span.begin.num_new > 0
    begin = structs.replace(
        begin,
        sequence_ids=begin.sequence_ids[own],
        num_past=begin.num_past[own],
        num_new=begin.num_new[own],
        num_queries=begin.num_queries[own],
        num_visible=begin.num_visible[own],
        num_beyond=None,
        want_lse=False,
    )
    return replace(span, begin=begin, closed=())


@dataclass(frozen=True)
class PastPart:
    """Where consecutive tokens of a sequence are cached."""

    holder: HolderId
    sequence_id: int
    """What the part is called there."""
    first_token: int
    """Of the part."""
    tokens: range
    """Which tokens, counted in the sequence."""

    def behind(self, num_tokens: int) -> PastPart:
        """Without a sequence's first tokens."""
        return replace(self, tokens=range(max(self.tokens.start, num_tokens), self.tokens.stop))


def _parts(batch: StepBatch, span: HolderSpan, index: int, rows: slice) -> list[PastPart]:
    """Where the tokens before a chunk are cached that its rows see: closed parts, and
    the one that grows.

    Raises:
        ProtocolError: If other tokens come between them.
    """
    begin, past = span.begin, int(batch.positions[rows.start])
    parts = []
    for part in sorted(batch.closed, key=lambda part: part.part):
        if part.first_row == rows.start:
            end = past + part.num_rows - part.num_beyond
            first = end - part.num_tokens
            parts.append(PastPart(part.holder, part.part_id, first, range(first, end)))
    first = past - int(begin.num_past[index])
    own = PastPart(span.holder, int(begin.sequence_ids[index]), first, range(first, past))
    parts.append(own)
    follow = [a.tokens.stop == b.tokens.start for a, b in itertools.pairwise(parts)]
    if not all(follow) or parts[0].tokens.start < 0:
        raise ProtocolError("a prompt came with tokens missing between its parts")
    return parts


class Past:
    """Cached tokens of a sequence that a prompt stage fetches for a step.

    Args:
        cache: gets them.
        home: the holder that gets the tokens of the step.
        missing: where they are.
        slots: in the cache, int64 [L], of all of its tokens.
    """

    def __init__(
        self, cache: PagedKV, home: HolderId, missing: Seq[PastPart], slots: Tensor
    ) -> None:
        self.home = home
        self.holders = frozenset(part.holder for part in missing)
        """They have them."""
        self._slots, self._kv, self._memory = slots, cache.kv, DeviceMemory(cache)
        self._missing = {part.sequence_id: part for part in missing}
        kv = cache.kv
        shape = ChunkShape(layout_of(kv), ChunkForm.TOKENS, 1, kv.num_kv_heads, 1)
        self._most = max(1, (MAX_CHUNK_BYTES - shape.padding_bytes) // shape.unit_bytes)
        num_tokens = sum(len(part.tokens) for part in missing)
        self._num_due = dict.fromkeys(range(kv.num_layers), num_tokens)  # by layer

    def questions(self, lane: int) -> Iterator[FetchChunk]:
        """For all layers, the first one first."""
        for layer, part in itertools.product(self._num_due, self._missing.values()):
            for first in part.tokens[:: self._most]:
                num_tokens = min(self._most, part.tokens.stop - first)
                ids = np.array([part.sequence_id], np.int64)
                at = np.array([first - part.first_token], np.int32)
                count = np.array([num_tokens], np.int32)
                sides = layer, 1, 0, self._kv.num_kv_heads
                form = ChunkForm.TOKENS
                yield FetchChunk(form, *sides, ids, at, count, part.holder, lane=lane)

    def is_here(self, layer: int) -> bool:
        """Whether all of a layer has come."""
        return not self._num_due[layer]

    def place(self, past: PastTokens) -> None:
        """A part of it has come.

        Raises:
            ProtocolError: If it isn't what was asked for.
        """
        asked, first_head = past.asked, 0
        num_tokens = int(asked.num_tokens[0])
        first = self._missing[int(asked.sequence_ids[0])].first_token + int(asked.first_tokens[0])
        slots = self._slots[first : first + num_tokens].cpu()
        for data in past.parts:
            chunk = self._chunk(asked, data, first_head)
            self._memory.place_chunk(chunk, slots.numpy())
            first_head += chunk.num_heads
        if first_head != self._kv.num_kv_heads:
            raise ProtocolError(f"K and V of {first_head} of {self._kv.num_kv_heads} heads came")
        self._num_due[asked.first_layer] -= num_tokens

    def _chunk(self, asked: FetchChunk, data: NDArray[np.uint8], first_head: int) -> StoreChunk:
        """What a member has sent: of so many heads as its size says.

        Raises:
            ProtocolError: If no number of heads has that size.
        """
        kv, num_tokens = self._kv, int(asked.num_tokens[0])
        for num_heads in range(1, kv.num_kv_heads - first_head + 1):
            shape = ChunkShape(layout_of(kv), ChunkForm.TOKENS, 1, num_heads, num_tokens)
            if shape.num_bytes == data.nbytes:
                at = asked.sequence_ids, asked.first_tokens, asked.num_tokens
                sides = asked.first_layer, 1, first_head, num_heads
                return StoreChunk("", kv, ChunkForm.TOKENS, *sides, *at, data)
        raise ProtocolError(f"{data.nbytes} bytes came for {num_tokens} tokens of a layer")


@dataclass(frozen=True)
class PromptPlan(AttentionPlan):
    """Makes the steps of a prompt stage.

    Args:
        rooms: for prompts under way.
    """

    rooms: LanePrompts | None = None

    def begin(self, batch: StepBatch, s_worker: SWorker) -> tuple[StepRecord, Begun]:
        """Begin a step. See ``Attention``."""
        assert self.rooms is not None
        begun = self.rooms.begin(batch)
        if begun is None:
            return self.begin_merging(batch)
        chunks, past = begun
        if past is None:
            return self.begin_merging(chunks.batch, chunks)
        record, made = self.begin_merging(chunks.batch)
        assert made.remote is not None
        part = FetchingPart(chunks, past, made.remote)
        for question in past.questions(chunks.batch.spans[0].begin.lane):
            self.fleet.send(HolderId(question.holder), question)
        return record, made._replace(parts=(*made.parts, part))


class FetchingPart:
    """Rows of a prompt whose past is fetched: each layer waits for its part of it. See
    ``AttentionPart``.

    Args:
        chunks: of the prompt.
        past: before it.
        remote: Gathers o.
    """

    def __init__(self, chunks: HeldChunks, past: Past, remote: RemotePart) -> None:
        self._chunks, self._past, self._remote = chunks, past, remote
        self._waiting: tuple[int, Tensor, Tensor, Tensor] | None = None
        """A layer whose past isn't here, with q, k and v."""
        self._is_over = False
        """Part of the past is lost: the prompt's rows mean nothing any more."""

    def scatter(self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None) -> None:
        """Keep a layer until its past is here."""
        self._waiting = layer, q, k, v

    def ready(self) -> bool:
        """Attend the prompt once its past is here; until then the layer isn't ready."""
        lost = self._remote.record.lost
        if self._waiting is None or self._is_over or lost & {self._past.home, *self._past.holders}:
            return True
        layer, q, k, v = self._waiting
        if not self._past.is_here(layer):
            return False
        self._chunks.run(layer, q, k, v, self._remote.o)
        self._waiting = None
        return True

    def deliver_past(self, holder: HolderId, past: PastTokens) -> None:
        """Take in some of the past. See ``ReadsPast``."""
        if holder not in self._past.holders:
            raise ProtocolError(f"holder {holder} sent tokens that another one was asked for")
        if past.is_dropped:
            self._is_over = True
        else:
            self._past.place(past)

    def take(self, o: Tensor | None) -> Tensor:
        """Leave o as it is: it has the prompt's rows."""
        assert o is not None
        return o


class ApartAttention:
    """Begins steps of the first stage, where prompts run on others.

    Args:
        tokens: of steps that decode.
        first_lane: the first of prompts.
    """

    def __init__(self, tokens: Attention, first_lane: int) -> None:
        self._tokens = tokens
        self._first_lane = first_lane

    @property
    def fleet(self) -> HolderPool:
        return self._tokens.fleet

    @property
    def holders(self) -> Seq[Holder]:
        return self._tokens.holders

    def begin(self, batch: StepBatch, s_worker: SWorker) -> tuple[StepRecord, Begun]:
        """See ``Attention``. Steps of prompts are only embedded."""
        lane = batch.spans[0].begin.lane
        if lane < self._first_lane:
            assert not batch.num_prompt_tokens, "a step that decodes has a prompt's rows"
            return self._tokens.begin(batch, s_worker)
        assert not batch.num_decoding, "a step of prompts has a row that decodes"
        return StepRecord(batch.spans), Begun(forward=s_worker.embed(batch.rows, lane))

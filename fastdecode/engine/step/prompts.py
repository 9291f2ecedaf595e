"""Prompts that run in several chunks, and whose KV goes to R-workers: until such
a prompt is done, its K and V stay on the S-worker's device, too.

Else R-workers would have to attend what they hold of earlier chunks, and the
lane would wait for them in every layer. So they only store, chunk by chunk,
behind what the S-worker computes, and the prompt's last chunk finds them with
all but its own tokens. A prompt for which there is no room on the device goes
the other way, and so does one that begins with blocks that R-workers keep.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from fastdecode.core.dtype import DType
from fastdecode.core.sequence import Sequence
from fastdecode.core.spec import AttentionSpec
from fastdecode.engine.step.batch import HolderSpan, LocalSpan, StepBatch
from fastdecode.engine.step.merge import Merge
from fastdecode.schedule.plan import Chunk
from sworker.paged import ChunkWork, PagedKV, Prompt, Window
from sworker.prefill import as_cached, local_causal_attention

if TYPE_CHECKING:
    from fastdecode.engine.step.remote import RemotePart


@dataclass(eq=False)
class _DevicePrompt:
    """A prompt's place on the device, as long as it lives: while the prompt is
    under way, and the steps that use it."""

    room: range
    """Its slots."""
    slots: Tensor  # int64 [len(room)], on the device
    num_before: int = 0
    """Tokens that are there when its last step begins."""
    num_tokens: int = 0
    """And when that ends."""

    def next_slots(self, num_tokens: int) -> Tensor:
        """Take the slots of the next tokens."""
        self.num_before = self.num_tokens
        self.num_tokens += num_tokens
        return self.slots[self.num_before : self.num_tokens]


@dataclass(frozen=True)
class HeldChunks:
    """A step's chunks of prompts that are held.

    Args:
        batch: The step without the rows that are attended here.
    """

    batch: StepBatch
    _cache: PagedKV
    _stored: tuple[tuple[slice, Tensor], ...]
    """Rows and their slots."""
    _later: tuple[tuple[Prompt, ...], ...]
    """Chunks that see more than themselves, by stretches of rows."""
    _kept: tuple[object, ...]
    """Their places, as long as the step needs them."""
    _work: dict[int, dict[Window, ChunkWork]] = field(default_factory=dict)
    """How the attention of each stretch is divided, as the first layer has found."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        """Keep a layer's k and v [T, Hkv, D] of these rows, and attend q [T, Hq,
        D] of later chunks → their rows of o [T, Hq, D]."""
        for rows, slots in self._stored:
            self._cache.store(layer, k[rows], v[rows], slots)
        for index, chunks in enumerate(self._later):
            work = self._work.setdefault(index, {})
            self._cache.attend_later(layer, q, chunks, o, work)


class PromptPart:
    """Prompt chunks of one step that the S-worker attends. See ``AttentionPart``.

    Args:
        local: Rows that it attends as they are.
        merge: Merges these rows with what R-workers say of them, and with sinks.
        held: Rows that the device attends in a cache of its own.
    """

    def __init__(
        self,
        specs: Seq[AttentionSpec],
        kv_dtype: DType,
        local: Seq[LocalSpan],
        remote: RemotePart,
        merge: Merge | None = None,
        held: HeldChunks | None = None,
    ) -> None:
        self._specs, self._kv_dtype, self._local = specs, kv_dtype, local
        self._remote, self._merge, self._held = remote, merge, held

    def scatter(self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None) -> None:
        """Attend a layer's chunks."""
        o, merge = self._remote.o, self._merge
        if self._held is not None:
            self._held.run(layer, q, k, v, o)
        has_sinks = merge is not None and merge.has_sinks
        for local in self._local:
            rows = local.rows
            # Attend to K and V as the cache will hold them, so that where a prompt
            # is cut leaves no trace.
            k_seen, v_seen = (as_cached(x[rows], self._kv_dtype) for x in (k, v))
            want_lse = local.merge or has_sinks
            o[rows], lse = local_causal_attention(
                q[rows], k_seen, v_seen, local.starts, self._specs[layer], want_lse=want_lse
            )
            if merge is not None and lse is not None:
                merge.attended(local, lse)

    def ready(self) -> bool:
        """Return True: what is queued on a device is not waited for."""
        return True

    def take(self, o: Tensor | None) -> Tensor:
        """Leave o as it is: it has the chunks' rows."""
        assert o is not None
        return o


class DevicePrefill:
    """The prompts that are held; for all lanes of one engine.

    Args:
        cache: on the device; holds them and nothing else.
    """

    def __init__(self, cache: PagedKV) -> None:
        self._cache = cache
        self._prompts: WeakKeyDictionary[Sequence, _DevicePrompt] = WeakKeyDictionary()
        self._rooms: WeakSet[_DevicePrompt] = WeakSet()

    @property
    def num_held(self) -> int:
        """Slots that are taken."""
        return sum(len(held.room) for held in self._rooms)

    def begin(self, batch: StepBatch) -> HeldChunks | None:
        """Begin a step. Return None if it has no such prompts."""
        if not batch.local:
            return None
        stored: list[tuple[slice, Tensor]] = []
        later: list[tuple[Prompt, ...]] = []
        kept: list[_DevicePrompt] = []
        local: list[LocalSpan] = []
        spans = list(batch.spans)
        for span in batch.local:
            chunks = list(_chunks(batch, span))
            take = self._held if span.merge else self._take
            found = [take(chunk) for _, chunk in chunks]
            if span.merge and None in found:
                for _, chunk in chunks:
                    self._prompts.pop(chunk.sequence, None)
                local.append(span)
                continue
            prompts: list[Prompt] = []
            for (rows, chunk), held in zip(chunks, found, strict=True):
                if held is not None:
                    stored.append((rows, held.next_slots(chunk.num_tokens)))
                    prompts.append(Prompt(rows, held.slots[: held.num_tokens]))
                    kept.append(held)
                    if chunk.num_tokens == chunk.sequence.num_uncached:  # its last chunk
                        del self._prompts[chunk.sequence]
            if span.merge:
                later.append(tuple(prompts))
                first = span.rows.start
                index = next(i for i, x in enumerate(spans) if x.rows.start <= first < x.rows.stop)
                spans[index] = _without_queries(spans[index], batch, span)
            else:
                local.append(span)
        if not stored:
            return None
        seen = replace(batch, spans=tuple(spans), local=tuple(local))
        return HeldChunks(seen, self._cache, tuple(stored), tuple(later), tuple(kept))

    def _take(self, chunk: Chunk) -> _DevicePrompt | None:
        """Return a place for a prompt that begins. None if it runs in one chunk, or there is no
        room for all of it."""
        sequence, length = chunk.sequence, len(chunk.sequence.token_ids)
        self._prompts.pop(sequence, None)  # it ran before, and was lost
        if chunk.num_tokens == length or not _is_whole(sequence) or sequence.behind_gap:
            return None
        for other, held in list(self._prompts.items()):
            # It does not continue where it was: it was lost or cancelled.
            if other.num_cached not in (held.num_before, held.num_tokens):
                del self._prompts[other]
        room = self._free(length)
        if room is None:
            return None
        slots = torch.arange(room.start, room.stop, device=self._cache.pool.device)
        held = self._prompts[sequence] = _DevicePrompt(room, slots)
        self._rooms.add(held)
        return held

    def _held(self, chunk: Chunk) -> _DevicePrompt | None:
        """Return the place of a prompt. None if it lacks tokens before this chunk."""
        held = self._prompts.get(chunk.sequence)
        return held if held is not None and held.num_tokens == chunk.first else None

    def _free(self, num_slots: int) -> range | None:
        """Return the first ``num_slots`` free slots in a row. None if there are none."""
        first = 0
        for room in sorted((held.room for held in self._rooms), key=lambda room: room.start):
            if room.start - first >= num_slots:
                break
            first = room.stop
        return (
            range(first, first + num_slots) if first + num_slots <= self._cache.num_slots else None
        )


def _chunks(batch: StepBatch, span: LocalSpan) -> Iterable[tuple[slice, Chunk]]:
    """A stretch's chunks, each with its rows."""
    for start in span.starts[:-1]:
        first = span.rows.start + start
        index = int(np.searchsorted(batch.last_rows, first))
        yield slice(first, int(batch.last_rows[index]) + 1), batch.chunks[index]


def _is_whole(sequence: Sequence) -> bool:
    """Return True if all of it is in one place."""
    return sequence.residence is not None and len(sequence.residence.parts) == 1


def _without_queries(span: HolderSpan, batch: StepBatch, local: LocalSpan) -> HolderSpan:
    """Return the span of a holder that stores these later chunks, and attends nothing for them."""
    begin = span.begin
    first, end = np.searchsorted(batch.last_rows, (span.rows.start, span.rows.stop))
    own_rows = batch.last_rows[first:end]
    is_later = (local.rows.start <= own_rows) & (own_rows < local.rows.stop)
    num_seen = span.load_tokens - int(begin.num_past[: len(own_rows)][is_later].sum())
    num_queries = begin.num_queries.copy()
    num_queries[: len(own_rows)][is_later] = 0  # closed parts are behind them
    is_split = not all(map(_is_whole, [chunk.sequence for chunk in batch.chunks[first:end]]))
    begin = structs.replace(begin, num_queries=num_queries, want_lse=is_split or bool(span.closed))
    return replace(
        span,
        begin=begin,
        query_rows=slice(span.query_rows.start, local.rows.start),
        load_tokens=num_seen,
    )

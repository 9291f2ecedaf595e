"""Cuts pieces into chunks: what to ask a source for, and what to send the target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ConfigError
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import MAX_CHUNK_BYTES, MAX_PIECES, ChunkForm, FetchChunk, StoreChunk
from fastdecode.wire.codec import Array
from rworker.stream.chunks import ChunkShape, layout_of
from rworker.stream.pieces import Piece


@dataclass(frozen=True)
class CacheKind:
    """What has to be known of a cache before anything is sent to it."""

    model_hash: str
    kv: KVSpec

    def check_takes(self, other: CacheKind) -> None:
        """
        Raises:
            ConfigError: what the other cache holds can't be put in this one as
                it is.
        """
        mine, theirs = self.kv, other.kv
        for what, wanted, given in (
            ("the model", self.model_hash, other.model_hash),
            ("KV dtype", mine.dtype.value, theirs.dtype.value),
            ("head_dim", mine.head_dim, theirs.head_dim),
        ):
            if wanted != given:
                raise ConfigError(f"K and V of {what} {given} can't go to a cache of {wanted}")


@dataclass(frozen=True, eq=False)
class TokenRuns:
    """Consecutive tokens of N sequences, as both sides call and count them."""

    source_ids: NDArray[np.int64]  # [N]
    target_ids: NDArray[np.int64]  # [N]
    at_source: NDArray[np.int32]  # [N]
    at_target: NDArray[np.int32]  # [N]
    num_tokens: NDArray[np.int32]  # [N]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]]) -> TokenRuns:
        """A row of each field's value for every sequence; one at least."""
        dtypes = np.int64, np.int64, np.int32, np.int32, np.int32
        return cls(*map(np.array, zip(*rows, strict=True), dtypes))

    def rows(self) -> Iterator[tuple[int, ...]]:
        """See ``of``."""
        fields = self.source_ids, self.target_ids, self.at_source, self.at_target, self.num_tokens
        return zip(*[field.tolist() for field in fields], strict=True)

    def part(self, starts: NDArray[np.int32], ends: NDArray[np.int32]) -> TokenRuns:
        """Some tokens of each, [N]; runs of which there are none are left out."""
        some = ends > starts
        starts, num_tokens = starts[some], (ends - starts)[some]
        ids = self.source_ids[some], self.target_ids[some]
        return TokenRuns(
            *ids, self.at_source[some] + starts, self.at_target[some] + starts, num_tokens
        )

    @cached_property
    def total(self) -> int:
        """Tokens of all."""
        return int(self.num_tokens.sum(dtype=np.int64))


@dataclass(eq=False, slots=True)
class ChunkCut:
    """One chunk: read this, and send it as that."""

    request: FetchChunk
    num_bytes: int
    target: CacheKind
    to_layer: int
    to_head: int
    runs: TokenRuns

    def filled(self, data: Array) -> StoreChunk:
        """The chunk, once what was asked for is here."""
        asked, runs = self.request, self.runs
        return StoreChunk(
            self.target.model_hash,
            self.target.kv,
            asked.form,
            self.to_layer,
            asked.num_layers,
            self.to_head,
            asked.num_heads,
            runs.target_ids,
            runs.at_target,
            runs.num_tokens,
            data,
        )


def cut_pieces(
    pieces: Sequence[Piece],
    source: CacheKind,
    target: CacheKind,
    most_bytes: int = MAX_CHUNK_BYTES,
) -> Iterator[ChunkCut]:
    """Chunks of all pieces from one cache to another, as ``cut_runs`` has them.

    Args:
        pieces: of each part, tokens from one on only (``turns``).
        most_bytes: of a chunk.

    Raises:
        ConfigError: the target can't take what the source has.
    """
    target.check_takes(source)
    for (layers, to_layers, heads, to_heads), runs in _by_sides(pieces).items():
        sides = (layers, to_layers[0]), (heads, to_heads[0])
        yield from cut_runs(runs, source, target, *sides, most_bytes)


def cut_runs(
    runs: TokenRuns,
    source: CacheKind,
    target: CacheKind,
    layers: tuple[range, int],
    heads: tuple[range, int],
    most_bytes: int = MAX_CHUNK_BYTES,
) -> Iterator[ChunkCut]:
    """Chunks of all runs, layer by layer where more than one chunk is needed. Whole
    blocks travel as they lie, if both caches' blocks are of one size; what else there
    is, as tokens.

    Args:
        layers, heads: of the source, and where the target's begin.
        most_bytes: of a chunk.
    """
    block_size = source.kv.block_size
    forms = _forms(runs, block_size if block_size == target.kv.block_size else None)
    yield from _Cutter(source, target, most_bytes, forms, *heads).cut(*layers)


def _by_sides(pieces: Sequence[Piece]) -> dict[tuple[range, range, range, range], TokenRuns]:
    """Runs that may share chunks: they have layers and heads in common."""
    sides: dict[tuple[range, range, range, range], list[tuple[int, ...]]] = {}
    for piece in pieces:
        here, there = piece.at_source, piece.at_target
        both = here.layers, there.layers, here.heads, there.heads
        ids = int(piece.source.part_id), int(piece.target.part_id)
        run = *ids, here.tokens.start, there.tokens.start, len(here.tokens)
        sides.setdefault(both, []).append(run)
    return {both: TokenRuns.of(runs) for both, runs in sides.items()}


def _forms(runs: TokenRuns, block_size: int | None) -> list[tuple[ChunkForm, TokenRuns]]:
    """In the order in which tokens follow: what precedes whole blocks, whole
    blocks, what is left."""
    ends = runs.num_tokens
    if block_size is None or (ends < block_size).all():
        return [(ChunkForm.TOKENS, runs)]
    starts = np.minimum(-runs.at_source % block_size, ends)
    stops = starts + (ends - starts) // block_size * block_size
    fits = (stops > starts) & ((runs.at_source - runs.at_target) % block_size == 0)
    starts, stops = starts * fits, stops * fits
    none = np.zeros_like(starts)
    forms = [
        (ChunkForm.TOKENS, runs.part(none, starts)),
        (ChunkForm.BLOCKS, runs.part(starts, stops)),
        (ChunkForm.TOKENS, runs.part(stops, ends)),
    ]
    return [(form, some) for form, some in forms if len(some.num_tokens)]


_Lot: TypeAlias = tuple[ChunkForm, range, int, TokenRuns, int]
"""Heads of the source, where the target's begin, tokens, and bytes of all."""


@dataclass(frozen=True)
class _Cutter:
    """Cuts runs of one form after the other, over the same heads."""

    source: CacheKind
    target: CacheKind
    most_bytes: int
    forms: list[tuple[ChunkForm, TokenRuns]]
    heads: range
    to_head: int

    def cut(self, layers: range, to_layer: int) -> Iterator[ChunkCut]:
        """As many layers to a chunk as it holds with all tokens, else one."""
        num_bytes = sum(self._shape(form, 1, runs).num_bytes for form, runs in self.forms)
        step = max(1, self.most_bytes // num_bytes)
        lots: list[_Lot] = []
        for first in range(0, len(layers), step):
            group = layers[first : first + step]
            if not lots or len(group) < step:
                lots = [lot for form in self.forms for lot in self._lots(*form, len(group))]
            for lot in lots:
                yield self._cut(lot, group, to_layer + first)

    def _lots(self, form: ChunkForm, runs: TokenRuns, num_layers: int) -> Iterator[_Lot]:
        """What chunks of so many layers hold, which layers ever they are."""
        shape = self._shape(form, num_layers, runs)
        room = self.most_bytes - shape.padding_bytes
        # Fewer heads only where a single block or token of all is too much.
        width = len(self.heads)
        head_bytes = shape.unit_bytes // width
        while width > 1 and head_bytes * width > room:
            width = -(-width // 2)
        num_units = max(1, room // (head_bytes * width))
        unit = self.source.kv.block_size if form is ChunkForm.BLOCKS else 1
        some = list(_fill(runs, num_units * unit))
        for first in range(0, len(self.heads), width):
            heads = self.heads[first : first + width]
            for lot in some:
                of_lot = replace(shape, num_heads=len(heads), num_tokens=lot.total)
                yield form, heads, self.to_head + first, lot, of_lot.num_bytes

    def _shape(self, form: ChunkForm, num_layers: int, runs: TokenRuns) -> ChunkShape:
        layout = layout_of(self.source.kv)
        return ChunkShape(layout, form, num_layers, len(self.heads), runs.total)

    def _cut(self, lot: _Lot, layers: range, to_layer: int) -> ChunkCut:
        form, heads, to_head, runs, num_bytes = lot
        request = FetchChunk(
            form,
            layers.start,
            len(layers),
            heads.start,
            len(heads),
            runs.source_ids,
            runs.at_source,
            runs.num_tokens,
        )
        return ChunkCut(request, num_bytes, self.target, to_layer, to_head, runs)


def _fill(runs: TokenRuns, most_tokens: int) -> Iterator[TokenRuns]:
    """Runs, cut where one has to be, so that no lot has more tokens."""
    if runs.total <= most_tokens and len(runs.num_tokens) <= MAX_PIECES:
        yield runs
        return
    lot, room = [], most_tokens
    for *ids, at_source, at_target, num_tokens in runs.rows():
        done = 0
        while done < num_tokens:
            num = min(num_tokens - done, room)
            lot.append((*ids, at_source + done, at_target + done, num))
            done, room = done + num, room - num
            if not room or len(lot) == MAX_PIECES:
                yield TokenRuns.of(lot)
                lot, room = [], most_tokens
    if lot:
        yield TokenRuns.of(lot)

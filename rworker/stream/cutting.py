"""Cuts pieces into chunks: what to ask a source for, and what the target is
then told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastdecode.core.errors import ConfigError
from fastdecode.core.spec import KVSpec
from fastdecode.wire.arrays import Array
from fastdecode.wire.kv.chunks import (
    MAX_CHUNK_BYTES,
    MAX_PIECES,
    ChunkForm,
    FetchChunk,
    StoreChunk,
)
from rworker.stream.chunks import ChunkShape, layout_of
from rworker.stream.pieces import Box, Piece


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


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens of one sequence, as both sides call and count them."""

    source_id: int
    target_id: int
    at_source: int
    at_target: int
    num_tokens: int

    def part(self, start: int, end: int) -> TokenRun:
        """Some of its tokens."""
        return replace(
            self,
            at_source=self.at_source + start,
            at_target=self.at_target + start,
            num_tokens=end - start,
        )


@dataclass(frozen=True)
class ChunkCut:
    """One chunk: read this, and send it as that."""

    request: FetchChunk
    header: StoreChunk
    """Without its data."""

    def filled(self, data: Array) -> StoreChunk:
        """The chunk, once what was asked for is here."""
        return replace(self.header, data=data)


def cut_pieces(
    pieces: Sequence[Piece],
    source: CacheKind,
    target: CacheKind,
    most_bytes: int = MAX_CHUNK_BYTES,
) -> Iterator[ChunkCut]:
    """Chunks of all pieces from one cache to another, layer by layer where more
    than one chunk is needed. Whole blocks travel as they lie, if both caches'
    blocks are of one size; what else there is, as tokens.

    Args:
        pieces: of each part, tokens from one on only (``turns``).
        most_bytes: of a chunk.

    Raises:
        ConfigError: the target can't take what the source has.
    """
    target.check_takes(source)
    block_size = source.kv.block_size
    as_blocks = block_size == target.kv.block_size
    for (layers, to_layers, heads, to_heads), runs in _by_sides(pieces).items():
        forms = _forms(runs, block_size if as_blocks else None)
        cutter = _Cutter(source, target, most_bytes, forms, heads, to_heads)
        yield from cutter.cut(layers, to_layers)


def _by_sides(pieces: Sequence[Piece]) -> dict[tuple[range, range, range, range], list[TokenRun]]:
    """Runs that may share chunks: they have layers and heads in common."""
    sides: dict[tuple[range, range, range, range], list[TokenRun]] = {}
    for piece in pieces:
        here, there = piece.at_source, piece.at_target
        both = here.layers, there.layers, here.heads, there.heads
        sides.setdefault(both, []).append(_run(piece, here, there))
    return sides


def _run(piece: Piece, here: Box, there: Box) -> TokenRun:
    return TokenRun(
        int(piece.source.part_id),
        int(piece.target.part_id),
        here.tokens.start,
        there.tokens.start,
        len(here.tokens),
    )


def _forms(
    runs: Sequence[TokenRun], block_size: int | None
) -> list[tuple[ChunkForm, list[TokenRun]]]:
    """In the order in which tokens follow: what precedes whole blocks, whole
    blocks, what is left."""
    before: list[TokenRun] = []
    whole: list[TokenRun] = []
    after: list[TokenRun] = []
    for run in runs:
        start, end = 0, 0
        if block_size is not None and (run.at_source - run.at_target) % block_size == 0:
            start = min(-run.at_source % block_size, run.num_tokens)
            end = start + (run.num_tokens - start) // block_size * block_size
        if end == start:
            start = end = 0
        if start:
            before.append(run.part(0, start))
        if end:
            whole.append(run.part(start, end))
        if end < run.num_tokens:
            after.append(run.part(end, run.num_tokens))
    forms = [ChunkForm.TOKENS, ChunkForm.BLOCKS, ChunkForm.TOKENS]
    return [(form, some) for form, some in zip(forms, (before, whole, after), strict=True) if some]


@dataclass(frozen=True)
class _Cutter:
    """Cuts runs of one form after the other, over the same heads."""

    source: CacheKind
    target: CacheKind
    most_bytes: int
    forms: list[tuple[ChunkForm, list[TokenRun]]]
    heads: range
    to_heads: range

    def cut(self, layers: range, to_layers: range) -> Iterator[ChunkCut]:
        """As many layers to a chunk as it holds with all tokens, else one."""
        num_bytes = sum(self._shape(form, 1, runs).num_bytes for form, runs in self.forms)
        step = max(1, self.most_bytes // num_bytes)
        for first in range(0, len(layers), step):
            group = layers[first : first + step]
            for form, runs in self.forms:
                yield from self._cut_form(form, runs, group, to_layers[first])

    def _cut_form(
        self, form: ChunkForm, runs: list[TokenRun], layers: range, to_layer: int
    ) -> Iterator[ChunkCut]:
        shape = self._shape(form, len(layers), runs)
        room = self.most_bytes - shape.padding_bytes
        # Fewer heads only where a single block or token of all is too much.
        width = len(self.heads)
        while width > 1 and replace(shape, num_heads=width).unit_bytes > room:
            width = -(-width // 2)
        num_units = max(1, room // replace(shape, num_heads=width).unit_bytes)
        unit = self.source.kv.block_size if form is ChunkForm.BLOCKS else 1
        for first in range(0, len(self.heads), width):
            heads = self.heads[first : first + width]
            for lot in _fill(runs, num_units * unit):
                yield self._cut(form, lot, (layers, to_layer), (heads, self.to_heads[first]))

    def _shape(self, form: ChunkForm, num_layers: int, runs: Sequence[TokenRun]) -> ChunkShape:
        num_tokens = sum(run.num_tokens for run in runs)
        layout = layout_of(self.source.kv)
        return ChunkShape(layout, form, num_layers, len(self.heads), num_tokens)

    def _cut(
        self,
        form: ChunkForm,
        runs: Sequence[TokenRun],
        layers: tuple[range, int],
        heads: tuple[range, int],
    ) -> ChunkCut:
        counts = np.array([run.num_tokens for run in runs], np.int32)
        request = FetchChunk(
            form,
            layers[0].start,
            len(layers[0]),
            heads[0].start,
            len(heads[0]),
            np.array([run.source_id for run in runs], np.int64),
            np.array([run.at_source for run in runs], np.int32),
            counts,
        )
        header = StoreChunk(
            self.target.model_hash,
            self.target.kv,
            form,
            layers[1],
            len(layers[0]),
            heads[1],
            len(heads[0]),
            np.array([run.target_id for run in runs], np.int64),
            np.array([run.at_target for run in runs], np.int32),
            counts,
            _NO_DATA,
        )
        return ChunkCut(request, header)


def _fill(runs: Sequence[TokenRun], most_tokens: int) -> Iterator[list[TokenRun]]:
    """Runs, cut where one has to be, so that no lot has more tokens."""
    lot: list[TokenRun] = []
    room = most_tokens
    for run in runs:
        start = 0
        while start < run.num_tokens:
            end = min(run.num_tokens, start + room)
            lot.append(run.part(start, end))
            room -= end - start
            start = end
            if room == 0 or len(lot) == MAX_PIECES:
                yield lot
                lot, room = [], most_tokens
    if lot:
        yield lot


_NO_DATA = np.zeros(0, np.uint8)

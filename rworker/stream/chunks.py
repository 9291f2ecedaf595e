"""How K and V lie in a chunk; see ``fastdecode.wire.blocks``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import BlockLayout, StoredTokens
from cpu_kernels.layout import CARRIERS
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import ChunkForm, ExpectTokens, FetchChunk, ReadBlocks, StoreChunk
from fastdecode.wire.codec import ALIGNMENT, aligned

_SCALE_BYTES = 8
"""Of a token and head: of K and of V."""
_REMEMBERED = 64
"""Caches have few shapes, and every chunk asks for the same."""


@lru_cache(_REMEMBERED)
def layout_of(kv: KVSpec) -> BlockLayout:
    """How a cache's blocks lie.

    Raises:
        ValueError: there are none like that.
    """
    return BlockLayout(kv.num_kv_heads, kv.head_dim, kv.dtype.value, kv.block_size)


@dataclass(frozen=True)
class ChunkShape:
    """What a chunk holds: so many tokens of all its sequences, of so many
    layers and heads.

    Args:
        layout: of the cache that it is of.
    """

    layout: BlockLayout
    form: ChunkForm
    num_layers: int
    num_heads: int
    num_tokens: int
    """Of all pieces together; whole blocks in that form."""

    @classmethod
    def of(
        cls,
        layout: BlockLayout,
        chunk: StoreChunk | FetchChunk | ReadBlocks,
        num_tokens: int | None = None,
    ) -> ChunkShape:
        """``num_tokens``: where they have been counted already."""
        if num_tokens is None:
            num_tokens = int(chunk.num_tokens.sum(dtype=np.int64))
        return cls(layout, chunk.form, chunk.num_layers, chunk.num_heads, num_tokens)

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        if self.form is ChunkForm.BLOCKS:
            return self.num_layers * self._num_blocks * self._block_bytes
        return self._scales_at + self._num_rows * self._scale_bytes

    def blocks(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """[num_layers, num_blocks, num_heads * head_bytes], a view."""
        return data.reshape(self.num_layers, self._num_blocks, self._block_bytes)

    def tokens(self, data: NDArray[np.uint8], layer: int) -> StoredTokens:
        """One layer's stored rows, views; layers count as in the chunk."""
        shape = (self.num_layers, self.num_tokens, self.num_heads, -1)
        carrier = CARRIERS[self.layout.dtype]
        half = self._num_rows * self._row_bytes
        k, v = (
            data[at : at + half].view(carrier).reshape(shape)[layer] for at in (0, aligned(half))
        )
        if not self.layout.is_quantized:
            return StoredTokens(k, v, None)
        scales = data[self._scales_at :].view(np.float32).reshape(shape)
        return StoredTokens(k, v, scales[layer])

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Bytes of its data that hold nothing: from, to."""
        if self.form is ChunkForm.BLOCKS:
            return ()
        half = self._num_rows * self._row_bytes
        v_end = aligned(half) + half
        return (half, aligned(half)), (v_end, max(v_end, self._scales_at))

    @property
    def unit_bytes(self) -> int:
        """Of one more block or token."""
        heads = self.num_layers * self.num_heads
        if self.form is ChunkForm.BLOCKS:
            return heads * self.layout.head_bytes
        return heads * (2 * self._row_bytes + self._scale_bytes)

    @property
    def padding_bytes(self) -> int:
        """The most that its data has beside its units."""
        return 0 if self.form is ChunkForm.BLOCKS else 2 * ALIGNMENT

    @property
    def _num_blocks(self) -> int:
        return self.num_tokens // self.layout.block_size

    @property
    def _block_bytes(self) -> int:
        return self.num_heads * self.layout.head_bytes

    @property
    def _num_rows(self) -> int:
        return self.num_layers * self.num_tokens * self.num_heads

    @property
    def _row_bytes(self) -> int:
        return self.layout.row_length * int(CARRIERS[self.layout.dtype].itemsize)

    @property
    def _scale_bytes(self) -> int:
        return _SCALE_BYTES if self.layout.is_quantized else 0

    @property
    def _scales_at(self) -> int:
        """Where V ends, or scales begin."""
        half = self._num_rows * self._row_bytes
        return aligned(aligned(half) + half) if self._scale_bytes else aligned(half) + half


def sides_of(chunk: StoreChunk | FetchChunk | ReadBlocks) -> tuple[slice, slice]:
    """Its layers and heads."""
    return (
        slice(chunk.first_layer, chunk.first_layer + chunk.num_layers),
        slice(chunk.first_head, chunk.first_head + chunk.num_heads),
    )


def slots_of(form: ChunkForm, places: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """Slots [T] of a chunk's tokens, by what ``PlaceChunk`` says of them."""
    if form is ChunkForm.TOKENS:
        return places
    slots: NDArray[np.int64] = places[:, None] * block_size + np.arange(block_size)
    return slots.reshape(-1)


def expectation(tokens: Mapping[int, int]) -> ExpectTokens:
    """That so many tokens of each sequence are to come."""
    ids = np.fromiter(tokens, np.int64, len(tokens))
    return ExpectTokens(ids, np.fromiter(tokens.values(), np.int32, len(tokens)))

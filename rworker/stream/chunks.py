"""How K and V lie in a chunk; see ``fastdecode.wire.blocks``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import BlockLayout, StoredTokens
from cpu_kernels.layout import CARRIERS
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import ChunkForm
from fastdecode.wire.codec import aligned


@lru_cache(64)  # caches have few shapes, and every chunk asks for the same
def layout_of(kv: KVSpec) -> BlockLayout:
    """Return how a cache's blocks lie. Raises ValueError: If that is not possible."""
    return BlockLayout(kv.num_kv_heads, kv.head_dim, kv.dtype.value, kv.block_size)


@dataclass(frozen=True)
class ChunkShape:
    """Tokens of some layers and KV heads of a cache, as a chunk has them."""

    layout: BlockLayout
    """Layout of the cache."""
    form: ChunkForm
    layers: range
    heads: range
    num_tokens: int
    """Tokens of all pieces together. Whole blocks in that form."""

    @classmethod
    def whole(cls, kv: KVSpec, form: ChunkForm, num_tokens: int) -> ChunkShape:
        """Return the shape of tokens of all layers and heads."""
        sides = range(kv.num_layers), range(kv.num_kv_heads)
        return cls(layout_of(kv), form, *sides, num_tokens)

    @property
    def num_bytes(self) -> int:
        if self.form is ChunkForm.BLOCKS:
            num_blocks = self.num_tokens // self.layout.block_size
            return len(self.layers) * num_blocks * self._block_bytes
        return self._scales_at + self._num_rows * self._scale_bytes

    def blocks(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a view, [num_layers, num_blocks, num_heads * head_bytes]."""
        return data.reshape(len(self.layers), -1, self._block_bytes)

    def tokens(self, data: NDArray[np.uint8], layer: int) -> StoredTokens:
        """Return views of one layer's stored rows. Layers count as in the chunk."""
        shape = (len(self.layers), self.num_tokens, len(self.heads), -1)
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
        """Start and end of the bytes that hold nothing."""
        if self.form is ChunkForm.BLOCKS:
            return ()
        half = self._num_rows * self._row_bytes
        v_end = aligned(half) + half
        return (half, aligned(half)), (v_end, max(v_end, self._scales_at))

    @property
    def _block_bytes(self) -> int:
        return len(self.heads) * self.layout.head_bytes

    @property
    def _num_rows(self) -> int:
        return len(self.layers) * self.num_tokens * len(self.heads)

    @property
    def _row_bytes(self) -> int:
        return self.layout.row_length * int(CARRIERS[self.layout.dtype].itemsize)

    @property
    def _scale_bytes(self) -> int:
        """Bytes of the scales of K and V, of one token and head."""
        return 8 if self.layout.is_quantized else 0

    @property
    def _scales_at(self) -> int:
        """Where V ends, or scales begin."""
        half = self._num_rows * self._row_bytes
        return aligned(aligned(half) + half) if self._scale_bytes else aligned(half) + half

"""A chunk's data as stored rows (``cpu_kernels.layout``), whichever form it has: for
caches that have no blocks of this layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cpu_kernels
from cpu_kernels.layout import CARRIERS
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import ChunkForm, FetchChunk, ReadBlocks, StoreChunk
from fastdecode.wire.codec import Array
from rworker.stream.chunks import ChunkShape, layout_of


@dataclass(frozen=True, eq=False)
class StoredRows:
    """K and V of a chunk's layers, heads and T tokens."""

    rows: NDArray[Any]
    """[layers, 2, T, heads, row length] of the cache's ``CARRIERS``."""
    scales: NDArray[np.float32] | None
    """[layers, 2, T, heads]; of int8 and int4 alone."""

    @classmethod
    def room(cls, kv: KVSpec, chunk: StoreChunk, num_tokens: int) -> StoredRows:
        """Uninitialised room for a chunk of a cache."""
        layout = layout_of(kv)
        shape = (chunk.num_layers, 2, num_tokens, chunk.num_heads)
        rows = np.empty((*shape, layout.row_length), CARRIERS[layout.dtype])
        return cls(rows, np.empty(shape, np.float32) if layout.is_quantized else None)

    @classmethod
    def of(cls, kv: KVSpec, chunk: StoreChunk, num_tokens: int) -> StoredRows:
        """The rows that a chunk's data holds."""
        shape, stored = ChunkShape.of(layout_of(kv), chunk), cls.room(kv, chunk, num_tokens)
        for layer in range(chunk.num_layers):
            there = shape.tokens(chunk.data, layer) if chunk.form is ChunkForm.TOKENS else None
            if there is None:
                layout = layout_of(replace(kv, num_kv_heads=chunk.num_heads))
                there = cpu_kernels.allocate_tokens(layout, num_tokens)
                blocks, places = shape.blocks(chunk.data)[layer], np.arange(num_tokens)
                cpu_kernels.gather(layout, blocks, places, *there)
            stored.rows[layer] = there.k, there.v
            if stored.scales is not None and there.scales is not None:
                stored.scales[layer] = np.moveaxis(there.scales, -1, 0)
        return stored

    def write(self, kv: KVSpec, chunk: FetchChunk | ReadBlocks, data: Array) -> None:
        """Make them a chunk's data, uint8 [B], which is overwritten."""
        data[:] = 0  # padding never shows what it held before
        layout = layout_of(replace(kv, num_kv_heads=chunk.num_heads))
        shape = ChunkShape.of(layout_of(kv), chunk)
        for layer, (k, v) in enumerate(self.rows):
            scales = None
            if self.scales is not None:
                scales = np.ascontiguousarray(np.moveaxis(self.scales[layer], 0, -1))
            if chunk.form is ChunkForm.BLOCKS:
                blocks, places = shape.blocks(data)[layer], np.arange(len(k))
                cpu_kernels.append(layout, blocks, k, v, places, source=layout.dtype, scales=scales)
                continue
            there = shape.tokens(data, layer)
            there.k[:], there.v[:] = k, v
            if there.scales is not None:
                there.scales[:] = scales

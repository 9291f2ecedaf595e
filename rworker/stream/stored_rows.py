"""A chunk's data as stored rows (``cpu_kernels.layout``), whichever form it has: for
caches that have no blocks of this layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cpu_kernels
from cpu_kernels import BlockLayout
from cpu_kernels.layout import CARRIERS
from fastdecode.wire.blocks import ChunkForm
from fastdecode.wire.codec import Array
from rworker.stream.chunks import ChunkShape


@dataclass(frozen=True, eq=False)
class StoredRows:
    """K and V of a chunk's layers, heads and T tokens."""

    rows: NDArray[Any]
    """[layers, 2, T, heads, row length] of the cache's ``CARRIERS``."""
    scales: NDArray[np.float32] | None
    """[layers, 2, T, heads]; of int8 and int4 alone."""

    @classmethod
    def of(cls, shape: ChunkShape, data: Array) -> StoredRows:
        """Return the rows that a chunk's data holds."""
        layout, num_tokens = shape.layout, shape.num_tokens
        sides = (len(shape.layers), 2, num_tokens, len(shape.heads))
        rows = np.empty((*sides, layout.row_length), CARRIERS[layout.dtype])
        stored = cls(rows, np.empty(sides, np.float32) if layout.is_quantized else None)
        for layer in range(len(shape.layers)):
            if shape.form is ChunkForm.TOKENS:
                there = shape.tokens(data, layer)
            else:
                own = _layout_of_heads(shape)
                there = cpu_kernels.allocate_tokens(own, num_tokens)
                blocks, places = shape.blocks(data)[layer], np.arange(num_tokens)
                cpu_kernels.gather(own, blocks, places, *there)
            stored.rows[layer] = there.k, there.v
            if stored.scales is not None and there.scales is not None:
                stored.scales[layer] = np.moveaxis(there.scales, -1, 0)
        return stored

    def write(self, shape: ChunkShape, data: Array) -> None:
        """Make them a chunk's data, uint8 [B], which is overwritten."""
        data[:] = 0  # padding never shows what it held before
        layout = _layout_of_heads(shape)
        for layer, (k, v) in enumerate(self.rows):
            scales = None
            if self.scales is not None:
                scales = np.ascontiguousarray(np.moveaxis(self.scales[layer], 0, -1))
            if shape.form is ChunkForm.BLOCKS:
                blocks, places = shape.blocks(data)[layer], np.arange(len(k))
                cpu_kernels.append(layout, blocks, k, v, places, source=layout.dtype, scales=scales)
                continue
            there = shape.tokens(data, layer)
            there.k[:], there.v[:] = k, v
            if there.scales is not None:
                there.scales[:] = scales


def _layout_of_heads(shape: ChunkShape) -> BlockLayout:
    """Return how blocks lie that have the chunk's heads alone."""
    return replace(shape.layout, num_kv_heads=len(shape.heads))

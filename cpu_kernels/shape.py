"""How a ``BlockLayout`` crosses into compiled code."""

from __future__ import annotations

import numpy as np

SHAPE_FIELDS = (
    "num_kv_heads", "head_dim", "block_size", "block_bytes", "head_bytes", "v_offset",
    "scale_offset", "padded_tokens", "padded_dims", "dim_words", "tile_dims", "tile_bytes", "pack",
    "source", "dtype",
)  # fmt: skip
"""The fields of a layout that kernels use, and the index of q's (or k's and
v's) element type in SOURCES."""

SHAPE = np.dtype([(name, np.int64) for name in SHAPE_FIELDS])

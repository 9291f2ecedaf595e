"""Every argument is looked at here before a kernel sees it: kernels have no bounds checks of their own."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.attend_driver import BAD_BLOCK, BAD_CONTEXT, BAD_POSITION
from cpu_kernels.layout import SOURCES, BlockLayout

_UINT8, _INT32 = np.dtype(np.uint8), np.dtype(np.int32)
_CARRIER = {"float32": np.dtype(np.float32), "float16": np.dtype(np.uint16), "bfloat16": np.dtype(np.uint16)}


def _array(name: str, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int | None, ...]) -> None:
    """``shape``: None leaves a dimension open."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise ValueError(f"{name} must be a NumPy array of {dtype}, got {getattr(array, 'dtype', type(array))}")
    if array.shape != shape and (
        array.ndim != len(shape)
        or any(want is not None and have != want for have, want in zip(array.shape, shape, strict=True))
    ):
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {list(array.shape)}, expected [{expected}]")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be C-contiguous")


def _pool(layout: BlockLayout, pool_layer: NDArray[np.uint8]) -> None:
    _array("pool_layer", pool_layer, _UINT8, (len(pool_layer), layout.block_bytes))


def _source(source: str) -> np.dtype[Any]:
    if source not in SOURCES:
        raise ValueError(f"source={source!r} is not one of {', '.join(SOURCES)}")
    return _CARRIER[source]


def _in_range(name: str, values: NDArray[Any], low: int, high: int) -> None:
    """All of ``values`` within low … high - 1."""
    if values.size and (values.min() < low or values.max() >= high):
        raise ValueError(f"{name} holds {values.min()}..{values.max()}, outside {low}..{high - 1}")


def check_append(
    layout: BlockLayout,
    pool_layer: NDArray[np.uint8],
    k: NDArray[Any],
    v: NDArray[Any],
    slots: NDArray[np.int64],
    source: str,
) -> None:
    """Raises ValueError, naming the argument, unless ``append`` can run on these."""
    _pool(layout, pool_layer)
    carrier = _source(source)
    _array("slots", slots, np.dtype(np.int64), (None,))
    for name, array in (("k", k), ("v", v)):
        _array(name, array, carrier, (slots.shape[0], layout.num_kv_heads, layout.head_dim))


def check_attend(
    layout: BlockLayout,
    pool_layer: NDArray[np.uint8],
    q: NDArray[Any],
    block_tables: NDArray[np.int32],
    query_starts: NDArray[np.int32],
    query_positions: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    out: NDArray[Any],
    lse: NDArray[np.float32] | None,
    source: str,
) -> None:
    """Raises ValueError, naming the argument, unless the arrays fit each other. Values: ``attend_driver``."""
    _pool(layout, pool_layer)
    carrier, int32 = _source(source), _INT32
    num_rows, num_q_heads = q.shape[:2] if q.ndim == 3 else (None, None)
    _array("q", q, carrier, (num_rows, num_q_heads, layout.head_dim))
    assert num_rows is not None and num_q_heads is not None
    if num_q_heads == 0 or num_q_heads % layout.num_kv_heads:
        raise ValueError(f"q has {num_q_heads} heads, not a multiple of {layout.num_kv_heads} KV heads")
    _array("out", out, carrier, q.shape)
    if lse is not None:
        _array("lse", lse, np.dtype(np.float32), (num_rows, num_q_heads))
    num_sequences = context_lens.size
    _array("context_lens", context_lens, int32, (num_sequences,))
    _array("query_positions", query_positions, int32, (num_sequences,))
    _array("query_starts", query_starts, int32, (num_sequences + 1,))
    _array("block_tables", block_tables, int32, (num_sequences, block_tables.shape[-1]))


def raise_bad_value(
    code: int,
    index: int,
    layout: BlockLayout,
    pool_layer: NDArray[np.uint8],
    block_tables: NDArray[np.int32],
    query_starts: NDArray[np.int32],
    query_positions: NDArray[np.int32],
    context_lens: NDArray[np.int32],
) -> NoReturn:
    """Says what ``attend_driver.check_values`` found."""
    if code == BAD_CONTEXT:
        most = block_tables.shape[1] * layout.block_size
        raise ValueError(f"context_lens[{index}]={context_lens[index]} is not within 0..{most}")
    if code == BAD_POSITION:
        raise ValueError(f"query_positions[{index}]={query_positions[index]} is not within 0..2^30")
    if code == BAD_BLOCK:
        used = block_tables[index, : -(-int(context_lens[index]) // layout.block_size)]
        raise ValueError(
            f"block_tables[{index}] holds {used.min()}..{used.max()}, outside 0..{pool_layer.shape[0] - 1}"
        )
    raise ValueError(f"query_starts must rise from 0 to the rows of q, got {query_starts}")


def check_score_options(
    num_q_heads: int,
    scale: float,
    sliding_window: int | None,
    alibi_slopes: NDArray[np.float32] | None,
    logit_softcap: float | None,
) -> None:
    """Raises ValueError unless the options that shape scores make sense."""
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale} must be finite")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window={sliding_window} must be >= 1")
    if logit_softcap is not None and not (math.isfinite(logit_softcap) and logit_softcap > 0):
        raise ValueError(f"logit_softcap={logit_softcap} must be finite and > 0")
    if alibi_slopes is not None:
        _array("alibi_slopes", alibi_slopes, np.dtype(np.float32), (num_q_heads,))


def check_copy(pool: NDArray[np.uint8], source_ids: NDArray[np.int64], target_ids: NDArray[np.int64]) -> None:
    """Raises ValueError unless ``copy_blocks`` can run on these."""
    if not isinstance(pool, np.ndarray) or pool.dtype != np.uint8 or pool.ndim != 3:
        raise ValueError("pool must be a uint8 array [num_layers, num_blocks, block_bytes]")
    int64 = np.dtype(np.int64)
    _array("source_ids", source_ids, int64, (None,))
    _array("target_ids", target_ids, int64, (source_ids.shape[0],))
    _in_range("source_ids", source_ids, 0, pool.shape[1])
    _in_range("target_ids", target_ids, 0, pool.shape[1])

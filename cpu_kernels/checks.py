"""Every argument is looked at here before a kernel sees it: kernels have no
bounds checks of their own."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.attention.driver import BAD_BLOCK, BAD_CONTEXT, BAD_POSITION, NOT_LAST
from cpu_kernels.layout import CARRIERS, SOURCES, BlockLayout

_UINT8, _INT32, _INT64 = np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.int64)


def _arrays(*wanted: tuple[str, NDArray[Any], np.dtype[Any], tuple[int | None, ...]]) -> None:
    """Each by its name, dtype and shape, of which None leaves a dimension open."""
    for name, array, dtype, shape in wanted:
        is_right = type(array) is np.ndarray and array.dtype == dtype and array.shape == shape
        if not is_right or not array.flags.c_contiguous:
            _array(name, array, dtype, shape)


def _array(
    name: str, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int | None, ...]
) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise ValueError(
            f"{name} must be a NumPy array of {dtype}, got {getattr(array, 'dtype', type(array))}"
        )
    if array.shape != shape and (
        array.ndim != len(shape)
        or any(
            want is not None and have != want for have, want in zip(array.shape, shape, strict=True)
        )
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
    return CARRIERS[source]


def _in_range(name: str, values: NDArray[Any], low: int, high: int) -> None:
    """All of ``values`` within low … high - 1."""
    if values.size and (values.min() < low or values.max() >= high):
        raise ValueError(f"{name} holds {values.min()}..{values.max()}, outside {low}..{high - 1}")


def _check_heads(layout: BlockLayout, heads: range | None) -> range:
    """Consecutive heads of the layout; None stands for all."""
    known = range(layout.num_kv_heads)
    if heads is None:
        return known
    if (
        not isinstance(heads, range)
        or heads.step != 1
        or not heads
        or heads[0] not in known
        or heads[-1] not in known
    ):
        raise ValueError(f"heads={heads!r} must be a range of consecutive heads within {known}")
    return heads


def _rows(
    layout: BlockLayout,
    slots: NDArray[np.int64],
    heads: range,
    named: dict[str, NDArray[Any]],
    scales: NDArray[np.float32] | None,
) -> None:
    """Stored rows of ``named``, and their scales, for so many slots and heads."""
    for name, array in named.items():
        _array(name, array, CARRIERS[layout.dtype], (slots.shape[0], len(heads), layout.row_length))
    if (scales is None) == layout.is_quantized:
        raise ValueError(
            f"scales go with rows of int8 and int4 and with no others; these are of {layout.dtype}"
        )
    if scales is not None:
        _array("scales", scales, np.dtype(np.float32), (slots.shape[0], len(heads), 2))


def check_append(
    layout: BlockLayout,
    pool_layer: NDArray[np.uint8],
    k: NDArray[Any],
    v: NDArray[Any],
    slots: NDArray[np.int64],
    source: str,
    scales: NDArray[np.float32] | None,
    heads: range | None,
) -> range:
    """The heads. Raises ValueError, naming the argument, unless ``append`` can run on these."""
    _pool(layout, pool_layer)
    _array("slots", slots, _INT64, (None,))
    heads = _check_heads(layout, heads)
    if source == layout.dtype:
        _rows(layout, slots, heads, {"k": k, "v": v}, scales)
        return heads
    carrier = _source(source)
    for name, array in (("k", k), ("v", v)):
        _array(name, array, carrier, (slots.shape[0], len(heads), layout.head_dim))
    if scales is not None:
        raise ValueError(
            f"scales go with what a cache of {layout.dtype} stores, not with source={source!r}"
        )
    return heads


def check_gather(
    layout: BlockLayout,
    pool_layer: NDArray[np.uint8],
    slots: NDArray[np.int64],
    k: NDArray[Any],
    v: NDArray[Any],
    scales: NDArray[np.float32] | None,
    heads: range | None,
) -> range:
    """The heads. Raises ValueError, naming the argument, unless ``gather`` can run on these."""
    _pool(layout, pool_layer)
    _array("slots", slots, _INT64, (None,))
    heads = _check_heads(layout, heads)
    _rows(layout, slots, heads, {"k": k, "v": v}, scales)
    for name, array in (("k", k), ("v", v), ("scales", scales)):
        if array is not None and not array.flags.writeable:
            raise ValueError(f"{name} can't be written to")
    return heads


def raise_bad_slots(
    layout: BlockLayout, pool_layer: NDArray[np.uint8], slots: NDArray[np.int64]
) -> NoReturn:
    """Says which slots there are, and which there should be."""
    most = pool_layer.shape[0] * layout.block_size - 1
    raise ValueError(f"slots holds {slots.min()}..{slots.max()}, outside 0..{most}")


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
    last: tuple[NDArray[Any], NDArray[Any]] | None,
    source: str,
) -> None:
    """Raises ValueError, naming the argument, unless the arrays fit each other.
    Values: ``attention.driver``."""
    carrier, int32 = _source(source), _INT32
    num_rows, num_q_heads = q.shape[:2] if q.ndim == 3 else (None, None)
    _arrays(
        ("pool_layer", pool_layer, _UINT8, (len(pool_layer), layout.block_bytes)),
        ("q", q, carrier, (num_rows, num_q_heads, layout.head_dim)),
    )
    assert num_rows is not None and num_q_heads is not None
    if num_q_heads == 0 or num_q_heads % layout.num_kv_heads:
        raise ValueError(
            f"q has {num_q_heads} heads, not a multiple of {layout.num_kv_heads} KV heads"
        )
    if lse is not None:
        _array("lse", lse, np.dtype(np.float32), (num_rows, num_q_heads))
    num_sequences = context_lens.size
    _arrays(
        ("out", out, carrier, q.shape),
        ("context_lens", context_lens, int32, (num_sequences,)),
        ("query_positions", query_positions, int32, (num_sequences,)),
        ("query_starts", query_starts, int32, (num_sequences + 1,)),
        ("block_tables", block_tables, int32, (num_sequences, block_tables.shape[-1])),
    )
    if last is not None:
        kv_shape = num_sequences, layout.num_kv_heads, layout.head_dim
        _arrays(("last k", last[0], carrier, kv_shape), ("last v", last[1], carrier, kv_shape))


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
    """Says what ``attention.driver.check_values`` found."""
    if code == BAD_CONTEXT:
        most = block_tables.shape[1] * layout.block_size
        raise ValueError(f"context_lens[{index}]={context_lens[index]} is not within 0..{most}")
    if code == BAD_POSITION:
        raise ValueError(f"query_positions[{index}]={query_positions[index]} is not within 0..2^30")
    if code == BAD_BLOCK:
        used = block_tables[index, : -(-int(context_lens[index]) // layout.block_size)]
        raise ValueError(
            f"block_tables[{index}] holds {used.min()}..{used.max()}, outside "
            f"0..{pool_layer.shape[0] - 1}"
        )
    if code == NOT_LAST:
        raise ValueError(
            f"sequence {index} brings its last token: it must have one query, at that token"
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


def check_copy(
    pool: NDArray[np.uint8], source_ids: NDArray[np.int64], target_ids: NDArray[np.int64]
) -> None:
    """Raises ValueError unless ``copy_blocks`` can run on these."""
    if not isinstance(pool, np.ndarray) or pool.dtype != np.uint8 or pool.ndim != 3:
        raise ValueError("pool must be a uint8 array [num_layers, num_blocks, block_bytes]")
    _array("source_ids", source_ids, _INT64, (None,))
    _array("target_ids", target_ids, _INT64, (source_ids.shape[0],))
    _in_range("source_ids", source_ids, 0, pool.shape[1])
    _in_range("target_ids", target_ids, 0, pool.shape[1])

"""The NumPy twin of every kernel: same signature, same meaning, no speed. The tests compare the
two.

Quantised caches are exact here in the sense that the twin reads the very same quantised words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.layout import CARRIERS, BlockLayout


def to_float32(values: NDArray[Any], source: str) -> NDArray[np.float32]:
    """Elements in their carrier (float32, or uint16 bits) as float32."""
    if source == "float32":
        return values.astype(np.float32, copy=False)
    if source == "float16":
        return values.view(np.float16).astype(np.float32)
    return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float32(values: NDArray[np.float32], source: str) -> NDArray[Any]:
    """float32 rounded to nearest even, in the carrier of ``source``."""
    if source == "float32":
        return values.astype(np.float32, copy=False)
    if source == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def quantize(
    values: NDArray[np.float32], dtype: str
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """``values [..., D]`` → integers ``[..., D]`` within ±127 (int8) or ±7
    (int4), and one scale for each ``[...]``."""
    most = np.float32(127 if dtype == "int8" else 7)
    scales = np.max(np.abs(values), axis=-1).astype(np.float32) / most  # [...]
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    return np.rint(values * inverse[..., None]).astype(np.int64).clip(-most, most), scales


@dataclass(frozen=True)
class _Head:
    """Views into one head of one block."""

    k: NDArray[Any]  # cells [dim_words, padded_tokens]
    v: NDArray[Any]  # cells [dim tiles, token_words, tile_dims]
    scales: NDArray[np.float32]  # [2, padded_tokens], or empty

    @classmethod
    def of(cls, layout: BlockLayout, pool_layer: NDArray[np.uint8], block: int, head: int) -> _Head:
        raw = pool_layer[block, head * layout.head_bytes : (head + 1) * layout.head_bytes]
        cell = np.dtype(np.uint16 if layout.cell_bytes == 2 else np.uint32)
        k_bytes = layout.dim_words * layout.padded_tokens * layout.cell_bytes
        v_bytes = layout.token_words * layout.padded_dims * layout.cell_bytes
        return cls(
            raw[:k_bytes].view(cell).reshape(layout.dim_words, layout.padded_tokens),
            raw[layout.v_offset :][:v_bytes]
            .view(cell)
            .reshape(-1, layout.token_words, layout.tile_dims),
            raw[layout.scale_offset :].view(np.float32).reshape(-1, layout.padded_tokens),
        )


def _element_shifts(layout: BlockLayout) -> list[int]:
    """How far each element of a cell is shifted up."""
    if layout.dtype == "int4":
        return [8 * (element % 4) + 4 * (element // 4) for element in range(8)]
    return [element * 32 // layout.pack for element in range(layout.pack)]


def _encode(
    values: NDArray[np.float32], dtype: str
) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """Elements ``[..., D]`` as bit patterns, and a scale for each ``[...]``."""
    ones = np.ones(values.shape[:-1], np.float32)
    if dtype == "float32":
        return np.ascontiguousarray(values).view(np.uint32).astype(np.uint64), ones
    if dtype in ("float16", "bfloat16"):
        return from_float32(values, dtype).astype(np.uint64), ones
    integers, scales = quantize(values, dtype)
    bias = 128 if dtype == "int8" else 8
    return (integers + bias).astype(np.uint64), scales


def _decode(bits: NDArray[np.uint32], dtype: str) -> NDArray[np.float32]:
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype in ("float16", "bfloat16"):
        return to_float32(bits.astype(np.uint16), dtype)
    return bits.astype(np.float32) - np.float32(128 if dtype == "int8" else 8)


def _unpack(layout: BlockLayout, rows: NDArray[Any]) -> NDArray[np.uint64]:
    """Stored rows ``[..., row_length]`` → the bits of their elements ``[..., head_dim]``."""
    if layout.dtype != "int4":
        return rows.view(f"u{rows.itemsize}").astype(np.uint64)
    words = np.ascontiguousarray(rows).view(np.uint32)[..., None] >> np.array(
        _element_shifts(layout), np.uint32
    )
    return (
        (words & np.uint32(15))
        .reshape(*rows.shape[:-1], -1)[..., : layout.head_dim]
        .astype(np.uint64)
    )


def _stored_bits(
    layout: BlockLayout, values: NDArray[Any], scales: NDArray[np.float32] | None, source: str
) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """K or V ``[T, heads, …]`` as the bits of elements ``[T, heads, D]``, and
    their scales ``[T, heads]``."""
    if source == layout.dtype:
        return _unpack(layout, values), np.ones(
            values.shape[:2], np.float32
        ) if scales is None else scales
    return _encode(to_float32(values, source), layout.dtype)


def append(
    layout: BlockLayout,
    pool_layer: NDArray[np.uint8],
    k: NDArray[Any],
    v: NDArray[Any],
    slots: NDArray[np.int64],
    *,
    source: str = "float32",
    scales: NDArray[np.float32] | None = None,
    heads: range | None = None,
    num_threads: int = 1,
    team: object = None,
) -> None:
    """See ``cpu_kernels.append``."""
    shifts, pack = _element_shifts(layout), layout.pack
    mask = (1 << (8 * layout.cell_bytes // pack)) - 1
    v_signs = 0x80 if layout.dtype == "int8" else 0
    k_bits, k_scales = _stored_bits(layout, k, None if scales is None else scales[..., 0], source)
    v_bits, v_scales = _stored_bits(layout, v, None if scales is None else scales[..., 1], source)
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, layout.block_size)
        for index, head in enumerate(heads or range(layout.num_kv_heads)):
            cells = _Head.of(layout, pool_layer, block, head)
            cells.k[:, offset] = 0
            for d in range(layout.head_dim):
                cells.k[d // pack, offset] |= int(k_bits[token, index, d]) << shifts[d % pack]
                cell = d // layout.tile_dims, offset // pack, d % layout.tile_dims
                old = int(cells.v[cell]) & ~(mask << shifts[offset % pack])
                cells.v[cell] = (
                    old | (int(v_bits[token, index, d]) ^ v_signs) << shifts[offset % pack]
                )
            if layout.is_quantized:
                cells.scales[:, offset] = k_scales[token, index], v_scales[token, index]


def _block_bits(
    layout: BlockLayout, pool_layer: NDArray[np.uint8], block: int, head: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The bits of K's and V's elements, raised alike: [block_size, head_dim] each."""
    cells = _Head.of(layout, pool_layer, block, head)
    mask = np.uint32((1 << (8 * layout.cell_bytes // layout.pack)) - 1)
    shifts = np.array(_element_shifts(layout), np.uint32)[:, None]
    k_bits = (cells.k[:, None].astype(np.uint32) >> shifts & mask).reshape(-1, layout.padded_tokens)
    v_cells = cells.v.swapaxes(0, 1).reshape(-1, 1, layout.padded_dims).astype(np.uint32)
    v_bits = (v_cells >> shifts & mask).reshape(-1, layout.padded_dims)
    v_bits ^= np.uint32(0x80 if layout.dtype == "int8" else 0)
    return k_bits[: layout.head_dim, : layout.block_size].T.copy(), v_bits[
        : layout.block_size, : layout.head_dim
    ]


def _pack_row(layout: BlockLayout, bits: NDArray[np.uint32]) -> NDArray[Any]:
    """The bits of one row's elements ``[head_dim]`` → the stored row ``[row_length]``."""
    if layout.dtype != "int4":
        return bits.astype(f"u{CARRIERS[layout.dtype].itemsize}").view(CARRIERS[layout.dtype])
    elements = np.zeros(2 * layout.row_length, np.uint32)
    elements[: layout.head_dim] = bits
    words = elements.reshape(-1, 8) << np.array(_element_shifts(layout), np.uint32)
    return np.bitwise_or.reduce(words, axis=1).view(np.uint8)


def gather(
    layout: BlockLayout,
    pool_layer: NDArray[np.uint8],
    slots: NDArray[np.int64],
    k: NDArray[Any],
    v: NDArray[Any],
    scales: NDArray[np.float32] | None = None,
    *,
    heads: range | None = None,
    num_threads: int = 1,
    team: object = None,
) -> None:
    """See ``cpu_kernels.gather``."""
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, layout.block_size)
        for index, head in enumerate(heads or range(layout.num_kv_heads)):
            k_bits, v_bits = _block_bits(layout, pool_layer, block, head)
            k[token, index] = _pack_row(layout, k_bits[offset])
            v[token, index] = _pack_row(layout, v_bits[offset])
            if scales is not None:
                scales[token, index] = _Head.of(layout, pool_layer, block, head).scales[:, offset]


def _read_sequence(
    layout: BlockLayout, pool_layer: NDArray[np.uint8], blocks: NDArray[np.int32], num_tokens: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The first ``num_tokens`` cached tokens of a sequence: K and V, float32
    [num_tokens, Hkv, D]."""
    num_used = -(-num_tokens // layout.block_size)
    shape = (num_used * layout.block_size, layout.num_kv_heads, layout.head_dim)
    k, v = np.empty(shape, np.float32), np.empty(shape, np.float32)
    for index, block in enumerate(blocks[:num_used].tolist()):
        rows = slice(index * layout.block_size, (index + 1) * layout.block_size)
        for head in range(layout.num_kv_heads):
            k_block, v_block = (
                _decode(x, layout.dtype) for x in _block_bits(layout, pool_layer, block, head)
            )
            if layout.is_quantized:
                scales = _Head.of(layout, pool_layer, block, head).scales[
                    :, : layout.block_size, None
                ]
                k_block, v_block = k_block * scales[0], v_block * scales[1]
            k[rows, head], v[rows, head] = k_block, v_block
    return k[:num_tokens], v[:num_tokens]


def attend(
    layout: BlockLayout,
    pool_layer: NDArray[np.uint8],
    q: NDArray[Any],
    block_tables: NDArray[np.int32],
    query_starts: NDArray[np.int32],
    query_positions: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    *,
    scale: float,
    sliding_window: int | None = None,
    alibi_slopes: NDArray[np.float32] | None = None,
    logit_softcap: float | None = None,
    out: NDArray[Any],
    lse: NDArray[np.float32] | None = None,
    last: tuple[NDArray[Any], NDArray[Any]] | None = None,
    source: str = "float32",
    num_threads: int = 1,
    team: object = None,
    prefetch: object = None,
) -> None:
    """See ``cpu_kernels.attend``. Computes in float64."""
    if last is not None:
        token = context_lens.astype(np.int64) - 1
        block, offset = np.divmod(token, layout.block_size)
        slots = block_tables[np.arange(len(token)), block].astype(np.int64) * layout.block_size
        append(layout, pool_layer, *last, slots + offset, source=source)
    num_q_heads = q.shape[1]
    group_size = num_q_heads // layout.num_kv_heads
    queries = to_float32(q, source).astype(np.float64)  # [T, Hq, D]
    for n, context_len in enumerate(context_lens.tolist()):
        first, end = int(query_starts[n]), int(query_starts[n + 1])
        if first == end:
            continue
        k, v = _read_sequence(layout, pool_layer, block_tables[n], context_len)
        k = np.repeat(k, group_size, axis=1).astype(np.float64)  # [L, Hq, D]
        v = np.repeat(v, group_size, axis=1).astype(np.float64)
        position = int(query_positions[n]) + np.arange(end - first)[:, None]  # [Q, 1]
        key = np.arange(context_len)[None, :]  # [1, L]
        visible = key <= position
        if sliding_window is not None:
            visible &= key > position - sliding_window
        scores = np.einsum("qhd,lhd->hql", queries[first:end], k) * scale
        if logit_softcap is not None:
            scores = logit_softcap * np.tanh(scores / logit_softcap)
        if alibi_slopes is not None:
            scores = (
                scores + alibi_slopes[:, None, None].astype(np.float64) * (key - position)[None]
            )
        scores = np.where(visible[None], scores, -np.inf)
        top = scores.max(axis=-1, keepdims=True, initial=-np.inf)  # [Hq, Q, 1]
        weights = np.where(
            visible[None], np.exp(scores - np.where(np.isfinite(top), top, 0.0)), 0.0
        )
        total = weights.sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse_rows = (np.log(total) + np.where(np.isfinite(top), top, 0.0))[..., 0].T  # [Q, Hq]
        rows = np.einsum("hql,lhd->qhd", weights / np.where(total > 0, total, 1.0), v)
        out[first:end] = from_float32(rows.astype(np.float32), source)
        if lse is not None:
            lse[first:end] = lse_rows


def copy_blocks(
    pool: NDArray[np.uint8], source_ids: NDArray[np.int64], target_ids: NDArray[np.int64]
) -> None:
    """See ``cpu_kernels.copy_blocks``."""
    for source_id, target_id in zip(source_ids.tolist(), target_ids.tolist(), strict=True):
        pool[:, target_id] = pool[:, source_id]

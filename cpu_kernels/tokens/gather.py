# mypy: ignore-errors
# Everything here runs inside Numba's type inference and code generation, whose
# types are not Python's.
"""Reading tokens' K and V out of their blocks, as they are stored: the inverse
of ``append``.

Consecutive tokens of a block, a **run**, are read together: 16 tokens of K's
rows of cells are turned into 16 rows of words, for a word of a stored row is a
cell of K; of V's cells, a token's share is cut out, 16 dims at a time. Units
are a head's ``UNIT_TOKENS`` tokens: no two write to the same row.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cpu_kernels.codegen.compiled import entry, part
from cpu_kernels.codegen.memory import (
    as_record,
    keep_alive,
    load_f32,
    load_i64,
    load_u8,
    store_f32,
    store_u8,
)
from cpu_kernels.codegen.simd import I8, I16, I32, broadcast, constant, load_at, store_at, vec
from cpu_kernels.shape import SHAPE
from cpu_kernels.team import run_units

GATHER_JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            "pool", "slots", "k", "v", "scales", "shape", "num_tokens", "num_heads", "first_head",
            "row_bytes", "last_word", "pack_shift",
        )
    ]
)  # fmt: skip
"""What all units of one call share."""

FLOAT32, FLOAT16, BFLOAT16, INT8, INT4 = range(5)  # the order of layout.DTYPES
UNIT_TOKENS = 256
SIDE = 16
"""Tokens, and words or dims, that are read at once."""


def _turned(builder, rows):
    """The columns of SIDE vectors."""
    indices = list(range(2 * SIDE))
    zipped = [x for pair in zip(indices[:SIDE], indices[SIDE:], strict=True) for x in pair]
    low, high = (ir.Constant(vec(I32, SIDE), half) for half in (zipped[:SIDE], zipped[SIDE:]))
    for _ in range(4):  # each round doubles how many elements of a column stand together
        halves = zip(rows[: SIDE // 2], rows[SIDE // 2 :], strict=True)
        rows = [builder.shuffle_vector(a, b, order) for a, b in halves for order in (low, high)]
    return rows


def _load_words(builder, address, row_bytes, row, halves: bool):
    """SIDE words: a row of cells, or two rows of cells of 16 bits side by side."""

    def load(index, element):
        start = builder.add(address, builder.mul(row_bytes, ir.Constant(row_bytes.type, index)))
        return load_at(builder, start, vec(element, SIDE), align=element.width // 8)

    if not halves:
        return load(row, I32)
    lower, upper = (builder.zext(load(2 * row + i, I16), vec(I32, SIDE)) for i in range(2))
    return builder.or_(lower, builder.shl(upper, constant(I32, SIDE, 16)))


def _turn(halves: bool):
    @intrinsic
    def turn(typingctx, source, source_bytes, target, target_bytes):
        """SIDE tokens' cells, in rows ``source_bytes`` apart, to SIDE words
        each, ``target_bytes`` apart."""

        def codegen(context, builder, signature, args):
            rows = [_load_words(builder, args[0], args[1], row, halves) for row in range(SIDE)]
            for row, column in enumerate(_turned(builder, rows)):
                address = builder.add(args[2], builder.mul(args[3], ir.Constant(args[3].type, row)))
                store_at(builder, column, address, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, types.int64), codegen

    return turn


_turn_words, _turn_halves = _turn(halves=False), _turn(halves=True)


def _cut(emit):
    @intrinsic
    def cut(typingctx, source, shift, target):
        """One token's share of SIDE cells of V, ``shift`` bits up, to elements of a stored row."""

        def codegen(context, builder, signature, args):
            cells = load_at(builder, args[0], vec(I32, SIDE))
            shift = broadcast(builder, builder.trunc(args[1], I32), SIDE)
            store_at(builder, emit(builder, builder.lshr(cells, shift)), args[2], align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return cut


def _emit_bytes(builder, shares):
    signed = builder.trunc(shares, vec(I8, SIDE))
    # V's bytes are signed, K's are raised by 128.
    return builder.xor(signed, constant(I8, SIDE, 0x80))


def _emit_nibbles(builder, shares):
    """Two words, each with element i in the lower half of byte i, and element i
    + 4 in its upper half."""
    nibbles = builder.trunc(builder.and_(shares, constant(I32, SIDE, 15)), vec(I8, SIDE))
    nothing = ir.Constant(nibbles.type, ir.Undefined)
    order = vec(I32, SIDE // 2)
    lower = builder.shuffle_vector(nibbles, nothing, ir.Constant(order, [0, 1, 2, 3, 8, 9, 10, 11]))
    upper = builder.shuffle_vector(
        nibbles, nothing, ir.Constant(order, [4, 5, 6, 7, 12, 13, 14, 15])
    )
    return builder.or_(lower, builder.shl(upper, constant(I8, SIDE // 2, 4)))


_cut_word = _cut(lambda builder, shares: shares)
_cut_half = _cut(lambda builder, shares: builder.trunc(shares, vec(I16, SIDE)))
_cut_byte, _cut_nibble = _cut(_emit_bytes), _cut(_emit_nibbles)


@intrinsic
def _copy_halves(typingctx, source, target):
    """SIDE elements of 16 bits."""

    def codegen(context, builder, signature, args):
        store_at(builder, load_at(builder, args[0], vec(I16, SIDE), align=2), args[1], align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@part
def _copy_bytes(source, count, target):
    for byte in range(count):
        store_u8(target + byte, load_u8(source + byte))


@part
def _shift_of(dtype, pack_shift, token):
    element = token & ((1 << pack_shift) - 1)
    if dtype == INT4:
        return ((element & 3) << 3) + (element >> 2 << 2)
    return element << (5 - pack_shift)


@part
def _turn_cells(dtype, cells, cells_bytes, target, target_bytes):
    if dtype == FLOAT16:
        _turn_halves(cells, cells_bytes, target, target_bytes)
    else:
        _turn_words(cells, cells_bytes, target, target_bytes)


@part
def _gather_square(dtype, cells, cells_bytes, begin, end, rows, row_bytes, scratch):
    """SIDE words of the stored rows of the tokens ``begin`` to ``end`` of a group of SIDE."""
    if begin == 0 and end == SIDE:
        _turn_cells(dtype, cells, cells_bytes, rows, row_bytes)
        return
    _turn_cells(dtype, cells, cells_bytes, scratch, 64)
    for token in range(begin, end):
        _cut_word(scratch + 64 * token, np.int64(0), rows + (token - begin) * row_bytes)


@part
def _gather_edge(cells, cells_bytes, cell_bytes, first, end, target):
    """One token's K, from byte ``first`` of its stored row to its end: what fills no square."""
    for byte in range(first, end):
        store_u8(
            target + byte, load_u8(cells + byte // cell_bytes * cells_bytes + byte % cell_bytes)
        )


@part
def _gather_k(job, shape, base, offset, count, rows, row_bytes, scratch):
    """K of ``count`` tokens from ``offset`` on of the block and head at ``base``."""
    cell_bytes = 2 if shape.dtype == FLOAT16 else 4
    cells_bytes = shape.padded_tokens * cell_bytes
    dtype, num_words = shape.dtype, job.row_bytes // 4
    for word in range(0, num_words if num_words >= SIDE else 0, SIDE):
        first = 4 * min(word, num_words - SIDE)  # the last square may take some words again
        for group in range(offset // SIDE * SIDE, offset + count, SIDE):
            begin, end = max(offset, group), min(offset + count, group + SIDE)
            cells = base + first // cell_bytes * cells_bytes + group * cell_bytes
            target = rows + (begin - offset) * row_bytes + first
            _gather_square(
                dtype, cells, cells_bytes, begin - group, end - group, target, row_bytes, scratch
            )
    done = 4 * num_words if num_words >= SIDE else 0
    if done < job.row_bytes:
        for token in range(count):
            cells = base + (offset + token) * cell_bytes
            _gather_edge(
                cells, cells_bytes, cell_bytes, done, job.row_bytes, rows + token * row_bytes
            )


@part
def _cut_cells(dtype, count, cells, shift, target):
    """One token's share of ``count`` times SIDE cells of V."""
    if dtype == FLOAT32:
        for i in range(count):
            _cut_word(cells + 64 * i, shift, target + 64 * i)
    elif dtype == FLOAT16:
        for i in range(count):
            _copy_halves(cells + 32 * i, target + 32 * i)
    elif dtype == BFLOAT16:
        for i in range(count):
            _cut_half(cells + 64 * i, shift, target + 32 * i)
    elif dtype == INT8:
        for i in range(count):
            _cut_byte(cells + 64 * i, shift, target + 16 * i)
    else:
        for i in range(count):
            _cut_nibble(cells + 64 * i, shift, target + 8 * i)


@part
def _gather_v(job, shape, base, offset, count, rows, row_bytes, scratch):
    """V of ``count`` tokens from ``offset`` on of the block and head at ``base``."""
    dtype, pack_shift, num_dims = shape.dtype, job.pack_shift, shape.tile_dims
    cell_shift = 1 if dtype == FLOAT16 else 2
    tile = base + shape.v_offset
    for first in range(0, shape.head_dim, num_dims):
        whole = (min(first + num_dims, shape.head_dim) - first) // SIDE
        done = (first + whole * SIDE << cell_shift) >> pack_shift
        tail = job.row_bytes - done if first + num_dims >= shape.head_dim else 0
        for token in range(offset, offset + count):
            cells = tile + ((token >> pack_shift) * num_dims << cell_shift)
            shift = _shift_of(dtype, pack_shift, token)
            row = rows + (token - offset) * row_bytes
            _cut_cells(dtype, whole, cells, shift, row + (first << cell_shift >> pack_shift))
            if tail > 0:
                _cut_cells(dtype, 1, cells + (whole * SIDE << cell_shift), shift, scratch)
                _copy_bytes(scratch, tail, row + done)
        tile += shape.tile_bytes


@part
def _gather_scales(shape, base, offset, count, scales, row_bytes):
    for token in range(count):
        source = base + shape.scale_offset + 4 * (offset + token)
        target = scales + token * row_bytes
        store_f32(target, load_f32(source))
        store_f32(target + 4, load_f32(source + 4 * shape.padded_tokens))


@part
def _clear_padding(job, rows, count, row_bytes):
    """Zeros for the elements beyond the head's dims: in blocks they are anything."""
    for token in range(count):
        for byte in range(4):
            last = rows + token * row_bytes + job.row_bytes - 4 + byte
            store_u8(last, np.uint8(load_u8(last) & (job.last_word >> (8 * byte))))


@part
def _run_length(job, token, end, most):
    """How many slots from ``token`` on follow each other, up to ``most``."""
    first = load_i64(job.slots + 8 * token)
    count = 1
    while (
        count < most
        and token + count < end
        and load_i64(job.slots + 8 * (token + count)) == first + count
    ):
        count += 1
    return count


@entry
def gather_unit(variant, job_address, unit, scratch):
    """Read UNIT_TOKENS tokens' K and V of one head. ``variant`` is not used."""
    job = as_record(job_address, GATHER_JOB)
    shape = as_record(job.shape, SHAPE)
    head = unit % job.num_heads
    token = unit // job.num_heads * UNIT_TOKENS
    end = min(token + UNIT_TOKENS, job.num_tokens)
    row_bytes = job.num_heads * job.row_bytes
    while token < end:
        slot = load_i64(job.slots + 8 * token)
        offset = slot % shape.block_size
        count = _run_length(job, token, end, shape.block_size - offset)
        base = (
            job.pool
            + slot // shape.block_size * shape.block_bytes
            + (job.first_head + head) * shape.head_bytes
        )
        row = token * job.num_heads + head
        k, v = job.k + row * job.row_bytes, job.v + row * job.row_bytes
        _gather_k(job, shape, base, offset, count, k, row_bytes, scratch)
        _gather_v(job, shape, base, offset, count, v, row_bytes, scratch)
        if shape.dtype >= INT8:
            _gather_scales(shape, base, offset, count, job.scales + 8 * row, 8 * job.num_heads)
        if shape.dtype == INT4 and shape.head_dim % 8 > 0:
            _clear_padding(job, k, count, row_bytes)
            _clear_padding(job, v, count, row_bytes)
        token += count


@part
def _last_word(head_dim):
    """A mask of the int4 elements of a stored row's last word that belong to the head."""
    mask = np.int64(0)
    for element in range((head_dim - 1) % 8 + 1):
        mask |= np.int64(15) << (8 * (element % 4) + 4 * (element // 4))
    return mask


@entry
def run_gather(entry, team, scratch, fields, pool, slots, k, v, scales, first_head):
    """Check the slots and run. Returns False if one is out of range."""
    shape = as_record(fields.ctypes.data, SHAPE)
    limit = pool.shape[0] * shape.block_size
    for t in range(slots.shape[0]):
        if slots[t] < 0 or slots[t] >= limit:
            return False
    jobs = np.zeros(1, GATHER_JOB)
    job = jobs[0]
    job.pool, job.slots, job.shape = pool.ctypes.data, slots.ctypes.data, fields.ctypes.data
    job.k, job.v, job.scales = k.ctypes.data, v.ctypes.data, scales.ctypes.data
    job.num_tokens, job.num_heads, job.first_head = slots.shape[0], k.shape[1], first_head
    job.row_bytes, job.last_word = k.shape[2] * k.itemsize, _last_word(shape.head_dim)
    while 1 << job.pack_shift < shape.pack:
        job.pack_shift += 1
    num_units = (slots.shape[0] + UNIT_TOKENS - 1) // UNIT_TOKENS * k.shape[1]
    run_units(team, entry, jobs.ctypes.data, num_units, scratch)
    keep_alive(jobs)
    keep_alive(fields)
    return True

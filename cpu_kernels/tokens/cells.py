# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""Stored rows and cells, 16 tokens or dims at a time.

A word of a stored row of K is a cell of K, so 16 tokens' rows of words are turned into 16 rows of
cells, or back. Of V's cells a token's share is cut out, or put in."""

from __future__ import annotations

from llvmlite import ir
from numba.types import int32, int64

from cpu_kernels.codegen.compiled import part
from cpu_kernels.codegen.memory import load_u8, store_u8
from cpu_kernels.codegen.simd import (
    I8,
    I16,
    I32,
    broadcast,
    constant,
    load_at,
    store_at,
    transpose,
    vec,
)
from cpu_kernels.codegen.translate import Emitter
from cpu_kernels.tokens.job import BFLOAT16, FLOAT16, FLOAT32, INT8

SIDE = 16  # tokens, and words or dims, that are moved at once


def _load_words(builder, address, row_bytes, row, halves: bool):
    """SIDE words: a row of cells, or two rows of cells of 16 bits side by side."""

    def load(index, element):
        start = builder.add(address, builder.mul(row_bytes, ir.Constant(row_bytes.type, index)))
        return load_at(builder, start, vec(element, SIDE), align=element.width // 8)

    if not halves:
        return load(row, I32)
    lower, upper = (builder.zext(load(2 * row + i, I16), vec(I32, SIDE)) for i in range(2))
    return builder.or_(lower, builder.shl(upper, constant(I32, SIDE, 16)))


def _store_words(builder, words, address, row_bytes, row, halves: bool):
    """SIDE words to where ``_load_words`` finds them."""

    def store(index, value, align):
        start = builder.add(address, builder.mul(row_bytes, ir.Constant(row_bytes.type, index)))
        store_at(builder, value, start, align=align)

    if not halves:
        store(row, words, 1)
        return
    kind = vec(I16, SIDE)
    store(2 * row, builder.trunc(words, kind), 2)
    store(2 * row + 1, builder.trunc(builder.lshr(words, constant(I32, SIDE, 16)), kind), 2)


@Emitter
def _turn(
    builder, source: int64, source_bytes: int64, from_halves, target: int64, target_bytes: int64,
    to_halves,
):  # fmt: skip
    """SIDE rows of SIDE words, ``source_bytes`` apart, to their columns,
    ``target_bytes`` apart. Rows of halves are half as far apart."""
    rows = [_load_words(builder, source, source_bytes, row, from_halves) for row in range(SIDE)]
    for row, column in enumerate(transpose(builder, rows)):
        _store_words(builder, column, target, target_bytes, row, to_halves)


@part
def take_square(dtype, cells, cells_bytes, rows, row_bytes):
    """SIDE tokens' cells of K, in rows ``cells_bytes`` apart, to SIDE words of each stored row."""
    if dtype == FLOAT16:
        _turn(cells, cells_bytes, True, rows, row_bytes, False)
    else:
        _turn(cells, cells_bytes, False, rows, row_bytes, False)


@part
def put_square(dtype, rows, row_bytes, cells, cells_bytes):
    """SIDE words of SIDE tokens' stored rows to cells of K."""
    if dtype == FLOAT16:
        _turn(rows, row_bytes, False, cells, cells_bytes, True)
    else:
        _turn(rows, row_bytes, False, cells, cells_bytes, False)


def _cut(emit):
    @Emitter
    def cut(builder, source: int64, shift: int32, target: int64):
        """One token's share of SIDE cells of V, ``shift`` bits up, to elements of a stored row."""
        cells = load_at(builder, source, vec(I32, SIDE))
        shares = builder.lshr(cells, broadcast(builder, shift, SIDE))
        store_at(builder, emit(builder, shares), target, align=1)

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


def _put(element: ir.Type, count: int, emit):
    @Emitter
    def put(builder, source: int64, shift: int32, mask: int32, cells: int64):
        """``count`` elements of a stored row to one token's share of SIDE cells
        of V; ``mask``: the bits of a cell that stay."""
        shares = emit(builder, load_at(builder, source, vec(element, count), align=1))
        kept = load_at(builder, cells, vec(I32, SIDE))
        kept = builder.and_(kept, broadcast(builder, mask, SIDE))
        shares = builder.shl(shares, broadcast(builder, shift, SIDE))
        store_at(builder, builder.or_(kept, shares), cells)

    return put


def _spread_bytes(builder, row):
    return builder.zext(builder.xor(row, constant(I8, SIDE, 0x80)), vec(I32, SIDE))


def _spread_nibbles(builder, row):
    """The inverse of ``_emit_nibbles``."""
    half = SIDE // 2
    lower = builder.and_(row, constant(I8, half, 15))
    upper = builder.lshr(row, constant(I8, half, 4))
    order = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    nibbles = builder.shuffle_vector(lower, upper, ir.Constant(vec(I32, SIDE), order))
    return builder.zext(nibbles, vec(I32, SIDE))


cut_word = _cut(lambda builder, shares: shares)
_cut_half = _cut(lambda builder, shares: builder.trunc(shares, vec(I16, SIDE)))
_cut_byte, _cut_nibble = _cut(_emit_bytes), _cut(_emit_nibbles)
_put_word = _put(I32, SIDE, lambda builder, row: row)
_put_half = _put(I16, SIDE, lambda builder, row: builder.zext(row, vec(I32, SIDE)))
_put_byte, _put_nibble = _put(I8, SIDE, _spread_bytes), _put(I8, SIDE // 2, _spread_nibbles)


@Emitter
def _copy_halves(builder, source: int64, target: int64):
    """SIDE elements of 16 bits."""
    store_at(builder, load_at(builder, source, vec(I16, SIDE), align=2), target, align=1)


@part
def copy_bytes(source, count, target):
    for byte in range(count):
        store_u8(target + byte, load_u8(source + byte))


@part
def cut_cells(dtype, count, cells, shift, target):
    """One token's share of ``count`` times SIDE cells of V."""
    if dtype == FLOAT32:
        for i in range(count):
            cut_word(cells + 64 * i, shift, target + 64 * i)
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
def put_cells(dtype, count, row, shift, mask, cells):
    """The inverse of ``cut_cells``: the bits of ``mask`` are the other tokens'."""
    if dtype == FLOAT32:
        for i in range(count):
            _put_word(row + 64 * i, shift, mask, cells + 64 * i)
    elif dtype == FLOAT16:
        for i in range(count):
            _copy_halves(row + 32 * i, cells + 32 * i)
    elif dtype == BFLOAT16:
        for i in range(count):
            _put_half(row + 32 * i, shift, mask, cells + 64 * i)
    elif dtype == INT8:
        for i in range(count):
            _put_byte(row + 16 * i, shift, mask, cells + 64 * i)
    else:
        for i in range(count):
            _put_nibble(row + 8 * i, shift, mask, cells + 64 * i)

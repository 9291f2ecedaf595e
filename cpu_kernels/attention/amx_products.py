# mypy: ignore-errors
# Everything here runs inside Numba's type inference and code generation, whose
# types are not Python's.
"""The two products of attention in AMX tiles.

Cells lie as the instruction wants its second matrix: 16 rows of K are 32 dims
of 16 tokens, 16 rows of V are 32 tokens at 16 dims, both as pairs along the
summed axis. Operand rows are its first matrix, 16 query rows at most. Totals,
up to four, are scores of 16 tokens or outputs at 16 dims each::

    tile 0 … 3   totals          rows x 16 float32
    tile 4, 5    operands, cells     rows x 32 and 32 x 16 bfloat16
    tile 6, 7    the same for what is left of a head_dim that 32 doesn't divide

Of int8 a product sums up 64 elements, and both planes of the operands are multiplied with
cells that are loaded once; their totals are int32::

    tile 0 … 3   totals          of the high and the low plane, vector by vector
    tile 4, 5    operands        high and low plane, rows x 64 bytes
    tile 6       cells           16 words of 4 bytes x 16

A product of tiles takes 16 cycles for 1 KB of cells, several times as fast as
memory brings them.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from cpu_kernels.attention.operands import BIAS, FACTOR_BYTES, PLANE_BYTES, ROW_BYTES, UNIT
from cpu_kernels.codegen.amx import (
    BRAINS,
    CONFIG_BYTES,
    NUM_TILES,
    SIGNED_BY_UNSIGNED,
    TILE_BYTES,
    TILE_UNITS,
    UNSIGNED_BY_SIGNED,
    clear_config,
    set_tile,
)
from cpu_kernels.codegen.compiled import part
from cpu_kernels.codegen.simd import (
    F32,
    I1,
    I32,
    I64,
    broadcast,
    constant,
    load_at,
    multiply_add,
    store_at,
    vec,
)

WORDS = 16
"""Cells that a product sums up: 32 elements."""
MAX_TOTALS = 4
_OPERANDS, _CELLS, _LAST_OPERANDS, _LAST_CELLS = 4, 5, 6, 7
_BYTE_CELLS = 6
_QUERY_BITS, _WEIGHT_BITS = 7, 8
"""By which a high plane is worth more than a low one."""


class AmxTileType(types.Type):
    """The totals of a product. The value is the address of the tile file, as
    the registers have no other name.

    Args:
        planes: of integers that are multiplied; 0: floats are.
    """

    integer = False
    lanes = 16

    def __init__(self, rows: int, vectors: int, planes: int = 0) -> None:
        self.rows, self.vectors, self.planes = rows, vectors, planes
        self.num_totals = vectors * max(1, planes)
        super().__init__(name=f"AmxTile({rows}x{vectors}x{planes})")


@register_model(AmxTileType)
class _AmxTileModel(models.PrimitiveModel):
    def __init__(self, manager, typ):
        super().__init__(manager, typ, I64)


@intrinsic
def _load_config(typingctx, variant, file):
    def codegen(context, builder, signature, args):
        TILE_UNITS[variant.variant.tiles].configure(context, builder, args[1])
        return context.get_dummy_value()

    return types.void(variant, types.int64), codegen


@intrinsic
def release_tiles(typingctx, variant, file):
    """The end of what ``configure_tiles`` began; nothing where products aren't made in tiles."""

    def codegen(context, builder, signature, args):
        if variant.variant.tiles:
            TILE_UNITS[variant.variant.tiles].release(context, builder, args[1])
        return context.get_dummy_value()

    return types.void(variant, types.int64), codegen


@intrinsic
def configure_tiles(typingctx, variant, file, dim_words):
    """Give this thread's tiles their shapes; nothing where products aren't made in tiles."""

    def codegen(context, builder, signature, args):
        if variant.variant.tiles:
            context.compile_internal(builder, _configure.py_func, signature, args)
        return context.get_dummy_value()

    return types.void(variant, types.int64, types.int64), codegen


@part
def _configure(variant, file, dim_words):
    clear_config(file)
    whole, left = np.int64(WORDS), dim_words % WORDS
    for tile in range(NUM_TILES):
        words = whole if tile < _LAST_OPERANDS or variant.is_integer else left
        are_cells = tile in (_CELLS, _LAST_CELLS)
        if variant.is_integer:
            are_cells = tile == _BYTE_CELLS
        if words > 0:
            rows = words if are_cells else variant.product_rows
            column_words = words if tile in (_OPERANDS, _LAST_OPERANDS) else whole
            set_tile(file, tile, rows, 4 * column_words)
    _load_config(variant, file)


def zero_totals(context, builder, shape, tile_type, file):
    unit = TILE_UNITS[shape.tiles]
    for total in range(tile_type.num_totals):
        unit.zero(context, builder, file, total)
    return file


def store_totals(context, builder, shape, tile_type, file, address, stride):
    unit = TILE_UNITS[shape.tiles]
    for vector in range(tile_type.vectors):
        unit.store(context, builder, file, vector, builder.add(address, I64(64 * vector)), stride)


def accumulate_totals(
    context, builder, shape, tile_type, file, operands, cells, row_bytes, words_left, of_keys
):
    """totals += operands · cells over WORDS words; of keys, over those that are left."""
    unit = TILE_UNITS[shape.tiles]
    if tile_type.planes:
        _accumulate_bytes(
            context, builder, unit, tile_type, file, operands, cells, row_bytes, of_keys
        )
        return file

    def emit(operand_tile: int, cell_tile: int) -> None:
        unit.load(context, builder, file, operand_tile, operands, I64(ROW_BYTES))
        for vector in range(tile_type.vectors):
            unit.load(
                context, builder, file, cell_tile, builder.add(cells, I64(64 * vector)), row_bytes
            )
            unit.multiply(context, builder, file, vector, operand_tile, cell_tile, BRAINS)

    if not of_keys:
        emit(_OPERANDS, _CELLS)
        return file
    with builder.if_else(builder.icmp_signed(">=", words_left, I64(WORDS))) as (whole, rest):
        with whole:
            emit(_OPERANDS, _CELLS)
        with rest:
            emit(_LAST_OPERANDS, _LAST_CELLS)
    return file


def _accumulate_bytes(context, builder, unit, tile_type, file, operands, cells, row_bytes, of_keys):
    """Both planes' totals. Keys are unsigned, and values signed; operands are the other."""
    planes, product = range(tile_type.planes), SIGNED_BY_UNSIGNED if of_keys else UNSIGNED_BY_SIGNED
    for plane in planes:
        address = builder.add(operands, I64(plane * PLANE_BYTES))
        unit.load(context, builder, file, _OPERANDS + plane, address, I64(ROW_BYTES))
    for vector in range(tile_type.vectors):
        address = builder.add(cells, I64(64 * vector))
        unit.load(context, builder, file, _BYTE_CELLS, address, row_bytes)
        for plane in planes:
            total = vector * tile_type.planes + plane
            unit.multiply(context, builder, file, total, _OPERANDS + plane, _BYTE_CELLS, product)


def _integer_totals(context, builder, shape, tile_type, file, bits):
    """The planes' totals as one, by way of the tile file: a vector by row and vector."""
    unit = TILE_UNITS[shape.tiles]
    for total in range(tile_type.num_totals):
        address = builder.add(file, I64(CONFIG_BYTES + TILE_BYTES * total))
        unit.store(context, builder, file, total, address, I64(64))

    def read(row, vector):
        total = None
        for plane in range(tile_type.planes):
            tile = vector * tile_type.planes + plane
            offset = CONFIG_BYTES + TILE_BYTES * tile + 64 * row
            part = load_at(builder, file, vec(I32, 16), offset)
            if total is not None:
                part = builder.add(builder.shl(total, constant(I32, 16, bits)), part)
            total = part
        return total

    return read


def store_integer_scores(context, builder, shape, tile_type, file, operands, address):
    """Scores of each row to float32 [rows][ROW_BYTES]: what the operands' bias adds is taken
    off, and an integer is worth their unit."""
    read = _integer_totals(context, builder, shape, tile_type, file, _QUERY_BITS)
    for row in range(tile_type.rows):
        bias, unit = (
            broadcast(builder, load_at(builder, operands, kind, row * ROW_BYTES + offset), 16)
            for kind, offset in ((I32, BIAS), (F32, UNIT))
        )
        for vector in range(tile_type.vectors):
            exact = builder.sitofp(builder.sub(read(row, vector), bias), vec(F32, 16))
            score = builder.fmul(exact, unit)
            store_at(builder, score, address, row * ROW_BYTES + 64 * vector)


def add_integer_values(context, builder, shape, tile_type, file, factors, state, row_bytes, due):
    """state = state · rescale + totals · unit, of float32 rows."""
    read = _integer_totals(context, builder, shape, tile_type, file, _WEIGHT_BITS)
    for row in range(tile_type.rows):
        offset = _factor_offset(shape, row)
        rescale = builder.select(due, load_at(builder, factors, F32, offset), F32(1.0))
        unit = load_at(builder, factors, F32, offset + FACTOR_BYTES)
        rescale, unit = broadcast(builder, rescale, 16), broadcast(builder, unit, 16)
        target = builder.add(state, builder.mul(row_bytes, I64(row)))
        for vector in range(tile_type.vectors):
            old = builder.fmul(load_at(builder, target, vec(F32, 16), 64 * vector), rescale)
            exact = builder.sitofp(read(row, vector), vec(F32, 16))
            new = multiply_add(builder, exact, unit, old, shape.has_fma)
            store_at(builder, new, target, 64 * vector)


def _factor_offset(shape, row: int) -> int:
    """Where a row's factor is: register tiles have vectors of their own."""
    return row // shape.rows * 2 * FACTOR_BYTES + 4 * (row % shape.rows)


def load_state(context, builder, shape, tile_type, file, factors, state, row_bytes, due):
    """Totals from the state's float32 rows, times their rescale factors where
    these are due and not all 1."""
    addresses = [
        builder.add(factors, I64(_factor_offset(shape, row))) for row in range(tile_type.rows)
    ]
    changed = I1(0)
    for first in range(0, tile_type.rows, shape.rows):
        lanes = load_at(builder, addresses[first], vec(F32, shape.rows))
        differs = builder.fcmp_unordered("!=", lanes, ir.Constant(lanes.type, [1.0] * shape.rows))
        for row in range(shape.rows):
            changed = builder.or_(changed, builder.extract_element(differs, ir.IntType(32)(row)))
    with builder.if_then(builder.and_(due, changed), likely=False):
        for row, address in enumerate(addresses):
            target = builder.add(state, builder.mul(row_bytes, I64(row)))
            factor = broadcast(builder, load_at(builder, address, F32), 16)
            for vector in range(tile_type.vectors):
                old = load_at(builder, target, vec(F32, 16), 64 * vector)
                store_at(builder, builder.fmul(old, factor), target, 64 * vector)
    unit = TILE_UNITS[shape.tiles]
    for vector in range(tile_type.vectors):
        unit.load(context, builder, file, vector, builder.add(state, I64(64 * vector)), row_bytes)
    return file

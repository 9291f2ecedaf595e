# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""The two products of attention in AMX tiles.

Cells lie as the instruction wants its second matrix: 16 rows of K are 32 dims
of 16 tokens, 16 rows of V are 32 tokens at 16 dims, both as pairs along the
summed axis. Operand rows are its first matrix, 16 query rows at most. Totals,
up to four, are scores of 16 tokens or outputs at 16 dims each::

    tile 0 … 3   totals          rows x 16 float32
    tile 4, 5    operands, cells     rows x 32 and 32 x 16 bfloat16
    tile 6, 7    the same for what is left of a head_dim that 32 doesn't divide

A product of tiles takes 16 cycles for 1 KB of cells, several times as fast as
memory brings them.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import register_model
from numba.types import int64

from cpu_kernels.attention.operands import FACTOR_BYTES, ROW_BYTES
from cpu_kernels.codegen.amx import NUM_TILES, TILE_UNITS, clear_config, set_tile
from cpu_kernels.codegen.compiled import part
from cpu_kernels.codegen.simd import F32, I1, I64, broadcast, load_at, store_at, vec
from cpu_kernels.codegen.translate import Emitter

WORDS = 16  # cells that a product sums up: 32 elements
MAX_TOTALS = 4
_OPERANDS, _CELLS, _LAST_OPERANDS, _LAST_CELLS = 4, 5, 6, 7


class AmxTileType(types.Type):
    """The totals of a product. The value is the address of the tile file, as
    the registers have no other name."""

    integer = False
    lanes = 16

    def __init__(self, rows: int, vectors: int) -> None:
        self.rows, self.vectors = rows, vectors
        super().__init__(name=f"AmxTile({rows}x{vectors})")


@register_model(AmxTileType)
class _AmxTileModel(models.PrimitiveModel):
    def __init__(self, manager, typ):
        super().__init__(manager, typ, I64)


@Emitter
def _load_config(builder, variant, file: int64):
    TILE_UNITS[variant.tiles].configure(builder, file)


@Emitter
def release_tiles(builder, variant, file: int64):
    """The end of what ``configure_tiles`` began; nothing where products aren't made in tiles."""
    if variant.tiles:
        TILE_UNITS[variant.tiles].release(builder, file)


@part
def configure_tiles(variant, file, dim_words):
    """Give this thread's tiles their shapes; nothing where products aren't made in tiles."""
    if variant.tiles:
        _configure(variant, file, dim_words)


@part
def _configure(variant, file, dim_words):
    clear_config(file)
    whole, left = np.int64(WORDS), dim_words % WORDS
    for tile in range(NUM_TILES):
        words = whole if tile < _LAST_OPERANDS else left
        are_cells = tile in (_CELLS, _LAST_CELLS)
        if words > 0:
            rows = words if are_cells else variant.product_rows
            column_words = words if tile in (_OPERANDS, _LAST_OPERANDS) else whole
            set_tile(file, tile, rows, 4 * column_words)
    _load_config(variant, file)


def zero_totals(builder, shape, tile_type, file):
    unit = TILE_UNITS[shape.tiles]
    for total in range(tile_type.vectors):
        unit.zero(builder, file, total)
    return file


def store_totals(builder, shape, tile_type, file, address, stride):
    unit = TILE_UNITS[shape.tiles]
    for vector in range(tile_type.vectors):
        unit.store(builder, file, vector, builder.add(address, I64(64 * vector)), stride)


def accumulate_totals(
    builder, shape, tile_type, file, operands, cells, row_bytes, words_left, of_keys
):
    """totals += operands · cells over WORDS words; of keys, over those that are left."""
    unit = TILE_UNITS[shape.tiles]

    def emit(operand_tile: int, cell_tile: int) -> None:
        unit.load(builder, file, operand_tile, operands, I64(ROW_BYTES))
        for vector in range(tile_type.vectors):
            unit.load(builder, file, cell_tile, builder.add(cells, I64(64 * vector)), row_bytes)
            unit.multiply(builder, file, vector, operand_tile, cell_tile)

    if not of_keys:
        emit(_OPERANDS, _CELLS)
        return file
    with builder.if_else(builder.icmp_signed(">=", words_left, I64(WORDS))) as (whole, rest):
        with whole:
            emit(_OPERANDS, _CELLS)
        with rest:
            emit(_LAST_OPERANDS, _LAST_CELLS)
    return file


def _factor_offset(shape, row: int) -> int:
    """Where a row's factor is: register tiles have vectors of their own."""
    return row // shape.rows * 2 * FACTOR_BYTES + 4 * (row % shape.rows)


def load_state(builder, shape, tile_type, file, factors, state, row_bytes, due):
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
        unit.load(builder, file, vector, builder.add(state, I64(64 * vector)), row_bytes)
    return file

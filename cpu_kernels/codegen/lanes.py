# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""One vector: a number for each query row of a register tile, or for each of a few neighbouring
tokens.

What a kernel keeps for its rows (running maxima, sums, rescale factors) is brought up to date for
all rows of a tile at once, lane r for row r; a loop over rows would wait for one number's latency
after another."""

from __future__ import annotations

from llvmlite import ir
from numba.types import float32, int64

from cpu_kernels.codegen.simd import (
    EXP2_PRECISE,
    F32,
    I16,
    I32,
    TileType,
    brain_bits,
    broadcast,
    column_type,
    constant,
    count_up,
    emit_exp2,
    load_at,
    make_tile,
    map_tile,
    store_at,
    vec,
)
from cpu_kernels.codegen.translate import Emitter


def _wrap(builder, value):
    """One vector as a tile."""
    kind = TileType(1, 1, value.type.count)
    return make_tile(builder, kind, lambda row, vector: value)


@Emitter
def fill_lanes(builder, variant, scalar: float32):
    """``scalar`` everywhere."""
    return _wrap(builder, broadcast(builder, scalar, variant.lanes))


@Emitter
def count_lanes(builder, variant, first: float32):
    """first, first + 1, …"""
    return _wrap(builder, count_up(builder, variant.lanes, first))


@Emitter
def load_lanes(builder, variant, address: int64):
    """Consecutive float32."""
    return _wrap(builder, load_at(builder, address, vec(F32, variant.lanes)))


@Emitter
def store_lanes(builder, value, address: int64):
    store_at(builder, builder.extract_value(value.llvm, 0), address)


@Emitter
def exp2_lanes(builder, variant, value):
    """2^x for x <= 127, always precise: 2^0 is 1; 0 where x <= -127, minus
    infinity included; NaN stays NaN."""
    return map_tile(builder, lambda x: emit_exp2(builder, x, variant.has_fma, EXP2_PRECISE), value)


@Emitter
def spread_lanes(builder, variant, value):
    """The column whose row r repeats lane r."""
    lanes = builder.extract_value(value.llvm, 0)
    return make_tile(
        builder,
        column_type(variant),
        lambda row, vector: _shuffle(builder, lanes, lanes, [row] * variant.lanes),
    )


@Emitter
def first_lane(builder, value) -> float32:
    return builder.extract_element(builder.extract_value(value.llvm, 0), I32(0))


def _shuffle(builder, a, b, indices):
    return builder.shuffle_vector(a, b, ir.Constant(vec(I32, len(indices)), indices))


def _fold(builder, rows, lanes: int, combine):
    """Lane r = all lanes of rows[r], combined in a fixed tree.

    Rows are folded two at a time, the halves of one beside the halves of the other, until one
    vector holds them all with ``group`` lanes each, which then fold within the vector."""
    count = 1
    while count < len(rows):
        count *= 2
    vectors, group = list(rows) + [rows[0]] * (count - len(rows)), lanes
    while len(vectors) > 1:
        half, held = group // 2, lanes // group
        low = [
            start + row * group + lane
            for start in (0, lanes)
            for row in range(held)
            for lane in range(half)
        ]
        high = [index + half for index in low]
        vectors = [
            combine(builder, _shuffle(builder, a, b, low), _shuffle(builder, a, b, high))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        group = half
    value = vectors[0]
    while group > 1:
        half = group // 2
        low = [row * group + lane for row in range(count) for lane in range(half)]
        low = (low * lanes)[:lanes]  # what is to spare repeats
        value = combine(
            builder,
            _shuffle(builder, value, value, low),
            _shuffle(builder, value, value, [i + half for i in low]),
        )
        group = half
    return value


@Emitter
def fold_rows(builder, column, combine):
    """Each row's lanes combined: of a column, or of a single vector to lane 0."""
    rows = [builder.extract_value(column.llvm, row) for row in range(column.type.rows)]
    return _wrap(builder, _fold(builder, rows, column.type.lanes, combine))


# --- vectors of a model's own 16-bit elements


@Emitter
def load_brains(builder, variant, address: int64):
    """Consecutive bfloat16 → float32."""
    words = vec(I32, variant.lanes)
    bits = builder.zext(load_at(builder, address, vec(I16, variant.lanes), align=2), words)
    wide = builder.shl(bits, constant(I32, variant.lanes, 16))
    return _wrap(builder, builder.bitcast(wide, vec(F32, variant.lanes)))


@Emitter
def store_brains(builder, value, address: int64):
    """float32 → consecutive bfloat16, to nearest even."""
    rounded = brain_bits(builder, builder.extract_value(value.llvm, 0))
    store_at(builder, builder.trunc(rounded, vec(I16, value.type.lanes)), address, align=2)


@Emitter
def load_halves(builder, variant, address: int64):
    """Consecutive float16 → float32; only where the host converts them itself."""
    half = load_at(builder, address, vec(ir.HalfType(), variant.lanes), align=2)
    return _wrap(builder, builder.fpext(half, vec(F32, variant.lanes)))


@Emitter
def store_halves(builder, value, address: int64):
    """float32 → consecutive float16, to nearest even; only where the host converts them itself."""
    kind = vec(ir.HalfType(), value.type.lanes)
    half = builder.fptrunc(builder.extract_value(value.llvm, 0), kind)
    store_at(builder, half, address, align=2)

# mypy: ignore-errors
# Everything here runs inside Numba's type inference and code generation, whose
# types are not Python's.
"""One vector: a number for each query row of a register tile, or for each of a
few neighbouring tokens.

What a kernel keeps for its rows (running maxima, sums, rescale factors) is
brought up to date for all rows of a tile at once, lane r for row r; a loop over
rows would wait for one number's latency after another.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

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
    emit_exp2,
    larger,
    load_at,
    make_tile,
    store_at,
    vec,
)


def _lanes_type(variant_typ) -> TileType:
    return TileType(1, 1, variant_typ.variant.lanes)


def _wrap(builder, value, result):
    return builder.insert_value(ir.Constant(result.value, ir.Undefined), value, 0)


@intrinsic
def fill_lanes(typingctx, variant, scalar):
    """``scalar`` everywhere."""
    result = _lanes_type(variant)

    def codegen(context, builder, signature, args):
        return _wrap(builder, broadcast(builder, args[1], result.lanes), result)

    return result(variant, types.float32), codegen


@intrinsic
def count_lanes(typingctx, variant, first):
    """first, first + 1, …"""
    result = _lanes_type(variant)

    def codegen(context, builder, signature, args):
        steps = ir.Constant(vec(F32, result.lanes), [float(lane) for lane in range(result.lanes)])
        return _wrap(
            builder, builder.fadd(steps, broadcast(builder, args[1], result.lanes)), result
        )

    return result(variant, types.float32), codegen


@intrinsic
def load_lanes(typingctx, variant, address):
    """Consecutive float32."""
    result = _lanes_type(variant)

    def codegen(context, builder, signature, args):
        return _wrap(builder, load_at(builder, args[1], result.vector), result)

    return result(variant, types.int64), codegen


@intrinsic
def store_lanes(typingctx, value, address):
    def codegen(context, builder, signature, args):
        store_at(builder, builder.extract_value(args[0], 0), args[1])
        return context.get_dummy_value()

    return types.void(value, types.int64), codegen


@intrinsic
def exp2_lanes(typingctx, variant, value):
    """2^x for x <= 127, always precise: 2^0 is 1; 0 where x <= -127, minus
    infinity included; NaN stays NaN."""

    def codegen(context, builder, signature, args):
        power = emit_exp2(
            builder, builder.extract_value(args[1], 0), variant.variant.has_fma, EXP2_PRECISE
        )
        return _wrap(builder, power, value)

    return value(variant, value), codegen


@intrinsic
def spread_lanes(typingctx, variant, value):
    """The column whose row r repeats lane r."""
    result = column_type(variant)

    def codegen(context, builder, signature, args):
        lanes = builder.extract_value(args[1], 0)
        undefined = ir.Constant(lanes.type, ir.Undefined)
        return make_tile(
            builder,
            result,
            lambda row, vector: builder.shuffle_vector(
                lanes, undefined, constant(I32, result.lanes, row)
            ),
        )

    return result(variant, value), codegen


@intrinsic
def first_lane(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.extract_element(builder.extract_value(args[0], 0), I32(0))

    return types.float32(value), codegen


def _shuffle(builder, a, b, indices):
    return builder.shuffle_vector(a, b, ir.Constant(vec(I32, len(indices)), indices))


def _fold(builder, rows, lanes: int, combine):
    """Lane r = all lanes of rows[r], combined in a fixed tree.

    Rows are folded two at a time, the halves of one beside the halves of the
    other, until one vector holds them all with ``group`` lanes each, which then
    fold within the vector.
    """
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
            combine(_shuffle(builder, a, b, low), _shuffle(builder, a, b, high))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        group = half
    value = vectors[0]
    while group > 1:
        half = group // 2
        low = [row * group + lane for row in range(count) for lane in range(half)]
        low = (low * lanes)[:lanes]  # what is to spare repeats
        value = combine(
            _shuffle(builder, value, value, low),
            _shuffle(builder, value, value, [i + half for i in low]),
        )
        group = half
    return value


def _row_fold(combine):
    @intrinsic
    def fold(typingctx, variant, column):
        result = _lanes_type(variant)

        def codegen(context, builder, signature, args):
            rows = [builder.extract_value(args[1], row) for row in range(column.rows)]
            return _wrap(
                builder,
                _fold(builder, rows, column.lanes, lambda a, b: combine(builder, a, b)),
                result,
            )

        return result(variant, column), codegen

    return fold


fold_maxima = _row_fold(larger)
"""The largest lane of each row of a column (or of a single vector: lane 0)."""
fold_sums = _row_fold(lambda builder, a, b: builder.fadd(a, b))
"""The sum of each row's lanes."""


# --- vectors of a model's own 16-bit elements


@intrinsic
def load_brains(typingctx, variant, address):
    """Consecutive bfloat16 → float32."""
    result = _lanes_type(variant)

    def codegen(context, builder, signature, args):
        bits = load_at(builder, args[1], vec(I16, result.lanes), align=2)
        wide = builder.shl(
            builder.zext(bits, vec(I32, result.lanes)), constant(I32, result.lanes, 16)
        )
        return _wrap(builder, builder.bitcast(wide, result.vector), result)

    return result(variant, types.int64), codegen


@intrinsic
def store_brains(typingctx, value, address):
    """float32 → consecutive bfloat16, to nearest even."""

    def codegen(context, builder, signature, args):
        rounded = brain_bits(builder, builder.extract_value(args[0], 0))
        store_at(builder, builder.trunc(rounded, vec(I16, value.lanes)), args[1], align=2)
        return context.get_dummy_value()

    return types.void(value, types.int64), codegen


@intrinsic
def load_halves(typingctx, variant, address):
    """Consecutive float16 → float32; only where the host converts them itself."""
    result = _lanes_type(variant)

    def codegen(context, builder, signature, args):
        half = load_at(builder, args[1], vec(ir.HalfType(), result.lanes), align=2)
        return _wrap(builder, builder.fpext(half, result.vector), result)

    return result(variant, types.int64), codegen


@intrinsic
def store_halves(typingctx, value, address):
    """float32 → consecutive float16, to nearest even; only where the host converts them itself."""

    def codegen(context, builder, signature, args):
        half = builder.fptrunc(builder.extract_value(args[0], 0), vec(ir.HalfType(), value.lanes))
        store_at(builder, half, args[1], align=2)
        return context.get_dummy_value()

    return types.void(value, types.int64), codegen

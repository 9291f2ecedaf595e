# mypy: ignore-errors
# Everything here runs inside Numba's type inference and code generation, whose types are not Python's.
"""Register tiles: rows of queries (or weights) times vectors of cached words.

Both matrix products of attention have the same inner step: a few vectors of **cells** from the cache (K: one dim word
of many tokens; V: one token word of many dims), each multiplied with one broadcast operand word per query row::

    tile[r][c] += operand[r] · cells[c]            r < rows, c < vectors: all in registers

An **operand row** is what the small side of the product looks like in memory, ``ROW_BYTES`` apart from the next::

    dot "fma"    float32 elements
    dot "bf16"   bfloat16 elements of the high plane; the low plane (what rounding left over) PLANE_BYTES further
    dot "int8"   the same with signed bytes: element ≈ unit · (128 · high + low)
    + 2048       float32 unit, int32 bias sum, float32 rescale factor (``UNIT``, ``BIAS``, ``RESCALE``)
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from cpu_kernels.simd import (
    F32,
    I8,
    I16,
    I32,
    VecType,
    broadcast,
    call,
    constant,
    emit_prefetch,
    load_at,
    multiply_add,
    pointer,
    store_at,
    vec,
)

MAX_OPERANDS = 512
"""Elements of an operand row: the largest head_dim, and the most tokens of a superblock."""
PLANE_BYTES = 2 * MAX_OPERANDS
UNIT, BIAS, RESCALE = (4 * MAX_OPERANDS + offset for offset in (0, 4, 8))
ROW_BYTES = 4 * MAX_OPERANDS + 64
"""An odd number of cache lines, so that rows don't fall on the same cache sets."""
MAX_INTEGER = 127 * 128
"""The largest magnitude of 128 · high + low with both planes in signed bytes."""

_ROUNDING = 12582912.0
_ROUNDING_BITS = 0x4B400000


class _BFloat(ir.Type):
    """llvmlite has no name for it."""

    null = "0.0"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16 = _BFloat()


class TileType(types.Type):
    """rows x vectors accumulators, float32 or int32."""

    def __init__(self, rows: int, vectors: int, lanes: int, integer: bool) -> None:
        self.rows, self.vectors, self.lanes, self.integer = rows, vectors, lanes, integer
        super().__init__(name=f"Tile({rows}x{vectors},{'i' if integer else 'f'}32x{lanes})")

    @property
    def element(self) -> ir.Type:
        return I32 if self.integer else F32


@register_model(TileType)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager, typ):
        kind = ir.ArrayType(vec(typ.element, typ.lanes), typ.rows * typ.vectors)
        super().__init__(manager, typ, kind)


def _tile_maker(vectors_of):
    @intrinsic
    def make(typingctx, variant):
        shape = variant.variant
        result = TileType(shape.rows, vectors_of(shape), shape.lanes, shape.dot == "int8")

        def codegen(context, builder, signature, args):
            return ir.Constant(context.get_value_type(result), None)

        return result(variant), codegen

    return make


zero_scores = _tile_maker(lambda shape: shape.score_vectors)
zero_values = _tile_maker(lambda shape: shape.value_vectors)


def _each(builder, tile_type, tile, emit):
    """The tile with ``emit(row, vector, accumulator)`` in the place of each accumulator."""
    for row in range(tile_type.rows):
        for vector in range(tile_type.vectors):
            index = row * tile_type.vectors + vector
            value = emit(row, vector, builder.extract_value(tile, index))
            tile = builder.insert_value(tile, value, index)
    return tile


# --- cells → operands of a product --------------------------------------------------------------------------------


def _half_to_float(builder, half, lanes: int):
    """float16 bits in int32 lanes → float32, for hosts without F16C; exact, subnormals, infinities and NaN included."""
    kind, ints = vec(F32, lanes), vec(I32, lanes)
    magnitude = builder.shl(builder.and_(half, constant(I32, lanes, 0x7FFF)), constant(I32, lanes, 13))
    scaled = builder.fmul(builder.bitcast(magnitude, kind), constant(F32, lanes, 2.0**112))
    special = builder.icmp_unsigned(">=", magnitude, constant(I32, lanes, 0x0F800000))
    raised = builder.or_(magnitude, constant(I32, lanes, 0x7F800000))
    bits = builder.select(special, raised, builder.bitcast(scaled, ints))
    sign = builder.shl(builder.and_(half, constant(I32, lanes, 0x8000)), constant(I32, lanes, 16))
    return builder.bitcast(builder.or_(bits, sign), kind)


def _unpack(builder, shape, address, offset: int):
    """The float32 vectors, one for each packed element, that a vector of cells holds."""
    lanes = shape.lanes
    if shape.dtype == "float32":
        return [load_at(builder, address, vec(F32, lanes), offset)]
    if shape.dtype == "float16":
        if shape.has_f16c:
            half = load_at(builder, address, vec(ir.HalfType(), lanes), offset, align=2)
            return [builder.fpext(half, vec(F32, lanes))]
        bits = builder.zext(load_at(builder, address, vec(I16, lanes), offset, align=2), vec(I32, lanes))
        return [_half_to_float(builder, bits, lanes)]
    cells = load_at(builder, address, vec(I32, lanes), offset)
    if shape.dtype == "bfloat16":
        low = builder.shl(cells, constant(I32, lanes, 16))
        high = builder.and_(cells, constant(I32, lanes, 0xFFFF0000))
        return [builder.bitcast(half, vec(F32, lanes)) for half in (low, high)]
    bits = 32 // shape.pack
    flipped = builder.xor(cells, constant(I32, lanes, 0x80808080 if bits == 8 else 0x88888888))
    parts = []
    for element in range(shape.pack):
        top = 32 - bits - (8 * (element % 4) + 4 * (element // 4))
        raised = builder.shl(flipped, constant(I32, lanes, top)) if top else flipped
        signed = builder.ashr(raised, constant(I32, lanes, 32 - bits))
        parts.append(builder.sitofp(signed, vec(F32, lanes)))
    return parts


def _operand(builder, address, row: int, offset: int, lanes: int, element):
    return broadcast(builder, load_at(builder, address, element, row * ROW_BYTES + offset), lanes)


def _accumulate_fma(builder, shape, tile_type, tile, operands, cells):
    lanes = shape.lanes
    vectors = [_unpack(builder, shape, cells, vector * lanes * shape.cell_bytes) for vector in range(tile_type.vectors)]
    for part in range(shape.pack):
        scalars = [_operand(builder, operands, row, 4 * part, lanes, F32) for row in range(tile_type.rows)]
        tile = _each(
            builder, tile_type, tile,
            lambda row, vector, value, part=part, scalars=scalars: multiply_add(
                builder, scalars[row], vectors[vector][part], value, shape.has_fma
            ),
        )  # fmt: skip
    return tile


def _accumulate_bf16(builder, shape, tile_type, tile, operands, cells, planes: int):
    kind = vec(BF16, 32)
    vectors = [load_at(builder, cells, kind, 64 * vector) for vector in range(tile_type.vectors)]
    for plane in range(planes):
        scalars = [
            builder.bitcast(_operand(builder, operands, row, plane * PLANE_BYTES, 16, I32), kind)
            for row in range(tile_type.rows)
        ]
        tile = _each(
            builder, tile_type, tile,
            lambda row, vector, value, scalars=scalars: call(
                builder, "llvm.x86.avx512bf16.dpbf16ps.512", value.type,
                [value, scalars[row], vectors[vector]],
            ),
        )  # fmt: skip
    return tile


def _accumulate_int8(builder, shape, tile_type, tile, operands, cells):
    loaded = [load_at(builder, cells, vec(I32, 16), 64 * vector) for vector in range(tile_type.vectors)]
    parts = [loaded]
    if shape.dtype == "int4":
        nibbles = constant(I32, 16, 0x0F0F0F0F)
        parts = [
            [builder.and_(cell, nibbles) for cell in loaded],
            [builder.and_(builder.lshr(cell, constant(I32, 16, 4)), nibbles) for cell in loaded],
        ]
    for part, vectors in enumerate(parts):
        scalars = [_operand(builder, operands, row, 4 * part, 16, I32) for row in range(tile_type.rows)]
        tile = _each(
            builder, tile_type, tile,
            lambda row, vector, value, vectors=vectors, scalars=scalars: call(
                builder, "llvm.x86.avx512.vpdpbusd.512", value.type, [value, vectors[vector], scalars[row]]
            ),
        )  # fmt: skip
    return tile


def _accumulator(planes_of):
    @intrinsic
    def accumulate(typingctx, variant, tile, operands, cells):
        shape = variant.variant

        def codegen(context, builder, signature, args):
            arguments = (builder, shape, tile, *args[1:])
            if shape.dot == "bf16":
                return _accumulate_bf16(*arguments, planes_of(shape))
            if shape.dot == "int8":
                return _accumulate_int8(*arguments)
            return _accumulate_fma(*arguments)

        return tile(variant, tile, types.int64, types.int64), codegen

    return accumulate


accumulate_scores = _accumulator(lambda shape: shape.q_planes)
"""tile += (query operands of one dim word) · (K cells of one dim word)."""
accumulate_values = _accumulator(lambda shape: shape.p_planes)
"""tile += (weight operands of one token word) · (V cells of one token word)."""


@intrinsic
def begin_low_plane(typingctx, tile):
    """Integer tiles: what the high plane summed up is worth 128 times the low plane's."""

    def codegen(context, builder, signature, args):
        if not tile.integer:
            return args[0]
        seven = constant(I32, tile.lanes, 7)
        return _each(builder, tile, args[0], lambda row, vector, value: builder.shl(value, seven))

    return tile(tile), codegen


@intrinsic
def prefetch_cells(typingctx, variant, tile, address):
    """Ask for the lines that a vector row of cells covers, at another address."""
    num_bytes = tile.vectors * tile.lanes * variant.variant.cell_bytes

    def codegen(context, builder, signature, args):
        for offset in range(0, num_bytes, 64):
            emit_prefetch(builder, args[2], offset)
        return context.get_dummy_value()

    return types.void(variant, tile, types.int64), codegen


# --- tiles → memory -----------------------------------------------------------------------------------------------


def _as_float(builder, tile, value, row: int, operands):
    """An accumulator in units of its operand row, as float32."""
    bias = _operand(builder, operands, row, BIAS, tile.lanes, I32)
    return builder.sitofp(builder.sub(value, bias), vec(F32, tile.lanes))


@intrinsic
def store_scores(typingctx, variant, tile, operands, address):
    """Scores of each row to float32 [rows][ROW_BYTES]."""

    def codegen(context, builder, signature, args):
        _, value, rows, target = args

        def emit(row, vector, accumulator):
            if tile.integer:
                unit = _operand(builder, rows, row, UNIT, tile.lanes, F32)
                result = builder.fmul(_as_float(builder, tile, accumulator, row, rows), unit)
            else:
                result = accumulator
            store_at(builder, result, target, row * ROW_BYTES + vector * tile.lanes * 4)
            return accumulator

        _each(builder, tile, value, emit)
        return context.get_dummy_value()

    return types.void(variant, tile, types.int64, types.int64), codegen


@intrinsic
def fold_values(typingctx, variant, tile, operands, state, row_bytes):
    """state[r] = state[r] · rescale[r] + tile[r], in float32 [rows][row_bytes]."""
    shape = variant.variant

    def codegen(context, builder, signature, args):
        _, value, rows, address, stride = args
        lanes = tile.lanes
        targets = [builder.add(address, builder.mul(stride, stride.type(row))) for row in range(tile.rows)]

        def emit(row, vector, accumulator):
            offset = vector * lanes * 4
            old = load_at(builder, targets[row], vec(F32, lanes), offset)
            rescale = _operand(builder, rows, row, RESCALE, lanes, F32)
            if tile.integer:
                unit = _operand(builder, rows, row, UNIT, lanes, F32)
                new = _as_float(builder, tile, accumulator, row, rows)
                result = multiply_add(builder, new, unit, builder.fmul(old, rescale), shape.has_fma)
            else:
                result = multiply_add(builder, old, rescale, accumulator, shape.has_fma)
            store_at(builder, result, targets[row], offset)
            return accumulator

        _each(builder, tile, value, emit)
        return context.get_dummy_value()

    return types.void(variant, tile, types.int64, types.int64, types.int64), codegen


# --- vectors → operand rows ---------------------------------------------------------------------------------------


def _round_to_bf16(builder, value):
    """(bits in <16 x i16>, the rounded value as float32)"""
    rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", vec(BF16, 16), [value])
    bits = builder.bitcast(rounded, vec(I16, 16))
    wide = builder.shl(builder.zext(bits, vec(I32, 16)), constant(I32, 16, 16))
    return bits, builder.bitcast(wide, vec(F32, 16))


def _store_bf16(builder, value, address, planes: int):
    bits, effective = _round_to_bf16(builder, value)
    store_at(builder, bits, address, align=2)
    if planes == 1:
        return effective
    bits, _ = _round_to_bf16(builder, builder.fsub(value, effective))
    store_at(builder, bits, address, PLANE_BYTES, align=2)
    return value


def _store_int8(builder, value, address):
    shifted = builder.bitcast(builder.fadd(value, constant(F32, 16, _ROUNDING)), vec(I32, 16))
    integer = builder.sub(shifted, constant(I32, 16, _ROUNDING_BITS))
    seven = constant(I32, 16, 7)
    high = builder.ashr(builder.add(integer, constant(I32, 16, 64)), seven)
    low = builder.sub(integer, builder.shl(high, seven))
    for plane, part in enumerate((high, low)):
        store_at(builder, builder.trunc(part, vec(I8, 16)), address, plane * PLANE_BYTES, align=1)
    return builder.sitofp(integer, vec(F32, 16))


def _operand_store(planes_of):
    @intrinsic
    def store_operands(typingctx, variant, value, address):
        shape = variant.variant

        def codegen(context, builder, signature, args):
            _, vector, target = args
            if shape.dot in ("bf16", "tile"):
                return _store_bf16(builder, vector, target, planes_of(shape))
            if shape.dot == "int8":
                return _store_int8(builder, vector, target)
            store_at(builder, vector, target)
            return vector

        return value(variant, value, types.int64), codegen

    return store_operands


store_query = _operand_store(lambda shape: shape.q_planes)
"""Write a vector of query elements into an operand row; returns what the planes hold."""
store_weights = _operand_store(lambda shape: shape.p_planes)
"""The same for softmax weights."""


@intrinsic
def copy_low_halves(typingctx, source, target):
    """16 words with their upper half cleared."""

    def codegen(context, builder, signature, args):
        words = load_at(builder, args[0], vec(I32, 16))
        store_at(builder, builder.and_(words, constant(I32, 16, 0xFFFF)), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


__all__ = [
    "MAX_INTEGER",
    "MAX_OPERANDS",
    "PLANE_BYTES",
    "ROW_BYTES",
    "TileType",
    "VecType",
    "accumulate_scores",
    "accumulate_values",
    "begin_low_plane",
    "copy_low_halves",
    "fold_values",
    "pointer",
    "prefetch_cells",
    "store_query",
    "store_scores",
    "store_weights",
    "zero_scores",
    "zero_values",
]

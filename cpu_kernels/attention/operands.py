# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""Operand rows: the small side of a product, queries or weights, as its
instructions read it from memory.

An **operand row** is what the small side of the product looks like in memory,
``ROW_BYTES`` apart from the next::

    dot "fma"    float32 elements
    dot "bf16"   bfloat16 elements of the high plane; the low plane (what
                 rounding left over) PLANE_BYTES further
    dot "amx"    the same, the high plane only
    dot "int8"   the same with bytes: element ≈ unit · (128 · high + low) for
                 queries, both planes signed, and unit · (256 · high + low) for
                 weights, both planes unsigned; or one plane, unit · byte
    dot "int16"  unit · int16, of each four elements the first and third, then the others
    + 2048       float32 unit and int32 bias of a query (integers only)

The softmax leaves two vectors for each tile's weights, FACTOR_BYTES apart: what
the state has to be multiplied with first, row for row, and what a unit of
integer weight is worth.
"""

from __future__ import annotations

from llvmlite import ir
from numba.types import int32, int64

from cpu_kernels.codegen.simd import (
    F32,
    I8,
    I16,
    I32,
    brain_bits,
    broadcast,
    call,
    constant,
    load_at,
    make_tile,
    store_at,
    vec,
)
from cpu_kernels.codegen.translate import Emitter

MAX_OPERANDS = 512
"""Elements of an operand row: the largest head_dim, and the most tokens of a block."""
PLANE_BYTES = 2 * MAX_OPERANDS
UNIT, BIAS = 4 * MAX_OPERANDS, 4 * MAX_OPERANDS + 4
FACTOR_BYTES = 64
ROW_BYTES = 4 * MAX_OPERANDS + 64
"""An odd number of cache lines, so that rows don't fall on the same cache sets."""
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


def _round_to_bf16(builder, shape, value):
    """(bits in <16 x i16>, the rounded value as float32)"""
    if shape.tiles not in ("", "amx"):
        bits = builder.trunc(brain_bits(builder, value), vec(I16, 16))
    else:
        rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", vec(BF16, 16), [value])
        bits = builder.bitcast(rounded, vec(I16, 16))
    wide = builder.shl(builder.zext(bits, vec(I32, 16)), constant(I32, 16, 16))
    return bits, builder.bitcast(wide, vec(F32, 16))


def _store_bf16(builder, shape, value, address, offset: int, planes: int) -> None:
    bits, effective = _round_to_bf16(builder, shape, value)
    store_at(builder, bits, address, offset, align=2)
    if planes > 1:
        bits, _ = _round_to_bf16(builder, shape, builder.fsub(value, effective))
        store_at(builder, bits, address, offset + PLANE_BYTES, align=2)


def _store_integers(builder, shape, value, address, offset: int, planes: int, bits: int):
    """``bits`` of each integer go to the low plane: 7 for signed planes, 8 for unsigned ones."""
    lanes = shape.lanes
    shifted = builder.bitcast(builder.fadd(value, constant(F32, lanes, _ROUNDING)), vec(I32, lanes))
    integer = builder.sub(shifted, constant(I32, lanes, _ROUNDING_BITS))
    shift = constant(I32, lanes, bits)
    if planes == 1:
        stored = builder.trunc(integer, vec(I8 if shape.dot == "int8" else I16, lanes))
        if shape.dot == "int16":
            order = [word + element for word in range(0, lanes, 4) for element in (0, 2, 1, 3)]
            stored = builder.shuffle_vector(stored, stored, ir.Constant(vec(I32, lanes), order))
        store_at(builder, stored, address, offset, align=1)
        return builder.sitofp(integer, vec(F32, lanes))
    if bits == 7:
        high = builder.ashr(builder.add(integer, constant(I32, 16, 64)), shift)
        low = builder.sub(integer, builder.shl(high, shift))
    else:
        high, low = builder.lshr(integer, shift), integer
    for plane, part in enumerate((high, low)):
        store_at(
            builder,
            builder.trunc(part, vec(I8, lanes)),
            address,
            offset + plane * PLANE_BYTES,
            align=1,
        )
    return builder.sitofp(integer, vec(F32, lanes))


def _store_operand(builder, shape, element, address, offset: int, planes: int, bits: int):
    """Write a vector of elements; returns what integer planes hold of it."""
    if shape.is_integer:
        return _store_integers(builder, shape, element, address, offset, planes, bits)
    if shape.has_brain_operands:
        _store_bf16(builder, shape, element, address, offset, planes)
    else:
        store_at(builder, element, address, offset)
    return element


@Emitter
def store_query(builder, shape, value, address: int64):
    """Write a column of query elements into operand rows; returns what integer planes hold."""

    def emit(row, vector):
        element = builder.extract_value(value.llvm, row)
        return _store_operand(builder, shape, element, address, row * ROW_BYTES, shape.q_planes, 7)

    return make_tile(builder, value.type, emit)


@Emitter
def store_weights(builder, shape, value, address: int64):
    """Write a column of softmax weights into operand rows."""
    for row in range(value.type.rows):
        element = builder.extract_value(value.llvm, row)
        _store_operand(builder, shape, element, address, row * ROW_BYTES, shape.p_planes, 8)


@Emitter
def copy_masked(builder, source: int64, target: int64, mask: int32):
    """16 words, each anded with ``mask``."""
    words = load_at(builder, source, vec(I32, 16))
    store_at(builder, builder.and_(words, broadcast(builder, mask, 16)), target)

# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""Vectors as first-class values in Numba: the building blocks of the kernels.

A ``Tile`` is rows x vectors of float32 (or int32) that live in registers between the statements of
a kernel; tiles of floats know ``+ - * /``. A **column** is a tile of one vector for each query row
of the kernel. Kernels take a ``Variant`` as their first argument. Addresses are plain int64.
Everything is emitted as LLVM IR, so it compiles for every target; only the names that begin with
``llvm.x86`` need a feature."""

from __future__ import annotations

import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import lower_builtin, register_model, type_callable
from numba.types import float32

from cpu_kernels.codegen.compiled import part
from cpu_kernels.codegen.translate import Emitter, Value

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()


class TileType(types.Type):
    """rows x vectors registers of float32 or int32."""

    def __init__(self, rows: int, vectors: int, lanes: int, integer: bool = False) -> None:
        self.rows, self.vectors, self.lanes, self.integer = rows, vectors, lanes, integer
        super().__init__(name=f"Tile({rows}x{vectors},{'i' if integer else 'f'}32x{lanes})")

    @property
    def vector(self) -> ir.VectorType:
        return vec(I32 if self.integer else F32, self.lanes)

    @property
    def value(self) -> ir.ArrayType:
        return ir.ArrayType(self.vector, self.rows * self.vectors)


@register_model(TileType)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager, typ):
        super().__init__(manager, typ, typ.value)


def column_type(variant) -> TileType:
    return TileType(variant.rows, 1, variant.lanes)


def make_tile(builder, tile_type, emit):
    """The tile of ``emit(row, vector)``."""
    tile = ir.Constant(tile_type.value, ir.Undefined)
    for row in range(tile_type.rows):
        for vector in range(tile_type.vectors):
            tile = builder.insert_value(tile, emit(row, vector), row * tile_type.vectors + vector)
    return Value(tile_type, tile)


def map_tile(builder, emit, *tiles):
    """The tile of ``emit(a, b, …)`` over the registers of ``tiles``."""
    kind = tiles[0].type
    result = ir.Constant(kind.value, ir.Undefined)
    for index in range(kind.rows * kind.vectors):
        value = emit(*[builder.extract_value(tile.llvm, index) for tile in tiles])
        result = builder.insert_value(result, value, index)
    return Value(kind, result)


def vec(element: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def pointer(builder, address, element: ir.Type, offset: int = 0):
    """``address + offset`` as a pointer, in a form that folds into an addressing mode."""
    base = builder.inttoptr(address, I8.as_pointer())
    if offset:
        base = builder.gep(base, [I64(offset)])
    return builder.bitcast(base, element.as_pointer())


def load_at(builder, address, element: ir.Type, offset: int = 0, align: int = 4):
    return builder.load(pointer(builder, address, element, offset), align=align)


def store_at(builder, value, address, offset: int = 0, align: int = 4):
    builder.store(value, pointer(builder, address, value.type, offset), align=align)


def constant(element: ir.Type, lanes: int, value) -> ir.Constant:
    return ir.Constant(vec(element, lanes), [value] * lanes)


def broadcast(builder, scalar, lanes: int):
    kind = vec(scalar.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), constant(I32, lanes, 0))


def call(builder, name: str, result: ir.Type, args):
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def multiply_add(builder, a, b, c, has_fma: bool):
    """a * b + c, fused where the host fuses; without FMA ``llvm.fma`` would
    call the C library lane by lane."""
    kind = "fma" if has_fma else "fmuladd"
    suffix = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
    return call(builder, f"llvm.{kind}.{suffix}", a.type, [a, b, c])


def brain_bits(builder, number):
    """float32 → bfloat16 to nearest even, its bits in the lower halves of int32, for any host."""
    lanes = number.type.count
    bits = builder.bitcast(number, vec(I32, lanes))
    odd = builder.and_(builder.lshr(bits, constant(I32, lanes, 16)), constant(I32, lanes, 1))
    rounded = builder.add(builder.add(bits, constant(I32, lanes, 0x7FFF)), odd)
    wrong = builder.fcmp_unordered("uno", number, number)
    return builder.select(
        wrong, constant(I32, lanes, 0x7FC0), builder.lshr(rounded, constant(I32, lanes, 16))
    )


def transpose(builder, rows):
    """The columns of as many vectors of 32 bits as each has lanes, a power of two."""
    size = len(rows)
    indices = list(range(2 * size))
    zipped = [x for pair in zip(indices[:size], indices[size:], strict=True) for x in pair]
    low, high = (ir.Constant(vec(I32, size), half) for half in (zipped[:size], zipped[size:]))
    for _ in range(size.bit_length() - 1):
        # Each round doubles how many elements of a column stand together.
        halves = zip(rows[: size // 2], rows[size // 2 :], strict=True)
        rows = [builder.shuffle_vector(a, b, order) for a, b in halves for order in (low, high)]
    return rows


def larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def added(builder, a, b):
    return builder.fadd(a, b)


def fold_lanes(builder, value, combine):
    """All lanes combined in a fixed tree, so that the result doesn't depend on the compiler."""
    lanes = value.type.count
    while lanes > 1:
        lanes //= 2
        undefined = ir.Constant(value.type, ir.Undefined)
        low = builder.shuffle_vector(
            value, undefined, ir.Constant(vec(I32, lanes), list(range(lanes)))
        )
        high = builder.shuffle_vector(
            value, undefined, ir.Constant(vec(I32, lanes), list(range(lanes, 2 * lanes)))
        )
        value = combine(builder, low, high)
    return builder.extract_element(value, I32(0))


@Emitter
def splat(builder, variant, scalar: float32):
    """A column with ``scalar`` everywhere."""
    value = broadcast(builder, scalar, variant.lanes)
    return make_tile(builder, column_type(variant), lambda row, vector: value)


def count_up(builder, lanes: int, first):
    """first, first + 1, …"""
    steps = ir.Constant(vec(F32, lanes), [float(lane) for lane in range(lanes)])
    return builder.fadd(steps, broadcast(builder, first, lanes))


@Emitter
def iota(builder, variant, first: float32):
    """A column whose rows all count up from ``first``."""
    value = count_up(builder, variant.lanes, first)
    return make_tile(builder, column_type(variant), lambda row, vector: value)


def _lower_operator(symbol, name):
    """``symbol`` between tiles of floats."""

    @type_callable(symbol)
    def infer(context):
        return lambda a, b: a if isinstance(a, TileType) and a == b and not a.integer else None

    @lower_builtin(symbol, TileType, TileType)
    def lower(context, builder, signature, args):
        tiles = [Value(signature.return_type, arg) for arg in args]
        return map_tile(builder, getattr(builder, name), *tiles).llvm


_lower_operator(operator.add, "fadd")
_lower_operator(operator.sub, "fsub")
_lower_operator(operator.mul, "fmul")
_lower_operator(operator.truediv, "fdiv")


@Emitter
def maximum(builder, a, b):
    """The larger of each two elements."""
    return map_tile(builder, lambda x, y: larger(builder, x, y), a, b)


@Emitter
def fma(builder, variant, a, b, c):
    """a · b + c"""
    fused = variant.has_fma
    return map_tile(builder, lambda x, y, z: multiply_add(builder, x, y, z, fused), a, b, c)


@Emitter
def keep_within(builder, value, index, low, high):
    """``value`` where low <= index < high, minus infinity elsewhere; all of them columns."""
    nothing = constant(F32, value.type.lanes, float("-inf"))

    def emit(x, i, lowest, highest):
        inside = builder.and_(
            builder.fcmp_ordered(">=", i, lowest), builder.fcmp_ordered("<", i, highest)
        )
        return builder.select(inside, x, nothing)

    return map_tile(builder, emit, value, index, low, high)


@Emitter
def zero_if_infinite(builder, value):
    """Minus infinity becomes 0."""
    lanes = value.type.lanes
    nothing, zero = constant(F32, lanes, float("-inf")), constant(F32, lanes, 0.0)

    def emit(x):
        return builder.select(builder.fcmp_ordered("==", x, nothing), zero, x)

    return map_tile(builder, emit, value)


@Emitter
def clamp(builder, value, bound: float32):
    """``value`` held within ± ``bound``; NaN stays NaN."""
    high = broadcast(builder, bound, value.type.lanes)
    low = builder.fsub(constant(F32, value.type.lanes, -0.0), high)

    def emit(x):
        x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
        return builder.select(builder.fcmp_ordered("<", x, low), low, x)

    return map_tile(builder, emit, value)


EXP2_PRECISE = (1.0, 0.693146944, 0.240221202, 0.0555071309, 0.00967554189, 0.00132764725)
"""2^f on [-0.5, 0.5]: relative error 1.5e-7."""
EXP2_COARSE = (0.999999285, 0.693121791, 0.240247443, 0.0559178628, 0.00957010221)
"""Relative error 2.6e-6, for what is rounded to bfloat16 anyway."""
# 1.5 · 2^23 + the exponent's bias: the sum's lowest bits are a biased exponent.
_ROUNDING = 12582912.0 + 127.0


def emit_exp2(builder, value, has_fma: bool, coefficients):
    lanes = value.type.count
    low = constant(F32, lanes, -127.0)
    x = builder.select(builder.fcmp_ordered("<", value, low), low, value)
    shifted = builder.fadd(x, constant(F32, lanes, _ROUNDING))
    fraction = builder.fsub(x, builder.fsub(shifted, constant(F32, lanes, _ROUNDING)))
    exponent = builder.shl(builder.bitcast(shifted, vec(I32, lanes)), constant(I32, lanes, 23))
    result = constant(F32, lanes, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = multiply_add(builder, result, fraction, constant(F32, lanes, coefficient), has_fma)
    return builder.fmul(result, builder.bitcast(exponent, vec(F32, lanes)))


@Emitter
def exp2(builder, variant, value):
    """2^x for x <= 127; 0 where x <= -127, minus infinity included; NaN stays NaN."""
    coarse = variant.has_brain_operands and variant.p_planes == 1
    coefficients = EXP2_COARSE if coarse else EXP2_PRECISE
    return map_tile(builder, lambda x: emit_exp2(builder, x, variant.has_fma, coefficients), value)


@Emitter
def exp2_scalar(builder, variant, value: float32) -> float32:
    """The same for one number, always precise."""
    power = emit_exp2(builder, broadcast(builder, value, 4), variant.has_fma, EXP2_PRECISE)
    return builder.extract_element(power, I32(0))


@part
def tanh(variant, x):
    """tanh, to about 3e-7 of 1."""
    one = splat(variant, np.float32(1))
    power = exp2(
        variant, clamp(x, np.float32(15)) * splat(variant, np.float32(2 * 1.4426950408889634))
    )
    return one - splat(variant, np.float32(2)) / (power + one)

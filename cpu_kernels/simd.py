# mypy: ignore-errors
# Everything here runs inside Numba's type inference and code generation, whose types are not Python's.
"""Vectors as first-class values in Numba: the building blocks of the kernels.

A ``Tile`` is rows x vectors of float32 (or int32) that live in registers between the statements of a kernel; tiles of
floats know ``+ - *``. A **column** is a tile of one vector for each query row of the kernel. A ``Variant`` says at
compile time for which element type, tile shape and instruction set a kernel is compiled; kernels take it as their
first argument, and its fields read as constants. Addresses are plain int64. Everything is emitted as LLVM IR, so it
compiles for every target; only the names that begin with ``llvm.x86`` need a feature.
"""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    intrinsic,
    lower_builtin,
    lower_getattr_generic,
    register_model,
    type_callable,
    typeof_impl,
    unbox,
)

from cpu_kernels.compiled import part

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()


# --- compile-time parameters -------------------------------------------------------------------------------------


@cache
def _sources_digest() -> str:
    """Numba's disk cache looks at one file's time stamp only; this makes it look at all that a kernel is made of."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Variant:
    """What one compiled attention kernel is made for."""

    dtype: str
    """Element type of the cache."""
    dot: str
    """How products are summed: "fma" on unpacked floats, "bf16", "int8" on packed words."""
    lanes: int
    has_fma: bool
    has_f16c: bool
    rows: int
    """Query rows in a register tile."""
    score_vectors: int
    """Vectors of tokens in a register tile of scores."""
    value_vectors: int
    """Vectors of dims in a register tile of outputs."""
    q_planes: int
    """Operands that a query is split into, so that low-precision products lose nothing that matters."""
    p_planes: int
    """The same for the softmax weights."""
    spread: int
    """Tiles of rows over which asking for the next piece of memory is spread."""

    @property
    def pack(self) -> int:
        """Elements in a cell."""
        return {"float32": 1, "float16": 1, "bfloat16": 2, "int8": 4, "int4": 8}[self.dtype]

    @property
    def cell_bytes(self) -> int:
        return 2 if self.dtype == "float16" else 4

    @property
    def operand_bytes(self) -> int:
        """Bytes of one element in one plane of an operand row."""
        return {"fma": 4, "bf16": 2, "int8": 1}[self.dot]

    @property
    def is_quantized(self) -> bool:
        return self.pack > 2

    @property
    def is_integer(self) -> bool:
        """Products are summed in integers."""
        return self.dot == "int8"

    @property
    def passes(self) -> int:
        """Times that a piece is multiplied: once for each plane where planes can't be summed in one go."""
        return self.q_planes if self.is_integer else 1

    @property
    def max_query(self) -> int:
        """The largest magnitude of an integer query operand."""
        return 127 if self.q_planes == 1 else 127 * 128

    @property
    def max_weight(self) -> int:
        """The largest integer weight."""
        return 255 if self.p_planes == 1 else 65535

    @property
    def word_bytes(self) -> int:
        """Bytes of the operands that one cell is multiplied with."""
        return max(4, self.pack * self.operand_bytes)

    @property
    def element_bias(self) -> int:
        """What the packed integers of K have been raised by, to be unsigned."""
        return {"int8": 128, "int4": 8}.get(self.dtype, 0)

    @property
    def key(self) -> str:
        return "_".join(str(getattr(self, field.name)) for field in fields(self))


class VariantType(types.Type):
    def __init__(self, variant: Variant, digest: str) -> None:
        self.variant = variant
        super().__init__(name=f"Variant({variant.key},{digest})")


@register_model(VariantType)
class _VariantModel(models.OpaqueModel):
    pass


def variant_type(variant: Variant) -> VariantType:
    return VariantType(variant, _sources_digest())


@typeof_impl.register(Variant)
def _typeof_variant(value, context):
    return variant_type(value)


@unbox(VariantType)
def _unbox_variant(typ, obj, c):
    return NativeValue(cgutils.get_null_value(c.context.get_value_type(typ)))


@infer_getattr
class _VariantAttributes(AttributeTemplate):
    key = VariantType

    def generic_resolve(self, typ, attribute):
        value = getattr(typ.variant, attribute, None)
        if isinstance(value, (bool, int)):
            return types.int64
        return None


@lower_getattr_generic(VariantType)
def _lower_variant_attribute(context, builder, typ, value, attribute):
    return I64(int(getattr(typ.variant, attribute)))


# --- tiles -------------------------------------------------------------------------------------------------------


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


def column_type(variant_typ) -> TileType:
    return TileType(variant_typ.variant.rows, 1, variant_typ.variant.lanes)


def make_tile(builder, tile_type, emit):
    """The tile of ``emit(row, vector)``."""
    tile = ir.Constant(tile_type.value, ir.Undefined)
    for row in range(tile_type.rows):
        for vector in range(tile_type.vectors):
            tile = builder.insert_value(tile, emit(row, vector), row * tile_type.vectors + vector)
    return tile


def map_tile(builder, tile_type, emit, *tiles):
    """The tile of ``emit(a, b, …)`` over the registers of ``tiles``."""
    result = ir.Constant(tile_type.value, ir.Undefined)
    for index in range(tile_type.rows * tile_type.vectors):
        value = emit(*[builder.extract_value(tile, index) for tile in tiles])
        result = builder.insert_value(result, value, index)
    return result


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
    """a * b + c, fused where the host fuses; without FMA ``llvm.fma`` would call the C library lane by lane."""
    kind = "fma" if has_fma else "fmuladd"
    suffix = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
    return call(builder, f"llvm.{kind}.{suffix}", a.type, [a, b, c])


def larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def fold_lanes(builder, value, combine):
    """All lanes combined in a fixed tree, so that the result doesn't depend on the compiler's mood."""
    lanes = value.type.count
    while lanes > 1:
        lanes //= 2
        undefined = ir.Constant(value.type, ir.Undefined)
        low = builder.shuffle_vector(value, undefined, ir.Constant(vec(I32, lanes), list(range(lanes))))
        high = builder.shuffle_vector(value, undefined, ir.Constant(vec(I32, lanes), list(range(lanes, 2 * lanes))))
        value = combine(low, high)
    return builder.extract_element(value, I32(0))


@intrinsic
def splat(typingctx, variant, scalar):
    """A column with ``scalar`` everywhere."""
    result = column_type(variant)

    def codegen(context, builder, signature, args):
        value = broadcast(builder, args[1], result.lanes)
        return make_tile(builder, result, lambda row, vector: value)

    return result(variant, types.float32), codegen


@intrinsic
def iota(typingctx, variant, first):
    """A column whose rows all count up from ``first``."""
    result = column_type(variant)

    def codegen(context, builder, signature, args):
        steps = ir.Constant(vec(F32, result.lanes), [float(lane) for lane in range(result.lanes)])
        value = builder.fadd(steps, broadcast(builder, args[1], result.lanes))
        return make_tile(builder, result, lambda row, vector: value)

    return result(variant, types.float32), codegen


def _lower_operator(symbol, emit):
    """``symbol`` between tiles of floats. Much cheaper to compile than an overload that calls an intrinsic."""

    @type_callable(symbol)
    def infer(context):
        return lambda a, b: a if isinstance(a, TileType) and a == b and not a.integer else None

    @lower_builtin(symbol, TileType, TileType)
    def lower(context, builder, signature, args):
        return map_tile(builder, signature.return_type, lambda x, y: emit(builder, x, y), *args)


_lower_operator(operator.add, lambda builder, a, b: builder.fadd(a, b))
_lower_operator(operator.sub, lambda builder, a, b: builder.fsub(a, b))
_lower_operator(operator.mul, lambda builder, a, b: builder.fmul(a, b))
_lower_operator(operator.truediv, lambda builder, a, b: builder.fdiv(a, b))


@intrinsic
def maximum(typingctx, a, b):
    """The larger of each two elements."""
    if not (isinstance(a, TileType) and a == b and not a.integer):
        return None

    def codegen(context, builder, signature, args):
        return map_tile(builder, a, lambda x, y: larger(builder, x, y), *args)

    return a(a, b), codegen


@intrinsic
def fma(typingctx, variant, a, b, c):
    """a · b + c"""

    def codegen(context, builder, signature, args):
        fused = variant.variant.has_fma
        return map_tile(builder, a, lambda x, y, z: multiply_add(builder, x, y, z, fused), *args[1:])

    return a(variant, a, b, c), codegen


@intrinsic
def keep_within(typingctx, value, index, low, high):
    """``value`` where low <= index < high, minus infinity elsewhere; all of them columns."""

    def codegen(context, builder, signature, args):
        nothing = constant(F32, value.lanes, float("-inf"))

        def emit(x, i, lowest, highest):
            inside = builder.and_(builder.fcmp_ordered(">=", i, lowest), builder.fcmp_ordered("<", i, highest))
            return builder.select(inside, x, nothing)

        return map_tile(builder, value, emit, *args)

    return value(value, index, low, high), codegen


@intrinsic
def zero_if_infinite(typingctx, value):
    """Minus infinity becomes 0."""

    def codegen(context, builder, signature, args):
        nothing, zero = constant(F32, value.lanes, float("-inf")), constant(F32, value.lanes, 0.0)
        return map_tile(
            builder, value, lambda x: builder.select(builder.fcmp_ordered("==", x, nothing), zero, x), args[0]
        )

    return value(value), codegen


@intrinsic
def clamp(typingctx, value, bound):
    """``value`` held within ± ``bound``; NaN stays NaN."""

    def codegen(context, builder, signature, args):
        high = broadcast(builder, args[1], value.lanes)
        low = builder.fsub(constant(F32, value.lanes, -0.0), high)

        def emit(x):
            x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
            return builder.select(builder.fcmp_ordered("<", x, low), low, x)

        return map_tile(builder, value, emit, args[0])

    return value(value, types.float32), codegen


EXP2_PRECISE = (1.0, 0.693146944, 0.240221202, 0.0555071309, 0.00967554189, 0.00132764725)
"""2^f on [-0.5, 0.5]: relative error 1.5e-7."""
EXP2_COARSE = (0.999999285, 0.693121791, 0.240247443, 0.0559178628, 0.00957010221)
"""Relative error 2.6e-6, for what is rounded to bfloat16 anyway."""
_ROUNDING = 12582912.0 + 127.0  # 1.5 · 2^23 + the exponent's bias: the sum's lowest bits are a biased exponent


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


@intrinsic
def exp2(typingctx, variant, value):
    """2^x for x <= 127; 0 where x <= -127, minus infinity included; NaN stays NaN."""
    shape = variant.variant
    coarse = shape.dot == "bf16" and shape.p_planes == 1

    def codegen(context, builder, signature, args):
        coefficients = EXP2_COARSE if coarse else EXP2_PRECISE
        return map_tile(builder, value, lambda x: emit_exp2(builder, x, shape.has_fma, coefficients), args[1])

    return value(variant, value), codegen


@intrinsic
def exp2_scalar(typingctx, variant, value):
    """The same for one number, always precise."""

    def codegen(context, builder, signature, args):
        vector = broadcast(builder, args[1], 4)
        power = emit_exp2(builder, vector, variant.variant.has_fma, EXP2_PRECISE)
        return builder.extract_element(power, I32(0))

    return types.float32(variant, types.float32), codegen


@part
def tanh(variant, x):
    """tanh, to about 3e-7 of 1."""
    one = splat(variant, np.float32(1))
    power = exp2(variant, clamp(x, np.float32(15)) * splat(variant, np.float32(2 * 1.4426950408889634)))
    return one - splat(variant, np.float32(2)) / (power + one)


# --- memory ------------------------------------------------------------------------------------------------------


def emit_prefetch(builder, address, offset: int = 0, locality: int = 3) -> None:
    target = pointer(builder, address, I8, offset)
    suffix = ".p0" if llvm.llvm_version_info[0] >= 15 else ".p0i8"
    call(builder, f"llvm.prefetch{suffix}", ir.VoidType(), [target, I32(0), I32(locality), I32(1)])


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at ``address``; any address is harmless."""

    def codegen(context, builder, signature, args):
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic(prefer_literal=True)
def load_rows(typingctx, variant, address, row_bytes):
    """A column from memory: one vector of float32 a row, ``row_bytes`` (a constant; 0: all the same) apart."""
    result, stride = column_type(variant), row_bytes.literal_value

    def codegen(context, builder, signature, args):
        if stride == 0:
            value = load_at(builder, args[1], result.vector)
            return make_tile(builder, result, lambda row, vector: value)
        return make_tile(builder, result, lambda row, vector: load_at(builder, args[1], result.vector, row * stride))

    return result(variant, types.int64, row_bytes), codegen


@intrinsic(prefer_literal=True)
def store_rows(typingctx, value, address, row_bytes):
    """A column to memory."""
    stride = row_bytes.literal_value

    def codegen(context, builder, signature, args):
        for row in range(value.rows):
            store_at(builder, builder.extract_value(args[0], row), args[1], row * stride)
        return context.get_dummy_value()

    return types.void(value, types.int64, row_bytes), codegen


@intrinsic
def load_scalars(typingctx, variant, address):
    """A column each of whose rows repeats one float32: row r's is the r-th at ``address``."""
    result = column_type(variant)

    def codegen(context, builder, signature, args):
        return make_tile(
            builder, result,
            lambda row, vector: broadcast(builder, load_at(builder, args[1], F32, 4 * row), result.lanes),
        )  # fmt: skip

    return result(variant, types.int64), codegen


def _lane_fold(combine):
    @intrinsic
    def fold(typingctx, value, address):
        def codegen(context, builder, signature, args):
            for row in range(value.rows):
                folded = fold_lanes(builder, builder.extract_value(args[0], row), lambda a, b: combine(builder, a, b))
                store_at(builder, folded, args[1], 4 * row)
            return context.get_dummy_value()

        return types.void(value, types.int64), codegen

    return fold


store_row_maxima = _lane_fold(larger)
"""The largest lane of each row, to consecutive float32."""
store_row_sums = _lane_fold(lambda builder, a, b: builder.fadd(a, b))
"""The sum of each row's lanes, to consecutive float32."""


def _scalar_memory(numba_type, ir_type):
    @intrinsic
    def load_scalar(typingctx, address):
        def codegen(context, builder, signature, args):
            return load_at(builder, args[0], ir_type, align=ir_type.width // 8 if ir_type != F32 else 4)

        return numba_type(types.int64), codegen

    @intrinsic
    def store_scalar(typingctx, address, value):
        def codegen(context, builder, signature, args):
            store_at(builder, args[1], args[0], align=ir_type.width // 8 if ir_type != F32 else 4)
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return load_scalar, store_scalar


load_f32, store_f32 = _scalar_memory(types.float32, F32)
load_i64, store_i64 = _scalar_memory(types.int64, I64)
load_i32, store_i32 = _scalar_memory(types.int32, I32)
load_u32, store_u32 = _scalar_memory(types.uint32, I32)
load_u16, store_u16 = _scalar_memory(types.uint16, I16)
load_u8, store_u8 = _scalar_memory(types.uint8, I8)


@intrinsic
def as_record(typingctx, address, like):
    """The structure at ``address``, of the record type that the literal or dtype ``like`` names."""
    record = like.dtype

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(record))

    return record(types.int64, like), codegen


@intrinsic
def bits_of(typingctx, value):
    """float32 → its bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], I32)

    return types.uint32(types.float32), codegen


@intrinsic
def float_of(typingctx, bits):
    """Bits → float32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.uint32), codegen


@intrinsic
def keep_alive(typingctx, array):
    """Nothing, but a mention: Numba frees an array after its last one, even where others know its address."""

    def codegen(context, builder, signature, args):
        return context.get_dummy_value()

    return types.void(array), codegen

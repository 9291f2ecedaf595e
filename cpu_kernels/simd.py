# mypy: ignore-errors
# Everything here runs inside Numba's type inference and code generation, whose types are not Python's.
"""Vectors as first-class values in Numba: the building blocks of the kernels.

A ``Vec`` is a vector of float32 that lives in a register between the statements of a kernel and knows ``+ - *``.
A ``Variant`` says at compile time for which element type, tile shape and instruction set a kernel is compiled; kernels
take it as their first argument, and its fields read as constants. Addresses are plain int64. Everything is emitted as
LLVM IR, so it compiles for every target; only the names that begin with ``llvm.x86`` need a feature.
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
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    overload,
    register_model,
    typeof_impl,
    unbox,
)

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
FULL_VECTOR = 16  # lanes of the widest vector


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
    """How products are summed: "fma" on unpacked floats, "bf16", "int8" on packed words, "tile" by AMX."""
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
        return {"fma": 4, "bf16": 2, "tile": 2, "int8": 1}[self.dot]

    @property
    def is_quantized(self) -> bool:
        return self.pack > 2

    @property
    def is_integer(self) -> bool:
        """Products are summed in integers."""
        return self.dot == "int8"

    @property
    def element_bias(self) -> int:
        """What packed integers have been raised by, to be unsigned."""
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


# --- vectors -----------------------------------------------------------------------------------------------------


class VecType(types.Type):
    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"f32x{lanes}")


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager, typ):
        super().__init__(manager, typ, ir.VectorType(F32, typ.lanes))


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


def _vec_of(variant_typ) -> VecType:
    return VecType(variant_typ.variant.lanes)


@intrinsic
def splat(typingctx, variant, scalar):
    """A vector with ``scalar`` in every lane."""
    result = _vec_of(variant)

    def codegen(context, builder, signature, args):
        return broadcast(builder, args[1], result.lanes)

    return result(variant, types.float32), codegen


@intrinsic
def iota(typingctx, variant):
    """0, 1, 2, …"""
    result = _vec_of(variant)

    def codegen(context, builder, signature, args):
        return ir.Constant(vec(F32, result.lanes), [float(lane) for lane in range(result.lanes)])

    return result(variant), codegen


@intrinsic
def load(typingctx, variant, address):
    """A vector of float32 from memory."""
    result = _vec_of(variant)

    def codegen(context, builder, signature, args):
        return load_at(builder, args[1], vec(F32, result.lanes))

    return result(variant, types.int64), codegen


@intrinsic
def store(typingctx, value, address):
    def codegen(context, builder, signature, args):
        store_at(builder, args[0], args[1])
        return context.get_dummy_value()

    return types.void(value, types.int64), codegen


def _elementwise(emit):
    @intrinsic
    def operation(typingctx, a, b):
        if not (isinstance(a, VecType) and a == b):
            return None

        def codegen(context, builder, signature, args):
            return emit(builder, *args)

        return a(a, b), codegen

    return operation


add = _elementwise(lambda builder, a, b: builder.fadd(a, b))
subtract = _elementwise(lambda builder, a, b: builder.fsub(a, b))
multiply = _elementwise(lambda builder, a, b: builder.fmul(a, b))
divide = _elementwise(lambda builder, a, b: builder.fdiv(a, b))
maximum = _elementwise(larger)


def _overload_operator(symbol, operation):
    @overload(symbol, inline="always")
    def implementation(a, b):
        if isinstance(a, VecType) and isinstance(b, VecType):
            return lambda a, b: operation(a, b)
        return None


_overload_operator(operator.add, add)
_overload_operator(operator.sub, subtract)
_overload_operator(operator.mul, multiply)
_overload_operator(operator.truediv, divide)


@intrinsic
def fma(typingctx, variant, a, b, c):
    """a · b + c"""

    def codegen(context, builder, signature, args):
        return multiply_add(builder, *args[1:], variant.variant.has_fma)

    return a(variant, a, b, c), codegen


@intrinsic
def keep_within(typingctx, value, index, low, high):
    """``value`` where low <= index < high, minus infinity elsewhere."""

    def codegen(context, builder, signature, args):
        x, i, lowest, highest = args
        lanes = value.lanes
        inside = builder.and_(
            builder.fcmp_ordered(">=", i, broadcast(builder, lowest, lanes)),
            builder.fcmp_ordered("<", i, broadcast(builder, highest, lanes)),
        )
        return builder.select(inside, x, constant(F32, lanes, float("-inf")))

    return value(value, index, types.float32, types.float32), codegen


@intrinsic
def max_lane(typingctx, value):
    def codegen(context, builder, signature, args):
        return fold_lanes(builder, args[0], lambda a, b: larger(builder, a, b))

    return types.float32(value), codegen


@intrinsic
def sum_lanes(typingctx, value):
    def codegen(context, builder, signature, args):
        return fold_lanes(builder, args[0], builder.fadd)

    return types.float32(value), codegen


_EXP2 = (1.0, 0.6931471825, 0.24022650719, 0.05550357327, 0.009618237615, 0.001339527546, 0.0001535064)
"""2^f on [-0.5, 0.5], degree 6: relative error 1e-7 (minimax, coefficients rounded to float32)."""
_ROUNDING = 12582912.0  # 1.5 · 2^23: adding it rounds to an integer, held in the lowest bits


@intrinsic
def exp2(typingctx, variant, value):
    """2^x for x <= 127; 0 where x <= -127, minus infinity included; NaN stays NaN."""

    def codegen(context, builder, signature, args):
        lanes, has_fma = value.lanes, variant.variant.has_fma
        low = constant(F32, lanes, -127.0)
        x = builder.select(builder.fcmp_ordered("<", args[1], low), low, args[1])
        shifted = builder.fadd(x, constant(F32, lanes, _ROUNDING))
        fraction = builder.fsub(x, builder.fsub(shifted, constant(F32, lanes, _ROUNDING)))
        exponent = builder.add(builder.bitcast(shifted, vec(I32, lanes)), constant(I32, lanes, 127))
        power = builder.bitcast(builder.shl(exponent, constant(I32, lanes, 23)), vec(F32, lanes))
        result = constant(F32, lanes, _EXP2[-1])
        for coefficient in reversed(_EXP2[:-1]):
            result = multiply_add(builder, result, fraction, constant(F32, lanes, coefficient), has_fma)
        return builder.fmul(result, power)

    return value(variant, value), codegen


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
def lane0(typingctx, value):
    """The first lane."""

    def codegen(context, builder, signature, args):
        return builder.extract_element(args[0], I32(0))

    return types.float32(value), codegen


@intrinsic
def unless_zero(typingctx, condition, value):
    """``value`` where ``condition`` isn't zero, zero elsewhere (even where ``value`` is NaN)."""

    def codegen(context, builder, signature, args):
        zero = constant(F32, value.lanes, 0.0)
        return builder.select(builder.fcmp_ordered("==", args[0], zero), zero, args[1])

    return value(condition, value), codegen


@intrinsic
def clamp(typingctx, value, bound):
    """``value`` held within ± ``bound``; NaN stays NaN."""

    def codegen(context, builder, signature, args):
        high = broadcast(builder, args[1], value.lanes)
        low = builder.fsub(constant(F32, value.lanes, -0.0), high)
        x = builder.select(builder.fcmp_ordered(">", args[0], high), high, args[0])
        return builder.select(builder.fcmp_ordered("<", x, low), low, x)

    return value(value, types.float32), codegen


@njit(nogil=True, cache=True)
def tanh(variant, x):
    """tanh, to about 2e-7 of 1."""
    one = splat(variant, np.float32(1))
    power = exp2(variant, clamp(x, np.float32(15)) * splat(variant, np.float32(2 * 1.4426950408889634)))
    return one - splat(variant, np.float32(2)) / (power + one)

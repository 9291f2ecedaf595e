# mypy: ignore-errors
# Everything here runs inside Numba's type inference and code generation, whose
# types are not Python's.
"""Memory by address: scalars, columns, cache lines, records. Nothing is
checked: whoever calls a kernel has."""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cpu_kernels.codegen.simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    broadcast,
    call,
    column_type,
    fold_lanes,
    larger,
    load_at,
    make_tile,
    pointer,
    store_at,
)

LINE_BYTES = 64


def emit_prefetch(builder, address, offset: int = 0, locality: int = 3) -> None:
    target = pointer(builder, address, I8, offset)
    suffix = ".p0" if llvm.llvm_version_info[0] >= 15 else ".p0i8"
    call(builder, f"llvm.prefetch{suffix}", ir.VoidType(), [target, I32(0), I32(locality), I32(1)])


def emit_prefetches(builder, address, num_bytes: int) -> None:
    """The lines of ``num_bytes`` from ``address`` on."""
    for offset in range(0, num_bytes, LINE_BYTES):
        emit_prefetch(builder, address, offset)


@intrinsic
def prefetch_line(typingctx, variant, address):
    """Prefetch one line, if the variant prefetches."""

    def codegen(context, builder, signature, args):
        if variant.variant.has_prefetch:
            emit_prefetch(builder, args[1])
        return context.get_dummy_value()

    return types.void(variant, types.int64), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for the cache line at ``address``; any address is harmless."""

    def codegen(context, builder, signature, args):
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic(prefer_literal=True)
def load_rows(typingctx, variant, address, row_bytes):
    """A column from memory: one vector of float32 a row, ``row_bytes`` (a
    constant; 0: all the same) apart."""
    result, stride = column_type(variant), row_bytes.literal_value

    def codegen(context, builder, signature, args):
        if stride == 0:
            value = load_at(builder, args[1], result.vector)
            return make_tile(builder, result, lambda row, vector: value)
        return make_tile(
            builder,
            result,
            lambda row, vector: load_at(builder, args[1], result.vector, row * stride),
        )

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
            lambda row, vector: broadcast(builder, load_at(builder, args[1], F32, 4 * row),
                                          result.lanes),
        )  # fmt: skip

    return result(variant, types.int64), codegen


def _lane_fold(combine):
    @intrinsic
    def fold(typingctx, value, address):
        def codegen(context, builder, signature, args):
            for row in range(value.rows):
                folded = fold_lanes(
                    builder,
                    builder.extract_value(args[0], row),
                    lambda a, b: combine(builder, a, b),
                )
                store_at(builder, folded, args[1], 4 * row)
            return context.get_dummy_value()

        return types.void(value, types.int64), codegen

    return fold


store_row_maxima = _lane_fold(larger)
"""The largest lane of each row, to consecutive float32."""
store_row_sums = _lane_fold(lambda builder, a, b: builder.fadd(a, b))
"""The sum of each row's lanes, to consecutive float32."""


def _scalar_memory(numba_type, ir_type):
    align = ir_type.width // 8 if ir_type != F32 else 4

    @intrinsic
    def load_scalar(typingctx, address):
        def codegen(context, builder, signature, args):
            return load_at(builder, args[0], ir_type, align=align)

        return numba_type(types.int64), codegen

    @intrinsic
    def store_scalar(typingctx, address, value):
        def codegen(context, builder, signature, args):
            store_at(builder, args[1], args[0], align=align)
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
def new_record(typingctx, like):
    """A structure of zeros that lives until the caller returns, of the record type that the
    literal or dtype ``like`` names."""
    record = like.dtype

    def codegen(context, builder, signature, args):
        kind = ir.ArrayType(I64, -(-record.size // 8))
        with builder.goto_entry_block():
            memory = builder.alloca(kind)
        builder.store(ir.Constant(kind, None), memory)
        return builder.bitcast(memory, context.get_value_type(record))

    return record(like), codegen


@intrinsic
def address_of_record(typingctx, record):
    def codegen(context, builder, signature, args):
        return builder.ptrtoint(args[0], I64)

    return types.int64(record), codegen


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
def data_of(typingctx, array):
    """Where an array's elements begin."""

    def codegen(context, builder, signature, args):
        found = context.make_array(array)(context, builder, args[0])
        return builder.ptrtoint(found.data, I64)

    return types.int64(array), codegen

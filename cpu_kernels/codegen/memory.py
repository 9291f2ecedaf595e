# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""Memory by address: scalars, columns, cache lines, records. Nothing is
checked: whoever calls a kernel has."""

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.np.numpy_support import from_dtype
from numba.types import float32, int64, uint32

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
    load_at,
    make_tile,
    pointer,
    store_at,
    vec,
)
from cpu_kernels.codegen.translate import Emitter, Value

LINE_BYTES = 64


def emit_prefetch(builder, address, offset: int = 0, locality: int = 3) -> None:
    target = pointer(builder, address, I8, offset)
    suffix = ".p0" if llvm.llvm_version_info[0] >= 15 else ".p0i8"
    call(builder, f"llvm.prefetch{suffix}", ir.VoidType(), [target, I32(0), I32(locality), I32(1)])


def emit_prefetches(builder, address, num_bytes: int) -> None:
    """The lines of ``num_bytes`` from ``address`` on."""
    for offset in range(0, num_bytes, LINE_BYTES):
        emit_prefetch(builder, address, offset)


@Emitter
def prefetch(builder, address: int64):
    """Ask for the cache line at ``address``; any address is harmless."""
    emit_prefetch(builder, address)


@Emitter
def load_rows(builder, variant, address: int64, row_bytes):
    """A column from memory: one vector of float32 a row, ``row_bytes`` (a
    constant; 0: all the same) apart."""
    kind = vec(F32, variant.lanes)
    if row_bytes == 0:
        value = load_at(builder, address, kind)
        return make_tile(builder, column_type(variant), lambda row, vector: value)
    return make_tile(
        builder,
        column_type(variant),
        lambda row, vector: load_at(builder, address, kind, row * row_bytes),
    )


@Emitter
def store_rows(builder, value, address: int64, row_bytes):
    """A column to memory."""
    for row in range(value.type.rows):
        store_at(builder, builder.extract_value(value.llvm, row), address, row * row_bytes)


@Emitter
def load_scalars(builder, variant, address: int64):
    """A column each of whose rows repeats one float32: row r's is the r-th at ``address``."""

    def emit(row, vector):
        return broadcast(builder, load_at(builder, address, F32, 4 * row), variant.lanes)

    return make_tile(builder, column_type(variant), emit)


@Emitter
def store_folded(builder, value, address: int64, combine):
    """All lanes of each row combined, to consecutive float32."""
    for row in range(value.type.rows):
        lanes = builder.extract_value(value.llvm, row)
        store_at(builder, fold_lanes(builder, lanes, combine), address, 4 * row)


def _scalar_memory(kind, ir_type):
    @Emitter
    def load_scalar(builder, address: int64):
        return Value(kind, load_at(builder, address, ir_type, align=kind.bitwidth // 8))

    @Emitter
    def store_scalar(builder, address: int64, value):
        bits = builder.module.translation.cast(builder, value, kind)
        store_at(builder, bits, address, align=kind.bitwidth // 8)

    return load_scalar, store_scalar


load_f32, store_f32 = _scalar_memory(types.float32, F32)
load_i64, store_i64 = _scalar_memory(types.int64, I64)
load_i32, store_i32 = _scalar_memory(types.int32, I32)
load_u32, store_u32 = _scalar_memory(types.uint32, I32)
load_u16, store_u16 = _scalar_memory(types.uint16, I16)
load_u8, store_u8 = _scalar_memory(types.uint8, I8)


def _record(builder, like):
    """Numba's type of a structure's dtype, and LLVM's of its address."""
    kind = from_dtype(like)
    return kind, builder.module.translation.context.get_value_type(kind)


@Emitter
def as_record(builder, address: int64, like):
    """The structure at ``address``, of the dtype ``like``."""
    kind, pointer_type = _record(builder, like)
    return Value(kind, builder.inttoptr(address, pointer_type))


@Emitter
def new_record(builder, like):
    """A structure of zeros that lives until the caller returns, of the dtype ``like``."""
    kind, pointer_type = _record(builder, like)
    words = ir.ArrayType(I64, -(-kind.size // 8))
    with builder.goto_entry_block():
        memory = builder.alloca(words)
    builder.store(ir.Constant(words, None), memory)
    return Value(kind, builder.bitcast(memory, pointer_type))


@Emitter
def address_of_record(builder, record) -> int64:
    return builder.ptrtoint(record.llvm, I64)


@Emitter
def bits_of(builder, value: float32) -> uint32:
    """float32 → its bits."""
    return builder.bitcast(value, I32)


@Emitter
def float_of(builder, bits: uint32) -> float32:
    """Bits → float32."""
    return builder.bitcast(bits, F32)


@Emitter
def data_of(builder, array) -> int64:
    """Where an array's elements begin."""
    context = builder.module.translation.context
    return builder.ptrtoint(context.make_array(array.type)(context, builder, array.llvm).data, I64)

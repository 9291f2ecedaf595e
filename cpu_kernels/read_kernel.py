# mypy: ignore-errors
# Everything here runs inside Numba's type inference and code generation, whose
# types are not Python's.
"""Pure reads and copies of memory: the ceilings that attention and ``gather``
are measured against."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cpu_kernels.codegen.compiled import entry
from cpu_kernels.codegen.memory import (
    address_of_record,
    as_record,
    data_of,
    emit_prefetch,
    new_record,
)
from cpu_kernels.codegen.simd import I8, I32, I64, TileType, call, fold_lanes, load_at, pointer, vec
from cpu_kernels.team import run_units

READ_JOB = np.dtype(
    [(name, np.int64) for name in ("address", "num_bytes", "unit_bytes", "ahead", "total")]
)
COPY_JOB = np.dtype([(name, np.int64) for name in ("source", "target", "num_bytes", "unit_bytes")])
TOTAL = READ_JOB.fields["total"][1]
STEP_BYTES = 512


@intrinsic
def _nothing_read(typingctx, variant):
    lanes = variant.variant.lanes
    result = TileType(1, STEP_BYTES // (4 * lanes), lanes, True)

    def codegen(context, builder, signature, args):
        return ir.Constant(result.value, None)

    return result(variant), codegen


@intrinsic
def _read_step(typingctx, tile, address):
    """tile ^= the next STEP_BYTES"""

    def codegen(context, builder, signature, args):
        value, source = args
        for index in range(tile.vectors):
            line = load_at(builder, source, vec(I32, tile.lanes), 4 * tile.lanes * index)
            value = builder.insert_value(
                value, builder.xor(builder.extract_value(value, index), line), index
            )
        return value

    return tile(tile, types.int64), codegen


@intrinsic
def _fold(typingctx, tile):
    def codegen(context, builder, signature, args):
        total = builder.extract_value(args[0], 0)
        for index in range(1, tile.vectors):
            total = builder.xor(total, builder.extract_value(args[0], index))
        return builder.sext(
            fold_lanes(builder, total, builder.xor), context.get_value_type(types.int64)
        )

    return types.int64(tile), codegen


@intrinsic
def _xor_into(typingctx, address, value):
    """Atomic."""

    def codegen(context, builder, signature, args):
        builder.atomic_rmw("xor", pointer(builder, args[0], I64), args[1], "seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _prefetch_step(typingctx, address):
    def codegen(context, builder, signature, args):
        for offset in range(0, STEP_BYTES, 64):
            emit_prefetch(builder, args[0], offset)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@entry
def read_unit(variant, job_address, unit, scratch):
    """Read one stretch of memory, asking for what lies ``ahead`` bytes further
    (0: leave it to the hardware)."""
    job = as_record(job_address, READ_JOB)
    begin = job.address + unit * job.unit_bytes
    end = min(job.address + job.num_bytes, begin + job.unit_bytes)
    tile = _nothing_read(variant)
    if job.ahead > 0:
        for address in range(begin, end, STEP_BYTES):
            _prefetch_step(address + job.ahead)
            tile = _read_step(tile, address)
    else:
        for address in range(begin, end, STEP_BYTES):
            tile = _read_step(tile, address)
    _xor_into(address_of_record(job) + TOTAL, _fold(tile))


@entry
def run_read(entry, team, scratch, memory, unit_bytes, ahead):
    """Read all of ``memory`` (uint8, a multiple of STEP_BYTES), ``unit_bytes``
    at a time. Returns the xor of all."""
    job = new_record(READ_JOB)
    num_units = (memory.size + unit_bytes - 1) // unit_bytes
    job.address, job.num_bytes, job.unit_bytes = data_of(memory), memory.size, unit_bytes
    job.ahead = ahead
    run_units(team, entry, address_of_record(job), num_units, scratch)
    return job.total


@intrinsic
def _copy_memory(typingctx, target, source, num_bytes):
    """The C library's ``memcpy``."""

    def codegen(context, builder, signature, args):
        pointers = [pointer(builder, address, I8) for address in args[:2]]
        call(builder, "memcpy", I8.as_pointer(), [*pointers, builder.sext(args[2], I64)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@entry
def copy_unit(variant, job_address, unit, scratch):
    """Copy one stretch of memory. ``variant`` is not used."""
    job = as_record(job_address, COPY_JOB)
    begin = unit * job.unit_bytes
    _copy_memory(job.target + begin, job.source + begin, min(job.unit_bytes, job.num_bytes - begin))


@entry
def run_copy(entry, team, scratch, source, target, unit_bytes):
    """Copy ``source`` to ``target``, both uint8 of one length, ``unit_bytes`` at a time."""
    job = new_record(COPY_JOB)
    job.source, job.target = data_of(source), data_of(target)
    job.num_bytes, job.unit_bytes = min(source.size, target.size), unit_bytes
    run_units(
        team, entry, address_of_record(job), (job.num_bytes + unit_bytes - 1) // unit_bytes, scratch
    )

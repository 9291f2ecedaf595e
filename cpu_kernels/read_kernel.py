# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""Pure reads of memory: a ceiling that attention is measured against."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.types import int64

from cpu_kernels.codegen.compiled import entry
from cpu_kernels.codegen.memory import address_of_record, as_record, data_of, new_record, prefetch
from cpu_kernels.codegen.simd import I64, TileType, fold_lanes, load_at, make_tile, pointer
from cpu_kernels.codegen.translate import Emitter, Value
from cpu_kernels.team import run_units

READ_JOB = np.dtype(
    [(name, np.int64) for name in ("address", "num_bytes", "unit_bytes", "ahead", "total")]
)
TOTAL = READ_JOB.fields["total"][1]
STEP_BYTES = 512


@Emitter
def _nothing_read(builder, variant):
    kind = TileType(1, STEP_BYTES // (4 * variant.lanes), variant.lanes, True)
    return Value(kind, ir.Constant(kind.value, None))


@Emitter
def _read_step(builder, tile, address: int64):
    """tile ^= the next STEP_BYTES"""

    def emit(row, vector):
        line = load_at(builder, address, tile.type.vector, 4 * tile.type.lanes * vector)
        return builder.xor(builder.extract_value(tile.llvm, vector), line)

    return make_tile(builder, tile.type, emit)


@Emitter
def _xor_into(builder, address: int64, tile):
    """All of a tile into an int64; atomic."""
    total = builder.extract_value(tile.llvm, 0)
    for index in range(1, tile.type.vectors):
        total = builder.xor(total, builder.extract_value(tile.llvm, index))
    value = builder.sext(fold_lanes(builder, total, ir.IRBuilder.xor), I64)
    builder.atomic_rmw("xor", pointer(builder, address, I64), value, "seq_cst")


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
            for line in range(0, STEP_BYTES, 64):
                prefetch(address + job.ahead + line)
            tile = _read_step(tile, address)
    else:
        for address in range(begin, end, STEP_BYTES):
            tile = _read_step(tile, address)
    _xor_into(address_of_record(job) + TOTAL, tile)


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

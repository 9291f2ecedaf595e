# mypy: ignore-errors
# All of this runs inside Numba's type inference and code generation, whose types are not Python's.
"""Compiled products of float32 rows and weights of 16 bits, for ``narrow``: what one thread does.

Weights lie in panels: [panels, K, 2 · lanes] elements, zeros past the last weight row. Of a panel
of bfloat16 a line of K holds pairs: weight row j in the lower half of lane j, row lanes + j in the
upper half. So a shift and a mask widen them.

A tile is 1 to 6 rows and one panel or more, with its sums in registers. A sum begins with the
bias, and adds its K products one after the other, fused: each result depends on its row and its
weight row alone, to the bit, however rows are cut into tiles."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from cpu_kernels.codegen import memory, simd
from cpu_kernels.codegen.compiled import compiled_job, part
from cpu_kernels.codegen.memory import emit_prefetch
from cpu_kernels.codegen.simd import (
    F32,
    I32,
    I64,
    broadcast,
    constant,
    load_at,
    multiply_add,
    store_at,
    vec,
)
from cpu_kernels.isa import default_level
from sworker.kernels import row_loops
from sworker.kernels.row_loops import claim, pointer_to

# A job: int64 fields; the counter of units that are taken has a cache line of its own.
(
    NUM_ROWS, NUM_PANELS, SIZE_IN, X, X_ROW, WEIGHT, BIAS, OUT, OUT_ROW, ROW_UNITS, PANEL_UNITS,
    GROUP, NUM_FIELDS,
) = range(13)  # fmt: skip
NEXT = 128
JOB_BYTES = 192
LANES = default_level().lanes
PANEL = 2 * LANES  # weight rows that lie together
_TILE_ROWS = 6
_DEPTH = 1024
"""Elements of K that all tiles of a unit's rows run through before the next: a panel's part stays
in the first cache or the second."""
_AHEAD = 2048  # bytes of weights that are prefetched


def _widened(builder, address, is_half):
    """The two vectors of a panel's line."""
    if is_half:
        half = vec(ir.HalfType(), LANES)
        return [
            builder.fpext(load_at(builder, address, half, 2 * LANES * i, align=2), vec(F32, LANES))
            for i in range(2)
        ]
    pairs = load_at(builder, address, vec(I32, LANES))
    low = builder.shl(pairs, constant(I32, LANES, 16))
    high = builder.and_(pairs, constant(I32, LANES, -65536))
    return [builder.bitcast(bits, vec(F32, LANES)) for bits in (low, high)]


def _make_tile(num_rows, num_panels, is_half):
    @intrinsic
    def tile(typingctx, weight, panel_bytes, x, x_row, depth, start, start_row, out, out_row):
        """out [rows, panels · PANEL] = start + x [rows, depth] · weights. Rows of ``start`` and
        ``out`` are that number of bytes apart."""

        def codegen(context, builder, signature, args):
            weight, panel_bytes, x, x_row, depth, start, start_row, out, out_row = args
            kind = vec(F32, LANES)
            places = [(r, v) for r in range(num_rows) for v in range(2 * num_panels)]

            def at(base, stride, row):
                return builder.add(base, builder.mul(stride, I64(row)))

            first = [
                load_at(builder, at(start, start_row, r), kind, 4 * LANES * v) for r, v in places
            ]
            rows = [at(x, x_row, r) for r in range(num_rows)]
            panels = [at(weight, panel_bytes, p) for p in range(num_panels)]
            before = builder.block
            loop, end = (builder.append_basic_block(name) for name in ("depth", "done"))
            builder.branch(loop)
            builder.position_at_end(loop)
            k, sums = builder.phi(I64), [builder.phi(kind) for _ in places]
            line = builder.mul(k, I64(4 * LANES))
            widened = []
            for panel in panels:
                here = builder.add(panel, line)
                emit_prefetch(builder, here, _AHEAD)
                widened += _widened(builder, here, is_half)
            totals = []
            for row in range(num_rows):
                element = load_at(builder, builder.add(rows[row], builder.mul(k, I64(4))), F32)
                lanes = broadcast(builder, element, LANES)
                for v, weights in enumerate(widened):
                    total = sums[row * 2 * num_panels + v]
                    totals.append(multiply_add(builder, weights, lanes, total, True))
            following = builder.add(k, I64(1))
            k.add_incoming(I64(0), before)
            k.add_incoming(following, loop)
            for phi, begun, total in zip(sums, first, totals, strict=True):
                phi.add_incoming(begun, before)
                phi.add_incoming(total, loop)
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, end)
            builder.position_at_end(end)
            for (r, v), total in zip(places, totals, strict=True):
                store_at(builder, total, at(out, out_row, r), 4 * LANES * v)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return tile


def _make_unit(is_half):
    one_4, one_1 = _make_tile(1, 4, is_half), _make_tile(1, 1, is_half)
    two_2, two_1 = _make_tile(2, 2, is_half), _make_tile(2, 1, is_half)
    three, four, five, six = (_make_tile(rows, 1, is_half) for rows in (3, 4, 5, 6))

    @part
    def tiles(rows, panels, weight, panel_bytes, x, x_row, depth, start, start_row, out, out_row):
        """Rows, at most 6, times panels."""
        panel = 0
        while panel < panels:
            w = weight + panel * panel_bytes
            s, o = start + panel * 4 * PANEL, out + panel * 4 * PANEL
            taken = 1
            if rows == 6:
                six(w, panel_bytes, x, x_row, depth, s, start_row, o, out_row)
            elif rows == 5:
                five(w, panel_bytes, x, x_row, depth, s, start_row, o, out_row)
            elif rows == 4:
                four(w, panel_bytes, x, x_row, depth, s, start_row, o, out_row)
            elif rows == 3:
                three(w, panel_bytes, x, x_row, depth, s, start_row, o, out_row)
            elif rows == 2:
                if panels - panel >= 2:
                    taken = 2
                    two_2(w, panel_bytes, x, x_row, depth, s, start_row, o, out_row)
                else:
                    two_1(w, panel_bytes, x, x_row, depth, s, start_row, o, out_row)
            elif panels - panel >= 4:
                taken = 4
                one_4(w, panel_bytes, x, x_row, depth, s, start_row, o, out_row)
            else:
                one_1(w, panel_bytes, x, x_row, depth, s, start_row, o, out_row)
            panel += taken

    @part
    def unit(job, first_row, last_row, first_panel, last_panel):
        """Rows times panels, ``_DEPTH`` of K at a time."""
        size_in, out_row = job[SIZE_IN], job[OUT_ROW]
        panel_bytes = size_in * 2 * PANEL
        num_rows = last_row - first_row
        num_tiles = (num_rows + _TILE_ROWS - 1) // _TILE_ROWS
        at_once = last_panel - first_panel if num_tiles == 1 else 1
        for k in range(0, size_in, _DEPTH):
            depth = min(_DEPTH, size_in - k)
            for panel in range(first_panel, last_panel, at_once):
                weight = job[WEIGHT] + panel * panel_bytes + k * 2 * PANEL
                for number in range(num_tiles):
                    row = first_row + num_rows * number // num_tiles
                    rows = first_row + num_rows * (number + 1) // num_tiles - row
                    out = job[OUT] + row * out_row + panel * 4 * PANEL
                    start, start_row = out, out_row
                    if not k:
                        start, start_row = job[BIAS] + panel * 4 * PANEL, 0
                    x = job[X] + row * job[X_ROW] + k * 4
                    tiles(
                        rows, at_once, weight, panel_bytes, x, job[X_ROW], depth, start,
                        start_row, out, out_row,
                    )  # fmt: skip

    return unit


def _make_units(is_half):
    unit = _make_unit(is_half)

    @part
    def run_units(address):
        """Do units of a job until none is left."""
        job = carray(pointer_to(address), (NUM_FIELDS,), np.int64)
        rows, row_units = job[NUM_ROWS], job[ROW_UNITS]
        panels, panel_units, group = job[NUM_PANELS], job[PANEL_UNITS], job[GROUP]
        groups = (panels + group - 1) // group
        while True:
            number = claim(address + NEXT)
            if number >= row_units * panel_units:
                return
            i, j = number // panel_units, number % panel_units
            first_row, last_row = rows * i // row_units, rows * (i + 1) // row_units
            first = groups * j // panel_units * group
            last = min(panels, groups * (j + 1) // panel_units * group)
            unit(job, first_row, last_row, first, last)

    return run_units


_run_brain_units, _run_half_units = _make_units(False), _make_units(True)


def _run_brain_job(address):
    _run_brain_units(address)


def _run_half_job(address):
    _run_half_units(address)


@cache
def compiled(*, is_half):
    """Return the function that each thread runs, a ``CFunc`` that takes a job's address:
    for weights of float16, or of bfloat16. It is compiled once a host, where its disk allows."""
    function = _run_half_job if is_half else _run_brain_job
    function.__qualname__ += f"_{LANES}"  # the name on disk: a forced level has other lanes
    modules = (row_loops, memory, simd)
    return compiled_job(function, Path(__file__), *(Path(x.__file__) for x in modules))

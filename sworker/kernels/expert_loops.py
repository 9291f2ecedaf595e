# mypy: ignore-errors
# All of this runs inside Numba's type inference and code generation, whose types are not Python's.
"""Compiled products of a block of experts in bfloat16, for ``expert_products``: what one thread
does of a job. For CPUs with ``vdpbf16ps``.

No weight is packed. Where an expert has few rows (8), each is multiplied with 32 weights at a
time. Where it has more, they are the lanes of vectors: rows are packed, [K / 2, vectors, 16]
pairs, and each pair of weights is multiplied with all of them; results have the same form, so that
the gate packs what it writes.

A row's sum depends on nothing else in the batch but on whether its expert has more than 8 rows.
All compiled code is in this file, in ``row_loops`` and in two of ``cpu_kernels.codegen``: what is
kept of it on disk has a name made of a hash of their content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from cpu_kernels.codegen import memory, simd
from cpu_kernels.codegen.kept import keep
from cpu_kernels.codegen.memory import emit_prefetch
from cpu_kernels.codegen.simd import (
    F32,
    I32,
    I64,
    brain_bits,
    broadcast,
    call,
    constant,
    fold_lanes,
    load_at,
    store_at,
    transpose,
    vec,
)
from sworker.kernels import row_loops
from sworker.kernels.row_loops import claim, exp, narrow, pointer_to, widen

# A job: int64 fields and two float64; the counter of units that are taken has a
# cache line of its own.
(
    KIND, NUM_UNITS, CHUNKS, NUM_ROWS, TOP_K, NUM_EXPERTS, GROUP_BLOCKS, CHOSEN, WEIGHTS, IS_WIDE,
    SLOTS, PLACES, GROUPS, BLOCKS, X, ROWS, X_ROW, OUT, WEIGHT, BIAS, SIZE_IN, SIZE_OUT, GATE,
    NUM_GROUPS, NUM_BLOCKS, NUM_VECTORS, NUM_FIELDS,
) = range(27)  # fmt: skip
NUMBERS = 8 * NUM_FIELDS  # where the gate's limit and alpha are, float64
NEXT = 256
JOB_BYTES = 320
PLAN, PACK, UP, DOWN, SUM = range(5)
"""Kinds of jobs, in the order in which a block runs them."""
SILU, GELU_TANH, CLAMPED, SILU_CLAMPED = range(4)
"""Gates."""
LANES = 16
BLOCK_VECTORS = 4  # most vectors of rows that are multiplied together
FEW_ROWS = 8  # up to this number, each row of an expert is multiplied separately
PANEL = 48  # weight rows whose results are stored together
_PANEL_BYTES = PANEL * BLOCK_VECTORS * LANES * 4
GROUP_FIELDS, BLOCK_FIELDS = 3, 4
_EXPERT, _FIRST_BLOCK, _LAST_BLOCK = range(3)  # of a group
_FIRST_SLOT, _COUNT, _VECTORS, _OFFSET = range(4)  # of a block
SUM_ROWS = 8  # rows of a unit of the sum


# --- instructions
# ------------------------------------------------------------------------------


@intrinsic
def _scratch(typingctx):
    """Memory of this call's own: for 16 addresses, and two panels."""

    def codegen(context, builder, signature, args):
        kind = ir.ArrayType(F32, (2 * _PANEL_BYTES + 8 * LANES) // 4)
        with builder.goto_entry_block():
            memory = builder.alloca(kind)
            memory.align = 64
        return builder.ptrtoint(memory, I64)

    return types.int64(), codegen


def _products(builder, k, sums, rows, vectors, weight, stride, x):
    """One pair of each weight row times that of each vector of rows."""
    pairs = vec(I32, LANES)
    lanes = [load_at(builder, x, pairs, 64 * (k * vectors + v), align=64) for v in range(vectors)]
    result = []
    for row in range(rows):
        at = builder.add(weight, builder.mul(stride, I64(row)))
        pair = broadcast(builder, load_at(builder, at, I32, 4 * k, align=2), LANES)
        for v in range(vectors):
            result.append(_dot(builder, sums[row * vectors + v], pair, lanes[v]))
    return result


def _make_tile(num_rows, num_vectors):
    """The product of so many weight rows and vectors of rows."""

    @intrinsic
    def tile(typingctx, weight, stride, x, num_pairs, out, ahead):
        """float32 out [weight rows, vectors · 16] = weight rows · packed rows x. A
        row of weights is ``stride`` bytes; asks for those that lie ``ahead``
        bytes. num_pairs is a multiple of 16."""

        def codegen(context, builder, signature, args):
            weight, stride, x, num_pairs, out, ahead = args

            def add(done, sums):
                here = builder.add(weight, done)
                lanes = builder.add(x, builder.mul(done, I64(16 * num_vectors)))
                _ask(builder, here, stride, num_rows, ahead)
                for k in range(LANES):
                    sums = _products(builder, k, sums, num_rows, num_vectors, here, stride, lanes)
                return sums

            totals = _accumulate(builder, num_rows * num_vectors, num_pairs, add)
            for number, value in enumerate(totals):
                store_at(builder, value, out, 64 * number, align=64)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return _cover(tile, num_rows, num_vectors * 64)


def _make_dots(num_rows, num_others):
    """The product of so many weight rows and rows that aren't packed."""

    @intrinsic
    def tile(typingctx, weight, stride, addresses, num_pairs, out, ahead):
        """float32 out [rows, PANEL], the first of them, = rows at ``addresses``
        · weight rows; see ``_make_tile``."""

        def codegen(context, builder, signature, args):
            weight, stride, addresses, num_pairs, out, ahead = args
            others = [load_at(builder, addresses, I64, 8 * i, align=8) for i in range(num_others)]

            def add(done, sums):
                here = builder.add(weight, done)
                _ask(builder, here, stride, num_rows, ahead)
                rows = [_line(builder, builder.add(other, done)) for other in others]
                result = []
                for row in range(num_rows):
                    line = _line(builder, builder.add(here, builder.mul(stride, I64(row))))
                    result += [
                        _dot(builder, sums[row * num_others + i], line, rows[i])
                        for i in range(num_others)
                    ]
                return result

            totals = _accumulate(builder, num_rows * num_others, num_pairs, add)
            for number, value in enumerate(totals):
                total = fold_lanes(builder, value, ir.IRBuilder.fadd)
                row, other = divmod(number, num_others)
                store_at(builder, total, out, 4 * (other * PANEL + row))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return _cover(tile, num_rows, 4)


def _cover(tile, num_rows, row_bytes):
    """``tile`` for any count of weight rows from ``num_rows`` on, whose results
    are so many bytes apart."""

    @njit
    def all_tiles(weight, stride, others, num_pairs, out, ahead, count):
        """The last tile may do some rows once more."""
        done = 0
        while done < count:
            row = min(done, count - num_rows)
            tile(weight + row * stride, stride, others, num_pairs, out + row * row_bytes, ahead)
            done = row + num_rows

    return all_tiles


def _accumulate(builder, num_sums, num_pairs, add):
    """Sums, each a vector, to which ``add`` adds 16 pairs at a time, given how
    many bytes of weights are done."""
    zero = constant(F32, LANES, 0.0)
    before = builder.block
    loop, end = (builder.append_basic_block(name) for name in ("pairs", "done"))
    builder.branch(loop)
    builder.position_at_end(loop)
    done, sums = builder.phi(I64), [builder.phi(zero.type) for _ in range(num_sums)]
    totals = add(done, sums)
    following = builder.add(done, I64(64))
    done.add_incoming(I64(0), before)
    done.add_incoming(following, loop)
    for phi, value in zip(sums, totals, strict=True):
        phi.add_incoming(zero, before)
        phi.add_incoming(value, loop)
    is_more = builder.icmp_signed("<", following, builder.mul(num_pairs, I64(4)))
    builder.cbranch(is_more, loop, end)
    builder.position_at_end(end)
    return totals


def _ask(builder, weight, stride, num_rows, ahead):
    """Ask for each row's cache line that lies ``ahead`` of ``weight``."""
    for row in range(num_rows):
        line = builder.add(weight, builder.mul(stride, I64(row)))
        emit_prefetch(builder, builder.add(line, ahead), locality=2)


def _line(builder, address):
    return load_at(builder, address, vec(I32, LANES), align=2)


def _dot(builder, total, a, b):
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", total.type, [total, a, b])


_multiply_1, _multiply_2, _multiply_3, _multiply_4 = (
    _make_tile(rows, vectors) for rows, vectors in ((12, 1), (12, 2), (8, 3), (6, 4))
)
_dots_1, _dots_2, _dots_3, _dots_4 = (
    _make_dots(rows, others) for rows, others in ((12, 1), (12, 2), (8, 3), (6, 4))
)


@intrinsic
def _pack_square(typingctx, addresses, count, offset, out, out_row):
    """16 rows' 16 pairs from ``offset`` bytes on, turned, to rows ``out_row``
    bytes apart. Of 16 addresses the first ``count`` count; other lanes are 0."""

    def codegen(context, builder, signature, args):
        addresses, count, offset, out, out_row = args
        kind = vec(I32, LANES)
        rows = []
        for i in range(LANES):
            at = builder.add(load_at(builder, addresses, I64, 8 * i, align=8), offset)
            row = load_at(builder, at, kind, align=2)
            is_there = builder.icmp_signed("<", I64(i), count)
            rows.append(builder.select(is_there, row, ir.Constant(kind, [0] * LANES)))
        for i, row in enumerate(transpose(builder, rows)):
            store_at(builder, row, builder.add(out, builder.mul(out_row, I64(i))), align=64)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def _unpack_square(typingctx, x, x_row, count, out, out_row):
    """16 vectors of float32, ``x_row`` bytes apart, turned and rounded to
    bfloat16, to the first ``count`` of 16 rows ``out_row`` bytes apart."""

    def codegen(context, builder, signature, args):
        x, x_row, count, out, out_row = args
        kind = vec(F32, LANES)
        rows = [
            load_at(builder, builder.add(x, builder.mul(x_row, I64(i))), kind, align=64)
            for i in range(LANES)
        ]
        for i, row in enumerate(transpose(builder, rows)):
            bits = builder.trunc(brain_bits(builder, row), vec(ir.IntType(16), LANES))
            with builder.if_then(builder.icmp_signed("<", I64(i), count)):
                store_at(builder, bits, builder.add(out, builder.mul(out_row, I64(i))), align=2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@njit
def _rounded(value):
    """float32, to the nearest bfloat16."""
    return widen(narrow(value, np.uint16(0)))


@intrinsic
def _pair(typingctx, low, high):
    """Two float32 that are bfloat16, as a pair."""

    def codegen(context, builder, signature, args):
        low, high = (builder.bitcast(arg, I32) for arg in args)
        return builder.or_(builder.lshr(low, I32(16)), high)

    return types.uint32(types.float32, types.float32), codegen


# --- which rows go where
# ------------------------------------------------------------------------------


@njit
def _plan(job):
    """Sort slots by expert (stable), and divide each expert's into blocks of up
    to 64, and its blocks into groups. Writes how many of both there are."""
    num_slots = job[NUM_ROWS] * job[TOP_K]
    num_experts = job[NUM_EXPERTS]
    chosen = carray(pointer_to(job[CHOSEN]), (num_slots,), np.int64)
    slots = carray(pointer_to(job[SLOTS]), (num_slots,), np.int64)
    places = carray(pointer_to(job[PLACES]), (num_slots,), np.int64)
    groups = carray(pointer_to(job[GROUPS]), (num_slots + 1, GROUP_FIELDS), np.int64)
    blocks = carray(pointer_to(job[BLOCKS]), (num_slots, BLOCK_FIELDS), np.int64)
    ends = carray(pointer_to(job[OUT]), (num_experts + 1,), np.int64)
    ends[:] = 0
    for slot in range(num_slots):
        ends[min(chosen[slot], num_experts)] += 1
    first, block, group, vector = 0, 0, 0, 0
    for expert in range(num_experts + 1):
        count, ends[expert] = ends[expert], first
        if count and expert < num_experts:
            first_block = block
            block, vector = _divide(blocks, block, vector, first, count)
            while first_block < block:
                last = min(first_block + job[GROUP_BLOCKS], block)
                groups[group] = expert, first_block, last
                first_block, group = last, group + 1
        first += count
    for slot in range(num_slots):
        expert = min(chosen[slot], num_experts)
        place = ends[expert]
        ends[expert] += 1
        slots[place] = slot
        places[slot] = place if expert < num_experts else -1
    job[NUM_GROUPS], job[NUM_BLOCKS], job[NUM_VECTORS] = group, block, vector


@njit
def _divide(blocks, block, vector, first, count):
    """One expert's rows in blocks that are nearly alike."""
    num_vectors = (count + LANES - 1) // LANES
    num_blocks = (num_vectors + BLOCK_VECTORS - 1) // BLOCK_VECTORS
    end = first + count
    for number in range(num_blocks):
        share = num_vectors // num_blocks + (number < num_vectors % num_blocks)
        taken = min(share * LANES, end - first)
        blocks[block] = first, taken, share, vector
        first, block, vector = first + taken, block + 1, vector + share
    return block, vector


@njit
def _block(job, number):
    """(first slot, rows, vectors, offset of its first vector)"""
    block = carray(pointer_to(job[BLOCKS] + number * 8 * BLOCK_FIELDS), (BLOCK_FIELDS,), np.int64)
    return block[_FIRST_SLOT], block[_COUNT], block[_VECTORS], block[_OFFSET]


@njit
def _pack(job, unit):
    """One block's part of rows, packed, unless they are few."""
    chunks, size, top_k = job[CHUNKS], job[SIZE_IN], job[TOP_K]
    number, chunk = unit // chunks, unit % chunks
    first, count, vectors, offset = _block(job, number)
    if count <= FEW_ROWS:
        return
    slots = carray(pointer_to(job[SLOTS]), (job[NUM_ROWS] * top_k,), np.int64)
    at = _scratch()
    addresses = carray(pointer_to(at), (LANES,), np.int64)
    squares = size // 32
    out = job[OUT] + offset * size * 32
    for vector in range(vectors):
        here = min(LANES, count - vector * LANES)
        for lane in range(LANES):
            slot = slots[first + vector * LANES + min(lane, here - 1)]
            addresses[lane] = job[ROWS] + slot // top_k * job[X_ROW] * 2
        for square in range(squares * chunk // chunks, squares * (chunk + 1) // chunks):
            target = out + (square * LANES * vectors + vector) * 64
            _pack_square(at, here, square * 64, target, vectors * 64)


# --- products
# ------------------------------------------------------------------------------


@njit
def _multiply(vectors, weight, stride, x, num_pairs, out, ahead, count):
    """float32 out [count, vectors · 16]."""
    if vectors == 4:
        _multiply_4(weight, stride, x, num_pairs, out, ahead, count)
    elif vectors == 3:
        _multiply_3(weight, stride, x, num_pairs, out, ahead, count)
    elif vectors == 2:
        _multiply_2(weight, stride, x, num_pairs, out, ahead, count)
    else:
        _multiply_1(weight, stride, x, num_pairs, out, ahead, count)


@njit
def _multiply_few(rows, weight, stride, addresses, num_pairs, out, ahead, count):
    """float32 out [rows, PANEL] of rows that aren't packed."""
    for first in range(0, rows, 4):
        here, there = addresses + 8 * first, out + first * PANEL * 4
        if rows - first == 1:
            _dots_1(weight, stride, here, num_pairs, there, ahead, count)
        elif rows - first == 2:
            _dots_2(weight, stride, here, num_pairs, there, ahead, count)
        elif rows - first == 3:
            _dots_3(weight, stride, here, num_pairs, there, ahead, count)
        else:
            _dots_4(weight, stride, here, num_pairs, there, ahead, count)
        ahead = 0


@njit
def _bias_of(job, expert, first, count):
    """The bias of an expert's weight rows, from ``first`` on."""
    size = job[SIZE_OUT] * (2 if job[KIND] == UP else 1)
    return carray(pointer_to(job[BIAS] + (expert * size + first) * 2), (count,), np.uint16)


@njit
def _add_bias(job, expert, first, count, out, vectors):
    """To sums [count, vectors · 16]."""
    if not job[BIAS]:
        return
    bias = _bias_of(job, expert, first, count)
    sums = carray(pointer_to(out), (count, vectors * LANES), np.float32)
    for row in range(count):
        for lane in range(vectors * LANES):
            sums[row, lane] += widen(bias[row])


@njit
def _add_bias_few(job, expert, first, count, out, rows):
    """To sums [rows, PANEL]."""
    if not job[BIAS]:
        return
    bias = _bias_of(job, expert, first, count)
    sums = carray(pointer_to(out), (rows, PANEL), np.float32)
    for row in range(rows):
        for j in range(count):
            sums[row, j] += widen(bias[j])


@njit(fastmath={"contract"}, error_model="numpy")
def _silu(g):
    return _rounded(g / (np.float32(1.0) + exp(-g)))


@njit(fastmath={"contract"}, error_model="numpy")
def _gelu(g):
    u = np.float32(0.7978845608028654) * (g + np.float32(0.044715) * g * g * g)
    return _rounded(g / (np.float32(1.0) + exp(np.float32(-2.0) * u)))


@njit(fastmath={"contract"}, error_model="numpy")
def _gated(kind, g, u, limit, alpha):
    g, u = _rounded(g), _rounded(u)
    one = np.float32(1.0)
    if kind == SILU:
        return _rounded(_silu(g) * u)
    if kind == GELU_TANH:
        return _rounded(_gelu(g) * u)
    if kind == CLAMPED:
        g = min(g, limit)
        g = _rounded(g * _rounded(one / (one + exp(-_rounded(g * alpha)))))
        return _rounded(g * _rounded(max(min(u, limit), -limit) + one))
    return _rounded(min(_silu(g), limit) * max(min(u, limit), -limit))


@njit
def _gate_pairs(kind, gate, up, out, num_pairs, lanes, limit, alpha):
    """float32 gate, up [2 · num_pairs, lanes] → pairs [num_pairs, lanes]."""
    for p in range(num_pairs):
        for lane in range(lanes):
            low = _gated(kind, gate[2 * p, lane], up[2 * p, lane], limit, alpha)
            high = _gated(kind, gate[2 * p + 1, lane], up[2 * p + 1, lane], limit, alpha)
            out[p, lane] = _pair(low, high)


@njit
def _gate_panel(job, numbers, gate, up, out, count, vectors):
    lanes = vectors * LANES
    g = carray(pointer_to(gate), (count, lanes), np.float32)
    u = carray(pointer_to(up), (count, lanes), np.float32)
    pairs = carray(pointer_to(out), (count // 2, lanes), np.uint32)
    limit, alpha = np.float32(numbers[0]), np.float32(numbers[1])
    kind = job[GATE]
    if kind == SILU:
        _gate_pairs(SILU, g, u, pairs, count // 2, lanes, limit, alpha)
    elif kind == GELU_TANH:
        _gate_pairs(GELU_TANH, g, u, pairs, count // 2, lanes, limit, alpha)
    elif kind == CLAMPED:
        _gate_pairs(CLAMPED, g, u, pairs, count // 2, lanes, limit, alpha)
    else:
        _gate_pairs(SILU_CLAMPED, g, u, pairs, count // 2, lanes, limit, alpha)


@njit
def _gate_few(job, numbers, gate, up, out, count, rows):
    """float32 gate, up [rows, PANEL] → bfloat16 [rows, SIZE_OUT], ``count`` of each."""
    g = carray(pointer_to(gate), (rows, PANEL), np.float32)
    u = carray(pointer_to(up), (rows, PANEL), np.float32)
    limit, alpha = np.float32(numbers[0]), np.float32(numbers[1])
    for row in range(rows):
        h = carray(pointer_to(out + row * job[SIZE_OUT] * 2), (count,), np.uint16)
        for j in range(count):
            h[j] = narrow(_gated(job[GATE], g[row, j], u[row, j], limit, alpha), h[0])


@njit
def _unit(job, unit):
    """(expert, first block, last block, first weight row, last) of a unit: a
    group's part of an output."""
    chunks, panels = job[CHUNKS], (job[SIZE_OUT] + PANEL - 1) // PANEL
    group = carray(
        pointer_to(job[GROUPS] + unit // chunks * 8 * GROUP_FIELDS), (GROUP_FIELDS,), np.int64
    )
    chunk = unit % chunks
    first, last = panels * chunk // chunks * PANEL, panels * (chunk + 1) // chunks * PANEL
    last = min(last, job[SIZE_OUT])
    return group[_EXPERT], group[_FIRST_BLOCK], group[_LAST_BLOCK], first, last


@njit
def _up(job, numbers, unit):
    """A unit's rows through both halves of ``up``, and the gate."""
    expert, first_block, last_block, begin, end = _unit(job, unit)
    size_in, size_out = job[SIZE_IN], job[SIZE_OUT]
    stride = size_in * 2
    weight = job[WEIGHT] + expert * 2 * size_out * stride
    if _block(job, first_block)[1] <= FEW_ROWS:
        _up_few(job, numbers, first_block, weight, expert, begin, end)
        return
    gate = _scratch()
    up = gate + _PANEL_BYTES
    for row in range(begin, end, PANEL):
        count = min(PANEL, end - row)
        ahead = PANEL * stride
        for number in range(first_block, last_block):
            _, _, vectors, offset = _block(job, number)
            x = job[X] + offset * size_in * 32
            at = weight + row * stride
            _multiply(vectors, at, stride, x, size_in // 2, gate, ahead, count)
            at += size_out * stride
            _multiply(vectors, at, stride, x, size_in // 2, up, ahead, count)
            _add_bias(job, expert, row, count, gate, vectors)
            _add_bias(job, expert, size_out + row, count, up, vectors)
            out = job[OUT] + offset * size_out * 32 + row // 2 * vectors * 64
            _gate_panel(job, numbers, gate, up, out, count, vectors)
            ahead = 0


@njit
def _up_few(job, numbers, number, weight, expert, begin, end):
    """``_up`` of the one block of an expert with few rows."""
    size_in, size_out, top_k = job[SIZE_IN], job[SIZE_OUT], job[TOP_K]
    first, rows, _, offset = _block(job, number)
    slots = carray(pointer_to(job[SLOTS]), (job[NUM_ROWS] * top_k,), np.int64)
    gate = _scratch()
    up, at, stride = gate + _PANEL_BYTES, gate + 2 * _PANEL_BYTES, size_in * 2
    addresses = carray(pointer_to(at), (LANES,), np.int64)
    for row in range(rows):
        addresses[row] = job[ROWS] + slots[first + row] // top_k * job[X_ROW] * 2
    for row in range(begin, end, PANEL):
        count, ahead = min(PANEL, end - row), PANEL * stride
        here = weight + row * stride
        _multiply_few(rows, here, stride, at, size_in // 2, gate, ahead, count)
        here += size_out * stride
        _multiply_few(rows, here, stride, at, size_in // 2, up, ahead, count)
        _add_bias_few(job, expert, row, count, gate, rows)
        _add_bias_few(job, expert, size_out + row, count, up, rows)
        out = job[OUT] + (offset * LANES * size_out + row) * 2
        _gate_few(job, numbers, gate, up, out, count, rows)


@njit
def _down(job, unit):
    """A unit's rows through ``down``, to rows [S, SIZE_OUT] of bfloat16."""
    expert, first_block, last_block, begin, end = _unit(job, unit)
    size_in, size_out = job[SIZE_IN], job[SIZE_OUT]
    stride = size_in * 2
    weight = job[WEIGHT] + expert * size_out * stride
    if _block(job, first_block)[1] <= FEW_ROWS:
        _down_few(job, first_block, weight, expert, begin, end)
        return
    sums = _scratch()
    for row in range(begin, end, PANEL):
        count, ahead = min(PANEL, end - row), PANEL * stride
        for number in range(first_block, last_block):
            first, rows, vectors, offset = _block(job, number)
            x = job[X] + offset * size_in * 32
            at = weight + row * stride
            _multiply(vectors, at, stride, x, size_in // 2, sums, ahead, count)
            _add_bias(job, expert, row, count, sums, vectors)
            out = job[OUT] + (first * size_out + row) * 2
            _unpack(sums, rows, vectors, count, out, size_out * 2)
            ahead = 0


@njit
def _unpack(sums, rows, vectors, count, out, out_row):
    """float32 sums [count, vectors · 16] to bfloat16 [rows, count]."""
    for vector in range(vectors):
        here = min(LANES, rows - vector * LANES)
        target = out + vector * LANES * out_row
        for square in range(count // LANES):
            source = sums + (square * LANES * vectors + vector) * 64
            _unpack_square(source, vectors * 64, here, target + square * LANES * 2, out_row)


@njit
def _down_few(job, number, weight, expert, begin, end):
    """``_down`` of the one block of an expert with few rows."""
    size_in, size_out = job[SIZE_IN], job[SIZE_OUT]
    first, rows, _, offset = _block(job, number)
    sums = _scratch()
    at, stride = sums + 2 * _PANEL_BYTES, size_in * 2
    addresses = carray(pointer_to(at), (LANES,), np.int64)
    for row in range(rows):
        addresses[row] = job[X] + (offset * LANES + row) * size_in * 2
    for row in range(begin, end, PANEL):
        count, ahead = min(PANEL, end - row), PANEL * stride
        here = weight + row * stride
        _multiply_few(rows, here, stride, at, size_in // 2, sums, ahead, count)
        _add_bias_few(job, expert, row, count, sums, rows)
        found = carray(pointer_to(sums), (rows, PANEL), np.float32)
        for i in range(rows):
            at_out = job[OUT] + ((first + i) * size_out + row) * 2
            out = carray(pointer_to(at_out), (count,), np.uint16)
            for j in range(count):
                out[j] = narrow(found[i, j], out[0])


# --- the sum
# ------------------------------------------------------------------------------


@njit(fastmath={"contract"})
def _add_weighed(total, y, weight):
    for j in range(len(total)):
        total[j] += widen(y[j]) * weight


@njit
def _sum(job, unit):
    """Some rows' weighted sums, [T, SIZE_OUT], added in float32 in the order of the k."""
    size, top_k = job[SIZE_OUT], job[TOP_K]
    total = np.empty(size, np.float32)
    for row in range(unit * SUM_ROWS, min((unit + 1) * SUM_ROWS, job[NUM_ROWS])):
        places = carray(pointer_to(job[PLACES] + row * top_k * 8), (top_k,), np.int64)
        total[:] = np.float32(0.0)
        for k in range(top_k):
            if places[k] < 0:
                continue
            y = carray(pointer_to(job[X] + places[k] * size * 2), (size,), np.uint16)
            _add_weighed(total, y, _weight(job, row * top_k + k))
        out = carray(pointer_to(job[OUT] + row * size * 2), (size,), np.uint16)
        for j in range(size):
            out[j] = narrow(total[j], out[0])


@njit
def _weight(job, slot):
    if job[IS_WIDE]:
        return carray(pointer_to(job[WEIGHTS] + slot * 4), (1,), np.float32)[0]
    return widen(carray(pointer_to(job[WEIGHTS] + slot * 2), (1,), np.uint16)[0])


def _run_job(address):
    """Do units of a job until none is left: what each thread runs."""
    job = carray(pointer_to(address), (NUM_FIELDS,), np.int64)
    numbers = carray(pointer_to(address + NUMBERS), (2,), np.float64)
    if job[KIND] == PLAN:
        _plan(job)
        return
    while True:
        unit = claim(address + NEXT)
        if unit >= job[NUM_UNITS]:
            return
        if job[KIND] == PACK:
            _pack(job, unit)
        elif job[KIND] == UP:
            _up(job, numbers, unit)
        elif job[KIND] == DOWN:
            _down(job, unit)
        else:
            _sum(job, unit)


run_job = CFunc(_run_job, ((types.int64,), types.void), locals={}, options={})
"""Takes a job's address; compiled once a host, where its disk allows."""
keep(
    run_job,
    _run_job,
    Path(__file__),
    *(Path(module.__file__) for module in (row_loops, memory, simd)),
)
run_job.compile()

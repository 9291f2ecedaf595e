# mypy: ignore-errors
# All of this runs inside Numba's type inference and code generation, whose types are not Python's.
"""Compiled loops over the rows of a tensor, for ``fused_numba``: what one thread does of a job.

A tensor of float32 is read as it is; one of bfloat16 as the bits, uint16. Loops are compiled for
each of both when they are first needed. A row's result depends on that row alone, to the bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from cpu_kernels.codegen.compiled import compiled_job, part

# A job: int64 fields and two float64; the counter of blocks that are taken has
# a cache line of its own. K_OUT to V_HEAD: only where q and k are turned, and v is copied.
KIND, IS_WIDE, NUM_ROWS, ROWS_AT_ONCE, SIZE, NUM_HEADS, X, X_ROW, X_HEAD, Y, Y_ROW = range(11)
WEIGHT, TOTAL, OUT, FLAG, K_OUT, V_OUT, NUM_K, V, V_ROW, V_HEAD, NUM_FIELDS = range(11, 22)
NEXT = 192
JOB_BYTES = 256
NORM, ROTATE, GATE = range(3)
"""Kinds of jobs."""


# --- what Numba lacks
# ------------------------------------------------------------------------------


@intrinsic
def pointer_to(typingctx, address):
    """An address as a pointer."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def claim(typingctx, address):
    """Atomically add 1; returns what was there."""

    def codegen(context, builder, signature, args):
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, ir.IntType(64)(1), "seq_cst")

    return types.int64(types.int64), codegen


_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


@intrinsic
def widen(typingctx, element):
    """An element as float32: of a float32 tensor itself, else the bits of a bfloat16, uint16."""

    def codegen(context, builder, signature, args):
        if signature.args[0] == types.float32:
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], _I32), _I32(16)), _F32)

    return types.float32(element), codegen


@intrinsic
def narrow(typingctx, value, like):
    """float32 → an element of ``like``'s type, rounded to the nearest, ties to even."""

    def codegen(context, builder, signature, args):
        if signature.return_type == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], _I32)
        last = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        nearest = builder.lshr(builder.add(bits, builder.add(last, _I32(0x7FFF))), _I32(16))
        is_number = builder.fcmp_ordered("ord", args[0], args[0])
        return builder.trunc(builder.select(is_number, nearest, _I32(0x7FC0)), _I16)

    return like(types.float32, like), codegen


@intrinsic
def _two_to_the(typingctx, shifted):
    """float32 1.5 · 2^23 + n → 2^n, for a whole n from -126 to 127."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[0], _I32)  # what 1.5 · 2^23 leaves of itself is shifted out
        return builder.bitcast(builder.shl(builder.add(bits, _I32(127)), _I32(23)), _F32)

    return types.float32(types.float32), codegen


# --- rows
# ------------------------------------------------------------------------------


@njit
def exp(x):
    """e^x for float32, to 2 steps of the last digit; below -87 it stays what it
    is there, above 88 it is infinite."""
    is_huge = x > np.float32(88.0)
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    # 1.5 · 2^23: the fraction drops off.
    shifted = x * np.float32(1.4426950408889634) + np.float32(12582912.0)
    n = shifted - np.float32(12582912.0)
    r = x - n * np.float32(0.693145751953125)
    r = r - n * np.float32(1.428606765330187e-06)
    p = np.float32(1.9841270e-04)
    p = p * r + np.float32(1.3888889e-03)
    p = p * r + np.float32(8.3333333e-03)
    p = p * r + np.float32(4.1666667e-02)
    p = p * r + np.float32(1.6666667e-01)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1.0)
    p = p * r + np.float32(1.0)
    return np.float32(np.inf) if is_huge else p * _two_to_the(shifted)


@part
def _elements(job, tensor, first, size, dtype):
    """``size`` elements of the tensor at an address, from number ``first`` on."""
    itemsize = 4 if job[IS_WIDE] else 2
    return carray(pointer_to(tensor + first * itemsize), (size,), dtype)


# So that sums may be vectors; NaN and Inf stay themselves.
@njit(fastmath={"reassoc", "contract"}, error_model="numpy")
def _norm_row(x, added, weight, total, out, eps, offset):
    size, none = len(x), out[0]
    squares = np.float32(0.0)
    if len(added):
        for j in range(size):
            kept = narrow(widen(x[j]) + widen(added[j]), none)
            total[j] = kept
            squares += widen(kept) * widen(kept)
        x = total
    else:
        for j in range(size):
            squares += widen(x[j]) * widen(x[j])
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(size) + eps)
    for j in range(size):
        out[j] = narrow(widen(x[j]) * scale * (widen(weight[j]) + offset), none)


@part
def _norm_rows(dtype, job, numbers, first, last):
    size, heads = job[SIZE], job[NUM_HEADS]
    added_size = size if job[Y] else 0
    weight = _elements(job, job[WEIGHT], np.int64(0), size, dtype)
    for row in range(first, last):
        added = _elements(job, job[Y], row * job[Y_ROW], added_size, dtype)
        total = _elements(job, job[TOTAL], row * size, added_size, dtype)
        for head in range(heads):
            x = _elements(job, job[X], row * job[X_ROW] + head * job[X_HEAD], size, dtype)
            out = _elements(job, job[OUT], (row * heads + head) * size, size, dtype)
            _norm_row(x, added, weight, total, out, np.float32(numbers[0]), np.float32(numbers[1]))


@njit(fastmath={"contract"})
def _rotate_head(x, table, out):
    num = len(table) // 2
    for j in range(num):
        a, b, cos, sin = widen(x[j]), widen(x[num + j]), table[j], table[num + j]
        out[j] = narrow(a * cos - b * sin, x[0])
        out[num + j] = narrow(b * cos + a * sin, x[0])
    for j in range(2 * num, len(x)):
        out[j] = x[j]


@part
def _rotate_rows(dtype, job, first, last):
    """Turn q and k of rows and copy v, each to a tensor of its own. A job may have q alone."""
    size, num_q, num_k, num = job[SIZE], job[NUM_HEADS], job[NUM_K], job[FLAG]
    positions = carray(pointer_to(job[Y]), (job[NUM_ROWS],), np.int64)
    for row in range(first, last):
        table = carray(pointer_to(job[WEIGHT] + positions[row] * num * 8), (2 * num,), np.float32)
        x = row * job[X_ROW]
        for head in range(num_q):
            q = _elements(job, job[X], x + head * job[X_HEAD], size, dtype)
            _rotate_head(
                q, table, _elements(job, job[OUT], (row * num_q + head) * size, size, dtype)
            )
        for head in range(num_k):
            k = _elements(job, job[X], x + (num_q + head) * job[X_HEAD], size, dtype)
            _rotate_head(
                k, table, _elements(job, job[K_OUT], (row * num_k + head) * size, size, dtype)
            )
        for head in range(num_k):
            v = _elements(job, job[V], row * job[V_ROW] + head * job[V_HEAD], size, dtype)
            out = _elements(job, job[V_OUT], (row * num_k + head) * size, size, dtype)
            for j in range(size):
                out[j] = v[j]


@njit(fastmath={"contract"}, error_model="numpy")
def _silu_row(gate, up, out):
    for j in range(len(out)):
        g = widen(gate[j])
        active = narrow(g / (np.float32(1.0) + exp(-g)), gate[j])
        out[j] = narrow(widen(active) * widen(up[j]), active)


@njit(fastmath={"contract"}, error_model="numpy")
def _gelu_row(gate, up, out):
    """(1 + tanh(u)) / 2 is 1 / (1 + exp(-2u))."""
    for j in range(len(out)):
        g = widen(gate[j])
        u = np.float32(0.7978845608028654) * (g + np.float32(0.044715) * g * g * g)
        active = narrow(g / (np.float32(1.0) + exp(np.float32(-2.0) * u)), gate[j])
        out[j] = narrow(widen(active) * widen(up[j]), active)


@part
def _gate_rows(dtype, job, first, last):
    size = job[SIZE]
    for row in range(first, last):
        gate = _elements(job, job[X], row * job[X_ROW], size, dtype)
        up = _elements(job, job[X], row * job[X_ROW] + size, size, dtype)
        out = _elements(job, job[OUT], row * size, size, dtype)
        if job[FLAG]:
            _silu_row(gate, up, out)
        else:
            _gelu_row(gate, up, out)


@part
def _do_rows(dtype, job, numbers, first, last):
    if job[KIND] == NORM:
        _norm_rows(dtype, job, numbers, first, last)
    elif job[KIND] == ROTATE:
        _rotate_rows(dtype, job, first, last)
    else:
        _gate_rows(dtype, job, first, last)


@part
def _run_units(dtype, address):
    """Do blocks of a job's rows until none is left: what each thread runs."""
    job = carray(pointer_to(address), (NUM_FIELDS,), np.int64)
    numbers = carray(pointer_to(address + 8 * NUM_FIELDS), (2,), np.float64)
    while True:
        first = claim(address + NEXT) * job[ROWS_AT_ONCE]
        if first >= job[NUM_ROWS]:
            return
        _do_rows(dtype, job, numbers, first, min(first + job[ROWS_AT_ONCE], job[NUM_ROWS]))


def _run_wide_job(address):
    _run_units(np.float32, address)


def _run_brain_job(address):
    _run_units(np.uint16, address)


@cache
def compiled(*, is_wide):
    """Return what each thread runs: for tensors of float32, or of bfloat16."""
    return compiled_job(_run_wide_job if is_wide else _run_brain_job, Path(__file__))

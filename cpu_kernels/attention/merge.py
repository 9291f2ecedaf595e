# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""The end of a row: its result where the sequence is one chunk, else its part
of it, and the merge of the parts."""

from __future__ import annotations

import numpy as np

from cpu_kernels.codegen.compiled import part
from cpu_kernels.codegen.memory import load_f32, load_i32, load_i64, store_f32
from cpu_kernels.codegen.rows import add_row, copy_row, fill_row, write_row
from cpu_kernels.codegen.simd import exp2_scalar

LN_2 = 0.6931471805599453
PARTIAL_HEADER = 16  # float32 of a partial result before its values: running max, sum, padding


@part
def write_result(variant, job, sequence, num_chunks, chunk, row, q_head, top, total, state):
    """One row's end: to ``out``, or to the partial results of its chunk."""
    group = job.num_q_heads // job.num_kv_heads
    start = np.int64(load_i32(job.starts + 4 * sequence))
    if num_chunks == 1:
        inverse = np.float32(1) / total if total > 0 or total != total else np.float32(0)
        index = (start + row // group) * job.num_q_heads + q_head
        element = 4 if job.source == 0 else 2
        write_row(
            variant,
            job.source,
            state,
            job.head_dim,
            job.out + index * job.head_dim * element,
            inverse,
        )
        if job.lse != 0:
            lse = np.float32(-np.inf)
            if total > 0 or total != total:
                lse = np.float32((np.float64(top) + np.log2(np.float64(total))) * LN_2)
            store_f32(job.lse + 4 * index, lse)
        return
    partial = load_i64(job.partial_starts + 8 * sequence)
    queries = np.int64(load_i32(job.starts + 4 * sequence + 4)) - start
    index = (chunk * queries + row // group) * job.num_q_heads + q_head
    target = partial + index * (job.padded_dims + PARTIAL_HEADER) * 4
    store_f32(target, top)
    store_f32(target + 4, total)
    copy_row(variant, state, job.padded_dims, target + 4 * PARTIAL_HEADER)


@part
def merge_chunks(variant, job, sequence, num_chunks, row, q_head, state):
    """Merge one row's partial results, in the order of the chunks, and write it
    out. ``state``: room for a row."""
    group = job.num_q_heads // job.num_kv_heads
    partial = load_i64(job.partial_starts + 8 * sequence)
    queries = np.int64(load_i32(job.starts + 4 * sequence + 4)) - np.int64(
        load_i32(job.starts + 4 * sequence)
    )
    stride = (job.padded_dims + PARTIAL_HEADER) * 4
    first = partial + ((row // group) * job.num_q_heads + q_head) * stride
    step = queries * job.num_q_heads * stride
    top = np.float32(-np.inf)
    for chunk in range(num_chunks):
        top = max(top, load_f32(first + chunk * step))
    total = np.float32(0)
    fill_row(variant, state, job.padded_dims, np.float32(0))
    for chunk in range(num_chunks):
        source = first + chunk * step
        share = load_f32(source + 4)
        if share > 0 or share != share:
            weight = exp2_scalar(variant, np.float32(load_f32(source) - top))
            total += weight * share
            add_row(variant, source + 4 * PARTIAL_HEADER, job.padded_dims, weight, state)
    write_result(variant, job, sequence, np.int64(1), np.int64(0), row, q_head, top, total, state)

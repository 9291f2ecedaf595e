# mypy: ignore-errors
# Everything here runs inside Numba's type inference and code generation, whose
# types are not Python's.
"""From one call's arrays to units of work: the checks that look at values, and
the partition over threads.

Work is cut by cached tokens: a sequence longer than a chunk gives a unit a
chunk, so that one long sequence among short ones, or alone, still keeps all
threads busy. Where the chunks fall depends on the sequence alone. How many KV
heads a unit takes depends on the rest of the batch and on the threads, which
changes nothing in the results.
"""

from __future__ import annotations

import numpy as np

from cpu_kernels.attention.kernel import CHUNK_TOKENS, JOB, MAX_ROWS, UNIT_FIELDS
from cpu_kernels.attention.merge import PARTIAL_HEADER
from cpu_kernels.codegen.compiled import entry, part
from cpu_kernels.codegen.memory import address_of_record, as_record, keep_alive, new_record
from cpu_kernels.shape import SHAPE
from cpu_kernels.team import run_units
from cpu_kernels.tokens.job import JOB as APPEND_JOB
from cpu_kernels.tokens.job import fill_job as fill_append_job

OK, BAD_CONTEXT, BAD_POSITION, BAD_STARTS, BAD_BLOCK, MORE_ROOM, NOT_LAST = range(7)
MAX_POSITION = 1 << 24
"""Kernels count tokens in float32, which is exact up to here."""
MAX_PARTIALS = (32 << 20) // 4
"""float32 of partial results that a call may have outstanding, unless a single
sequence has more."""
_UNITS_PER_THREAD = 8


@part
def check_values(shape, num_rows, num_blocks, tables, starts, positions, context_lens):
    """What is wrong with the values of a batch, and with which sequence: (code, index)."""
    num_sequences, max_blocks = tables.shape
    last = np.int64(0)
    for n in range(num_sequences):
        length, end = np.int64(context_lens[n]), np.int64(starts[n + 1])
        if length < 0 or length > max_blocks * shape.block_size:
            return BAD_CONTEXT, n
        if positions[n] < 0 or positions[n] >= MAX_POSITION - num_rows:
            return BAD_POSITION, n
        if end < last or end > num_rows:
            return BAD_STARTS, n
        last = end
        worst = np.uint32(0)
        for b in range((length + shape.block_size - 1) // shape.block_size):
            worst = max(worst, np.uint32(tables[n, b]))  # a negative id is a huge one
        if np.int64(worst) >= num_blocks:
            return BAD_BLOCK, n
    if starts[0] != 0 or last != num_rows:
        return BAD_STARTS, num_sequences
    return OK, 0


@part
def _cut(job, num_rows, position, context_len):
    """(row blocks, chunks) of one sequence."""
    if num_rows == 0:
        return 0, 0
    if num_rows > MAX_ROWS:
        return (num_rows + MAX_ROWS - 1) // MAX_ROWS, 1
    group = job.num_q_heads // job.num_kv_heads
    low = max(np.int64(0), position - job.window + 1) if job.window > 0 else np.int64(0)
    high = min(context_len, position + (num_rows - 1) // group + 1)
    chunk_tokens = job.chunk_blocks * job.block_size
    if high <= low:
        return 1, 1
    return 1, (high - 1) // chunk_tokens - low // chunk_tokens + 1


@part
def _fill_job(
    job,
    shape,
    pool,
    q,
    tables,
    starts,
    positions,
    context_lens,
    slopes,
    out,
    lse,
    scale,
    softcap,
    window,
):
    """What doesn't depend on the partition."""
    job.pool, job.q, job.tables = pool.ctypes.data, q.ctypes.data, tables.ctypes.data
    job.starts, job.positions = starts.ctypes.data, positions.ctypes.data
    job.context_lens, job.out = context_lens.ctypes.data, out.ctypes.data
    job.slopes = slopes.ctypes.data if slopes.size > 0 else 0
    job.lse = lse.ctypes.data if lse.size > 0 else 0
    job.source, job.num_q_heads, job.num_kv_heads = shape.source, q.shape[1], shape.num_kv_heads
    job.head_dim, job.block_size, job.max_blocks = shape.head_dim, shape.block_size, tables.shape[1]
    job.window, job.scale, job.softcap = window, np.float32(scale), np.float32(softcap)
    job.block_bytes, job.head_bytes = shape.block_bytes, shape.head_bytes
    job.v_offset, job.scale_offset = shape.v_offset, shape.scale_offset
    job.padded_tokens, job.padded_dims = shape.padded_tokens, shape.padded_dims
    job.dim_words = shape.dim_words
    job.tile_dims = shape.tile_dims
    job.tile_bytes = shape.tile_bytes
    job.chunk_blocks = max(1, CHUNK_TOKENS // shape.block_size)


@part
def _list_units(
    job, first, end, starts, positions, context_lens, most_heads, tile_rows, units, pending
):
    """The units of the sequences from ``first`` to ``end``, each of at most
    ``most_heads`` heads. Returns how many."""
    group = job.num_q_heads // job.num_kv_heads
    num_units = 0
    for n in range(first, end):
        num_rows = np.int64(starts[n + 1] - starts[n]) * group
        row_blocks, chunks = _cut(job, num_rows, np.int64(positions[n]), np.int64(context_lens[n]))
        padded_rows = (min(num_rows, MAX_ROWS) + tile_rows - 1) // tile_rows * tile_rows
        heads = max(1, min(most_heads, MAX_ROWS // max(1, padded_rows)))
        for index in range(max(row_blocks, chunks)):
            for head in range(0, job.num_kv_heads, heads):
                unit = units[num_units]
                unit[0], unit[1], unit[2] = n, head, min(head + heads, job.num_kv_heads)
                unit[3] = index * MAX_ROWS if row_blocks > 1 else 0
                unit[4] = min(num_rows, unit[3] + MAX_ROWS)
                unit[5] = index if chunks > 1 else 0
                unit[6] = chunks
                if chunks > 1:
                    pending[n * job.num_kv_heads + head] = chunks
                num_units += 1
    return num_units


@part
def _last_slots(shape, tables, starts, positions, context_lens, slots):
    """Where each sequence's last token lies. Returns the first sequence whose one
    query isn't that token's, or -1."""
    for n in range(slots.shape[0]):
        last = np.int64(context_lens[n]) - 1
        if last < 0 or positions[n] != last or starts[n + 1] - starts[n] != 1:
            return n
        block = np.int64(tables[n, last // shape.block_size])
        slots[n] = block * shape.block_size + last % shape.block_size
    return -1


@entry
def run_attend(
    entry, tile_rows, team, num_threads, scratch, partials, fields, pool, q, tables, starts,
    positions, context_lens, slopes, out, lse, scale, softcap, window, append_entry, k, v,
):  # fmt: skip
    """Check, partition, run. Returns (code, index) as ``check_values``, or
    (MORE_ROOM, the length that ``partials``, memory for what chunks leave, must
    have), with nothing done.

    Sequences whose partial results fit into ``partials`` together run as one,
    the others after them. ``append_entry``: address of what writes k and v of
    each sequence's last token, or 0 to write none.
    """
    shape = as_record(fields.ctypes.data, SHAPE)
    code, index = check_values(
        shape, q.shape[0], pool.shape[0], tables, starts, positions, context_lens
    )
    if code != OK:
        return code, index
    num_sequences = context_lens.shape[0]
    job = new_record(JOB)
    _fill_job(
        job, shape, pool, q, tables, starts, positions, context_lens, slopes, out, lse, scale,
        softcap, window,
    )  # fmt: skip

    slots = np.empty(num_sequences if append_entry != 0 else 0, np.int64)
    index = _last_slots(shape, tables, starts, positions, context_lens, slots)
    if index >= 0:
        return NOT_LAST, index
    append_job = new_record(APPEND_JOB)
    if append_entry != 0:
        no_scales = np.zeros((0, 0, 2), np.float32)
        fill_append_job(append_job, fields, pool, k, v, no_scales, slots, 0)
    job.append_entry, job.append_job = append_entry, address_of_record(append_job)

    num_base_units, num_partials, most_partials = 0, 0, 0
    # A sequence's number of float32 first, then their address.
    partial_starts = np.zeros(num_sequences, np.int64)
    for n in range(num_sequences):
        queries = np.int64(starts[n + 1] - starts[n])
        num_rows = queries * (job.num_q_heads // job.num_kv_heads)
        row_blocks, chunks = _cut(job, num_rows, np.int64(positions[n]), np.int64(context_lens[n]))
        num_base_units += row_blocks * chunks
        if chunks > 1:
            partial_starts[n] = (
                chunks * queries * job.num_q_heads * (job.padded_dims + PARTIAL_HEADER)
            )
            num_partials += partial_starts[n]
            most_partials = max(most_partials, partial_starts[n])
    if num_base_units == 0:
        return OK, 0
    room = min(num_partials, max(MAX_PARTIALS, most_partials))
    if partials.size < room:
        return MORE_ROOM, room
    pending = np.zeros(num_sequences * job.num_kv_heads if num_partials > 0 else 0, np.int64)
    job.partial_starts, job.pending = partial_starts.ctypes.data, pending.ctypes.data

    splits = 1
    if num_threads > 1:
        splits = min(
            job.num_kv_heads,
            (_UNITS_PER_THREAD * num_threads + num_base_units - 1) // num_base_units,
        )
    most_heads = (job.num_kv_heads + splits - 1) // splits
    units = np.empty((num_base_units * job.num_kv_heads, UNIT_FIELDS), np.int32)
    job.units = units.ctypes.data
    first = np.int64(0)
    while first < num_sequences:
        end, used = first, 0
        while end < num_sequences and used + partial_starts[end] <= partials.size:
            length = partial_starts[end]
            partial_starts[end] = partials.ctypes.data + 4 * used
            used += length
            end += 1
        num_units = _list_units(
            job, first, end, starts, positions, context_lens, most_heads, tile_rows, units, pending,
        )  # fmt: skip
        run_units(team, entry, address_of_record(job), num_units, scratch)
        first = end
    keep_alive(units)
    keep_alive(partials)
    keep_alive(partial_starts)
    keep_alive(pending)
    keep_alive(slots)
    return OK, 0

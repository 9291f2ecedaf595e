# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""From one call's arrays to units of work: the checks that look at values, and the partition over
threads.

Work is cut by cached tokens: a sequence longer than a chunk gives a unit a chunk, so that one long
sequence among short ones, or alone, still keeps all threads busy. Where the chunks fall depends on
the sequence alone. How many KV heads a unit takes depends on the rest of the batch and on the
threads, which changes nothing in the results."""

from __future__ import annotations

import numpy as np

from cpu_kernels.attention.kernel import CHUNK_TOKENS, JOB, MAX_ROWS, UNIT_FIELDS
from cpu_kernels.attention.merge import PARTIAL_HEADER
from cpu_kernels.codegen.compiled import entry, part
from cpu_kernels.codegen.memory import (
    address_of_record,
    as_record,
    data_of,
    new_record,
    store_i32,
    store_i64,
)
from cpu_kernels.shape import SHAPE
from cpu_kernels.team import run_units
from cpu_kernels.tokens.job import JOB as APPEND_JOB
from cpu_kernels.tokens.job import fill_job as fill_append_job

OK, BAD_CONTEXT, BAD_POSITION, BAD_STARTS, BAD_BLOCK, MORE_ROOM, NOT_LAST = range(7)
MAX_POSITION = 1 << 24  # kernels count tokens in float32, which is exact up to here
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
def _measure(job, starts, positions, context_lens, n):
    """(row blocks, chunks, float32 of partial results) of sequence ``n``."""
    queries = np.int64(starts[n + 1] - starts[n])
    num_rows = queries * (job.num_q_heads // job.num_kv_heads)
    row_blocks, chunks = _cut(job, num_rows, np.int64(positions[n]), np.int64(context_lens[n]))
    length = queries * job.num_q_heads * (job.padded_dims + PARTIAL_HEADER)
    return row_blocks, chunks, length * chunks if chunks > 1 else 0


@part
def _list_units(job, first, end, starts, positions, context_lens, most_heads, tile_rows):
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
                unit = job.units + 4 * UNIT_FIELDS * num_units
                first_row = index * MAX_ROWS if row_blocks > 1 else 0
                store_i32(unit, n)
                store_i32(unit + 4, head)
                store_i32(unit + 8, min(head + heads, job.num_kv_heads))
                store_i32(unit + 12, first_row)
                store_i32(unit + 16, min(num_rows, first_row + MAX_ROWS))
                store_i32(unit + 20, index if chunks > 1 else 0)
                store_i32(unit + 24, chunks)
                if chunks > 1:
                    store_i64(job.pending + 8 * (n * job.num_kv_heads + head), chunks)
                num_units += 1
    return num_units


@part
def _last_slots(shape, tables, starts, positions, context_lens, slots):
    """Where each sequence's last token lies. Returns the first sequence whose one
    query isn't that token's, or -1."""
    for n in range(context_lens.shape[0]):
        last = np.int64(context_lens[n]) - 1
        if last < 0 or positions[n] != last or starts[n + 1] - starts[n] != 1:
            return n
        block = np.int64(tables[n, last // shape.block_size])
        store_i64(slots + 8 * n, block * shape.block_size + last % shape.block_size)
    return -1


@entry
def run_attend(
    entry, tile_rows, team, num_threads, scratch, partials, fields, pool, q, tables, starts,
    positions, context_lens, slopes, out, lse, scale, softcap, window, append_entry, k, v,
):  # fmt: skip
    """Check, partition, run. Returns (code, index) as ``check_values``, or (MORE_ROOM, the length
    that ``partials``, memory for what chunks leave and for this call's own numbers, must have),
    with nothing done.

    Sequences whose partial results fit into ``partials`` together run as one, the others after
    them. ``append_entry``: address of what writes k and v of each sequence's last token, or 0 to
    write none."""
    shape = as_record(data_of(fields), SHAPE)
    code, index = check_values(
        shape, q.shape[0], pool.shape[0], tables, starts, positions, context_lens
    )
    if code != OK:
        return code, index
    num_sequences = context_lens.shape[0]
    job = new_record(JOB)
    job.pool, job.q, job.tables = data_of(pool), data_of(q), data_of(tables)
    job.starts, job.positions = data_of(starts), data_of(positions)
    job.context_lens, job.out = data_of(context_lens), data_of(out)
    job.slopes = data_of(slopes) if slopes.size > 0 else 0
    job.lse = data_of(lse) if lse.size > 0 else 0
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

    num_base_units, num_partials, most_partials = 0, 0, 0
    for n in range(num_sequences):
        row_blocks, chunks, length = _measure(job, starts, positions, context_lens, n)
        num_base_units += row_blocks * chunks
        num_partials += length
        most_partials = max(most_partials, length)
    # Of each sequence its last token's slot, its partial results' address, and what its heads
    # wait for. Then the units, then partial results.
    own_bytes = 8 * num_sequences * (2 + job.num_kv_heads)
    own_bytes += 8 * ((num_base_units * job.num_kv_heads * UNIT_FIELDS + 1) // 2)
    room = min(own_bytes // 4 + num_partials, max(MAX_PARTIALS, own_bytes // 4 + most_partials))
    if partials.size < room:
        return MORE_ROOM, room
    slots = data_of(partials)
    job.partial_starts = slots + 8 * num_sequences
    job.pending = job.partial_starts + 8 * num_sequences
    job.units = job.pending + 8 * num_sequences * job.num_kv_heads

    append_job = new_record(APPEND_JOB)
    if append_entry != 0:
        index = _last_slots(shape, tables, starts, positions, context_lens, slots)
        if index >= 0:
            return NOT_LAST, index
        fill_append_job(append_job, fields, pool, k, v, 0, slots, num_sequences, 0)
    job.append_entry, job.append_job = append_entry, address_of_record(append_job)
    if num_base_units == 0:
        return OK, 0

    splits = 1
    if num_threads > 1:
        splits = min(
            job.num_kv_heads,
            (_UNITS_PER_THREAD * num_threads + num_base_units - 1) // num_base_units,
        )
    most_heads = (job.num_kv_heads + splits - 1) // splits
    first = np.int64(0)
    while first < num_sequences:
        end, used = first, own_bytes // 4
        while end < num_sequences:
            _, _, length = _measure(job, starts, positions, context_lens, end)
            if used + length > partials.size:
                break
            store_i64(job.partial_starts + 8 * end, data_of(partials) + 4 * used)
            used += length
            end += 1
        num_units = _list_units(
            job, first, end, starts, positions, context_lens, most_heads, tile_rows
        )
        run_units(team, entry, address_of_record(job), num_units, scratch)
        first = end
    return OK, 0

# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""What ``append`` and ``gather`` share: the fields of a call, its checks, and where a token lies.

Consecutive tokens of a block, a **run**, are moved together."""

from __future__ import annotations

import numpy as np

from cpu_kernels.codegen.compiled import part
from cpu_kernels.codegen.memory import as_record, data_of, load_i64
from cpu_kernels.shape import SHAPE

JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            "pool", "slots", "k", "v", "scales", "shape", "num_tokens", "num_heads", "first_head",
            "row_bytes", "last_word", "pack_shift",
        )
    ]
)  # fmt: skip
"""What all units of one call share."""

FLOAT32, FLOAT16, BFLOAT16, INT8, INT4 = range(5)  # the order of layout.DTYPES


@part
def _last_word(head_dim):
    """A mask of the int4 elements of a stored row's last word that belong to the head."""
    mask = np.int64(0)
    for element in range((head_dim - 1) % 8 + 1):
        mask |= np.int64(15) << (8 * (element % 4) + 4 * (element // 4))
    return mask


@part
def fill_job(job, fields, pool, k, v, scales, slots, num_tokens, first_head):
    """Describe a call. ``scales``, ``slots``: addresses. Returns False if a slot is out of
    range."""
    shape = as_record(data_of(fields), SHAPE)
    limit = pool.shape[0] * shape.block_size
    for t in range(num_tokens):
        slot = load_i64(slots + 8 * t)
        if slot < 0 or slot >= limit:
            return False
    job.pool, job.slots, job.shape = data_of(pool), slots, data_of(fields)
    job.k, job.v, job.scales = data_of(k), data_of(v), scales
    job.num_tokens, job.num_heads, job.first_head = num_tokens, k.shape[1], first_head
    job.row_bytes, job.last_word = k.shape[2] * k.itemsize, _last_word(shape.head_dim)
    while 1 << job.pack_shift < shape.pack:
        job.pack_shift += 1
    return True


@part
def run_length(job, token, end, most):
    """How many slots from ``token`` on follow each other, up to ``most``."""
    first = load_i64(job.slots + 8 * token)
    count = 1
    while (
        count < most
        and token + count < end
        and load_i64(job.slots + 8 * (token + count)) == first + count
    ):
        count += 1
    return count


@part
def cells_of(job, shape, slot, head):
    """Address of a head's cells in the slot's block, and the token's place in the block."""
    block = job.pool + slot // shape.block_size * shape.block_bytes
    return block + (job.first_head + head) * shape.head_bytes, slot % shape.block_size


@part
def shift_of(dtype, pack_shift, token):
    """Where a token's element begins in its cell of V, in bits."""
    element = token & ((1 << pack_shift) - 1)
    if dtype == INT4:
        return ((element & 3) << 3) + (element >> 2 << 2)
    return element << (5 - pack_shift)

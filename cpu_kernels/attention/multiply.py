# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""Pure arithmetic: the ceiling of attention where arithmetic binds."""

from __future__ import annotations

import numpy as np

from cpu_kernels.attention.amx_products import configure_tiles, release_tiles
from cpu_kernels.attention.operands import FACTOR_BYTES, ROW_BYTES
from cpu_kernels.attention.products import score_block
from cpu_kernels.attention.softmax import find_maxima, weigh_scores
from cpu_kernels.codegen.amx import FILE_BYTES
from cpu_kernels.codegen.compiled import entry
from cpu_kernels.codegen.memory import address_of_record, as_record, new_record
from cpu_kernels.codegen.rows import fill_row
from cpu_kernels.team import run_units

MULTIPLY_JOB = np.dtype([(name, np.int64) for name in ("dim_words", "padded_tokens", "repeats")])


@entry
def multiply_unit(variant, job_address, unit, scratch):
    """Multiply one product's rows with a block in L1, and weigh their scores, over and over."""
    job = as_record(job_address, MULTIPLY_JOB)
    tile_bytes = variant.rows * ROW_BYTES
    operands = scratch + FILE_BYTES
    scores = operands + variant.product_tiles * tile_bytes
    weights = scores + variant.product_tiles * tile_bytes
    state = weights + variant.product_tiles * tile_bytes
    v_scales = state + 4 * FACTOR_BYTES
    cells = v_scales + ROW_BYTES
    end = cells + job.dim_words * job.padded_tokens * variant.cell_bytes
    fill_row(variant.plain, operands, (end - operands) // 4, np.float32(0))
    configure_tiles(variant, scratch, job.dim_words)
    for _ in range(job.repeats):
        for _ in range(2):  # products of K, and of V, which are as many
            score_block(
                variant, job, scratch, cells, False, cells, operands, scores, job.padded_tokens,
                variant.product_tiles,
            )  # fmt: skip
        for tile in range(variant.product_tiles):
            own = scores + tile * tile_bytes
            weigh_scores(
                variant, job.padded_tokens, np.float32(1), np.float32(1),
                find_maxima(variant, job.padded_tokens, own), own, v_scales, state,
                state + FACTOR_BYTES, state + 2 * FACTOR_BYTES, weights + tile * tile_bytes,
            )  # fmt: skip
    release_tiles(variant, scratch)


@entry
def run_multiply(entry, team, scratch, num_units, dim_words, padded_tokens, repeats):
    """Run ``multiply_unit`` once for each of ``num_units``."""
    job = new_record(MULTIPLY_JOB)
    job.dim_words, job.padded_tokens, job.repeats = dim_words, padded_tokens, repeats
    run_units(team, entry, address_of_record(job), num_units, scratch)

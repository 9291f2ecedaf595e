# mypy: ignore-errors
# Everything here runs inside Numba's type inference and code generation, whose
# types are not Python's.
"""Pure products: the ceiling of attention where arithmetic binds."""

from __future__ import annotations

import numpy as np

from cpu_kernels.attention.amx_products import configure_tiles, release_tiles
from cpu_kernels.attention.operands import PLANE_BYTES, ROW_BYTES
from cpu_kernels.attention.tiles import accumulate_scores, store_scores, zero_scores
from cpu_kernels.codegen.amx import FILE_BYTES
from cpu_kernels.codegen.compiled import entry
from cpu_kernels.codegen.memory import address_of_record, as_record, new_record
from cpu_kernels.codegen.rows import fill_row
from cpu_kernels.team import run_units

MULTIPLY_JOB = np.dtype([("repeats", np.int64)])
MULTIPLY_WORDS = 64


@entry
def multiply_unit(variant, job_address, unit, scratch):
    """Multiply one register tile with MULTIPLY_WORDS words of K that stay in L1, over and over."""
    job = as_record(job_address, MULTIPLY_JOB)
    operands = scratch + FILE_BYTES
    cells = operands + variant.product_rows * ROW_BYTES
    row_bytes = variant.score_vectors * variant.lanes * variant.cell_bytes
    end = cells + MULTIPLY_WORDS * row_bytes
    fill_row(variant.plain, operands, (end - operands) // 4, np.float32(0))
    configure_tiles(variant, scratch, MULTIPLY_WORDS)
    for _ in range(job.repeats):
        tile = zero_scores(variant, scratch)
        for plane in range(variant.passes):
            words = operands + plane * PLANE_BYTES
            for w in range(0, MULTIPLY_WORDS, variant.step_words):
                tile = accumulate_scores(
                    variant, tile, words + w * variant.word_bytes, cells + w * row_bytes,
                    row_bytes, MULTIPLY_WORDS - w,
                )  # fmt: skip
        store_scores(variant, tile, operands, end)
    release_tiles(variant, scratch)


@entry
def run_multiply(entry, team, scratch, num_units, repeats):
    """Run ``multiply_unit`` once for each of ``num_units``."""
    job = new_record(MULTIPLY_JOB)
    job.repeats = repeats
    run_units(team, entry, address_of_record(job), num_units, scratch)

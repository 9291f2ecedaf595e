# mypy: ignore-errors
# Compiled functions, and what emits their instructions: their types are not Python's.
"""A unit's products with one head's K and V of one block, tile by tile, while
the memory that is needed next is prefetched."""

from __future__ import annotations

import numpy as np

from cpu_kernels.attention.operands import FACTOR_BYTES, PLANE_BYTES, ROW_BYTES, copy_masked
from cpu_kernels.attention.tiles import (
    accumulate,
    begin_low_plane,
    begin_values,
    end_values,
    prefetch_share,
    store_scores,
    zero_scores,
)
from cpu_kernels.codegen.compiled import part
from cpu_kernels.codegen.memory import LINE_BYTES, prefetch


@part
def _ask_for_others(variant, ahead, walk, num_walks, share_bytes, num_bytes):
    """Prefetch ``num_bytes`` of each share that no walk has, where there are fewer walks
    than shares. A **walk** is one plane of one tile of rows. It prefetches its own share of
    the piece ``ahead`` step by step."""
    if variant.spread > 1:
        for _ in range(walk + num_walks, variant.spread, num_walks):
            ahead += num_walks * share_bytes
            for offset in range(0, num_bytes, LINE_BYTES):
                prefetch(ahead + offset)


@part
def ask_keys(variant, job, keys, num_tokens):
    """Prefetch the lines that hold a block's first ``num_tokens`` tokens of one head's K."""
    num_bytes = num_tokens * variant.cell_bytes
    for w in range(job.dim_words):
        row = keys + w * job.padded_tokens * variant.cell_bytes
        for offset in range(0, num_bytes, LINE_BYTES):
            prefetch(row + offset)


@part
def ask_values(variant, job, values, num_tokens):
    """Prefetch the lines that hold a block's first ``num_tokens`` tokens of one head's V."""
    num_words = (num_tokens + variant.pack - 1) // variant.pack
    num_bytes = num_words * job.tile_dims * variant.cell_bytes
    for _ in range(0, job.padded_dims, job.tile_dims):
        for offset in range(0, num_bytes, LINE_BYTES):
            prefetch(values + offset)
        values += job.tile_bytes


@part
def _walk(
    variant, of_keys, is_asking, tile, operands, cells, row_bytes, num_words, ahead, step_bytes
):
    """tile += operands · cells over all words. If ``is_asking``, prefetches ``step_bytes``
    from ``ahead`` on at each step."""
    for w in range(0, num_words, variant.step_words):
        if is_asking:
            prefetch_share(variant, tile, ahead)
            ahead += step_bytes
        tile = accumulate(
            variant, of_keys, tile, operands + w * variant.word_bytes, cells + w * row_bytes,
            row_bytes, num_words - w,
        )  # fmt: skip
    return tile


@part
def score_block(variant, job, file, keys, is_asking, ahead, queries, scores, num_scores, num_tiles):
    """Dot products of all rows with the first ``num_scores`` tokens of one block's K: float32
    [rows][num_scores]; prefetches the piece ``ahead`` if ``is_asking``.

    What is left of the tokens after whole register tiles is read a vector at a time: a block that
    has few tokens isn't read beyond them."""
    step = variant.score_vectors * variant.lanes
    whole = num_scores // step * step
    _score_tiles(
        variant, variant.score_vectors, job, file, keys, is_asking, ahead, queries, scores,
        np.int64(0), whole, num_tiles,
    )  # fmt: skip
    if variant.score_vectors > 1:
        _score_tiles(
            variant, 1, job, file, keys, False, ahead, queries, scores, whole, num_scores,
            num_tiles,
        )  # fmt: skip


@part
def _score_tiles(
    variant, vectors, job, file, keys, is_asking, ahead, queries, scores, first, end, num_tiles
):
    """``score_block`` of the tokens from ``first`` to ``end``, that number of vectors at once."""
    row_bytes = job.padded_tokens * variant.cell_bytes
    step = vectors * variant.lanes
    step_bytes = step * variant.cell_bytes * variant.step_words // variant.spread
    num_products = num_tiles // variant.product_tiles
    num_walks, num_asking = num_products * variant.passes, variant.spread if is_asking else 0
    walk_bytes = (job.dim_words + variant.step_words - 1) // variant.step_words * step_bytes
    share_bytes = end // step * walk_bytes
    for tile_index in range(num_products):
        operands = queries + tile_index * variant.product_rows * ROW_BYTES
        target = scores + tile_index * variant.product_rows * ROW_BYTES
        for t in range(first, end, step):
            cells = keys + t * variant.cell_bytes
            tile = zero_scores(variant, vectors, file)
            for plane in range(variant.passes):
                words = operands + plane * PLANE_BYTES
                if plane > 0:
                    tile = begin_low_plane(tile, 7)
                walk = tile_index * variant.passes + plane
                if walk < num_asking:
                    _ask_for_others(variant, ahead, walk, num_walks, share_bytes, walk_bytes)
                    tile = _walk(
                        variant, True, True, tile, words, cells, row_bytes, job.dim_words, ahead,
                        step_bytes,
                    )  # fmt: skip
                    ahead += walk_bytes
                else:
                    tile = _walk(
                        variant, True, False, tile, words, cells, row_bytes, job.dim_words, 0, 0
                    )
            store_scores(variant, tile, operands, target + 4 * t)


@part
def _add_values(
    variant, job, file, values, tile_bytes, num_words, is_asking, ahead, weights, factors, state,
    num_tiles, rescaling,
):  # fmt: skip
    """state = state · rescale + weights · V, over the first words of one
    block's V; prefetches the piece ``ahead`` if ``is_asking``."""
    row_bytes = job.tile_dims * variant.cell_bytes
    state_bytes = job.padded_dims * 4
    step = variant.value_vectors * variant.lanes
    step_bytes = step * variant.cell_bytes * variant.step_words // variant.spread
    num_products = num_tiles // variant.product_tiles
    num_walks, num_asking = num_products * variant.passes, variant.spread if is_asking else 0
    walk_bytes = (num_words + variant.step_words - 1) // variant.step_words * step_bytes
    share_bytes = (job.padded_dims + step - 1) // step * walk_bytes
    for tile_index in range(num_products):
        rows = weights + tile_index * variant.product_rows * ROW_BYTES
        target = state + tile_index * variant.product_rows * state_bytes
        scales = factors + tile_index * variant.product_tiles * 2 * FACTOR_BYTES
        for d in range(0, job.padded_dims, step):
            cells = (
                values + d // job.tile_dims * tile_bytes + d % job.tile_dims * variant.cell_bytes
            )
            tile = begin_values(variant, file, scales, target + 4 * d, state_bytes, rescaling)
            for plane in range(variant.passes):
                operands = rows + plane * PLANE_BYTES
                if plane > 0:
                    tile = begin_low_plane(tile, 8)
                walk = tile_index * variant.passes + plane
                if walk < num_asking:
                    _ask_for_others(variant, ahead, walk, num_walks, share_bytes, walk_bytes)
                    tile = _walk(
                        variant, False, True, tile, operands, cells, row_bytes, num_words, ahead,
                        step_bytes,
                    )  # fmt: skip
                    ahead += walk_bytes
                else:
                    tile = _walk(
                        variant, False, False, tile, operands, cells, row_bytes, num_words, 0, 0
                    )
            end_values(variant, tile, scales, target + 4 * d, state_bytes, rescaling)


@part
def _copy_last_step(variant, job, values, first_word, num_tokens, target):
    """The words of V from ``first_word`` on that a step takes, with zeros
    beyond the first ``num_tokens`` tokens, whose memory isn't read."""
    tile_bytes = variant.step_words * job.tile_dims * 4
    for w in range(variant.step_words):
        held = num_tokens - 2 * w
        mask = 0xFFFFFFFF if held > 1 else 0xFFFF if held == 1 else 0
        word = first_word + (w if held > 0 else 0)
        for d in range(0, job.padded_dims, 16):
            tile, cell = d // job.tile_dims, 4 * (d % job.tile_dims)
            source = values + tile * job.tile_bytes + 4 * word * job.tile_dims + cell
            copy_masked(source, target + tile * tile_bytes + 4 * w * job.tile_dims + cell, mask)


@part
def add_block(
    variant,
    job,
    file,
    values,
    num_tokens,
    is_asking,
    ahead,
    weights,
    factors,
    state,
    num_tiles,
    spare,
):
    """state = state · rescale + weights · V over one block, of which the first ``num_tokens`` are
    the sequence's.

    The other tokens hold what the block held before, perhaps NaN. A step of a product that takes
    in some of them (half a word of bfloat16, or a part of an AMX tile) is made on a copy in
    ``spare``."""
    num_words = (num_tokens + variant.pack - 1) // variant.pack
    left, first_step = num_tokens % (variant.pack * variant.step_words), 1
    if variant.pack == 2 and left > 0:
        num_words, first_step = (num_tokens - left) // variant.pack, 0
        _copy_last_step(variant, job, values, num_words, left, spare)
    for step in range(first_step, 2):  # the copy, then whole steps: one call is compiled once
        cells, tile_bytes, words, rows = values, job.tile_bytes, num_words, weights
        if step == 0:
            cells, tile_bytes = spare, 4 * variant.step_words * job.tile_dims
            words, rows = np.int64(variant.step_words), weights + num_words * variant.word_bytes
        _add_values(
            variant, job, file, cells, tile_bytes, words, is_asking and step == 1, ahead, rows,
            factors, state, num_tiles, step == first_step,
        )  # fmt: skip

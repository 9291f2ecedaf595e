"""Compiled kernels against their NumPy twins on random inputs, with poisoned outputs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from kernel_twins import SEED, compare, random_batch

import cpu_kernels
from cpu_kernels import BlockLayout, allocate_pool, dispatch, reference
from cpu_kernels.attention.driver import MAX_PARTIALS
from cpu_kernels.isa import host_levels
from examples import TRIES_ALL

# Kernels that other tests compile, too: those of the tests' Gemma 2 among them.
HEAD_DIM, GROUP_SIZE = 20, 3
NUM_QUERIES = [1, 1, 11, 1]
"""Rows of one register tile, and of several."""


# Every instruction set and every dtype; what an instruction set has to convert itself, with it.
OLDER = {
    "generic": ("float16", "int8"),
    "avx2": ("float32", "bfloat16", "int4"),
    "avx512": ("bfloat16", "int8", "int4"),
}
OLDER_CASES = [
    (isa.name, dtype)
    for isa in host_levels()[:-1]
    for dtype in (cpu_kernels.DTYPES if TRIES_ALL else OLDER.get(isa.name, cpu_kernels.DTYPES))
]


@pytest.mark.parametrize(("level", "dtype"), OLDER_CASES)
def test_instruction_sets_that_are_not_the_best_that_this_host_has(level, dtype):
    compare(
        BlockLayout(2, HEAD_DIM, dtype),
        2 * GROUP_SIZE,
        [1, 17, 70, 0],
        NUM_QUERIES,
        level=level,
        sliding_window=40,
    )


WIDE = ("bfloat16", "int4") if not TRIES_ALL else cpu_kernels.DTYPES
"""Products of pairs and of whole numbers."""


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_groups_long_contexts_threads_and_nan_in_what_blocks_held_before(dtype):
    """Contexts of several chunks and of odd lengths; where one thread and two
    leave the same bits."""
    layout = BlockLayout(2, 64, dtype)
    one, two = (
        compare(
            layout,
            32,
            [2101, 65, 1, 1024],
            [1, 1, 1, 1],
            tolerance=1e-5,
            stale=0xFF,
            num_threads=threads,
        )
        for threads in (1, 2)
    )
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif("avx2" not in [isa.name for isa in host_levels()], reason="needs AVX2")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_avx2_integers_at_their_limits(dtype):
    """Keys, values and queries whose every element is the largest, of one sign or of two."""
    layout, num_tokens = BlockLayout(1, 128, dtype), 70
    signs = np.random.default_rng(SEED).choice([-1.0, 1.0], (num_tokens, 1, 128))
    for values in (np.ones_like(signs), -np.ones_like(signs), signs):
        kv = values.astype(np.float32)
        pool = allocate_pool(layout, 1, 2)[0]
        cpu_kernels.append(layout, pool, kv, kv, np.arange(num_tokens))
        q = np.repeat(kv[:1], 8, axis=1)
        results = []
        for attend in (partial(cpu_kernels.attend, level="avx2"), reference.attend):
            out = np.full_like(q, np.nan)
            attend(
                layout, pool, q, np.array([[0, 1]], np.int32), np.array([0, 1], np.int32),
                np.array([num_tokens - 1], np.int32), np.array([num_tokens], np.int32),
                scale=0.05, out=out,
            )  # fmt: skip
            results.append(out)
        tolerance = 3e-4 if dtype == "int8" else 2e-2
        np.testing.assert_allclose(*results, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", cpu_kernels.DTYPES)
@pytest.mark.parametrize("source", cpu_kernels.SOURCES)
def test_every_dtype_and_source(dtype, source):
    # In blocks of 64, AMX would take it where there is AMX.
    block_size = 16 if dtype == source == "bfloat16" else 64
    layout = BlockLayout(2, HEAD_DIM, dtype, block_size)
    compare(layout, 2 * GROUP_SIZE, [1, 17, 70, 0], NUM_QUERIES, source)


# Nearly each pair is a kernel to compile, so not all of them.
PAIRS = [(1, 4), (20, 32), (24, 32), (64, 32), (112, 4), (128, 32)]
MORE_PAIRS = [(20, 4), (24, 4), (80, 4), (96, 32), (256, 4)]


@pytest.mark.parametrize(("head_dim", "block_size"), PAIRS + MORE_PAIRS * TRIES_ALL)
def test_head_dims(head_dim, block_size):
    compare(BlockLayout(1, head_dim, "bfloat16", block_size), 3, [33, 5], [1, 2])


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 7},
        {"logit_softcap": 5.0},
        {"alibi_slopes": np.array([0.5, 0.1, 0.02, 0.7], np.float32)},
        {"sliding_window": 20, "logit_softcap": 3.0, "alibi_slopes": np.full(4, 0.1, np.float32)},
    ],
)
def test_score_options(options):
    layout = BlockLayout(2, HEAD_DIM, "float16")
    compare(layout, 4, [30, 70, 3], [2, 5, 3], tolerance=1e-5, **options)


def test_past_only_context_and_nothing_visible():
    layout = BlockLayout(1, HEAD_DIM, "float16")
    pool = allocate_pool(layout, 1, 2)
    kv = np.ones((3, 1, HEAD_DIM), np.float32)
    cpu_kernels.append(layout, pool[0], kv, kv, np.arange(3))
    shape = 3, 2, HEAD_DIM
    q, out = np.ones(shape, np.float32), np.full(shape, np.nan, np.float32)
    lse = np.full((3, 2), np.nan, np.float32)
    cpu_kernels.attend(
        layout, pool[0], q, np.array([[0], [0]], np.int32), np.array([0, 2, 3], np.int32),
        np.array([3, 0], np.int32), np.array([3, 0], np.int32), scale=1.0, sliding_window=3,
        out=out, lse=lse,
    )  # fmt: skip
    np.testing.assert_allclose(out[:2], 1)
    np.testing.assert_allclose(lse[:2], HEAD_DIM + np.log([[2, 2], [1, 1]]))
    assert (out[2] == 0).all()
    assert (lse[2] == -np.inf).all()


def test_partial_results_of_many_long_sequences_share_bounded_memory():
    """40 sequences over the same 65,536 tokens leave 40 MB of partial results,
    more than a call keeps."""
    layout, num_sequences, num_tokens = BlockLayout(1, 16, "float32"), 40, 1 << 16
    rng = np.random.default_rng(SEED)
    pool = allocate_pool(layout, 1, num_tokens // layout.block_size)[0]
    k, v = (rng.standard_normal((num_tokens, 1, 16), np.float32) for _ in range(2))
    cpu_kernels.append(layout, pool, k, v, np.arange(num_tokens))
    q = rng.standard_normal((num_sequences, 128, 16), np.float32)
    table = np.arange(num_tokens // layout.block_size, dtype=np.int32)[None]

    def attend(q):
        count, out = len(q), np.full_like(q, np.nan)
        cpu_kernels.attend(
            layout, pool, q, np.repeat(table, count, axis=0), np.arange(count + 1, dtype=np.int32),
            np.full(count, num_tokens - 1, np.int32), np.full(count, num_tokens, np.int32),
            scale=0.25, out=out, num_threads=2,
        )  # fmt: skip
        return out

    out = attend(q)
    kept = dispatch.thread_partials(0)
    assert 0 < kept.size <= MAX_PARTIALS < num_sequences * (num_tokens // 1024) * 128 * 32
    for n in (0, 31, 32, 39):
        np.testing.assert_array_equal(out[n], attend(q[n : n + 1])[0])
    assert dispatch.thread_partials(0) is kept


# Kernels that other tests compile, too.
LAST = [(64, dtype, HEAD_DIM) for dtype in cpu_kernels.DTYPES]
LAST += [(16, "float32", HEAD_DIM), (16, "int4", HEAD_DIM)]
MORE_LAST = [(64, dtype, 40) for dtype in cpu_kernels.DTYPES]
MORE_LAST += [(16, dtype, 40) for dtype in cpu_kernels.DTYPES]


@pytest.mark.parametrize(("block_size", "dtype", "head_dim"), LAST + MORE_LAST * TRIES_ALL)
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
def test_attention_writes_the_last_tokens_itself(source, block_size, dtype, head_dim):
    """The same bits, in the cache and in o, as ``append`` before it."""
    layout = BlockLayout(2, head_dim, dtype, block_size)
    lens = [1, 5, 64, 65, 130, 1024, 1025, 2100]
    rng = np.random.default_rng(SEED)
    pool, k, v, slots, q, tables, starts, positions, lens = random_batch(
        rng, layout, 6, lens, [1] * len(lens), source
    )
    ends = np.cumsum(lens)
    is_last = np.isin(np.arange(ends[-1]), ends - 1)
    cpu_kernels.append(
        layout, pool[0], k[~is_last], v[~is_last], slots[~is_last], source=source
    )  # fmt: skip
    before, last = pool.copy(), (k[is_last], v[is_last])
    cpu_kernels.append(layout, pool[0], *last, slots[is_last], source=source)
    expected, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
    options = {"scale": 0.1, "source": source, "sliding_window": 1200}
    batch = (q, tables, starts, positions, lens)
    cpu_kernels.attend(layout, pool[0], *batch, out=expected, lse=lse, **options)
    for num_threads in (1, 2):
        own, out, own_lse = before.copy(), np.empty_like(q), np.empty_like(lse)
        cpu_kernels.attend(
            layout, own[0], *batch, out=out, lse=own_lse, last=last, num_threads=num_threads,
            **options,
        )  # fmt: skip
        np.testing.assert_array_equal(own, pool)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(own_lse, lse)
    twin = before.copy()
    reference.attend(layout, twin[0], *batch, out=out, last=last, **options)
    np.testing.assert_array_equal(twin, pool)


def test_last_tokens_are_those_of_the_queries():
    layout = BlockLayout(2, HEAD_DIM, "float32")
    rng = np.random.default_rng(SEED)
    pool, k, v, _, q, tables, starts, positions, lens = random_batch(
        rng, layout, 6, [3, 7, 9], [1, 1, 1], "float32"
    )
    before, last = pool.copy(), (k[:3], v[:3])
    for name, bad in (
        ("sequence 1", {"positions": positions - [0, 1, 0]}),
        ("sequence 0", {"lens": lens - lens * [1, 0, 0]}),
        ("last v", {"last": (k[:3], v[:2])}),
    ):
        given = {"positions": positions, "lens": lens, "last": last} | bad
        with pytest.raises(ValueError, match=name):
            cpu_kernels.attend(
                layout, pool[0], q, tables, starts, given["positions"].astype(np.int32),
                given["lens"].astype(np.int32), scale=1.0, out=np.empty_like(q),
                last=given["last"],
            )  # fmt: skip
    np.testing.assert_array_equal(pool, before)

"""``gather`` against its NumPy twin, and as the inverse of ``append``: bit by
bit, for every KV dtype."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpu_kernels
from cpu_kernels import BlockLayout, StoredTokens, allocate_pool, allocate_tokens, reference
from examples import examples

SEED = 20261122
NUM_BLOCKS = 5

layouts = st.builds(
    BlockLayout,
    num_kv_heads=st.integers(1, 4),
    head_dim=st.one_of(st.sampled_from([1, 16, 31, 32, 64, 80, 128, 256]), st.integers(1, 130)),
    dtype=st.sampled_from(cpu_kernels.DTYPES),
    block_size=st.one_of(st.sampled_from([1, 16, 64]), st.integers(1, 80)),
)


def random_pool(layout, rng):
    """Blocks of anything: gathering and putting back must not depend on what the bits mean."""
    pool = allocate_pool(layout, 1, NUM_BLOCKS)[0]
    pool[:] = rng.integers(0, 256, pool.shape, dtype=np.uint8)
    return pool


def appended_pool(layout, rng, source="float32"):
    """Blocks all of whose slots were appended, scales of 0 and of subnormal numbers among them."""
    pool = allocate_pool(layout, 1, NUM_BLOCKS)[0]
    slots = np.arange(NUM_BLOCKS * layout.block_size)
    shape = slots.size, layout.num_kv_heads, layout.head_dim
    k, v = (rng.standard_normal(shape, np.float32) for _ in range(2))
    k[0], v[slots.size // 2], k[-1] = 0, 1e-42, 6e4
    k, v = (reference.from_float32(x, source) for x in (k, v))
    cpu_kernels.append(layout, pool, k, v, slots, source=source)
    return pool


def ragged_slots(rng, num_slots):
    """Slots of all kinds of stretches, none twice."""
    order = np.arange(num_slots)
    cuts = np.sort(rng.integers(0, num_slots + 1, rng.integers(0, 6)))
    pieces = [piece for piece in np.split(order, cuts) if piece.size]
    rng.shuffle(pieces)
    return np.concatenate(pieces)[: rng.integers(1, num_slots + 1)].astype(np.int64)


def random_heads(rng, count):
    first = int(rng.integers(0, count))
    return range(first, int(rng.integers(first + 1, count + 1)))


def poisoned(layout, num_tokens, heads):
    tokens = allocate_tokens(layout, num_tokens, len(heads))
    for array in tokens:
        if array is not None:
            array.view(np.uint8)[:] = 0xA5
    return tokens


def bits(tokens: StoredTokens):
    return [None if array is None else array.tobytes() for array in tokens]


def gathered(layout, pool, slots, heads, gather=cpu_kernels.gather, **threads):
    tokens = poisoned(layout, slots.size, heads)
    gather(layout, pool, slots, *tokens, heads=heads, **threads)
    return tokens


@settings(max_examples=examples(300), deadline=None)
@given(layout=layouts, seed=st.integers(0, 2**32 - 1))
def test_the_twin_gathers_the_same_bits(layout, seed):
    rng = np.random.default_rng(seed)
    pool = random_pool(layout, rng)
    slots = ragged_slots(rng, NUM_BLOCKS * layout.block_size)
    heads = random_heads(rng, layout.num_kv_heads)
    before = pool.copy()
    ours = gathered(layout, pool, slots, heads)
    assert bits(ours) == bits(gathered(layout, pool, slots, heads, gather=reference.gather))
    np.testing.assert_array_equal(pool, before)


@settings(max_examples=examples(200), deadline=None)
@given(layout=layouts, seed=st.integers(0, 2**32 - 1))
def test_appending_what_was_gathered_gives_the_same_bits(layout, seed):
    """In place, nothing changes; elsewhere, in blocks of another size and among
    other heads, the same is gathered."""
    rng = np.random.default_rng(seed)
    pool = appended_pool(layout, rng)
    slots = ragged_slots(rng, NUM_BLOCKS * layout.block_size)
    heads = random_heads(rng, layout.num_kv_heads)
    k, v, scales = tokens = gathered(layout, pool, slots, heads)
    before = pool.copy()
    cpu_kernels.append(layout, pool, k, v, slots, source=layout.dtype, scales=scales, heads=heads)
    np.testing.assert_array_equal(pool, before)

    other = replace(layout, num_kv_heads=len(heads) + 1, block_size=int(rng.integers(1, 80)))
    there = random_pool(other, rng)
    there = np.concatenate([there] * -(-slots.size // (NUM_BLOCKS * other.block_size)))
    twin = there.copy()
    places = rng.permutation(len(there) * other.block_size)[: slots.size]
    moved = range(1, len(heads) + 1)
    for append, target in ((cpu_kernels.append, there), (reference.append, twin)):
        append(other, target, k, v, places, source=layout.dtype, scales=scales, heads=moved)
    np.testing.assert_array_equal(there, twin)
    assert bits(gathered(other, there, places, moved)) == bits(tokens)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_of_float_caches_are_the_activations_that_were_appended(dtype):
    rng = np.random.default_rng(SEED)
    layout = BlockLayout(2, 40, dtype, 16)
    pool = allocate_pool(layout, 1, 3)[0]
    slots = rng.permutation(48)
    values = rng.standard_normal((2, 48, 2, 40), np.float32)
    values[0, 3, 0, :4] = np.nan, np.inf, -np.inf, -0.0
    k, v = reference.from_float32(values, dtype)
    cpu_kernels.append(layout, pool, k, v, slots, source=dtype)
    tokens = gathered(layout, pool, slots, range(2))
    assert bits(tokens) == [k.tobytes(), v.tobytes(), None]


@pytest.mark.parametrize("dtype", cpu_kernels.DTYPES)
def test_two_threads_gather_what_one_does(dtype):
    rng = np.random.default_rng(SEED)
    layout = BlockLayout(4, 64, dtype, 64)
    pool = appended_pool(layout, rng)
    slots = np.tile(ragged_slots(rng, NUM_BLOCKS * 64), 7)  # a token may be asked for twice
    one, two = (gathered(layout, pool, slots, range(1, 4), num_threads=n) for n in (1, 2))
    assert bits(one) == bits(two)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": np.array([0, 8])}, r"slots holds 0..8, outside 0..7"),
        ({"slots": np.array([-1, 0])}, r"slots holds -1..0, outside 0..7"),
        ({"slots": np.array([0, 1], np.int32)}, "slots must be a NumPy array of int64"),
        ({"slots": np.array([0, 1, 2])}, r"k has shape \[2, 3, 12\], expected \[3, 3, 12\]"),
        ({"heads": range(1, 4)}, "must be a range of consecutive heads within range.0, 3."),
        ({"heads": range(0, 3, 2)}, "heads=range.0, 3, 2. must be a range of consecutive heads"),
        ({"heads": range(2, 2)}, "heads=range.2, 2. must be"),
        ({"heads": range(2)}, r"k has shape \[2, 3, 12\], expected \[2, 2, 12\]"),
        ({"k": np.zeros((2, 3, 12), np.int8)}, "k must be a NumPy array of uint8"),
        ({"v": np.zeros((2, 3, 24), np.uint8)[..., ::2]}, "v must be C-contiguous"),
        ({"v": np.frombuffer(bytes(72), np.uint8).reshape(2, 3, 12)}, "v can't be written to"),
        ({"scales": None}, "scales go with rows of int8 and int4"),
        ({"scales": np.zeros((2, 3, 1), np.float32)}, "scales has shape"),
        ({"pool_layer": np.zeros((2, 4), np.uint8)}, "pool_layer has shape"),
    ],
)
def test_refusals_come_before_anything_is_written(change, message):
    layout = BlockLayout(3, 20, "int4", 4)
    rng = np.random.default_rng(SEED)
    k, v, scales = tokens = poisoned(layout, 2, range(3))
    given = {"pool_layer": random_pool(layout, rng)[:2], "slots": np.array([0, 5]), "k": k, "v": v,
             "scales": scales, "heads": None}  # fmt: skip
    before = bits(tokens)
    with pytest.raises(ValueError, match=message):
        cpu_kernels.gather(layout, **{**given, **change})
    assert bits(tokens) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": None}, "scales go with rows of int8 and int4"),
        ({"source": "int4"}, "source='int4' is not one of"),
        ({"source": "float32", "k": np.zeros((2, 3, 20), np.float32), "v": np.zeros((2, 3, 20),
            np.float32)},
         "scales go with what a cache of int8 stores"),
        ({"heads": range(2)}, r"k has shape \[2, 3, 20\], expected \[2, 2, 20\]"),
        ({"slots": np.array([0, 8])}, "outside 0..7"),
    ],
)  # fmt: skip
def test_appending_stored_rows_is_refused_where_they_do_not_fit(change, message):
    layout = BlockLayout(3, 20, "int8", 4)
    pool = random_pool(layout, np.random.default_rng(SEED))[:2]
    k, v, scales = poisoned(layout, 2, range(3))
    given = {"k": k, "v": v, "slots": np.array([0, 5]), "source": "int8", "scales": scales}
    before = pool.copy()
    with pytest.raises(ValueError, match=message):
        cpu_kernels.append(layout, pool, **{**given, **change})
    np.testing.assert_array_equal(pool, before)

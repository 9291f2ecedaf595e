"""Register tiles, and how much of a block they read, which no result depends on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cpu_kernels.attention import kernel
from cpu_kernels.dispatch import choose_variant
from cpu_kernels.isa import LEVELS
from cpu_kernels.layout import DTYPES, MAX_BLOCK_SIZE, MAX_HEAD_DIM, BlockLayout

ROWS_16, ROWS_8 = (16, 1, 1, 1), (8, 2, 2, 2)


@pytest.mark.parametrize(
    ("level", "dtype", "head_dim", "block_size", "shape"),
    [
        ("avx512dot", "bfloat16", 128, 64, ROWS_8),
        ("avx512dot", "int4", 96, 64, ROWS_8),
        ("avx512dot", "bfloat16", 80, 64, ROWS_16),  # 5 vectors of V
        ("avx512dot", "bfloat16", 128, 16, ROWS_16),  # a vector of tokens
        ("avx512", "bfloat16", 128, 64, ROWS_16),
        ("avx2", "bfloat16", 128, 64, (8, 1, 1, 1)),
    ],
)
def test_rows_by_the_dozen(
    level: str, dtype: str, head_dim: int, block_size: int, shape: tuple[int, ...]
) -> None:
    """Rows, vectors of tokens, vectors of dims, and tiles that share asking for memory."""
    layout = BlockLayout(8, head_dim, dtype, block_size)
    isa = next(each for each in LEVELS if each.name == level)
    found = choose_variant(layout, 4, isa, "bfloat16", ragged=True)
    assert (found.rows, found.score_vectors, found.value_vectors, found.spread) == shape


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "group_size", "dot", "shape"),
    [
        ("float32", 128, 64, 8, "fma", (4, 2, 2, 2, 1)),
        ("bfloat16", 128, 64, 4, "fma", (4, 2, 2, 1, 2)),
        ("bfloat16", 128, 64, 8, "fma", (4, 2, 2, 2, 2)),
        ("bfloat16", 128, 64, 16, "fma", (4, 2, 2, 2, 2)),  # four tiles, two of which prefetch
        ("bfloat16", 33, 64, 8, "fma", (4, 2, 2, 1, 1)),  # 17 words of dims
        ("int8", 128, 64, 4, "int16", (4, 2, 2, 1, 2)),
        ("int8", 128, 4, 4, "int16", (4, 2, 2, 1, 1)),  # one word of tokens
        ("int4", 128, 64, 4, "int8", (4, 2, 2, 1, 2)),
    ],
)
def test_avx2_tile_of_one_query(
    dtype: str, head_dim: int, block_size: int, group_size: int, dot: str, shape: tuple[int, ...]
) -> None:
    """Rows, vectors of tokens, vectors of dims, tiles that prefetch, and words of a step."""
    layout = BlockLayout(8, head_dim, dtype, block_size)
    isa = next(each for each in LEVELS if each.name == "avx2")
    found = choose_variant(layout, group_size, isa, "bfloat16", ragged=False)
    assert found.dot == dot
    chosen = (found.rows, found.score_vectors, found.value_vectors, found.spread, found.words)
    assert chosen == shape


def test_avx2_integers_hold_the_largest_sums() -> None:
    """Products of two bytes are summed up in int16 without saturation (4 bits), and all
    products of a head or a block in int32 (8 bits)."""
    isa = next(each for each in LEVELS if each.name == "avx2")
    four, eight = (
        choose_variant(BlockLayout(2, 128, dtype), 4, isa, "float32", ragged=False)
        for dtype in ("int4", "int8")
    )
    assert 4 * 15 * four.max_query <= 2**15 - 1 and 4 * 8 * four.max_weight <= 2**15 - 1
    assert MAX_HEAD_DIM * 255 * eight.max_query <= 2**31 - 1
    assert MAX_BLOCK_SIZE * 128 * eight.max_weight <= 2**31 - 1
    assert max(eight.max_query, eight.max_weight) <= 2**15 - 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_is_not_read_beyond_its_tokens(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of whole vectors up to half a block; beyond it, of all tokens."""
    for name in ("_round_up", "_tokens_to_read"):
        monkeypatch.setattr(kernel, name, getattr(kernel, name).py_func)
    count_scores = kernel._count_scores.py_func
    layout = BlockLayout(8, 128, dtype)
    job = SimpleNamespace(padded_tokens=layout.padded_tokens, block_size=layout.block_size)
    for isa in LEVELS:
        variant = choose_variant(layout, 4, isa, "bfloat16", ragged=False)
        vector = 32 if variant.step_words == 16 else 16  # a step of AMX takes 32 tokens
        for tokens in (1, 16, 17, 32):
            count = count_scores(variant, job, tokens)
            assert tokens <= count <= -(-tokens // vector) * vector
        assert count_scores(variant, job, 33) <= 64 == count_scores(variant, job, 64)

"""What attention prefetches and reads of a block that is at most half full."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cpu_kernels import BlockLayout
from cpu_kernels.attention import kernel, products
from cpu_kernels.dispatch import choose_variant
from cpu_kernels.isa import LEVELS
from cpu_kernels.layout import DTYPES

LINE = 64


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_is_not_read_beyond_its_tokens(dtype, monkeypatch):
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 32])
def test_lines_of_few_tokens_are_prefetched_once(dtype, num_tokens, monkeypatch):
    """K's rows up to the last token's line, V's words up to the last token's."""
    layout = BlockLayout(8, 128, dtype)
    variant = choose_variant(layout, 4, LEVELS[0], "bfloat16", ragged=False)
    asked: list[int] = []
    monkeypatch.setattr(products, "prefetch_line", lambda variant, line: asked.append(line))
    products.ask_keys.py_func(variant, layout, 0, num_tokens)
    row_bytes = layout.padded_tokens * layout.cell_bytes
    lines = -(-num_tokens * layout.cell_bytes // LINE)
    assert asked == [
        w * row_bytes + LINE * line for w in range(layout.dim_words) for line in range(lines)
    ]
    asked.clear()
    products.ask_values.py_func(variant, layout, 0, num_tokens)
    words = -(-num_tokens // layout.pack)
    word_bytes = layout.tile_dims * layout.cell_bytes
    assert asked == [
        tile * layout.tile_bytes + byte
        for tile in range(layout.padded_dims // layout.tile_dims)
        for byte in range(0, words * word_bytes, LINE)
    ]

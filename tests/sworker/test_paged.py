"""Attention over a paged KV cache against a dense reference: decoded tokens,
later and first chunks, in one step."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from paged_sequences import BLOCK_SIZE, CPU, SPECS, Sequences

from fastdecode.core.dtype import DType
from fastdecode.core.spec import KVSpec
from sworker import paged
from sworker.paged import PagedKV

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels run in its interpreter, as they must on a CPU."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="needs triton, which comes with torch for CUDA")


@pytest.mark.parametrize("name", SPECS)
def test_a_step_of_every_kind_of_row(name: str) -> None:
    step = Sequences(SPECS[name], [40, 0, 15, 16, 3, 70, 33, 0, 0], [1, 1, 1, 1, 1, 9, 21, 30, 2])
    np.testing.assert_allclose(step.attend(), step.expected(), atol=1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_groups_of_decoded_tokens(name: str) -> None:
    """Too little room for all of them side by side."""
    spec = SPECS[name]
    step = Sequences(spec, [5, 300, 64, 63, 0, 129, 128, 40, 41, 2], [1] * 10)
    room = 4 * spec.num_kv_heads * spec.head_dim * 150
    with mock.patch.object(paged, "MAX_CPU_GATHERED_BYTES", room):
        np.testing.assert_allclose(step.attend(), step.expected(), atol=1e-5)


@pytest.mark.parametrize("block_size", [16, 64, 128])  # tiles are of 64 tokens
@pytest.mark.parametrize("name", SPECS)
def test_blocks_read_where_they_lie(name: str, block_size: int, interpreted: None) -> None:
    step = Sequences(
        SPECS[name], [5, 700, 64, 63, 0, 20], [1] * 6, device=DEVICE, block_size=block_size
    )
    step.cache._reads_blocks = True
    np.testing.assert_allclose(step.attend(), step.expected(), atol=1e-5)


def test_splits_fill_the_gpu_but_are_worth_it(interpreted: None) -> None:
    from sworker.paged_triton import MIN_SPLIT_TOKENS, num_splits

    assert num_splits(1, 100_000, 132) == 100_000 // MIN_SPLIT_TOKENS
    assert num_splits(8, 1 << 20, 132) == 66
    assert num_splits(8 * 256, 4096, 132) == 1
    assert num_splits(1, 10, 132) == 1


def test_copied_blocks() -> None:
    cache = PagedKV(KVSpec(2, 1, 4, DType.FLOAT32, BLOCK_SIZE), [SPECS["plain"]] * 2, 4, CPU)
    cache.pool.copy_(torch.arange(cache.pool.numel()).view(cache.pool.shape))
    before = cache.pool.clone().unflatten(2, (4, BLOCK_SIZE))
    cache.copy_blocks(np.array([3, 1]), np.array([0, 2]))
    after = cache.pool.unflatten(2, (4, BLOCK_SIZE))
    assert torch.equal(after, before[:, :, [3, 1, 1, 3]])

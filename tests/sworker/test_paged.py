"""Attention over a paged KV cache against a dense reference: decoded tokens, later and first chunks, in one step."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
import torch
from dense_attention import dense_attention

from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker import paged
from sworker.paged import PagedKV, PagedStep, Prompt

SLOPES = (0.5, 0.25, 0.125, 0.06, 0.03, 1.0)
SPECS = {
    "plain": AttentionSpec(6, 2, 12, 0.3),
    "mha": AttentionSpec(2, 2, 8, 0.3),
    "window": AttentionSpec(6, 2, 12, 0.3, sliding_window=19),
    "alibi": AttentionSpec(6, 2, 12, 0.3, alibi_slopes=SLOPES),
    "all": AttentionSpec(6, 1, 20, 0.5, sliding_window=37, alibi_slopes=SLOPES, logit_softcap=2.0),
}
BLOCK_SIZE = 16
CPU = torch.device("cpu")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton kernels run in its interpreter, as they must on a CPU."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton", reason="needs triton, which comes with torch for CUDA")


class Sequences:
    """Sequences with a past in a cache, blocks in random order, and what the cache must hold for them."""

    def __init__(
        self, spec: AttentionSpec, pasts: Sequence[int], news: Sequence[int], device: torch.device = CPU
    ) -> None:
        kv = KVSpec(1, spec.num_kv_heads, spec.head_dim, DType.FLOAT32, BLOCK_SIZE)
        rng = np.random.default_rng(5)
        totals = [past + new for past, new in zip(pasts, news, strict=True)]
        widths = [-(-total // BLOCK_SIZE) for total in totals]
        blocks = rng.permutation(sum(widths) + 3)
        self.cache = PagedKV(kv, [spec], len(blocks), device)
        self.cache.pool.fill_(float("nan"))  # what nobody wrote must not be weighed in
        ends = np.cumsum(widths)
        self._tables = [blocks[end - width : end] for end, width in zip(ends, widths, strict=True)]
        self._draw = lambda n, heads: rng.standard_normal((n, heads, spec.head_dim), np.float32)
        self.k, self.v = ([self._draw(total, spec.num_kv_heads) for total in totals] for _ in range(2))
        self.q = [self._draw(new, spec.num_q_heads) for new in news]
        self.pasts, self.news = pasts, news
        self._device = device
        for i, past in enumerate(pasts):
            slots = self._on_device(self.slots(i)[:past])
            for half, x in enumerate((self.k[i], self.v[i])):
                self.cache.pool[0, half, slots] = self._on_device(x[:past])

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def slots(self, i: int) -> np.ndarray:
        places = np.arange(self.pasts[i] + self.news[i])
        return self._tables[i][places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE

    def step(self) -> PagedStep:
        ends = np.cumsum(self.news)
        decoded = [i for i, new in enumerate(self.news) if new == 1]
        later = [i for i, new in enumerate(self.news) if new > 1 and self.pasts[i]]
        first = [i for i, new in enumerate(self.news) if new > 1 and not self.pasts[i]]
        tables = np.full((len(decoded), max((len(self._tables[i]) for i in decoded), default=0)), 1, np.int32)
        for row, i in enumerate(decoded):
            tables[row, : len(self._tables[i])] = self._tables[i]
        lens = np.array([self.pasts[i] + 1 for i in decoded], np.int32)
        first_row = int(ends[first[0]] - self.news[first[0]]) if first else int(ends[-1])
        return PagedStep(
            slots=self._on_device(np.concatenate([self.slots(i)[past:] for i, past in enumerate(self.pasts)])),
            tables=self._on_device(tables),
            context_lens=self._on_device(lens),
            context_lens_host=lens,
            later=tuple(
                Prompt(slice(int(ends[i] - self.news[i]), int(ends[i])), self._on_device(self.slots(i))) for i in later
            ),
            first_rows=slice(first_row, int(ends[-1])),
            first_starts=tuple(int(ends[i] - self.news[i]) - first_row for i in first),
        )

    def attend(self) -> np.ndarray:
        new_k, new_v = (np.concatenate([x[i][past:] for i, past in enumerate(self.pasts)]) for x in (self.k, self.v))
        q, k, v = (self._on_device(x) for x in (np.concatenate(self.q), new_k, new_v))
        o: np.ndarray = self.cache.attend(0, q, k, v, self.step()).cpu().numpy()
        return o

    def expected(self) -> np.ndarray:
        spec = self.cache.attention[0]
        return np.concatenate([
            dense_attention(self.q[i], self.k[i], self.v[i], past, past + self.news[i], spec)[0]
            for i, past in enumerate(self.pasts)
        ])  # fmt: skip


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


@pytest.mark.parametrize("name", SPECS)
def test_blocks_read_where_they_lie(name: str, interpreted: None) -> None:
    step = Sequences(SPECS[name], [5, 700, 64, 63, 0, 20], [1] * 6)
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

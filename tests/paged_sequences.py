"""Sequences with a past in a paged cache, and what attention over it must give."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from dense_attention import dense_attention

from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker.paged import PagedKV, PagedStep, Prompt
from sworker.prefill import as_cached

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


class Sequences:
    """Sequences with a past in a cache, blocks in random order, and what the
    cache must hold for them."""

    def __init__(
        self,
        spec: AttentionSpec,
        pasts: Sequence[int],
        news: Sequence[int],
        device: torch.device = CPU,
        block_size: int = BLOCK_SIZE,
        dtype: DType = DType.FLOAT32,
    ) -> None:
        kv = KVSpec(1, spec.num_kv_heads, spec.head_dim, dtype, block_size)
        self._block_size = block_size
        rng = np.random.default_rng(5)
        totals = [past + new for past, new in zip(pasts, news, strict=True)]
        widths = [-(-total // block_size) for total in totals]
        blocks = rng.permutation(sum(widths) + 3)
        self.cache = PagedKV(kv, [spec], len(blocks), device)
        # What nobody wrote must not be weighed in.
        for memory in (self.cache.pool, self.cache.scales):
            if memory is not None and memory.is_floating_point():
                memory.fill_(float("nan"))
        ends = np.cumsum(widths)
        self._tables = [blocks[end - width : end] for end, width in zip(ends, widths, strict=True)]
        self._draw = lambda n, heads: rng.standard_normal((n, heads, spec.head_dim), np.float32)
        self.k, self.v = (
            [self._draw(total, spec.num_kv_heads) for total in totals] for _ in range(2)
        )
        self.q = [self._draw(new, spec.num_q_heads) for new in news]
        self.pasts, self.news = pasts, news
        self._device = device
        for i, past in enumerate(pasts):
            slots = self._on_device(self.slots(i)[:past])
            self.cache.store(0, *(self._on_device(x[i][:past]) for x in (self.k, self.v)), slots)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def slots(self, i: int) -> np.ndarray:
        places = np.arange(self.pasts[i] + self.news[i])
        return (
            self._tables[i][places // self._block_size] * self._block_size
            + places % self._block_size
        )

    def step(self) -> PagedStep:
        ends = np.cumsum(self.news)
        decoded = [i for i, new in enumerate(self.news) if new == 1]
        later = [i for i, new in enumerate(self.news) if new > 1 and self.pasts[i]]
        first = [i for i, new in enumerate(self.news) if new > 1 and not self.pasts[i]]
        tables = np.full(
            (len(decoded), max((len(self._tables[i]) for i in decoded), default=0)), 1, np.int32
        )
        for row, i in enumerate(decoded):
            tables[row, : len(self._tables[i])] = self._tables[i]
        lens = np.array([self.pasts[i] + 1 for i in decoded], np.int32)
        first_row = int(ends[first[0]] - self.news[first[0]]) if first else int(ends[-1])
        return PagedStep(
            slots=self._on_device(
                np.concatenate([self.slots(i)[past:] for i, past in enumerate(self.pasts)])
            ),
            tables=self._on_device(tables),
            context_lens=self._on_device(lens),
            context_lens_host=lens,
            later=tuple(
                Prompt(
                    slice(int(ends[i] - self.news[i]), int(ends[i])), self._on_device(self.slots(i))
                )
                for i in later
            ),
            first_rows=slice(first_row, int(ends[-1])),
            first_starts=tuple(int(ends[i] - self.news[i]) - first_row for i in first),
        )

    def attend(self) -> np.ndarray:
        new_k, new_v = (
            np.concatenate([x[i][past:] for i, past in enumerate(self.pasts)])
            for x in (self.k, self.v)
        )
        q, k, v = (self._on_device(x) for x in (np.concatenate(self.q), new_k, new_v))
        o: np.ndarray = self.cache.attend(0, q, k, v, self.step()).cpu().numpy()
        return o

    def expected(self) -> np.ndarray:
        spec = self.cache.attention[0]
        k, v = ([self._as_cached(one) for one in x] for x in (self.k, self.v))
        return np.concatenate([
            dense_attention(self.q[i], k[i], v[i], past, past + self.news[i], spec)[0]
            for i, past in enumerate(self.pasts)
        ])  # fmt: skip

    def _as_cached(self, x: np.ndarray) -> np.ndarray:
        return as_cached(torch.from_numpy(x), self.cache.kv.dtype).numpy()

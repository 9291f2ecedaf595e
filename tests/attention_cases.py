"""Attention over blocks by kernels, beside float64: of every dtype, head size, group, block
size and kind that an engine may ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker.paged import BlockKernels, PagedKV, PagedStep, Prompt

KINDS = ("plain", "window", "softcap", "alibi")
MOST_OFF = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Of the greatest result: softmax weights and results are rounded to the dtype."""


@dataclass(frozen=True)
class Case:
    """What is attended, by two KV heads."""

    dtype: torch.dtype
    is_int8: bool
    head_dim: int
    group_size: int
    block_size: int
    kind: str

    def __str__(self) -> str:
        kv = "int8" if self.is_int8 else "same"
        return (
            f"{str(self.dtype)[6:]}, KV {kv}, D {self.head_dim}, G {self.group_size}, "
            f"blocks {self.block_size}, {self.kind}"
        )

    @property
    def spec(self) -> AttentionSpec:
        plain = AttentionSpec(2 * self.group_size, 2, self.head_dim, self.head_dim**-0.5)
        slopes = tuple(
            2.0 ** -(8.0 * (i + 1) / plain.num_q_heads) for i in range(plain.num_q_heads)
        )
        return {
            "plain": plain,
            "window": replace(plain, sliding_window=100),
            "softcap": replace(plain, logit_softcap=3.0),
            "alibi": replace(plain, alibi_slopes=slopes),
        }[self.kind]

    @property
    def kv_dtype(self) -> DType:
        return DType.INT8 if self.is_int8 else DType(str(self.dtype).removeprefix("torch."))


def cases(
    dtypes: Sequence[torch.dtype],
    head_dims: Sequence[int] = (64, 80, 128, 256),
    group_sizes: Sequence[int] = (1, 4, 8, 32),
    block_sizes: Sequence[int] = (16, 64, 128),
    kinds: Sequence[str] = KINDS,
) -> Iterator[Case]:
    for values in product(dtypes, (False, True), head_dims, group_sizes, block_sizes, kinds):
        yield Case(*values)


def pairwise(all_cases: Sequence[Case]) -> list[Case]:
    """So few of them that any two values stand together in one, if they do in any."""
    values = [
        (c.dtype, c.is_int8, c.head_dim, c.group_size, c.block_size, c.kind) for c in all_cases
    ]
    pairs = [{(i, j, one[i], one[j]) for i in range(len(one)) for j in range(i)} for one in values]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(pairs)), key=lambda index: len(pairs[index] & missing))
        chosen.append(all_cases[best])
        missing -= pairs[best]
    return chosen


class CachedSequences:
    """Sequences of which the last tokens aren't cached yet, in blocks in random order.

    Args:
        pasts, news: tokens of each that are cached, and that come in a step.
        sinks: float32 [Hq], of attention that has them.
    """

    def __init__(
        self,
        case: Case,
        pasts: Sequence[int],
        news: Sequence[int],
        device: torch.device,
        kernels: BlockKernels | None,
        sinks: Tensor | None = None,
    ) -> None:
        self.sinks = sinks
        self.case, self.pasts, self.news = case, pasts, news
        self.device, size = device, case.block_size
        self.totals = [past + new for past, new in zip(pasts, news, strict=True)]
        widths = [-(-total // size) for total in self.totals]
        self.width = max(widths)
        rng = np.random.default_rng(3)
        blocks = rng.permutation(sum(widths) + 2).astype(np.int32)
        kv = KVSpec(1, 2, case.head_dim, case.kv_dtype, size)
        self.cache = PagedKV(kv, [case.spec], len(blocks), device)
        for memory in (self.cache.pool, self.cache.scales):
            if memory is not None and memory.is_floating_point():
                memory.fill_(float("nan"))  # what was never written must not be weighed in
        starts = np.cumsum(widths) - widths
        self.tables = [blocks[start:][:width] for start, width in zip(starts, widths, strict=True)]
        generator = torch.Generator().manual_seed(1)
        shape = (sum(self.totals), case.head_dim)

        def drawn(num_heads: int, num: int) -> Tensor:
            x = torch.randn(num, num_heads, shape[1], generator=generator)
            return x.to(case.dtype).to(device)

        self.k, self.v = drawn(2, shape[0]), drawn(2, shape[0])
        self.q = drawn(2 * case.group_size, sum(news))
        self.slots = [
            torch.from_numpy(
                table[np.arange(total) // size].astype(np.int64) * size + np.arange(total) % size
            ).to(device)
            for table, total in zip(self.tables, self.totals, strict=True)
        ]
        ends = np.cumsum(self.totals)
        is_new = torch.cat(
            [torch.arange(total) >= past for past, total in zip(pasts, self.totals, strict=True)]
        ).to(device)
        self.new_k, self.new_v = self.k[is_new], self.v[is_new]
        self._ends = ends
        self.cache.kernels = None  # the past is stored by torch
        self.cache.store(0, self.k[~is_new], self.v[~is_new], torch.cat(self.slots)[~is_new])
        self.cache.kernels = kernels
        if sinks is not None:
            self.cache.sinks = [sinks.to(device)]

    def decoded(self) -> PagedStep:
        """A step in which every sequence has one new token."""
        tables = np.full((len(self.totals), self.width), -1, np.int32)
        for row, table in zip(tables, self.tables, strict=True):
            row[: len(table)] = table
        lens = np.array(self.totals, np.int32)
        num = len(lens)
        return PagedStep(
            torch.stack([slots[-1] for slots in self.slots]),
            torch.from_numpy(tables.clip(min=0)).to(self.device),
            torch.from_numpy(lens).to(self.device), lens, (), slice(num, num), (),
        )  # fmt: skip

    def later(self) -> PagedStep:
        """A step of later chunks."""
        ends = np.cumsum(self.news)
        none = np.zeros(0, np.int32)
        prompts = tuple(
            Prompt(slice(int(end) - new, int(end)), slots)
            for end, new, slots in zip(ends, self.news, self.slots, strict=True)
        )
        new_slots = [slots[-new:] for slots, new in zip(self.slots, self.news, strict=True)]
        num = int(ends[-1])
        no_tables = torch.zeros((0, 0), dtype=torch.int32, device=self.device)
        return PagedStep(
            torch.cat(new_slots), no_tables, no_tables.flatten(), none, prompts, slice(num, num), ()
        )

    def first(self) -> PagedStep:
        """A step of first chunks: nothing is cached."""
        none, no_tables = np.zeros(0, np.int32), torch.zeros((0, 0), dtype=torch.int32)
        starts = tuple((np.cumsum(self.news) - self.news).tolist())
        slots = torch.cat(self.slots)
        return PagedStep(
            slots, no_tables, no_tables.flatten(), none, (), slice(0, len(slots)), starts
        )

    def error(self, step: PagedStep) -> float:
        """How far a step's attention is off, as a part of the greatest result."""
        found = self.cache.attend(0, self.q, self.new_k, self.new_v, step).double().cpu()
        expected = self.expected()
        assert found.isfinite().all()
        return float((found - expected).abs().max() / expected.abs().max())

    def expected(self) -> Tensor:
        """In float64 on the CPU, of what the cache holds. [T, Hq, D]."""
        starts = np.cumsum(self.news) - self.news
        return torch.cat([
            exact(
                self.q[start:][:new].double().cpu(),
                *(x.double().cpu() for x in self.cache._seen(0, slots, torch.float32)),
                self.case.spec,
                self.sinks,
            )
            for start, new, slots in zip(starts, self.news, self.slots, strict=True)
        ])  # fmt: skip


def exact(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
) -> Tensor:
    """Dense: q [n, Hq, D], the last of the keys' tokens, k and v [L, Hkv, D], float64 → [n,
    Hq, D]. Sinks [Hq] by their definition."""
    k, v = (x.repeat_interleave(spec.group_size, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    places = torch.arange(len(k))
    ahead = places - places[len(k) - len(q) :, None]  # [n, L]
    if spec.logit_softcap is not None:
        scores = spec.logit_softcap * (scores / spec.logit_softcap).tanh()
    if spec.alibi_slopes is not None:
        scores += torch.tensor(spec.alibi_slopes, dtype=torch.float64)[:, None, None] * ahead
    hidden = ahead > 0
    if spec.sliding_window is not None:
        hidden |= ahead <= -spec.sliding_window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        of_none = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, of_none), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)

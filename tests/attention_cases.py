"""Attention beside its definition in float64: of every dtype, head size, group, block size and
kind that an engine may ask for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from sworker.paged import BlockKernels, PagedKV, PagedStep, Prompt
from sworker.prefill import as_cached

CPU = torch.device("cpu")
KINDS = ("plain", "window", "softcap", "alibi")
MOST_OFF = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Largest error as a part of the greatest result: weights and results are rounded."""
SLOPES = (0.5, 0.25, 0.125, 0.06, 0.03, 1.0)
SPECS = {
    "plain": AttentionSpec(6, 2, 12, 0.3),
    "mha": AttentionSpec(2, 2, 8, 0.3),
    "window": AttentionSpec(6, 2, 12, 0.3, sliding_window=19),
    "alibi": AttentionSpec(6, 2, 12, 0.3, alibi_slopes=SLOPES),
    "all": AttentionSpec(6, 1, 20, 0.5, sliding_window=37, alibi_slopes=SLOPES, logit_softcap=2.0),
}


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    past: int = 0,
    keys: slice = slice(None),
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend by ``AttentionSpec``'s docstring, with all scores at once.

    Args:
        q: [Q, Hq, D], queries at ``past`` and the following positions.
        k, v: [n, Hkv, D], from position 0.
        keys: Keys that count.
        sinks: [Hq], a score without a value in every row.

    Returns:
        o [Q, Hq, D] and the log-sum-exp [Q, Hq], in float64.
    """
    groups = (spec.num_kv_heads, spec.group_size)
    scores = torch.einsum("ihgd,jhd->hgij", q.double().unflatten(1, groups), k.double())
    scores = scores.flatten(0, 1) * spec.scale
    if spec.logit_softcap is not None:
        scores = spec.logit_softcap * torch.tanh(scores / spec.logit_softcap)
    query_at, key_at = past + torch.arange(len(q))[:, None], torch.arange(len(k))[None, :]
    if spec.alibi_slopes is not None:
        slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float64)
        scores = scores + slopes[:, None, None] * (key_at - query_at)
    visible = key_at <= query_at
    if spec.sliding_window is not None:
        visible &= key_at > query_at - spec.sliding_window
    counted = torch.zeros(len(k), dtype=torch.bool)
    counted[keys] = True
    scores = scores.masked_fill(~(visible & counted), -math.inf)
    lse = scores.logsumexp(dim=-1)  # [Hq, Q]
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    weights = torch.where(lse[..., None] == -math.inf, 0.0, (scores - lse[..., None]).exp())
    o = torch.einsum("hgij,jhd->ihgd", weights.unflatten(0, groups), v.double())
    return o.flatten(1, 2), lse.T


class ReferenceAttention:
    """Appends, then attends, one sequence at a time.

    ``begin_step`` names the sequences of the coming pass; then this is its ``attend``."""

    def __init__(
        self, attention: Sequence[AttentionSpec], sinks: Sequence[Tensor] | None = None
    ) -> None:
        self.attention, self.sinks = tuple(attention), sinks
        # (sequence, layer) → K, V [L, Hkv, D]
        self._cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._lengths: dict[int, int] = {}
        self._step: list[tuple[int, int]] = []

    def begin_step(self, sequence_ids: Sequence[int], num_new: Sequence[int]) -> Tensor:
        """Append ``num_new`` tokens to each sequence. Returns their positions, int64 [T]."""
        self._step = list(zip(sequence_ids, num_new, strict=True))
        positions = []
        for sequence, count in self._step:
            past = self._lengths.get(sequence, 0)
            positions.append(torch.arange(past, past + count))
            self._lengths[sequence] = past + count
        return torch.cat(positions)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        counts = [count for _, count in self._step]
        outputs = []
        for (sequence, _), *qkv in zip(
            self._step, *(torch.split(x, counts) for x in (q, k, v)), strict=True
        ):
            q_new, k_new, v_new = qkv
            if (sequence, layer) in self._cache:
                k_past, v_past = self._cache[sequence, layer]
                k_new, v_new = torch.cat((k_past, k_new)), torch.cat((v_past, v_new))
            self._cache[sequence, layer] = k_new, v_new
            sinks = None if self.sinks is None else self.sinks[layer]
            past = len(k_new) - len(q_new)
            o, _ = dense(q_new, k_new, v_new, self.attention[layer], past=past, sinks=sinks)
            outputs.append(o.to(q.dtype))
        return torch.cat(outputs)


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

    def sequences(
        self,
        pasts: Sequence[int],
        news: Sequence[int],
        device: torch.device,
        kernels: BlockKernels | None,
        sinks: Tensor | None = None,
    ) -> CachedSequences:
        found = CachedSequences(
            self.spec, pasts, news, device, self.block_size,
            DType.INT8 if self.is_int8 else DType(str(self.dtype).removeprefix("torch.")),
            self.dtype, sinks,
        )  # fmt: skip
        found.cache.kernels = kernels
        return found


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
    """Return few cases: any two values stand together in one if they do in any."""
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
    """Sequences whose last tokens are not cached yet, in blocks in random order.

    Args:
        pasts, news: Tokens of each sequence that are cached, and that a step brings.
        sinks: float32 [Hq] of attention that has them.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        pasts: Sequence[int],
        news: Sequence[int],
        device: torch.device = CPU,
        block_size: int = 16,
        kv_dtype: DType = DType.FLOAT32,
        dtype: torch.dtype = torch.float32,
        sinks: Tensor | None = None,
    ) -> None:
        self.spec, self.pasts, self.news = spec, pasts, news
        self.device, self.block_size, self.sinks = device, block_size, sinks
        self.totals = [past + new for past, new in zip(pasts, news, strict=True)]
        widths = [-(-total // block_size) for total in self.totals]
        rng = np.random.default_rng(5)
        blocks = rng.permutation(sum(widths) + 3).astype(np.int32)
        kv = KVSpec(1, spec.num_kv_heads, spec.head_dim, kv_dtype, block_size)
        self.cache = PagedKV(kv, [spec], len(blocks), device)
        for memory in (self.cache.pool, self.cache.scales):
            if memory is not None and memory.is_floating_point():
                memory.fill_(float("nan"))  # what was never written must not be weighed in
        ends = np.cumsum(widths)
        self._tables = [blocks[end - width : end] for end, width in zip(ends, widths, strict=True)]
        generator = torch.Generator().manual_seed(1)
        self.k, self.v, self.q = (
            [
                torch.randn(num, heads, spec.head_dim, generator=generator).to(dtype).to(device)
                for num in nums
            ]
            for nums, heads in (
                (self.totals, spec.num_kv_heads),
                (self.totals, spec.num_kv_heads),
                (news, spec.num_q_heads),
            )
        )
        self.slots = [
            torch.from_numpy(
                table[np.arange(total) // block_size].astype(np.int64) * block_size
                + np.arange(total) % block_size
            ).to(device)
            for table, total in zip(self._tables, self.totals, strict=True)
        ]
        kernels, self.cache.kernels = self.cache.kernels, None  # torch stores the past
        for k, v, slots, past in zip(self.k, self.v, self.slots, pasts, strict=True):
            self.cache.store(0, k[:past], v[:past], slots[:past])
        self.cache.kernels = kernels
        if sinks is not None:
            self.cache.sinks = [sinks.to(device)]

    def new(self, of_each: Sequence[Tensor]) -> Tensor:
        """Return the rows of K, V or slots that the step brings."""
        return torch.cat([x[past:] for x, past in zip(of_each, self.pasts, strict=True)])

    def step(self, kind: str | None = None) -> PagedStep:
        """Return a step with the new tokens.

        Args:
            kind: ``decoded``, ``later`` or ``first`` chunks. None tells it by each sequence's
                tokens; decoded ones come first, first chunks last.
        """
        ends, of_kind = np.cumsum(self.news), dict[str, list[int]](decoded=[], later=[], first=[])
        for i, (past, new) in enumerate(zip(self.pasts, self.news, strict=True)):
            usual = "decoded" if new == 1 else "later" if past else "first"
            of_kind[kind or usual].append(i)
        decoded, first = of_kind["decoded"], of_kind["first"]
        width = max((len(self._tables[i]) for i in decoded), default=0)
        tables = np.zeros((len(decoded), width), np.int32)
        for row, i in enumerate(decoded):
            tables[row, : len(self._tables[i])] = self._tables[i]
        lens = np.array([self.totals[i] for i in decoded], np.int32)
        starts = ends - self.news
        first_row = int(starts[first[0]] if first else ends[-1])
        later = [
            Prompt(slice(int(starts[i]), int(ends[i])), self.slots[i]) for i in of_kind["later"]
        ]
        return PagedStep(
            self.new(self.slots),
            torch.from_numpy(tables).to(self.device),
            torch.from_numpy(lens).to(self.device),
            lens,
            tuple(later),
            slice(first_row, int(ends[-1])),
            tuple(int(starts[i]) - first_row for i in first),
        )

    def error(self, step: PagedStep | None = None) -> float:
        """Return how far a step's attention is off, as a part of the greatest result."""
        q, k, v = torch.cat(self.q), self.new(self.k), self.new(self.v)
        found = self.cache.attend(0, q, k, v, step or self.step()).double().cpu()
        expected = self.expected()
        assert found.isfinite().all()
        return float((found - expected).abs().max() / expected.abs().max())

    def expected(self) -> Tensor:
        """Attend in float64 to what the cache must hold. [T, Hq, D]."""
        k, v = (
            [as_cached(one.float(), self.cache.kv.dtype).cpu() for one in x]
            for x in (self.k, self.v)
        )
        return torch.cat([
            dense(self.q[i].cpu(), k[i], v[i], self.spec, past=past, sinks=self.sinks)[0]
            for i, past in enumerate(self.pasts)
        ])  # fmt: skip

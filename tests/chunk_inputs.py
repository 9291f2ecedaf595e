"""Queries, keys and values of chunks, kinds of attention, and a dense float64
reference: what a chunk's own attention is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from fastdecode.core.spec import AttentionSpec


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    past: int = 0,
    keys: slice = slice(None),
) -> tuple[Tensor, Tensor]:
    """AttentionSpec's docstring, all scores at once. The first query stands at
    ``past``; only ``keys`` count."""
    num_queries, num_keys = q.shape[0], k.shape[0]
    k, v = (x.double().repeat_interleave(spec.group_size, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) * spec.scale
    if spec.logit_softcap is not None:
        scores = spec.logit_softcap * torch.tanh(scores / spec.logit_softcap)
    query_at, key_at = past + torch.arange(num_queries)[:, None], torch.arange(num_keys)[None, :]
    if spec.alibi_slopes is not None:
        slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float64)
        scores = scores + slopes[:, None, None] * (key_at - query_at)
    visible = key_at <= query_at
    if spec.sliding_window is not None:
        visible &= key_at > query_at - spec.sliding_window
    counted = torch.zeros(num_keys, dtype=torch.bool)
    counted[keys] = True
    scores = scores.masked_fill(~(visible & counted), -math.inf)
    lse = scores.logsumexp(dim=-1)  # [Hq, n]
    weights = torch.where(lse[..., None] == -math.inf, 0.0, (scores - lse[..., None]).exp())
    return torch.einsum("hij,jhd->ihd", weights, v), lse.T


def tensors(
    spec: AttentionSpec, num_tokens: int, seed: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
    return [torch.randn(num_tokens, h, spec.head_dim, generator=generator).to(dtype) for h in heads]


def starts_of(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    num_kv_heads, group = draw(st.sampled_from([(1, 1), (1, 4), (3, 2), (2, 7), (4, 1)]))
    num_q_heads, head_dim = num_kv_heads * group, draw(st.sampled_from([1, 7, 16, 40]))
    return AttentionSpec(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=draw(st.sampled_from([head_dim**-0.5, 0.3])),
        sliding_window=draw(st.none() | st.integers(1, 50)),
        alibi_slopes=tuple(2.0**-h for h in range(num_q_heads)) if draw(st.booleans()) else None,
        logit_softcap=draw(st.sampled_from([None, None, 2.0])),
    )


FEATURES = {
    "plain": {},
    "window": {"sliding_window": 9},
    "window of one": {"sliding_window": 1},
    "wide window": {"sliding_window": 10_000},
    "alibi": {"alibi_slopes": (0.5, 0.25, 0.125, 0.06, 0.03, 1.0)},
    "softcap": {"logit_softcap": 1.5},
    "all": {
        "sliding_window": 33,
        "alibi_slopes": (0.5, 0.25, 0.125, 0.06, 0.03, 1.0),
        "logit_softcap": 4.0,
    },
}


def spec_with(name: str) -> AttentionSpec:
    return AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, **FEATURES[name])  # type: ignore[arg-type]

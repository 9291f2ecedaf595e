"""Queries, keys and values of chunks, and kinds of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from fastdecode.core.spec import AttentionSpec


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


_SLOPES = (0.5, 0.25, 0.125, 0.06, 0.03, 1.0)
_PLAIN = AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=16, scale=0.25)
FEATURES = {
    "plain": _PLAIN,
    "window": replace(_PLAIN, sliding_window=9),
    "window of one": replace(_PLAIN, sliding_window=1),
    "wide window": replace(_PLAIN, sliding_window=10_000),
    "alibi": replace(_PLAIN, alibi_slopes=_SLOPES),
    "softcap": replace(_PLAIN, logit_softcap=1.5),
    "all": replace(_PLAIN, sliding_window=33, alibi_slopes=_SLOPES, logit_softcap=4.0),
}

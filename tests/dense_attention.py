"""Plain dense attention of one sequence, and 16-bit floats as their bits: what
R-workers are compared with."""

from __future__ import annotations

import numpy as np

from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec


def to_float(bits: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is DType.BFLOAT16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits if dtype is DType.FLOAT32 else bits.view(np.float16).astype(np.float32)


def to_bits(x: np.ndarray, dtype: DType) -> np.ndarray:
    """Rounded to nearest, ties to even."""
    if dtype is DType.BFLOAT16:
        words = np.ascontiguousarray(x).view(np.uint32)
        return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    return x if dtype is DType.FLOAT32 else x.astype(np.float16).view(np.uint16)


def rounded(x: np.ndarray, dtype: DType) -> np.ndarray:
    return to_float(to_bits(x, dtype), dtype)


def dense_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    position: int,
    num_visible: int,
    spec: AttentionSpec,
) -> tuple[np.ndarray, np.ndarray]:
    """One sequence in float64: q [Q, Hq, D] from ``position`` on, k and v [n,
    Hkv, D] → o [Q, Hq, D], lse [Q, Hq]."""
    num_queries = len(q)
    o, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for i in range(num_queries):
        p = position + i
        first = 0 if spec.sliding_window is None else max(0, p - spec.sliding_window + 1)
        end = min(p + 1, num_visible)
        if first >= end:
            continue
        for h in range(spec.num_q_heads):
            keys, values = (x[first:end, h // spec.group_size].astype(np.float64) for x in (k, v))
            scores = spec.scale * (keys @ q[i, h].astype(np.float64))
            if spec.logit_softcap is not None:
                scores = spec.logit_softcap * np.tanh(scores / spec.logit_softcap)
            if spec.alibi_slopes is not None:
                scores += spec.alibi_slopes[h] * (np.arange(first, end) - p)
            weights = np.exp(scores - scores.max())
            o[i, h] = weights @ values / weights.sum()
            lse[i, h] = scores.max() + np.log(weights.sum())
    return o, lse

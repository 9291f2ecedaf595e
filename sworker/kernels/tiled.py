"""Attention of any kind in tiles of queries × keys with a running softmax (Milakov & Gimelshein,
"Online normalizer calculation for softmax", 2018). A tile's scores take ``MAX_TILE_BYTES`` at
most, however long the sequence."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastdecode.core.spec import AttentionSpec
from sworker.buffers import to_device

MAX_TILE_BYTES = 64 << 20  # bytes of float32 scores, over all heads
MAX_CPU_TILE_BYTES, MAX_CPU_TILE_QUERIES = 4 << 20, 64
"""On a CPU small tiles are as fast or faster: they stay in its caches, and less
of a tile lies beyond the diagonal."""


def tile_shape(
    num_q_heads: int, num_tokens: int, *, on_cpu: bool, num_keys: int | None = None
) -> tuple[int, int]:
    """Queries and keys of a tile: its num_q_heads · queries · keys scores take at most
    ``MAX_TILE_BYTES``, whatever the length of the sequence. No fewer keys than queries, so that
    every query of a block sees a key in its first tile: the window of its last query begins less
    than ``queries`` after that of its first."""
    # queries · keys
    most = max(1, (MAX_CPU_TILE_BYTES if on_cpu else MAX_TILE_BYTES) // (4 * num_q_heads))
    num_queries = min(num_tokens, MAX_CPU_TILE_QUERIES if on_cpu else num_tokens, math.isqrt(most))
    return num_queries, min(num_keys or num_tokens, most // num_queries)


def tiled(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, o: Tensor, lse: Tensor | None
) -> None:
    """Causal attention of one sequence; the queries are the last of the keys'
    tokens. Waits for no device.

    Args:
        q: [n, Hq, D].
        k, v: [L, Hkv, D].
        o: [n, Hq, D], written.
        lse: [n, Hq], written; None: it isn't wanted.
    """
    num_tokens = q.shape[0]
    num_past = k.shape[0] - q.shape[0]
    Hkv = spec.num_kv_heads
    G = spec.group_size
    keys = k.transpose(0, 1).float()  # [Hkv, L, D]
    values = v.transpose(0, 1).float()
    tile_queries, tile_keys = tile_shape(
        spec.num_q_heads, num_tokens, on_cpu=q.device.type == "cpu", num_keys=k.shape[0]
    )
    slopes = None
    if spec.alibi_slopes is not None:
        of_heads = torch.tensor(spec.alibi_slopes, dtype=torch.float32)
        slopes = to_device(of_heads, q.device).view(Hkv, G, 1, 1)
    for start in range(0, num_tokens, tile_queries):
        end = min(start + tile_queries, num_tokens)
        queries = (q[start:end].float() * spec.scale).view(end - start, Hkv, G, -1)
        queries = queries.permute(1, 2, 0, 3).reshape(Hkv, G * (end - start), -1)  # [Hkv, G·b, D]
        total = _RunningSoftmax(queries)
        place = num_past + start  # of the first query
        first = 0 if spec.sliding_window is None else max(0, place - spec.sliding_window + 1)
        for key_start in range(first, num_past + end, tile_keys):
            seen = slice(key_start, min(key_start + tile_keys, num_past + end))
            scores = torch.bmm(queries, keys[:, seen].mT)  # [Hkv, G·b, c]
            _shape_scores(scores.view(Hkv, G, end - start, -1), place, key_start, spec, slopes)
            total.add(scores, values[:, seen])
        found, log_sum = total.result()  # [Hkv, G·b, D], [Hkv, G·b]
        o[start:end].view(-1, Hkv, G, o.shape[-1]).copy_(
            found.view(Hkv, G, end - start, -1).permute(2, 0, 1, 3)
        )
        if lse is not None:
            lse[start:end].view(-1, Hkv, G).copy_(log_sum.view(Hkv, G, -1).permute(2, 0, 1))


def _shape_scores(
    scores: Tensor, start: int, key_start: int, spec: AttentionSpec, slopes: Tensor | None
) -> None:
    """Soft-cap, ALiBi and mask of one tile, in place. scores [Hkv, G, b, c];
    its corner is (start, key_start)."""
    num_queries, num_keys = scores.shape[-2:]
    if spec.logit_softcap is not None:
        scores.div_(spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
    is_causal_edge = key_start + num_keys - 1 > start
    window = spec.sliding_window
    is_window_edge = window is not None and key_start <= start + num_queries - 1 - window
    if not (is_causal_edge or is_window_edge or slopes is not None):
        return
    places = torch.arange(key_start, key_start + num_keys, device=scores.device)
    # [b, c] key - query.
    ahead = places - torch.arange(start, start + num_queries, device=scores.device)[:, None]
    if slopes is not None:
        scores.addcmul_(slopes, ahead.float())
    if is_causal_edge:
        scores.masked_fill_(ahead > 0, -math.inf)
    if window is not None and is_window_edge:
        scores.masked_fill_(ahead <= -window, -math.inf)


class _RunningSoftmax:
    """softmax(scores) · values over keys that come tile by tile, all float32."""

    def __init__(self, queries: Tensor) -> None:
        self._greatest = queries.new_full((*queries.shape[:-1], 1), -math.inf)  # [Hkv, G·b, 1]
        self._mass = torch.zeros_like(self._greatest)
        self._weighted = torch.zeros_like(queries)  # [Hkv, G·b, D]

    def add(self, scores: Tensor, values: Tensor) -> None:
        """scores [Hkv, G·b, c], overwritten; values [Hkv, c, D]. Every query
        sees a key of the first tile."""
        greatest = torch.maximum(self._greatest, scores.amax(dim=-1, keepdim=True))
        rescale = (self._greatest - greatest).exp_()
        weights = scores.sub_(greatest).exp_()
        self._mass.mul_(rescale).add_(weights.sum(dim=-1, keepdim=True))
        self._weighted.mul_(rescale).baddbmm_(weights, values)
        self._greatest = greatest

    def result(self) -> tuple[Tensor, Tensor]:
        """o [Hkv, G·b, D] and lse [Hkv, G·b]. Every query has seen itself at least."""
        return self._weighted / self._mass, (self._greatest + self._mass.log())[..., 0]

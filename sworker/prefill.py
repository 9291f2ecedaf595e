"""A prompt chunk's attention on the S-worker: the new tokens of one or several
sequences, causal among themselves.

What the tokens see of an earlier chunk, the R-worker that holds it attends to;
``merge_attention`` puts the two together by their log-sum-exp. Attention knows
tokens by their distance only (window, ALiBi), so a chunk's place in its
sequence doesn't matter here. Every sequence is computed alone: its result
doesn't depend on the others.

Two ways, by what the layer needs:

* **fused**: torch's own kernels, for plain causal attention; on CUDA all
  sequences in one call, on a CPU one after another, since laying them side by
  side costs more than the calls;
* **tiled**: tiles of queries × keys with a running softmax (Milakov &
  Gimelshein, "Online normalizer calculation for softmax", 2018), for soft-caps,
  ALiBi, windows shorter than the chunk, and devices whose kernels don't give
  the log-sum-exp. A tile's scores take ``MAX_TILE_BYTES`` at most, however long
  the chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec
from sworker.dtypes import torch_dtype

MAX_TILE_BYTES = 64 << 20
"""Of float32 scores, over all heads."""
MAX_CPU_TILE_BYTES, MAX_CPU_TILE_QUERIES = 4 << 20, 64
"""On a CPU small tiles are as fast or faster: they stay in its caches, and less
of a tile lies beyond the diagonal."""


def as_cached(x: Tensor, dtype: DType) -> Tensor:
    """K or V as a KV cache of ``dtype`` will give them back.

    Args:
        x: [T, Hkv, D].

    Returns:
        [T, Hkv, D] in x's dtype. int8 and int4 round to whole multiples of a
        float32 scale, one for each token and head: the largest magnitude is 127
        of them, or 7.
    """
    if dtype.is_float:
        return x.to(torch_dtype(dtype)).to(x.dtype)
    most = 127.0 if dtype is DType.INT8 else 7.0
    values = x.float()
    scales = values.abs().amax(-1, keepdim=True) / most  # [T, Hkv, 1]
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return ((values * inverse).round_().clamp_(-most, most) * scales).to(x.dtype)


def local_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Sequence[int], spec: AttentionSpec, *, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention of new tokens to the new tokens of their own sequence, up to
    their own position.

    Args:
        q: [T, Hq, D], the rows of all sequences, one sequence after the other.
        k, v: [T, Hkv, D], in q's dtype.
        starts: the first row of each sequence, ascending from 0; T may stand at
            the end.
        spec: the layer's attention.
        want_lse: whether the log-sum-exp of the scores is wanted, to merge with
            a past.

    Returns:
        o [T, Hq, D] in q's dtype, and the natural log-sum-exp, float32 [T, Hq],
        or None. Scores, softmax and sums are float32 (on CUDA, the fused kernel
        rounds softmax weights to q's dtype for its second product).
    """
    num_tokens = q.shape[0]
    assert q.shape == (num_tokens, spec.num_q_heads, spec.head_dim)
    assert k.shape == v.shape == (num_tokens, spec.num_kv_heads, spec.head_dim)
    bounds = [*starts, num_tokens]
    assert bounds[0] == 0 and all(a <= b for a, b in itertools.pairwise(bounds))
    o = torch.empty((num_tokens, spec.num_q_heads, spec.head_dim), dtype=q.dtype, device=q.device)
    lse = (
        torch.empty((num_tokens, spec.num_q_heads), dtype=torch.float32, device=q.device)
        if want_lse
        else None
    )
    lengths = [end - start for start, end in itertools.pairwise(bounds) if start < end]
    if (
        len(lengths) > 1
        and can_take_together(q, lengths, spec)
        and _fused_together(q, k, v, lengths, spec, o, lse)
    ):
        return o, lse
    for start, end in itertools.pairwise(bounds):
        if start < end:
            rows = slice(start, end)
            one_lse = None if lse is None else lse[rows]
            _attend_sequence(q[rows], k[rows], v[rows], spec, o[rows], one_lse)
    return o, lse


def chunk_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """The last n tokens of one sequence attend to all of it, up to their own
    position.

    Args:
        q: [n, Hq, D].
        k, v: [L, Hkv, D], L >= n, in q's dtype.

    Returns:
        o [n, Hq, D] in q's dtype; accuracy as in ``local_causal_attention``.
    """
    num_past = k.shape[0] - q.shape[0]
    assert num_past >= 0
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_past == 0:
        _attend_sequence(q, k, v, spec, o, None)
    elif not _is_plain(spec, k.shape[0]) or not _fused_chunk(q, k, v, spec, num_past, o):
        _tiled(q, k, v, spec, o, None)
    return o


def chunks_together(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_new: Sequence[int],
    num_keys: Sequence[int],
    spec: AttentionSpec,
) -> Tensor:
    """``chunk_attention`` of several sequences in one call. Only if
    ``can_take_together``.

    Args:
        q: [sum(num_new), Hq, D], the rows of all sequences, one sequence after
            the other.
        k, v: [sum(num_keys), Hkv, D], likewise; num_keys[i] >= num_new[i].
    """
    # The kernel's causal mask is aligned with the last query and the last key.
    return _ragged_kernel(q, k, v, num_new, num_keys, spec)[0]


def can_take_together(q: Tensor, num_keys: Sequence[int], spec: AttentionSpec) -> bool:
    """Whether torch and the device have a kernel for it. q [T, Hq, D]."""
    return _is_plain(spec, max(num_keys)) and _has_ragged_kernel(q)


def merge_attention(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention to two disjoint sets of keys, from the attention to each.

    A side that saw nothing (lse -inf) leaves exactly the other, whatever its
    own o holds; if neither saw anything, o is zero and lse -inf.

    Args:
        o_a, o_b: [T, Hq, D].
        lse_a, lse_b: float32 [T, Hq], natural log.

    Returns:
        o [T, Hq, D] in o_a's dtype, merged in float32, and lse float32 [T, Hq].
    """
    none_a, none_b = lse_a == -math.inf, lse_b == -math.inf  # [T, Hq]
    greatest = torch.maximum(lse_a, lse_b)
    greatest = greatest.masked_fill(none_a & none_b, 0.0)
    weight_a, weight_b = (lse_a - greatest).exp(), (lse_b - greatest).exp()
    total = weight_a + weight_b  # 0 where neither side saw anything, else 1 to 2
    share_a = (weight_a / total)[..., None]  # [T, Hq, 1]
    share_b = (weight_b / total)[..., None]
    # Not a product with 0: what a side that saw nothing holds may be NaN.
    part_a = (o_a.float() * share_a).masked_fill(none_a[..., None], 0.0)
    part_b = (o_b.float() * share_b).masked_fill(none_b[..., None], 0.0)
    return (part_a + part_b).to(o_a.dtype), greatest + total.log()


def _attend_sequence(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, o: Tensor, lse: Tensor | None
) -> None:
    """One sequence: q [n, Hq, D], k and v [n, Hkv, D] → written to o [n, Hq, D] and lse [n, Hq]."""
    if _is_plain(spec, q.shape[0]) and _fused(q, k, v, spec, o, lse):
        return
    _tiled(q, k, v, spec, o, lse)


def _is_plain(spec: AttentionSpec, num_tokens: int) -> bool:
    """Whether a sequence of so many tokens is attended without window, ALiBi or soft-cap."""
    sees_all = spec.sliding_window is None or spec.sliding_window >= num_tokens
    return sees_all and spec.alibi_slopes is None and spec.logit_softcap is None


# --- torch's kernels
# ------------------------------------------------------------------------------


def _fused_chunk(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, num_past: int, o: Tensor
) -> bool:
    """Plain attention of a chunk to its past, and causally to itself, merged.
    False if torch has no kernel."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    past_o, past_lse = torch.empty_like(o), torch.empty_like(lse)
    if not _fused(q, k[num_past:], v[num_past:], spec, o, lse):
        return False
    if not _fused(q, k[:num_past], v[:num_past], spec, past_o, past_lse, causal=False):
        return False
    o.copy_(merge_attention(o, lse, past_o, past_lse)[0])
    return True


def _fused_together(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    spec: AttentionSpec,
    o: Tensor,
    lse: Tensor | None,
) -> bool:
    """Plain causal attention of all sequences in one call: FlashAttention's for
    variable lengths, which reads each KV head once for its group (arXiv
    2307.08691). A sequence's result is the one that it has alone. False if
    torch's gives the log-sum-exp in another way."""
    found, log_sum = _ragged_kernel(q, k, v, lengths, lengths, spec)
    if lse is not None:
        if log_sum.shape != lse.shape[::-1]:  # older ones give it padded, by sequence
            return False
        lse.copy_(log_sum.T)
    o.copy_(found)
    return True


def _ragged_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_new: Sequence[int],
    num_keys: Sequence[int],
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """o [T, Hq, D], and the log-sum-exp, [Hq, T] in newer versions of torch."""
    starts, key_starts = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(
            q.device, non_blocking=True
        )
        for lengths in (num_new, num_keys)
    )
    attend = torch.ops.aten._flash_attention_forward
    found, log_sum, *_ = attend(
        q, k, v, starts, key_starts, max(num_new), max(num_keys), 0.0, True, False,
        scale=spec.scale,
    )  # fmt: skip
    return found, log_sum


def _has_ragged_kernel(q: Tensor) -> bool:
    """Whether torch has attention for variable lengths, for such a q [T, Hq, D]."""
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16) or q.numel() == 0:
        return False
    fits = (
        q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )
    return fits and torch.backends.cuda.is_flash_attention_available()


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    o: Tensor,
    lse: Tensor | None,
    *,
    causal: bool = True,
) -> bool:
    """Plain attention, causal or to all keys, by a kernel that never holds all
    scores. False if torch has none that fits."""
    num_tokens, Hkv, G = q.shape[0], spec.num_kv_heads, spec.group_size
    if q.device.type == "cpu":
        # The 16-bit kernels round the softmax weights, and without AMX are no
        # faster (bfloat16) or slower (float16).
        q, k, v = q.float(), k.float(), v.float()
    # KV heads as the batch and groups as the heads: GQA without copies, by
    # strides, whatever the kernel knows of it.
    queries = q.reshape(num_tokens, Hkv, G, -1).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    # [Hkv, G, n, D]
    keys, values = (x.transpose(0, 1)[:, None].expand(-1, G, -1, -1) for x in (k, v))
    if lse is None:
        if not _has_kernel(queries, keys, values):
            return False
        found = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=causal, scale=spec.scale
        )
    else:
        both = _fused_with_lse(queries, keys, values, spec.scale, causal)
        if both is None:
            return False
        found, log_sum = both  # [Hkv, G, n, D], [Hkv, G, n]
        lse.view(num_tokens, Hkv, G).copy_(log_sum[..., :num_tokens].permute(2, 0, 1))
    o.view(num_tokens, Hkv, G, -1).copy_(found.permute(2, 0, 1, 3))
    return True


def _fused_with_lse(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor] | None:
    """The kernels under ``scaled_dot_product_attention`` that also give the
    log-sum-exp, where there is one."""
    aten = torch.ops.aten
    if queries.device.type == "cpu" and hasattr(
        aten, "_scaled_dot_product_flash_attention_for_cpu"
    ):
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, causal, scale=scale
        )
        return o, lse
    if (
        queries.device.type == "cuda"
        and queries.shape[-1] % 8 == 0
        and _has_flash(queries, keys, values)
    ):
        o, lse, *_ = aten._scaled_dot_product_flash_attention(
            queries, keys, values, 0.0, causal, scale=scale
        )
        return o, lse
    return None


def _has_kernel(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether torch won't fall back on materialising all scores."""
    if queries.device.type != "cuda":
        return queries.device.type == "cpu"
    backends = torch.backends.cuda
    asked = backends.SDPAParams(queries, keys, values, None, 0.0, True, False)
    return backends.can_use_flash_attention(asked) or backends.can_use_efficient_attention(asked)


def _has_flash(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    backends = torch.backends.cuda
    return backends.can_use_flash_attention(
        backends.SDPAParams(queries, keys, values, None, 0.0, True, False)
    )


# --- tiles
# ------------------------------------------------------------------------------


def tile_shape(
    num_q_heads: int, num_tokens: int, *, on_cpu: bool, num_keys: int | None = None
) -> tuple[int, int]:
    """Queries and keys of a tile: its num_q_heads · queries · keys scores take
    at most ``MAX_TILE_BYTES``, whatever the length of the sequence. No fewer
    keys than queries, so that every query of a block sees a key in its first
    tile: the window of its last query begins less than ``queries`` after that
    of its first."""
    # queries · keys
    most = max(1, (MAX_CPU_TILE_BYTES if on_cpu else MAX_TILE_BYTES) // (4 * num_q_heads))
    num_queries = min(num_tokens, MAX_CPU_TILE_QUERIES if on_cpu else num_tokens, math.isqrt(most))
    return num_queries, min(num_keys or num_tokens, most // num_queries)


def _tiled(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, o: Tensor, lse: Tensor | None
) -> None:
    """The queries are the last of the keys' tokens: q [n, Hq, D], k and v [L, Hkv, D]."""
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
        slopes = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=q.device).view(
            Hkv, G, 1, 1
        )
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

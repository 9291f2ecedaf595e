"""A prompt chunk's attention on the S-worker: the new tokens of one or several
sequences, causal among themselves.

What the tokens see of an earlier chunk, the R-worker that holds it attends to;
``merge_attention`` puts the two together by their log-sum-exp. Attention knows
tokens by their distance only (window, ALiBi), so a chunk's place in its
sequence doesn't matter here. Every sequence is computed alone: its result
doesn't depend on the others.

Two ways, by what the layer needs:

* **fused**: torch's own kernels, for plain causal attention. On CUDA
  FlashAttention's for variable lengths, all sequences in one call, or one: it
  needs no plan. (``scaled_dot_product_attention`` may choose cuDNN's, which
  makes one for every new length, in tens of milliseconds, or, in float32, one
  that has been wrong for long sequences.) On a CPU one sequence after another,
  since laying them side by side costs more than the calls;
* **tiled** (``sworker.kernels.tiled``): for soft-caps, ALiBi, windows shorter than the
  chunk, and devices and dtypes without such a kernel.
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
from sworker.dtypes import quantize, torch_dtype
from sworker.kernels.tiled import tiled


def as_cached(x: Tensor, dtype: DType) -> Tensor:
    """K or V as a KV cache of ``dtype`` will give them back.

    Args:
        x: [T, Hkv, D].

    Returns:
        [T, Hkv, D] in x's dtype. int8 and int4 round to whole multiples of a float32 scale, one
        for each token and head: the largest magnitude is 127 of them, or 7.
    """
    if dtype.is_float:
        return x.to(torch_dtype(dtype)).to(x.dtype)
    whole, scales = quantize(x, dtype)
    return (whole * scales[..., None]).to(x.dtype)


def local_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Sequence[int], spec: AttentionSpec, *, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Attention of new tokens to the new tokens of their own sequence, up to their own position.

    Args:
        q: [T, Hq, D], the rows of all sequences, one sequence after the other.
        k, v: [T, Hkv, D], in q's dtype.
        starts: the first row of each sequence, ascending from 0; T may stand at the end.
        want_lse: whether the log-sum-exp of the scores is wanted, to merge with a past.

    Returns:
        o [T, Hq, D] in q's dtype, and the natural log-sum-exp, float32 [T, Hq], or None. Scores,
        softmax and sums are float32 (on CUDA, the fused kernel rounds softmax weights to q's
        dtype for its second product).
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
        lengths
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


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, lse: Tensor | None = None
) -> Tensor:
    """The last n tokens of one sequence attend to all of it, up to their own position.

    Args:
        q: [n, Hq, D].
        k, v: [L, Hkv, D], L >= n, in q's dtype.
        lse: Is written with the natural log-sum-exp, float32 [n, Hq]. None if it isn't wanted.

    Returns:
        o [n, Hq, D] in q's dtype; accuracy as in ``local_causal_attention``.
    """
    num_past = k.shape[0] - q.shape[0]
    assert num_past >= 0
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_past == 0:
        _attend_sequence(q, k, v, spec, o, lse)
    elif lse is None and can_take_together(q, (k.shape[0],), spec):
        return chunks_together(q, k, v, (q.shape[0],), (k.shape[0],), spec)
    elif not _is_plain(spec, k.shape[0]) or not _fused_chunk(q, k, v, spec, num_past, o, lse):
        tiled(q, k, v, spec, o, lse)
    return o


def chunks_together(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_new: Sequence[int],
    num_keys: Sequence[int],
    spec: AttentionSpec,
) -> Tensor:
    """``chunk_attention`` of several sequences in one call. Only if ``can_take_together``.

    Args:
        q: [sum(num_new), Hq, D], the rows of all sequences, one sequence after the other.
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


def add_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let sinks take their part of o, in place.

    A sink is a head's learned score that takes part in the softmax and has no value (gpt-oss;
    arXiv 2309.17453). It enters once, after the last merge.

    Args:
        o: attention without sinks, [T, Hq, D].
        lse: of the scores, natural log, float32 [T, Hq]; inf for rows that had their sinks.
        sinks: float32 [Hq].
    """
    o.copy_(o.float() * torch.sigmoid(lse - sinks)[..., None])


def _attend_sequence(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, o: Tensor, lse: Tensor | None
) -> None:
    """One sequence: q [n, Hq, D], k and v [n, Hkv, D] → written to o [n, Hq, D] and lse [n, Hq]."""
    if _is_plain(spec, q.shape[0]) and _fused(q, k, v, spec, o, lse):
        return
    tiled(q, k, v, spec, o, lse)


def _is_plain(spec: AttentionSpec, num_tokens: int) -> bool:
    """Whether a sequence of so many tokens is attended without window, ALiBi or soft-cap."""
    sees_all = spec.sliding_window is None or spec.sliding_window >= num_tokens
    return sees_all and spec.alibi_slopes is None and spec.logit_softcap is None


# --- torch's kernels
# ------------------------------------------------------------------------------


def _fused_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    num_past: int,
    o: Tensor,
    all_lse: Tensor | None,
) -> bool:
    """Plain attention of a chunk to its past, and causally to itself, merged.
    False if torch has no kernel."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    past_o, past_lse = torch.empty_like(o), torch.empty_like(lse)
    if not _fused(q, k[num_past:], v[num_past:], spec, o, lse):
        return False
    if not _fused(q, k[:num_past], v[:num_past], spec, past_o, past_lse, causal=False):
        return False
    merged, merged_lse = merge_attention(o, lse, past_o, past_lse)
    o.copy_(merged)
    if all_lse is not None:
        all_lse.copy_(merged_lse)
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
    """Plain causal attention of all sequences in one call: FlashAttention's for variable lengths,
    which reads each KV head once for its group (arXiv 2307.08691). A sequence's result is the one
    that it has alone. False if torch's gives the log-sum-exp in another way."""
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
    """Plain attention on a CPU, causal or to all keys, by a kernel that never holds all scores.
    False elsewhere, or if torch's doesn't give a log-sum-exp that is wanted."""
    with_lse = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if q.device.type != "cpu" or (lse is not None and with_lse is None):
        return False
    num_tokens, Hkv, G = q.shape[0], spec.num_kv_heads, spec.group_size
    # The 16-bit kernels round the softmax weights, and without AMX are no
    # faster (bfloat16) or slower (float16).
    q, k, v = q.float(), k.float(), v.float()
    # KV heads as the batch and groups as the heads: GQA without copies, by
    # strides, whatever the kernel knows of it.
    queries = q.reshape(num_tokens, Hkv, G, -1).permute(1, 2, 0, 3)  # [Hkv, G, n, D]
    # [Hkv, G, n, D]
    keys, values = (x.transpose(0, 1)[:, None].expand(-1, G, -1, -1) for x in (k, v))
    if lse is None:
        found = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=causal, scale=spec.scale
        )
    else:
        assert with_lse is not None
        found, log_sum = with_lse(queries, keys, values, 0.0, causal, scale=spec.scale)
        lse.view(num_tokens, Hkv, G).copy_(log_sum[..., :num_tokens].permute(2, 0, 1))
    o.view(num_tokens, Hkv, G, -1).copy_(found.permute(2, 0, 1, 3))
    return True

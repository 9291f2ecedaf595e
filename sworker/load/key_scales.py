"""Scales of keys beside large biases, for KV caches in int8 and int4.

Such a cache has one scale per token and head, so a pair of dims with a large bias (Qwen2, Qwen2.5)
leaves few steps for all others. Rotation turns a pair as a whole: dividing it in k by a power of
two and multiplying it in q leaves every product of q and k as it is, bit for bit."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from fastdecode.core.dtype import DType
from sworker.model.skeleton import Layer, Model

logger = logging.getLogger(__name__)

_DEVIATIONS = 3.0  # standard deviations of a key beside its bias that its scale has room for
_MOST_EXPONENT = 14


def even_out_keys(model: Model, kv_dtype: DType) -> None:
    """Divide the pairs of k whose bias outweighs all else by powers of two, and multiply q's.

    A layer whose weights cannot take that exactly, as in float16, stays as it is. What is lost
    nevertheless is a warning."""
    spec, num_uneven = model.spec, 0
    if not spec.qkv_bias or spec.qk_norm != "none" or spec.qkv_clip is not None:
        return
    for layer, rope in zip(model.layers, spec.ropes, strict=True):
        of_keys = _exponents(layer, rope.num_frequencies if rope else 0, spec.norm_offset)
        of_queries = of_keys.repeat_interleave(spec.num_q_heads // spec.num_kv_heads, 0)
        of_values = torch.zeros_like(of_keys)
        exponents = torch.cat((of_queries, -of_keys, of_values)).flatten()
        assert layer.qkv.bias is not None
        weight = _shifted(layer.qkv.weight, exponents[:, None])
        bias = _shifted(layer.qkv.bias, exponents)
        if weight is not None and bias is not None:
            layer.qkv.weight.copy_(weight)
            layer.qkv.bias.copy_(bias)
        elif kv_dtype is DType.INT8:
            num_uneven += 1
        num_uneven += kv_dtype is DType.INT4 and int(of_keys.max()) > 1
    if num_uneven:
        logger.warning(
            "the keys of %d layers have biases that outweigh all else, and a KV cache in %s holds "
            "them coarsely: text may suffer (in a test, the top token of 17%% of int4's positions "
            "and 66%% of uneven int8's stayed). Use %s",
            num_uneven, kv_dtype, "--kv-dtype int8 or auto" if kv_dtype is DType.INT4
            else "--kv-dtype auto, or --dtype bfloat16",
        )  # fmt: skip


def _shifted(tensor: Tensor, exponents: Tensor) -> Tensor | None:
    """Return the product with powers of two. None if it is not exact in the tensor's dtype."""
    found = torch.ldexp(tensor, exponents).to(tensor.dtype)
    is_exact = torch.equal(torch.ldexp(found, -exponents).to(tensor.dtype), tensor)
    return found if is_exact else None


def _exponents(layer: Layer, num_pairs: int, norm_offset: float) -> Tensor:
    """Return the power of two of each dim of k, int32 [Hkv, D]."""
    _, k_size, _ = layer.qkv.splits
    rows = slice(layer.qkv.splits[0], layer.qkv.splits[0] + k_size)
    assert layer.qkv.bias is not None
    heads = (layer.num_kv_heads, layer.head_dim)
    weight = layer.qkv.weight[rows].double()
    norm = getattr(layer.attn_norm, "weight", None)
    if norm is not None and layer.placement not in ("post", "branch"):
        weight *= norm.double() + norm_offset
    noise = _of_pairs(weight.square().sum(1).view(heads), num_pairs) * _DEVIATIONS**2
    bias = _of_pairs(layer.qkv.bias[rows].double().square().view(heads), num_pairs)
    size = (bias + noise).sqrt()
    ratio = size / size.median(1, keepdim=True).values.clamp(min=1e-30)
    exponents = ratio.clamp(min=1.0).log2().round().clamp(max=_MOST_EXPONENT)
    return torch.where(bias > noise, exponents, 0.0).int()


def _of_pairs(squares: Tensor, num_pairs: int) -> Tensor:
    """Return twice the mean of each pair's two dims; dims that do not turn are alone."""
    first, second, rest = squares.tensor_split((num_pairs, 2 * num_pairs), dim=1)
    both = first + second
    return torch.cat((both, both, 2 * rest), dim=1)

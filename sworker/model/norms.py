"""RMSNorm and LayerNorm over the last dim, computed in float32 whatever the
dtype of the activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdecode.core.model.spec import ModelSpec


class RMSNorm(nn.Module):
    """x / rms(x) · (weight + offset)   (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.size = (size,)
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:  # [..., size] → same
        if not self.offset:
            return F.rms_norm(x, self.size, self.weight, self.eps)
        # The sum of a small weight and 1 doesn't fit 16 bits.
        weight = self.weight.float() + self.offset
        return F.rms_norm(x.float(), self.size, weight, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean(x)) / std(x) · (weight + offset) + bias   (arXiv 1607.06450)."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, size: int, eps: float, affine: bool = True, has_bias: bool = True, offset: float = 0.0
    ) -> None:
        super().__init__()
        self.eps = eps
        self.size = (size,)
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False) if affine else None
        has_bias = affine and has_bias
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:  # [..., size] → same
        if not self.offset or self.weight is None:
            return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)
        # As of RMSNorm: the sum doesn't fit 16 bits.
        weight = self.weight.float() + self.offset
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.size, weight, bias, self.eps).to(x.dtype)


class OwnNorm(nn.Module):
    """LayerNorm of each head, with weights of its own."""

    def __init__(self, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.size = (head_dim,)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:  # [T, H, D] → same
        normed = F.layer_norm(x.float(), self.size, eps=self.eps)
        return (normed * self.weight.float()).to(x.dtype)


class FullNorm(nn.Module):
    """RMSNorm of all heads together."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size = (size,)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:  # [T, H, D] → same
        return F.rms_norm(x.flatten(1), self.size, self.weight, self.eps).view(x.shape)


class LengthNorm(nn.Module):
    """x / rms(x), computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size = (size,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., size] → same
        return F.rms_norm(x.float(), self.size, eps=self.eps).to(x.dtype)


def make_norm(spec: ModelSpec) -> nn.Module:
    """The model's norm over its hidden size."""
    if spec.norm == "rms":
        return RMSNorm(spec.hidden_size, spec.norm_eps, spec.norm_offset)
    return LayerNorm(
        spec.hidden_size, spec.norm_eps, spec.norm_affine, spec.norm_bias, spec.norm_offset
    )


def make_qk_norm(spec: ModelSpec, num_heads: int) -> nn.Module | None:
    """The norm of so many heads of q or k; None: they have none."""
    match spec.qk_norm:
        case "none":
            return None
        case "head" | "turned":
            return RMSNorm(spec.head_dim, spec.norm_eps, spec.norm_offset)
        case "own":
            return OwnNorm(num_heads, spec.head_dim, spec.norm_eps)
        case "full":
            return FullNorm(num_heads * spec.head_dim, spec.norm_eps)
        case "length":
            return LengthNorm(spec.head_dim, spec.norm_eps)

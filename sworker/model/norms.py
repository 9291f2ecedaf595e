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
    """(x - mean(x)) / std(x) · weight + bias   (arXiv 1607.06450)."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, size: int, eps: float, affine: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.size = (size,)
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False) if affine else None
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if affine else None

    def forward(self, x: Tensor) -> Tensor:  # [..., size] → same
        return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)


def make_norm(spec: ModelSpec) -> nn.Module:
    """The model's norm over its hidden size."""
    if spec.norm == "rms":
        return RMSNorm(spec.hidden_size, spec.norm_eps, spec.norm_offset)
    return LayerNorm(spec.hidden_size, spec.norm_eps, spec.norm_affine)

"""Embeddings, linear layers, alone and fused, and the MLPs made of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdecode.core.model.spec import Activation, ModelSpec


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
}


class Embedding(nn.Module):
    """Row lookup. ``nn.Embedding`` would draw random weights first, which
    without storage costs 3 s of imports."""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:  # [T] → [T, size]
        return F.embedding(rows, self.weight)


class Linear(nn.Module):
    """y = x · weightᵀ + bias. ``splits`` are the output sizes of the
    projections that are fused into this one."""

    bias: nn.Parameter | None

    def __init__(self, in_size: int, splits: tuple[int, ...], bias: bool) -> None:
        super().__init__()
        self.splits = splits
        self.weight = nn.Parameter(torch.empty(sum(splits), in_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(sum(splits)), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [T, in_size] → [T, sum(splits)]
        return F.linear(x, self.weight, self.bias)


class MLP(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) · up(x)) with gate and up fused, gate first."""

    gate_kernel: Callable[[Tensor], Tensor] | None = None
    """What a device may have in place of ``_gate``. That itself, kept here,
    would be a cycle: weights would outlive their model until the garbage
    collector comes."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.act = ACTIVATIONS[spec.activation]
        self.gated = spec.gated_mlp
        splits = (spec.intermediate_size,) * (2 if spec.gated_mlp else 1)
        self.up = Linear(spec.hidden_size, splits, spec.mlp_bias)
        self.down = Linear(spec.intermediate_size, (spec.hidden_size,), spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden] → [T, hidden]
        h: Tensor = self.up(x)
        y: Tensor = self.down(self.gate(h) if self.gated else self.act(h))
        return y

    def gate(self, h: Tensor) -> Tensor:
        """h [T, 2 · intermediate] → act(its first half) · its second half [T, intermediate]."""
        return (self.gate_kernel or self._gate)(h)

    def _gate(self, h: Tensor) -> Tensor:  # [T, 2 · intermediate] → [T, intermediate]
        gate, up = h.chunk(2, dim=-1)
        return self.act(gate).mul_(up)

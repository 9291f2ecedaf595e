"""Embeddings, linear layers, alone and fused, and the MLPs made of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdecode.core.model.spec import Activation, ModelSpec

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class XIELU(nn.Module):
    """αp · x² + β · x where x > 0, αn · (eˣ - 1 - x) + β · x elsewhere, α two
    learned numbers (arXiv 2411.13010)."""

    beta = 0.5
    eps = -1e-6

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1), requires_grad=False)
        self.alpha_n = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:  # [...] → same
        alpha_p = F.softplus(self.alpha_p)
        alpha_n = self.beta + F.softplus(self.alpha_n)
        below = torch.expm1(x.clamp(max=self.eps)) - x
        return torch.where(x > 0, alpha_p * x * x, below * alpha_n) + self.beta * x


def make_activation(kind: Activation) -> Callable[[Tensor], Tensor]:
    return XIELU() if kind == "xielu" else ACTIVATIONS[kind]


class Embedding(nn.Module):
    """Row lookup. ``nn.Embedding`` would draw random weights first, which
    without storage costs 3 s of imports."""

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:  # [T] → [T, size]
        return F.embedding(rows, self.weight)

    def project(self, x: Tensor) -> Tensor:
        """Multiply with the table, as a head that is tied to it: [T, size] → [T, num_rows]."""
        return F.linear(x, self.weight)


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
        own: dict[str, Any] = self._parameters  # as attributes they are looked up in three places
        return F.linear(x, own["weight"], own.get("bias"))


class PackedLinear(nn.Module):
    """A ``Linear`` whose weight oneDNN has put in order."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.splits, self.bias = linear.splits, linear.bias
        self._weight: Any = torch.ops.mkldnn._reorder_linear_weight(linear.weight, None)
        # The operator itself: through torch.ops each call would look for its overload.
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise.default._op

    def forward(self, x: Tensor) -> Tensor:  # [T, in_size] → [T, sum(splits)]
        y: Tensor = self._multiply(x, self._weight, self.bias, "none", [], "")
        return y


class AttentionGate(nn.Module):
    """o · act(proj(h)): one number a head, or a dim."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        size = spec.num_q_heads * (spec.head_dim if spec.attn_gate == "dim" else 1)
        self.act = torch.sigmoid if spec.attn_gate_activation == "sigmoid" else F.softplus
        self.proj = Linear(spec.hidden_size, (size,), bias=False)

    def forward(self, h: Tensor, o: Tensor) -> Tensor:
        """h: attention's input [T, hidden]; o [T, Hq, D] → same."""
        gate: Tensor = self.act(self.proj(h).float()).to(o.dtype)
        gated: Tensor = o * gate.unflatten(-1, (o.shape[1], -1))
        return gated


class Sinks(nn.Module):
    """Each query head's score of nothing; see ``sworker.prefill``."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.empty(num_heads), requires_grad=False)


class Gated(nn.Module):
    """What has a projection to gate and up, fused, gate first.

    ``gated``: the gate is act(gate(x)) · up(x)."""

    act: Callable[[Tensor], Tensor]
    gated: bool
    up: Any  # its ``splits`` are gate and up
    limit: float = 0.0  # limit of act(gate(x)) and of up(x), or 0 for none
    gate_kernel: Callable[[Tensor], Tensor] | None = None
    """What a device may have in place of ``_gate``. That itself, kept here, would be a cycle:
    weights would outlive their model until the garbage collector comes."""

    def gate(self, h: Tensor) -> Tensor:
        """h [T, 2 · intermediate] → act(its first half) · its second half [T, intermediate]."""
        return (self.gate_kernel or self._gate)(h)

    def _gate(self, h: Tensor) -> Tensor:  # [T, 2 · intermediate] → [T, intermediate]
        gate, up = h.chunk(2, dim=-1)
        return limited_gate(self.act(gate), up, self.limit)


def limited_gate(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """min(gate, limit) · clamp(up, ±limit), written over the gate, which is
    activated; limit 0: their product."""
    if not limit:
        return gate.mul_(up)
    return gate.clamp_(max=limit).mul_(up.clamp(-limit, limit))


class MLP(Gated):
    """down(act(up(x))), or down(act(gate(x)) · up(x)) with gate and up fused, gate first.

    Args:
        inner: its inner dims; None: the model's ``intermediate_size``.
        limit: of its gate; 0: none.
    """

    def __init__(self, spec: ModelSpec, inner: int | None = None, limit: float = 0.0) -> None:
        super().__init__()
        self.limit = limit
        inner = inner or spec.intermediate_size
        self.act = make_activation(spec.activation)
        self.gated = spec.gated_mlp
        splits = (inner,) * (2 if spec.gated_mlp else 1)
        self.up = Linear(spec.hidden_size, splits, spec.mlp_bias)
        self.down = Linear(inner, (spec.hidden_size,), spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:  # [T, hidden] → [T, hidden]
        h: Tensor = self.up(x)
        y: Tensor = self.down(self.gate(h) if self.gated else self.act(h))
        return y

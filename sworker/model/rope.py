"""The rotary table: cos and sin of every position, computed once, in float32."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastdecode.core.model.rope import RopeSpec


class QueryGrowth(nn.Module):
    """q · (1 + β · ln(1 + ⌊position / n⌋)), by a float32 table [max_len, 1]."""

    table: Tensor

    def __init__(self, beta: float, num: int, max_len: int) -> None:
        super().__init__()
        self.beta, self.num = beta, num
        self.register_buffer("table", torch.empty(max_len, 1), persistent=False)

    def fill(self, device: torch.device) -> None:
        steps = torch.arange(self.table.shape[0]).div(self.num, rounding_mode="floor")
        self.table = (1 + self.beta * torch.log(1 + steps.float()))[:, None].to(device)

    def forward(self, q: Tensor, positions: Tensor) -> Tensor:  # [T, Hq, D], [T] → [T, Hq, D]
        return q * F.embedding(positions, self.table)[:, None].to(q.dtype)


class RotaryTable(nn.Module):
    """Turns the first dims of every head by angles looked up by position.

    The table is float32 [max_len, 2 · num_frequencies]: cos, then sin. It isn't a weight; ``fill``
    makes it on the device where the weights will be."""

    table: Tensor

    def __init__(self, spec: RopeSpec, max_len: int) -> None:
        super().__init__()
        self.spec = spec
        self.max_len = max_len
        self.register_buffer(
            "table", torch.empty(max_len, 2 * spec.num_frequencies), persistent=False
        )

    def fill(self, device: torch.device) -> None:
        positions = torch.arange(self.max_len, dtype=torch.float32)
        # [max_len, num_frequencies]
        angles = positions[:, None] * frequencies(self.spec, positions)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * self.spec.attention_factor
        self.table = table.to(device)

    def forward(
        self, x: Tensor, positions: Tensor
    ) -> Tensor:  # x [T, H, D], positions [T] → [T, H, D]
        n = self.spec.num_frequencies
        cos, sin = F.embedding(positions, self.table)[:, None].chunk(2, dim=-1)  # [T, 1, n] each
        wide = x.float()  # only the sums of the products are rounded
        a, b, rest = wide.tensor_split((n, 2 * n), dim=-1)
        turned = torch.empty_like(wide)
        turned_a, turned_b, turned_rest = turned.tensor_split((n, 2 * n), dim=-1)
        torch.mul(a, cos, out=turned_a).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=turned_b).addcmul_(a, sin)
        if rest.shape[-1]:
            turned_rest.copy_(rest)
        return turned.to(x.dtype)


def frequencies(spec: RopeSpec, positions: Tensor) -> Tensor:
    """Radians a token, float32 [num_frequencies]; of dynamic scaling,
    [len(positions), num_frequencies]."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim
    match spec.kind:
        case "default":
            return 1.0 / spec.theta**exponents
        case "linear":
            return 1.0 / spec.theta**exponents / spec.factor
        case "dynamic":
            return _dynamic(spec, exponents, positions)
        case "llama3":
            return _llama3(spec, 1.0 / spec.theta**exponents)
        case "yarn":
            return _yarn(spec, spec.theta**exponents)
        case "longrope":
            return 1.0 / (torch.tensor(spec.frequency_factors) * spec.theta**exponents)


def _dynamic(spec: RopeSpec, exponents: Tensor, positions: Tensor) -> Tensor:
    """NTK-aware scaling of the base, by the length that each position alone
    implies (see ``RopeSpec``)."""
    lengths = (positions.double() + 1).clamp(min=spec.original_max_len)  # [P]
    stretch = spec.factor * lengths / spec.original_max_len - (spec.factor - 1)
    bases = spec.theta * stretch ** (spec.dim / (spec.dim - 2))
    return 1.0 / bases.float()[:, None] ** exponents


def _llama3(spec: RopeSpec, inverse: Tensor) -> Tensor:
    """Llama 3.1: long waves are stretched by the factor, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / inverse
    turns = spec.original_max_len / wavelengths
    blend = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blend = blend.clamp(0, 1)  # 0: stretched, 1: kept
    return (1 - blend) * inverse / spec.factor + blend * inverse


def _yarn(spec: RopeSpec, base_periods: Tensor) -> Tensor:
    """arXiv 2309.00071, section 3.2 ("NTK-by-parts")."""

    def dim_with(turns: float) -> float:
        return (
            spec.dim
            * math.log(spec.original_max_len / (turns * 2 * math.pi))
            / (2 * math.log(spec.theta))
        )

    low, high = dim_with(spec.beta_fast), dim_with(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(spec.num_frequencies, dtype=torch.float32) - low) / (high - low)).clamp(
        0, 1
    )
    return ramp / (spec.factor * base_periods) + (1 - ramp) / base_periods

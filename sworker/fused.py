"""Fused kernels, put on a model from outside: the modules that they replace stay as they are for every other device."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sworker.model.linear import ACTIVATIONS, MLP
from sworker.model.norms import RMSNorm
from sworker.model.rope import RotaryTable
from sworker.model.skeleton import AddNorm, Layer, Model

logger = logging.getLogger(__name__)

_GATES = {ACTIVATIONS["silu"]: True, ACTIVATIONS["gelu_tanh"]: False}
"""Activations that the kernel knows: whether it is SiLU."""
_ROWS = 3
_MAX_NORM_SIZE = 1 << 15
"""Of a row that one program holds."""


class FusedRotary(nn.Module):
    """``RotaryTable`` in one kernel."""

    def __init__(self, table: RotaryTable) -> None:
        super().__init__()
        self.unfused = table

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # x [T, H, D], positions [T] → [T, H, D]
        from sworker.fused_triton import rotate

        return rotate(x, positions, self.unfused.table) if x.shape[0] else x


class FusedRMSNorm(nn.Module):
    """``RMSNorm`` in one kernel."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.unfused = norm

    def forward(self, x: Tensor) -> Tensor:  # [T, size] or [T, H, size] → same
        from sworker.fused_triton import norm

        return norm(x, self.unfused.weight, self.unfused.eps, self.unfused.offset) if x.shape[0] else x


def fuse(model: Model, device: torch.device) -> bool:
    """Exchange what Triton has kernels for, on CUDA. Returns whether it did: not without Triton, nor if a kernel fails
    on this device, or differs from torch's result by more than rounding."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    try:
        return fuse_checked(model)
    except Exception as error:  # Triton's compiler, its driver and the kernels raise whatever they like
        logger.warning("Triton's kernels can't be used on %s, torch's are: %s", device, str(error).splitlines()[:1])
        return False


@torch.inference_mode()
def fuse_checked(model: Model) -> bool:
    """``fuse`` wherever Triton runs; raises whatever the kernels raise. All parts are exchanged, or none.

    Layers are alike: what the first one's parts say speaks for the others'.
    """
    fused: dict[nn.Module, nn.Module] = {}  # by what it replaces; layers share a rotary table
    for module in model.modules():
        if isinstance(module, RotaryTable):
            fused[module] = FusedRotary(module)
        elif isinstance(module, RMSNorm) and module.size[0] <= _MAX_NORM_SIZE:
            fused[module] = FusedRMSNorm(module)
    if not _same_parts(model.layers[0], fused):
        logger.warning("Triton's kernels differ from torch's here: torch's are used")
        return False
    num_gates = 0
    for layer in model.layers:
        if _norms_a_sum(layer, fused):
            layer.add_norm_kernel = _add_norm_of(layer.mlp_norm)
        if layer.mlp.gated and layer.mlp.act in _GATES:
            layer.mlp.gate_kernel = _gate_of(layer.mlp)
            num_gates += 1
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in fused and not isinstance(parent, (FusedRotary, FusedRMSNorm)):
                setattr(parent, name, fused[child])
    return bool(fused) or num_gates > 0


def _norms_a_sum(layer: Layer, fused: dict[nn.Module, nn.Module]) -> bool:
    return layer.mlp_norm in fused and layer.placement == "pre" and not layer.parallel


def _add_norm_of(rms_norm: nn.Module) -> AddNorm:
    assert isinstance(rms_norm, RMSNorm)

    def add_normed(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        from sworker.fused_triton import add_norm

        return add_norm(x, a, rms_norm.weight, rms_norm.eps, rms_norm.offset) if x.shape[0] else (x, x)

    return add_normed


def _gate_of(mlp: MLP) -> Callable[[Tensor], Tensor]:
    is_silu = _GATES[mlp.act]

    def gated(h: Tensor) -> Tensor:  # [T, 2 · intermediate] → [T, intermediate]
        from sworker.fused_triton import gate

        return gate(h, is_silu=is_silu) if h.shape[0] else h[:, : h.shape[1] // 2]

    return gated


def _same_parts(layer: Layer, fused: dict[nn.Module, nn.Module]) -> bool:
    """Whether the kernels say what torch says of a layer's parts."""
    weight = layer.qkv.weight

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, device=weight.device).to(weight.dtype)

    x, a = some(_ROWS, weight.shape[1]), some(_ROWS, weight.shape[1])
    heads = some(_ROWS, 5, layer.head_dim)[:, :3]  # of a fused projection
    pairs: list[tuple[Tensor, Tensor]] = []
    if layer.rope in fused:
        positions = torch.arange(_ROWS, device=weight.device)
        pairs.append((fused[layer.rope](heads, positions), layer.rope(heads, positions)))
    for norm, rows in ((layer.attn_norm, x), (layer.q_norm, heads)):
        if norm in fused:
            pairs.append((fused[norm](rows), norm(rows)))
    if _norms_a_sum(layer, fused):
        pairs += zip(_add_norm_of(layer.mlp_norm)(x, a), layer.add_norm(x, a), strict=True)
    if layer.mlp.gated and layer.mlp.act in _GATES:
        h = some(_ROWS, layer.mlp.up.weight.shape[0])
        pairs.append((_gate_of(layer.mlp)(h), layer.mlp.gate(h)))
    return all(_close(found, expected) for found, expected in pairs)


def _close(found: Tensor, expected: Tensor) -> bool:
    # A GPU's exponentials, roots and quotients are a few steps off, which 16-bit dtypes don't see.
    steps = (32 if expected.dtype == torch.float32 else 4) * torch.finfo(expected.dtype).eps
    return torch.allclose(found.float(), expected.float(), rtol=steps, atol=steps)

"""Fused kernels, put on a model from outside: the modules that they replace stay as they are for every other device."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sworker.model.linear import ACTIVATIONS
from sworker.model.rope import RotaryTable
from sworker.model.skeleton import Model

logger = logging.getLogger(__name__)

_GATES = {ACTIVATIONS["silu"]: True, ACTIVATIONS["gelu_tanh"]: False}
"""Activations that the kernel knows: whether it is SiLU."""
_ROWS = 3


class FusedRotary(nn.Module):
    """``RotaryTable`` in one kernel."""

    def __init__(self, table: RotaryTable) -> None:
        super().__init__()
        self.unfused = table

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # x [T, H, D], positions [T] → [T, H, D]
        from sworker.fused_triton import rotate

        if not x.shape[0]:
            return x
        return rotate(x, positions, self.unfused.table)


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
    """``fuse`` wherever Triton runs; raises whatever the kernels raise."""
    rotaries: dict[int, FusedRotary] = {}
    changes: list[Callable[[], None]] = []
    for layer in model.layers:
        table, mlp = layer.rope, layer.mlp
        if isinstance(table, RotaryTable):
            if id(table) not in rotaries:
                rotaries[id(table)] = FusedRotary(table)
                if not _same_rotary(rotaries[id(table)], layer.head_dim, mlp.up.weight):
                    return False
            changes.append(functools.partial(setattr, layer, "rope", rotaries[id(table)]))
        if mlp.gated and mlp.act in _GATES:
            gate = _gate_of(_GATES[mlp.act])
            if layer is model.layers[0] and not _same_gate(gate, mlp.act, mlp.up.weight):
                return False
            changes.append(functools.partial(setattr, mlp, "gate", gate))
    for change in changes:
        change()
    return bool(changes)


def _gate_of(is_silu: bool) -> Callable[[Tensor], Tensor]:
    def gated(h: Tensor) -> Tensor:  # [T, 2 · intermediate] → [T, intermediate]
        from sworker.fused_triton import gate

        return gate(h, is_silu=is_silu) if h.shape[0] else h[:, : h.shape[1] // 2]

    return gated


def _same_rotary(fused: FusedRotary, head_dim: int, like: Tensor) -> bool:
    wide = torch.randn(_ROWS, 5, head_dim, device=like.device).to(like.dtype)
    x = wide[:, :3]  # as heads of a fused projection
    positions = torch.arange(_ROWS, device=like.device)
    return _close(fused(x, positions), fused.unfused(x, positions))


def _same_gate(fused: Callable[[Tensor], Tensor], act: Callable[[Tensor], Tensor], like: Tensor) -> bool:
    h = torch.randn(_ROWS, like.shape[0], device=like.device).to(like.dtype)
    gate, up = h.chunk(2, dim=-1)
    return _close(fused(h), act(gate) * up)


def _close(found: Tensor, expected: Tensor) -> bool:
    steps = 4 * torch.finfo(expected.dtype).eps
    return torch.allclose(found.float(), expected.float(), rtol=steps, atol=steps)

"""Weights in the order in which a CPU's matrix kernels read them.

oneDNN's kernels read weights in tiles. Given rows, they put them in order at
every call, which for a small batch takes as long as the product; in float32,
torch doesn't even call them. So on a CPU every weight is put in order once, and
kept so instead of as rows.

In float32, products of packed weights were not seen to depend on how many rows
are multiplied at once, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sworker.model.linear import Linear
from sworker.model.skeleton import Model


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


def pack(model: Model) -> None:
    """Exchange a model's linear layers, each as it is packed, so that at most
    one is there twice. Those that other ranks have parts of, and dtypes that
    this CPU has no kernels for, stay as they are."""
    with torch.inference_mode():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is Linear and can_pack(child.weight):
                    setattr(parent, name, PackedLinear(child))


def can_pack(weight: Tensor) -> bool:
    """Return True if oneDNN multiplies the weight's dtype on this CPU."""
    mkldnn = torch.ops.mkldnn
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(mkldnn, "_linear_pointwise") or not hasattr(mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.float16:
        return bool(mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32 or bool(mkldnn._is_mkldnn_bf16_supported())

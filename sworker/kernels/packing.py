"""Weights in the order in which a CPU's matrix kernels read them.

oneDNN's kernels read weights in tiles. Given rows, they put them in order at every call, which for
a small batch takes as long as the product; in float32, torch doesn't even call them. So on a CPU
every weight is put in order once, and kept so instead of as rows.

In float32, products of packed weights were not seen to depend on how many rows are multiplied at
once, to the bit."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from cpu_kernels.isa import default_level, host_levels
from sworker.model.linear import Embedding, Linear, PackedLinear
from sworker.model.moe import ExpertLinear
from sworker.model.skeleton import Model

_AVX512_LANES: Final = 16


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which a device computes with weights of ``dtype``: on a CPU without
    products of 16 bits float32, otherwise theirs."""
    return dtype if device.type != "cpu" or _has_products(dtype) else torch.float32


def stays_narrow(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if weights of ``dtype`` keep it in memory."""
    if activation_dtype(dtype, device) == dtype:
        return True
    from sworker.kernels import narrow  # compiles loops

    return narrow.is_possible()


@torch.inference_mode()
def widen(model: Model) -> None:
    """Make a model on a CPU compute in its ``activation_dtype``. Its matrices stay as they are
    where ``pack`` has products for them, and are widened elsewhere."""
    device = torch.device("cpu")
    dtype = activation_dtype(model.dtype, device)
    if dtype == model.dtype:
        return
    matrices = (Embedding, ExpertLinear, Linear) if stays_narrow(model.dtype, device) else ()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias" or not isinstance(module, matrices):
                setattr(module, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
    model.dtype = dtype


@torch.inference_mode()
def pack(model: Model) -> None:
    """Exchange a model's matrices, each as it is packed, so that at most one is there twice:
    float32 and what this CPU has products of for oneDNN, others to be widened as they are read.
    An embedding is packed where it is the head, too."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (Embedding, ExpertLinear, Linear):
                setattr(parent, name, _packed(child, model))


def _packed(module: Any, model: Model) -> nn.Module:
    """Return what has the module's place, or itself."""
    if module.weight.dtype == model.dtype:
        return (
            PackedLinear(module) if type(module) is Linear and can_pack(module.weight) else module
        )
    from sworker.kernels import narrow

    if isinstance(module, Linear):
        return narrow.NarrowLinear(module)
    if isinstance(module, ExpertLinear):
        return narrow.NarrowExperts(module)
    is_head = model.with_head and model.spec.tied_embeddings
    return narrow.NarrowEmbedding(module) if is_head else module


def can_pack(weight: Tensor) -> bool:
    """Return True if oneDNN multiplies the weight's dtype on this CPU."""
    mkldnn = torch.ops.mkldnn
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(mkldnn, "_linear_pointwise") or not hasattr(mkldnn, "_reorder_linear_weight"):
        return False
    return _has_products(weight.dtype)


def _has_products(dtype: torch.dtype) -> bool:
    """Return True if oneDNN has fast products of ``dtype`` on this CPU. With AVX-512 but without
    ``avx512_bf16`` it computes those of bfloat16 in many instructions."""
    if dtype == torch.float32:
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    has_vectors = any(level.lanes == _AVX512_LANES for level in host_levels())
    if has_vectors and not default_level().has_bf16_dot:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

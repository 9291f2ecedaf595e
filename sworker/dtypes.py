"""Element types in torch's terms."""

from __future__ import annotations

import torch
from torch import Tensor

from fastdecode.core.dtype import DType


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's name for a floating-point type."""
    assert dtype.is_float, dtype
    found: torch.dtype = getattr(torch, dtype.value)
    return found


def quantize(x: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
    """Rows as a KV cache of int8 or int4 holds them.

    Args:
        x: [..., D], of any float dtype.

    Returns:
        Whole numbers within ±127, or ±7, float32 [..., D], and the scale of
        each row, float32 [...]: the largest magnitude is 127 of them, or 7.
    """
    most = 127.0 if dtype is DType.INT8 else 7.0
    values = x.float()
    scales = values.abs().amax(-1) / most
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return (values * inverse[..., None]).round_().clamp_(-most, most), scales

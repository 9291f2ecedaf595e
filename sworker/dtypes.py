"""Element types in torch's terms."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fastdecode.core.dtype import DType

CARRIERS: Final[dict[torch.dtype, np.dtype[Any]]] = {
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.uint16),
    torch.bfloat16: np.dtype(np.uint16),
}
"""The dtype of NumPy arrays that carry tensors of each dtype."""


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


def pack_int4(whole: Tensor) -> Tensor:
    """Whole numbers within ±7, [..., D], two in a byte: uint8 [..., ceil(D / 2)].
    Element i is the lower half of byte i, element i + ceil(D / 2) the upper half."""
    half = -(-whole.shape[-1] // 2)
    biased = (whole + 8).to(torch.uint8)
    low, high = biased[..., :half], biased[..., half:]
    if high.shape[-1] < half:
        high = torch.nn.functional.pad(high, (0, 1))
    return low | high << 4


def unpack_int4(packed: Tensor, size: int) -> Tensor:
    """What ``pack_int4`` has packed, int8 [..., size]."""
    both = torch.cat((packed & 15, packed >> 4), dim=-1)
    return both[..., :size].to(torch.int8) - 8

"""Element types in torch's terms."""

from __future__ import annotations

import torch

from fastdecode.core.dtype import DType


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's name for a floating-point type."""
    assert dtype.is_float, dtype
    found: torch.dtype = getattr(torch, dtype.value)
    return found

"""Memory that a step's tensors lie in, step after step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


class Room:
    """Memory that is lent out, again and again.

    Args:
        make: memory of so many bytes, uint8.
        num_bytes: to begin with.
    """

    def __init__(self, make: Callable[[int], Tensor], num_bytes: int = 0) -> None:
        self._make = make
        self._memory = make(num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
        self._taken: tuple[torch.Size, torch.dtype] | None = None
        self._lent = self._memory

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor; it holds until the next call. Grows by half, so that growing ends."""
        if (shape, dtype) == self._taken:
            return self._lent
        num_bytes = math.prod(shape) * dtype.itemsize
        # An inference tensor may be written by whoever runs in inference mode
        # and by nobody else: make it a plain one.
        with torch.inference_mode(False):
            if num_bytes > self._memory.nbytes:
                self._memory = self._make(max(num_bytes, self._memory.nbytes * 3 // 2))
            self._lent = self._memory[:num_bytes].view(dtype).view(shape)
        self._taken = shape, dtype
        return self._lent

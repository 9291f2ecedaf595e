"""Memory that messages are received into and sent from, used again and again."""

from __future__ import annotations

from sys import getrefcount
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.wire.arrays import ALIGNMENT

_SMALLEST_BYTES: Final = 1 << 12


class BufferPool:
    """Lends buffers. One is free again as soon as nobody refers to it or to any view of it: there is no giving back,
    and so no giving back too early. (NumPy views refer to the array that owns the memory, and CPython counts.)

    Args:
        idle_bytes: free buffers beyond so much memory are let go.
    """

    def __init__(self, idle_bytes: int = 1 << 28) -> None:
        self._idle_bytes = idle_bytes
        self._slabs: dict[int, list[tuple[NDArray[np.uint8], int]]] = {}  # by size: memory, its first aligned byte
        for slab, _ in [(np.empty(0, np.uint8), 0)]:
            self._free_count = getrefcount(slab)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """uint8 [num_bytes], uninitialised, its start a multiple of ``ALIGNMENT``."""
        size = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        slabs = self._slabs.get(size)
        if slabs is None:
            slabs = self._slabs[size] = []
        for slab, start in slabs:
            if getrefcount(slab) == self._free_count:
                return slab[start : start + num_bytes]
        self._let_go(size)
        slab = np.empty(size + ALIGNMENT, np.uint8)
        start = -slab.ctypes.data % ALIGNMENT
        slabs.append((slab, start))
        return slab[start : start + num_bytes]

    @property
    def num_bytes(self) -> int:
        """Memory that the pool holds, lent or free."""
        return sum(slab.nbytes for slabs in self._slabs.values() for slab, _ in slabs)

    def _let_go(self, needed_bytes: int) -> None:
        """Drop free buffers, largest first, until the pool holds at most ``idle_bytes`` with the one to come."""
        surplus = self.num_bytes + needed_bytes - self._idle_bytes
        for size in sorted(self._slabs, reverse=True):
            kept = []
            for slab, start in self._slabs[size]:
                if surplus > 0 and getrefcount(slab) == self._free_count:
                    surplus -= slab.nbytes
                else:
                    kept.append((slab, start))
            self._slabs[size][:] = kept

"""Memory that messages are received into and sent from, used again and again.

It lies in huge pages where the system grants them. An MPI rank that copies a message out of
another's memory has the kernel look up every page of it, which takes longer than the copy.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_SMALLEST_BYTES: Final = 1 << 12
_HUGE_PAGE_BYTES: Final = 2 << 20


class Pages(mmap.mmap):
    """Memory of this process alone, in huge pages where the system grants them."""

    unpin: Callable[[], object] | None = None
    """Called at its end: a device's driver unpins it. None if none has pinned it."""
    address: int = 0  # start of the used part, at a huge page's boundary
    num_bytes: int = 0  # of the used part

    def __del__(self) -> None:
        if self.unpin is not None and not sys.is_finalizing():
            self.unpin()


def map_pages(num_bytes: int) -> memoryview:
    """Return fresh memory that begins at a huge page's boundary, until it is freed."""
    pages = Pages(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # of a kernel that has none
            pages.madvise(mmap.MADV_HUGEPAGE)
    start = np.frombuffer(pages, np.uint8).ctypes.data
    skipped = -start % _HUGE_PAGE_BYTES
    pages.address, pages.num_bytes = start + skipped, num_bytes
    return memoryview(pages)[skipped : skipped + num_bytes]


def pages_of(array: NDArray[Any]) -> Pages | None:
    """Return the mapping that an array lies in. None if it is other memory."""
    owner: Any = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return owner if isinstance(owner, Pages) else None


class BufferPool:
    """Lends buffers. One is free again once no reference to it or to a view of it is left. NumPy
    views refer to the buffer, not to one another, and CPython counts references.

    Args:
        idle_bytes: Free buffers beyond this much memory are dropped.
    """

    def __init__(self, idle_bytes: int = 1 << 28) -> None:
        self._idle_bytes = idle_bytes
        self._slabs: dict[int, list[NDArray[np.uint8]]] = {}  # by size
        self._fresh = memoryview(b"")  # mapped, and not part of any slab yet
        for slab in [np.empty(0, np.uint8)]:
            self._free_count = getrefcount(slab)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """uint8 [num_bytes], uninitialised, its start a multiple of ``ALIGNMENT``."""
        size = max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length())
        slabs = self._slabs.get(size)
        if slabs is None:
            slabs = self._slabs[size] = []
        for slab in slabs:
            if getrefcount(slab) == self._free_count:
                return slab[:num_bytes]
        self._let_go(size)
        slab = self._new_slab(size)
        slabs.append(slab)
        return slab[:num_bytes]

    def release(self) -> None:
        """Drop every buffer. One that is lent stays until its last reference is gone."""
        self._slabs.clear()
        self._fresh = memoryview(b"")

    @property
    def num_bytes(self) -> int:
        """Memory that the pool holds, lent or free."""
        return sum(slab.nbytes for slabs in self._slabs.values() for slab in slabs)

    def _let_go(self, needed_bytes: int) -> None:
        """Drop free buffers, largest first, until the pool holds at most ``idle_bytes`` with the
        next one."""
        surplus = self.num_bytes + needed_bytes - self._idle_bytes
        for size in sorted(self._slabs, reverse=True):
            kept = []
            for slab in self._slabs[size]:
                if surplus > 0 and getrefcount(slab) == self._free_count:
                    surplus -= slab.nbytes
                else:
                    kept.append(slab)
            self._slabs[size][:] = kept

    def _new_slab(self, size: int) -> NDArray[np.uint8]:
        """Return one from memory of its own if it is large. Small ones share a huge page."""
        if size > len(self._fresh):
            self._fresh = map_pages(max(size, _HUGE_PAGE_BYTES))
        # An array over a memoryview: views of it refer to it, and not to what it lies in.
        slab = np.frombuffer(self._fresh[:size], np.uint8)
        self._fresh = self._fresh[size:]
        return slab


def in_one_array(arrays: Sequence[NDArray[Any]], alignment: int) -> NDArray[Any] | None:
    """Return the arrays as uint8 [N], if they lie in one flat array, one behind the other at
    multiples of ``alignment`` from the first."""
    base = arrays[0].base if arrays else None
    if not isinstance(base, np.ndarray) or base.ndim != 1 or not base.flags.c_contiguous:
        return None
    end = at = first = _address(arrays[0])
    for array in arrays:
        is_next = not array.size or _address(array) == at
        if array.base is not base or not array.flags.c_contiguous or not is_next:
            return None
        end = at + array.nbytes
        at = end + (first - end) % alignment
    start = first - _address(base)
    found: NDArray[Any] = base.view(np.uint8)[start : start + end - first]
    return found if len(found) == end - first else None


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address

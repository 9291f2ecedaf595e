"""Cached KV blocks in a file of slots, read and written past the page cache.

Nothing is ever mapped: a file that shrinks or a disk that fails is an error of a read, not a
signal. No sync is needed: this is a cache, and checksums find what a crash has torn.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rworker.tiers.format import PAGE_BYTES, Entry, SlotShape

logger = logging.getLogger(__name__)

FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
Bytes: TypeAlias = NDArray[np.uint8]


def page_buffer(num_bytes: int) -> Bytes:
    """Return memory for direct reads and writes: uint8 [num_bytes], whole pages."""
    room = np.empty(num_bytes + PAGE_BYTES, np.uint8)
    start = -room.ctypes.data % PAGE_BYTES
    return room[start : start + num_bytes]


class SlotFile:
    """The file of one R-worker. Any thread may call. Different slots are read and written in
    parallel.

    Args:
        path: path of the file.
        fd: its descriptor, for the table.
        shape: shape of its slots.
        num_slots: its slots.
        entries: what they hold, by slot.
    """

    def __init__(
        self, path: Path, fd: int, shape: SlotShape, num_slots: int, entries: Mapping[int, Entry]
    ) -> None:
        self.path: Final = path
        self.shape: Final = shape
        self.num_slots: Final = num_slots
        self._fd = fd
        self._start = shape.data_start(num_slots)
        self._data_fd, self.is_direct = _open_direct(path, fd, self._start)
        self._lock = threading.Lock()
        self._slot_of = {entry.key: slot for slot, entry in entries.items()}
        self._entries = dict(entries)
        self._free = [slot for slot in reversed(range(num_slots)) if slot not in entries]
        self._generation = max((entry.generation for entry in entries.values()), default=0)

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    @property
    def entries(self) -> list[Entry]:
        """What it holds, in the order in which it was stored."""
        with self._lock:
            return sorted(self._entries.values(), key=lambda entry: entry.generation)

    def take_slot(self) -> int | None:
        """Take a slot to be written. None if all are taken."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)

    def write(self, key: bytes, num_tokens: int, data: Bytes, checksums: tuple[int, ...]) -> bool:
        """Store a block. Return False if all slots are taken.

        Args:
            data: data of a whole slot, from ``page_buffer``.

        Raises:
            OSError: If it can't be written.
        """
        slot = self.take_slot()
        if slot is None:
            return False
        try:
            self._clear_entry(slot)
            _write_whole(self._data_fd, data, self._at(slot))
            with self._lock:
                self._generation += 1
                entry = Entry(key, num_tokens, self._generation, checksums)
            self._write_entry(slot, entry.pack(self.shape.entry_bytes))
        except OSError:
            self.give_back(slot)
            raise
        with self._lock:
            before = self._slot_of.get(key)
            self._slot_of[key], self._entries[slot] = slot, entry
            if before is not None:
                del self._entries[before]
        if before is not None:
            with contextlib.suppress(OSError):  # else the later one counts
                self._clear_entry(before)
            self.give_back(before)
        return True

    def find(self, key: bytes) -> tuple[int, Entry] | None:
        """Return the slot and the entry of a block."""
        with self._lock:
            slot = self._slot_of.get(key)
            return None if slot is None else (slot, self._entries[slot])

    def read(self, slot: int, first: int, into: Bytes) -> None:
        """Read whole pages of a slot, from byte ``first`` on.

        Raises:
            OSError: If they can't be read, or the file has become shorter.
        """
        view, at = into.data, self._at(slot) + first
        while view:
            count = os.preadv(self._data_fd, [view], at)
            if not count:
                raise OSError(errno.EIO, "the file ends in the middle of a slot")
            view, at = view[count:], at + count
        if not self.is_direct:
            _let_go(self._data_fd, self._at(slot) + first, into.nbytes)

    def drop(self, key: bytes) -> None:
        """Drop a block without the disk. Its entry stays until its slot is taken."""
        with self._lock:
            slot = self._slot_of.pop(key, None)
            if slot is not None:
                del self._entries[slot]
                self._free.append(slot)

    def erase(self, key: bytes, *, for_good: bool = False) -> None:
        """Drop a block, so that it is not found after a restart.

        Raises:
            OSError: If its entry can't be cleared.
        """
        with self._lock:
            slot = self._slot_of.pop(key, None)
            if slot is None:
                return
            del self._entries[slot]
        try:
            self._clear_entry(slot)
        finally:
            if not for_good:
                self.give_back(slot)

    def close(self) -> None:
        """Close the file for others to use."""
        for fd in {self._fd, self._data_fd}:
            os.close(fd)

    def _at(self, slot: int) -> int:
        return self._start + slot * self.shape.slot_bytes

    def _clear_entry(self, slot: int) -> None:
        self._write_entry(slot, bytes(self.shape.entry_bytes))

    def _write_entry(self, slot: int, data: bytes) -> None:
        at = PAGE_BYTES + slot * self.shape.entry_bytes
        if os.pwrite(self._fd, data, at) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _open_direct(path: Path, fd: int, start: int) -> tuple[int, bool]:
    """Return a descriptor, and True if it goes past the page cache."""
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        with contextlib.suppress(OSError):
            opened = os.open(f"/proc/self/fd/{fd}", (FLAGS & ~os.O_NOFOLLOW) | os.O_RDWR | direct)
            try:
                os.preadv(opened, [page_buffer(PAGE_BYTES).data], start)
                return opened, True
            except OSError:
                os.close(opened)
    logger.info("%s: no direct reads here; the page cache is used", path)
    return fd, False


def _write_whole(fd: int, data: Bytes, at: int) -> None:
    view = data.data
    while view:
        count = os.pwritev(fd, [view], at)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view, at = view[count:], at + count


def _let_go(fd: int, at: int, count: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, at, count, os.POSIX_FADV_DONTNEED)

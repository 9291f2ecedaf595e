"""Kept KV blocks in a file of slots, read and written past the page cache.

Nothing is ever mapped: a file that shrinks or a disk that fails is an error of
a read, and no signal. No sync is needed: this is a cache, and checksums find
what a crash has torn.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ConfigError
from fastdecode.core.model.block_keys import KEY_BYTES
from rworker.tiers.format import (
    PAGE_BYTES,
    Entry,
    Header,
    SlotShape,
    read_entries,
    read_header,
)

logger = logging.getLogger(__name__)

MOST_FILES: Final = 64
"""Of R-workers that keep the same blocks' heads, in one directory."""
_LOOKS: Final = 3
_LOOK_S: Final = 0.01
"""``fastdecode cache`` has a file's lock for a moment."""
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
Bytes: TypeAlias = NDArray[np.uint8]


def page_buffer(num_bytes: int) -> Bytes:
    """Memory for direct reads and writes: uint8 [num_bytes], whole pages."""
    room = np.empty(num_bytes + PAGE_BYTES, np.uint8)
    start = -room.ctypes.data % PAGE_BYTES
    return room[start : start + num_bytes]


class SlotFile:
    """One R-worker's. Any thread may call; reads and writes of different slots
    go on side by side.

    Args:
        path: of the file.
        fd: of it, for the table.
        shape: of its slots.
        num_slots: that it has.
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
        """What it holds; what was stored first comes first."""
        with self._lock:
            return sorted(self._entries.values(), key=lambda entry: entry.generation)

    def take_slot(self) -> int | None:
        """A slot to be written; None: there is none. Its entry is cleared.

        Raises:
            OSError: it can't be.
        """
        with self._lock:
            if not self._free:
                return None
            slot = self._free.pop()
        try:
            self._clear_entry(slot)
        except OSError:
            self.give_back(slot)
            raise
        return slot

    def give_back(self, slot: int) -> None:
        """A slot that was taken holds nothing."""
        with self._lock:
            self._free.append(slot)

    def write(
        self, slot: int, key: bytes, num_tokens: int, data: Bytes, checksums: tuple[int, ...]
    ) -> None:
        """Fill a slot that was taken.

        Args:
            data: of a whole slot, from ``page_buffer``.

        Raises:
            OSError: it can't be written; the slot was given back.
        """
        try:
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

    def find(self, key: bytes) -> tuple[int, Entry] | None:
        """Where a block is, and what it has to be."""
        with self._lock:
            slot = self._slot_of.get(key)
            return None if slot is None else (slot, self._entries[slot])

    def read(self, slot: int, first: int, into: Bytes) -> None:
        """Read whole pages of a slot, from byte ``first`` on.

        Raises:
            OSError: it can't be, or the file has become shorter.
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
        """A block is given up, if it is there. Its entry stays until its slot
        is taken: the disk isn't asked."""
        with self._lock:
            slot = self._slot_of.pop(key, None)
            if slot is not None:
                del self._entries[slot]
                self._free.append(slot)

    def erase(self, key: bytes, *, for_good: bool = False) -> None:
        """Give a block up, and have nobody find it after a restart.

        Raises:
            OSError: its entry can't be cleared.
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
        """Nobody reads or writes any more; another may have the file."""
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


def open_slots(directory: Path, shape: SlotShape, num_bytes: int) -> SlotFile:
    """The first file of this identity that nobody else has open, with what it
    holds; a new one, if there is none.

    Args:
        directory: the user's own, or to be made.
        num_bytes: that the file may take.

    Raises:
        ConfigError: it can't be made, there isn't the room for it, or it
            wouldn't hold a block.
    """
    num_slots = shape.num_slots_within(num_bytes)
    if not num_slots:
        raise ConfigError(
            f"{num_bytes} bytes on disk don't hold one KV block of {shape.slot_bytes} bytes: give "
            "the cache more (--cache-disk-gb)"
        )
    place = directory / shape.identity[:16]
    try:
        make_own_directory(directory)
        for number in range(MOST_FILES):
            opened = _open(place / f"slots-{number}.kv", shape, num_slots)
            if opened is not None:
                return opened
    except OSError as error:
        raise ConfigError(
            f"can't keep KV blocks in {place}: {error.strerror}; {shape.file_bytes(num_slots)} "
            "bytes are asked for (--cache-disk, --cache-disk-gb)"
        ) from None
    raise ConfigError(f"{MOST_FILES} R-workers keep KV blocks in {place} already")


def make_own_directory(path: Path) -> None:
    """Make it, if it isn't there.

    Raises:
        OSError: it can't be made.
        ConfigError: it isn't a directory, or not the user's alone.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"can't keep KV blocks in {path}: it has to be a directory of your own that nobody "
            "else may write (chmod 700)"
        )


def read_slots(path: Path) -> tuple[int, Header, dict[int, Entry], int]:
    """A file as it stands: its descriptor, which the caller closes, what it
    says, and how many entries are damaged.

    Raises:
        ConfigError: it is none of ours, another user's, or damaged.
        OSError: it can't be read.
    """
    fd = os.open(path, _FLAGS)
    try:
        reason = _strangeness(fd)
        header = None if reason else read_header(os.pread(fd, PAGE_BYTES, 0))
        if header is None:
            raise ConfigError(f"{path} holds no KV blocks: {reason or 'its header is damaged'}")
        shape, num_slots = header.shape, header.num_slots
        if os.fstat(fd).st_size != shape.file_bytes(num_slots):
            raise ConfigError(f"{path} has not the length that its header tells")
        table = os.pread(fd, num_slots * shape.entry_bytes, PAGE_BYTES)
        if len(table) < num_slots * shape.entry_bytes:
            raise ConfigError(f"{path} ends in the middle of its table")
        entries, num_damaged = read_entries(table, shape, num_slots)
    except BaseException:
        os.close(fd)
        raise
    return fd, header, entries, num_damaged


def _open(path: Path, shape: SlotShape, num_slots: int) -> SlotFile | None:
    """The file, made if need be; None: another process has it open."""
    while True:
        make_own_directory(path.parent)  # it goes with its last file
        fd = os.open(path, _FLAGS | os.O_CREAT, 0o600)
        if not _lock_patiently(fd):
            os.close(fd)
            return None
        if _is_at(path, fd):
            break
        os.close(fd)  # it was removed before we had the lock
    try:
        reason = _strangeness(fd)
        if reason:
            raise ConfigError(f"can't keep KV blocks in {path}: {reason}")
        return SlotFile(path, fd, shape, num_slots, _entries_of(path, fd, shape, num_slots))
    except BaseException:
        os.close(fd)
        raise


def lock(fd: int) -> bool:
    """Keep others from using a file for as long as it is open here; False:
    another process uses it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_patiently(fd: int) -> bool:
    """The same, though somebody may look at the file just now."""
    for _ in range(_LOOKS):
        if lock(fd):
            return True
        time.sleep(_LOOK_S)
    return False


def _is_at(path: Path, fd: int) -> bool:
    """Whether an open file is the one at a path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(fd))
    return False


def _entries_of(path: Path, fd: int, shape: SlotShape, num_slots: int) -> dict[int, Entry]:
    """What the file holds; it begins anew where it isn't what is wanted."""
    with contextlib.suppress(ConfigError):
        other, header, entries, num_damaged = read_slots(path)
        os.close(other)
        if header == Header(shape, num_slots):
            if num_damaged:
                logger.warning("%s: %d entries are damaged, and not used", path, num_damaged)
            return entries
        if header.shape == shape:
            logger.warning(
                "%s has room for %d KV blocks, and is to have room for %d: it begins anew, without "
                "the %d that it held (--cache-disk-gb as before keeps them)",
                path, header.num_slots, num_slots, len(entries),
            )  # fmt: skip
            return _made(path, fd, shape, num_slots)
    if os.fstat(fd).st_size:
        logger.warning("%s is damaged: it begins anew", path)
    return _made(path, fd, shape, num_slots)


def _made(path: Path, fd: int, shape: SlotShape, num_slots: int) -> dict[int, Entry]:
    """The file, empty and of full length."""
    if os.fstat(fd).st_size:
        os.ftruncate(fd, 0)
    logger.info("%s: making room for %d bytes", path, shape.file_bytes(num_slots))
    try:
        os.posix_fallocate(fd, 0, shape.file_bytes(num_slots))
        os.pwrite(fd, shape.header(num_slots), 0)
    except OSError:
        os.ftruncate(fd, 0)  # leave the disk to others
        raise
    return {}


def _strangeness(fd: int) -> str:
    """Why a file isn't to be used; empty: it may be."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        return "it is not a file"
    if found.st_uid != os.geteuid():
        return "it is another user's"
    return "others may read or write it: chmod 600" if found.st_mode & 0o077 else ""


def _open_direct(path: Path, fd: int, start: int) -> tuple[int, bool]:
    """A descriptor that goes past the page cache, if the file system has that,
    and whether it does."""
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        with contextlib.suppress(OSError):
            opened = os.open(f"/proc/self/fd/{fd}", (_FLAGS & ~os.O_NOFOLLOW) | direct)
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


assert KEY_BYTES == 16

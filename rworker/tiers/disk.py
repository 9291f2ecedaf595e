"""Files of cached blocks: where a user lets R-workers keep them, found or made, locked, and read as
they stand."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastdecode.core.errors import ConfigError, Given
from rworker.tiers.format import PAGE_BYTES, Entry, Header, SlotShape, read_entries, read_header
from rworker.tiers.slots import FLAGS, SlotFile

logger = logging.getLogger(__name__)

MOST_GB: Final = 1e6
MOST_FILES: Final = 64
"""Files of R-workers that cache the same heads of blocks, in one directory."""
_NAMED: Final = re.compile(r"[0-9A-Za-z]{16}/slots-[0-9]{1,2}\.kv")
_LOOKS: Final = 3
_LOOK_S: Final = 0.01
"""``fastdecode cache`` has a file's lock for a moment."""


def open_slots(directory: Path, shape: SlotShape, num_bytes: int) -> SlotFile:
    """Open the first file of this identity that no process has open, or a new one.

    Args:
        directory: the user's own, or to be made.
        num_bytes: bytes that the file may take.

    Raises:
        ConfigError: If it can't be made, lacks room, or would not hold a block.
    """
    num_slots = shape.num_slots_within(num_bytes)
    if not num_slots:
        why = f"{num_bytes} bytes on disk don't hold one KV block of {shape.slot_bytes} bytes"
        raise ConfigError(f"{why}: give the cache more (--cache-disk-gb)")
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
    """Make a directory, unless it exists.

    Raises:
        OSError: If it can't be made.
        ConfigError: If it is not a directory, or not the user's alone.
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
    """Return a file's descriptor, which the caller closes, header, entries, and damaged entries.

    Raises:
        ConfigError: If it is another program's, another user's, or damaged.
        OSError: If it can't be read.
    """
    fd = os.open(path, FLAGS)
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
    """Open a file, or make it. Return None if another process has it open."""
    while True:
        make_own_directory(path.parent)  # it goes with its last file
        fd = os.open(path, FLAGS | os.O_RDWR | os.O_CREAT, 0o600)
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
    """Lock a file until it is closed here. Return False if another process uses it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_patiently(fd: int) -> bool:
    for _ in range(_LOOKS):
        if lock(fd):
            return True
        time.sleep(_LOOK_S)
    return False


def _is_at(path: Path, fd: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.lstat(), os.fstat(fd))
    return False


def _entries_of(path: Path, fd: int, shape: SlotShape, num_slots: int) -> dict[int, Entry]:
    """Return what a file holds. Empty it if it has another shape, or is damaged."""
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
    """Return why a file can't be used. Empty if it can."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        return "it is not a file"
    if found.st_uid != os.geteuid():
        return "it is another user's"
    return "others may read or write it: chmod 600" if found.st_mode & 0o077 else ""


@dataclass(frozen=True)
class Disk:
    """Directory where R-workers cache blocks."""

    directory: Path
    num_bytes: int
    """Bytes of each R-worker's file."""


def disk_of(directory: str | None, gigabytes: float | None, num_workers: int = 1) -> Disk | None:
    """Return the directory that was asked for, which has the room. None if none was.

    Args:
        num_workers: R-workers, each with a file there.

    Raises:
        ConfigError: If only one of the two was given, or the directory can't be used, or lacks
            room.
    """
    if directory is None and gigabytes is None:
        return None
    if directory is None or gigabytes is None:
        words = " and ", Given("cache_disk_gb"), " belong together: give both, or neither"
        raise ConfigError(Given("cache_disk"), *words)
    if not 0 < gigabytes <= MOST_GB:
        why = f" is not a number of GB above 0 and up to {MOST_GB:g}"
        raise ConfigError(Given("cache_disk_gb", gigabytes), why)
    disk = Disk(Path(directory), int(gigabytes * 1e9))
    try:
        make_own_directory(disk.directory)
        stats = os.statvfs(disk.directory)
        there = sum(_room_of(path, disk.num_bytes) for path in slot_files(disk.directory))
    except OSError as error:
        why = f" can't be used: {error.strerror}"
        raise ConfigError(Given("cache_disk", directory), why) from None
    wanted, free_bytes = disk.num_bytes * num_workers, stats.f_bavail * stats.f_frsize + there
    if wanted > free_bytes:
        found = f" for {num_workers} R-worker(s) is {wanted} bytes, but {free_bytes} are free in "
        remedy = f"{directory}: ask for less, or make room"
        raise ConfigError(Given("cache_disk_gb", gigabytes), found + remedy)
    return disk


def _room_of(path: Path, num_bytes: int) -> int:
    """Return the bytes that a file has for an R-worker: ``num_bytes`` if it was made for those."""
    with contextlib.suppress(ConfigError, OSError):
        fd, header, _, _ = read_slots(path)
        os.close(fd)
        if header.shape.num_slots_within(num_bytes) == header.num_slots:
            return num_bytes
    return path.lstat().st_blocks * 512


def slot_files(directory: Path) -> list[Path]:
    """Return the files in a directory that are named as by ``open_slots``, of all models. Links are
    not followed."""
    return sorted(
        path
        for path in directory.glob("*/slots-*.kv")
        if _NAMED.fullmatch(f"{path.parent.name}/{path.name}")
        and not (path.is_symlink() or path.parent.is_symlink())
    )

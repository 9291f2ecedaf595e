"""Files of cached KV blocks, for people: shown, verified, cleared."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from fastdecode.core.errors import ConfigError
from rworker.tiers.disk import lock, make_own_directory, open_slots, read_slots, slot_files
from rworker.tiers.format import PAGE_BYTES, Entry, Header, SlotShape, is_own
from rworker.tiers.slots import page_buffer


@dataclass(frozen=True)
class KeptBlocksOnDisk:
    """Contents of one file."""

    path: str
    identity: str
    """Names the model, its numerics, and the heads."""
    num_slots: int
    num_blocks: int
    num_bytes: int
    """Bytes of disk that the file takes."""
    num_layers: int
    is_held: bool
    """True if a process uses it."""
    damage: tuple[str, ...]
    """What is not as it was written. A process that uses the file may be writing."""


def inspect_blocks(directory: Path, *, verify: bool) -> list[KeptBlocksOnDisk]:
    """Inspect all files in a directory. ``verify``: also compare all blocks with checksums."""
    return [_inspect(path, verify=verify) for path in slot_files(directory)]


def clear_blocks(directory: Path) -> tuple[int, list[Path]]:
    """Remove all files, and directories that this leaves empty, or none if a process uses one.

    Returns:
        How many were removed, and the files that only have such a name, and stay.

    Raises:
        ConfigError: If a process uses one, or one can't be removed. The text says how many were.
    """
    files = slot_files(directory)
    with ExitStack() as stack:
        held = [(path, stack.enter_context(_locked(path))) for path in files]
        own = [(path, fd) for path, fd in held if is_own(os.pread(fd, PAGE_BYTES, 0))]
        for number, (path, fd) in enumerate(own):
            try:
                os.ftruncate(fd, 0)
                path.unlink()
            except OSError as error:
                raise ConfigError(
                    f"can't remove {path}: {error.strerror}; {number} of {len(own)} files of KV "
                    "blocks are removed"
                ) from None
        for place in {path.parent for path, _ in own}:
            with contextlib.suppress(OSError):  # it has other files, too
                place.rmdir()
    removed = {path for path, _ in own}
    return len(own), [path for path in files if path not in removed]


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Yield the descriptor of a file that no process uses, or begins to use meanwhile."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"can't remove {path}: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"can't remove {path}: it is not a file")
        if not lock(fd):
            raise ConfigError(f"{path} is in use: end the R-worker that keeps it first")
        yield fd
    finally:
        os.close(fd)


def _inspect(path: Path, *, verify: bool) -> KeptBlocksOnDisk:
    try:
        fd, header, entries, num_damaged = read_slots(path)
    except (ConfigError, OSError) as error:
        return KeptBlocksOnDisk(str(path), "", 0, 0, 0, 0, False, (str(error),))
    try:
        damage = [f"{num_damaged} entries of the table"] if num_damaged else []
        if verify:
            damage += [
                f"the block in slot {slot}"
                for slot, entry in sorted(entries.items())
                if not _is_whole(fd, header, slot, entry)
            ]
        shape, count = header.shape, header.num_slots
        num_bytes = os.fstat(fd).st_blocks * 512
        return KeptBlocksOnDisk(
            str(path), shape.identity, count, len(entries), num_bytes, shape.num_layers,
            _is_held(fd), tuple(damage),
        )  # fmt: skip
    finally:
        os.close(fd)


def _is_whole(fd: int, header: Header, slot: int, entry: Entry) -> bool:
    """Return True if a slot matches the checksums of its entry."""
    shape = header.shape
    buffer = page_buffer(shape.slot_bytes)
    try:
        at = shape.data_start(header.num_slots) + slot * shape.slot_bytes
        count = os.preadv(fd, [buffer.data], at)
    except OSError:
        return False
    size = shape.layer_bytes
    found = [crc32(buffer[i * size : (i + 1) * size]) for i in range(shape.num_layers)]
    return count == shape.slot_bytes and tuple(found) == entry.checksums


def _is_held(fd: int) -> bool:
    """Return True if a process uses a file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


@dataclass(frozen=True)
class DiskSpeed:
    """Speed of a directory's disk with blocks."""

    write_gb_s: float
    read_gb_s: float
    is_direct: bool
    """True if it went past the page cache. Otherwise the disk was not read."""


def measure_disk(directory: Path, *, num_blocks: int = 8, block_bytes: int = 8 << 20) -> DiskSpeed:
    """Write blocks to a temporary file, and read them.

    Raises:
        ConfigError: If the directory can't be used.
        OSError: If the disk can't be written or read.
    """
    make_own_directory(directory)
    shape = SlotShape("0" * 64, 1, block_bytes)
    with tempfile.TemporaryDirectory(dir=directory, prefix="measure-") as place:
        slots = open_slots(Path(place), shape, shape.file_bytes(num_blocks))
        try:
            buffer = page_buffer(shape.slot_bytes)
            buffer[:] = 7
            started = time.perf_counter()
            for number in range(num_blocks):
                is_stored = slots.write(number.to_bytes(16, "little"), 1, buffer, (0,))
                assert is_stored
            written = time.perf_counter()
            for slot in range(num_blocks):
                slots.read(slot, 0, buffer)
            read = time.perf_counter()
        finally:
            slots.close()
    total_gb = num_blocks * shape.slot_bytes / 1e9
    return DiskSpeed(total_gb / (written - started), total_gb / (read - written), slots.is_direct)

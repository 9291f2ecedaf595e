"""Messages in files, one record each, as ``fastdecode.wire.codec`` writes them in one piece::

    record  num_bytes u32 | crc32 u32 of the message | message

What is torn or damaged is noticed before any of it is used. Only its owner may read or write a
file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import BinaryIO, Final
from zlib import crc32

import numpy as np
from msgspec.structs import replace

from fastdecode.core.errors import ConfigError, ProtocolError
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.codec import Array, Codec, Frame
from fastdecode.wire.messages import Message

_PREFIX: Final = Struct("<II")
_MOST_BYTES: Final = 1 << 27
"""Bytes of a record. A chunk may be as large as one token of all layers."""


class RecordWriter:
    """Appends records to a new file that only its owner may use.

    Args:
        path: a name that no file has yet.

    Raises:
        OSError: If it can't be made, or written (all methods).
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._codec = Codec()

    def write(self, message: Message) -> None:
        """Append a record."""
        frame = self._codec.encode(message)
        pieces = _in_pieces(frame)
        num_bytes, checksum = sum(map(len, pieces)), 0
        for piece in pieces:
            checksum = crc32(piece, checksum)
        for view in (memoryview(_PREFIX.pack(num_bytes, checksum)), *pieces):
            while view:
                view = view[os.write(self._fd, view) :]

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _in_pieces(frame: Frame) -> list[memoryview]:
    """Return a message's bytes: what is small in one piece, the last array where it lies."""
    if not frame.arrays:
        return [memoryview(frame.head)]
    *small, last = frame.arrays
    piece = replace(frame, arrays=[*small, last[:0]]).in_one_piece()
    return [memoryview(piece), memoryview(np.ascontiguousarray(last)).cast("B")]


def read_records(path: Path) -> Iterator[Message]:
    """Return a file's messages, up to where it ends.

    Raises:
        ConfigError: If it can't be read, isn't its reader's own, or is damaged or torn.
    """
    codec, buffers, number = Codec(), BufferPool(), 0
    try:
        with os.fdopen(_open_own(path), "rb") as file:
            while (data := _next_record(file, buffers)) is not None:
                yield codec.decode(data)
                number += 1
    except (OSError, ProtocolError, ValueError) as error:
        reason = f"record {number}: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(f"can't use the KV file {path}: {reason}", code="bad_kv_file") from None


def _next_record(file: BinaryIO, buffers: BufferPool) -> Array | None:
    """Return the bytes of the next message. None at the end.

    Raises:
        ValueError: If it is damaged or torn.
    """
    prefix = file.read(_PREFIX.size)
    if not prefix:
        return None
    if len(prefix) < _PREFIX.size:
        raise ValueError("it is torn: it ends in the middle of a record")
    num_bytes, checksum = _PREFIX.unpack(prefix)
    if not 0 < num_bytes <= _MOST_BYTES:
        raise ValueError(f"{num_bytes} bytes can't be right")
    data = buffers.take(num_bytes)
    if file.readinto(data.data) < num_bytes:  # type: ignore[attr-defined]  # buffered
        raise ValueError("it is torn: it ends in the middle of a record")
    if crc32(data) != checksum:
        raise ValueError("it is damaged (checksum)")
    return data


def _open_own(path: Path) -> int:
    """Open a file that only this user may read or write. Raises ValueError: If others may."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        reason = "it is not a file"
    elif found.st_uid != os.geteuid():
        reason = "it is another user's"
    elif found.st_mode & 0o077:
        reason = "others may read or write it: chmod 600"
    else:
        return fd
    os.close(fd)
    raise ValueError(reason)

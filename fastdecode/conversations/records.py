"""What a file of turns is made of.

::

    0    magic, identity of model and tokenizer, zeros to 64 bytes
    64   records: length and kind of what follows, CRC-32 of both and of it (12
         bytes, little endian), then
           a turn: length of JSON (4 bytes), JSON, the tokens added (int32)
           a conversation that is over: the digest of its id
           nothing any more: zeros, in the place of what is forgotten; the
           checksum is of length and kind alone
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fastdecode.core.errors import ConfigError
from fastdecode.core.os_errors import explained

MAGIC: Final = b"FDTURNS\x02"
HEADER_BYTES: Final = 64
MAX_RECORD_BYTES: Final = 1 << 28
HEAD: Final = struct.Struct("<III")
ERASED: Final = 0
TURN: Final = 1
OVER: Final = 2
_SIGN: Final = b'{"id": '
"""What turns begin with, behind their heads and the length of their JSON; no
JSON has it within."""
_WINDOW_BYTES: Final = 1 << 20


def open_alone(path: Path) -> int:
    """The file, which is made if there is none, for this process alone. Raises
    ConfigError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise ConfigError(f"can't keep conversations in {path}: {explained(error)}") from None
    try:
        lock(fd)
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise BlockingIOError  # it has been written anew since, by another process
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(
            f"another process keeps conversations in {path}: wait for it to end, or name another "
            "place"
        ) from None
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"can't keep conversations in {path}: {explained(error)}") from None
    return fd


def lock(fd: int) -> None:
    """Keep other processes out. Raises BlockingIOError: one is there."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # a file system without locks; then whoever runs two at once has to know


def is_held(fd: int) -> bool:
    """Whether another process keeps others out."""
    try:
        lock(fd)
    except BlockingIOError:
        return True
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def make_record(kind: int, payload: bytes) -> bytes:
    return make_head(kind, len(payload), payload) + payload


def make_head(kind: int, num_bytes: int, payload: bytes = b"") -> bytes:
    checked = b"" if kind == ERASED else payload
    crc = zlib.crc32(checked, zlib.crc32(struct.pack("<II", num_bytes, kind)))
    return HEAD.pack(num_bytes, kind, crc)


def read_records(fd: int) -> Iterator[tuple[int, int, bytes]]:
    """Each record's kind, place and payload, up to the first that isn't whole."""
    place = HEADER_BYTES
    while (record := record_at(fd, place)) is not None:
        kind, payload = record
        yield kind, place, payload
        place += HEAD.size + len(payload)


def record_at(fd: int, place: int) -> tuple[int, bytes] | None:
    """A record's kind and payload; None: there is no whole one."""
    head = os.pread(fd, HEAD.size, place)
    if len(head) < HEAD.size:
        return None
    num_bytes, kind, _ = HEAD.unpack(head)
    if num_bytes > MAX_RECORD_BYTES:
        return None
    payload = os.pread(fd, num_bytes, place + HEAD.size)
    if len(payload) < num_bytes or make_head(kind, num_bytes, payload) != head:
        return None
    return kind, payload


def is_followed(fd: int, place: int) -> bool:
    """Whether there is a whole turn anywhere behind this place."""
    at = place + 1
    while window := os.pread(fd, _WINDOW_BYTES, at):
        found = window.find(_SIGN)
        if found < 0:
            at += max(1, len(window) - len(_SIGN) + 1)
            continue
        begin = at + found - HEAD.size - 4
        if begin > place and record_at(fd, begin) is not None:
            return True
        at += found + 1
    return False


def overwrite(fd: int) -> None:
    """Zeros in the place of all that there is, on the disk."""
    left = os.fstat(fd).st_size
    while left > 0:
        num_bytes = min(left, _WINDOW_BYTES)
        left -= num_bytes
        write_at(fd, bytes(num_bytes), left)
    os.fsync(fd)


def write_at(fd: int, data: bytes, place: int) -> None:
    num_written = 0
    while num_written < len(data):
        num_written += os.pwrite(fd, data[num_written:], place + num_written)

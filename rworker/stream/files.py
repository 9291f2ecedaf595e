"""K and V in files: what would be sent to a cache, kept until somebody sends it.

A file is records, each one message of the wire (``ExpectTokens`` or ``StoreChunk``; in a
replica's, ``rworker.transfers.replica_file``, also what changes the cache) as
``fastdecode.wire.codec`` writes it in one piece::

    record  num_bytes u32 | crc32 u32 of the message | message
    end     0 u32 | crc32 u32 of the number | number of records u64

So model, layout, sequence, tokens, layers and heads stand in every piece, and
what is torn, damaged, or of another model is noticed before any of it is used.
Nobody but its owner may read or write a file; it has its name once it is whole.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Final
from zlib import crc32

import numpy as np
from msgspec.structs import replace

from fastdecode.core.errors import ConfigError, ProtocolError
from fastdecode.core.json_file import sync_directory
from fastdecode.wire.blocks import MAX_CHUNK_BYTES, ExpectTokens, StoreChunk
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.codec import Array, Codec, Frame
from fastdecode.wire.messages import Message
from rworker.stream.chunk_endpoints import ChunkSink
from rworker.stream.chunks import expectation
from rworker.stream.cutting import CacheKind

_PREFIX: Final = Struct("<II")
_NUMBER: Final = Struct("<Q")
_MOST_BYTES: Final = MAX_CHUNK_BYTES + (1 << 20)
"""Of a message: data, sequences, head."""


class RecordWriter:
    """Appends records to a new file that only its owner may use.

    Args:
        path: a name that nobody has yet.

    Raises:
        OSError: it can't be made, or written (all methods).
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        self._codec = Codec()
        self._num_records = 0

    def write(self, message: Message) -> None:
        """Append a record."""
        frame = self._codec.encode(message)
        pieces = _in_pieces(frame)
        checksum = 0
        for piece in pieces:
            checksum = crc32(piece, checksum)
        self._write_whole(_PREFIX.pack(frame.num_bytes, checksum))
        for piece in pieces:
            self._write_whole(piece)
        self._num_records += 1

    def sync(self) -> None:
        """What was written is on the disk."""
        os.fdatasync(self._fd)

    def end(self) -> None:
        """Append the end, which says how many records there are, and ``sync``."""
        number = _NUMBER.pack(self._num_records)
        self._write_whole(_PREFIX.pack(0, crc32(number)) + number)
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _write_whole(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


class KVFileWriter:
    """A new file, as a sink. Use it in ``with``: left by an error, the file
    isn't there.

    Args:
        path: a name that nobody has yet, in a directory that exists.
        kind: of the cache that it is for.

    Raises:
        ConfigError: it can't be made.
    """

    def __init__(self, path: Path, kind: CacheKind) -> None:
        self.kind: Final = kind
        self._path = path
        self._partial = path.with_name(path.name + ".part")
        for present in (path, self._partial):
            if present.is_symlink() or present.exists():
                raise ConfigError(f"can't write the KV file {path}: {present} is there already")
        with self._refusing():
            self._records = RecordWriter(self._partial)

    def __enter__(self) -> KVFileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                with self._refusing():
                    self._records.end()
                    os.rename(self._partial, self._path)
                    sync_directory(self._path.parent)
        finally:
            self._records.close()
            with contextlib.suppress(FileNotFoundError):
                self._partial.unlink()

    def expect(self, sequence_id: int, num_tokens: int) -> None:
        with self._refusing():
            self._records.write(expectation({sequence_id: num_tokens}))

    def flush(self, chunk: StoreChunk) -> None:
        with self._refusing():
            self._records.write(chunk)

    def finish(self) -> None:
        """See ``ChunkSink``; the file is whole once ``with`` has been left."""

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"can't write the KV file {self._path}: {error.strerror}") from None


def _in_pieces(frame: Frame) -> list[memoryview]:
    """Return a message's bytes: what is small in one piece, the last array where it lies."""
    if not frame.arrays:
        return [memoryview(frame.head)]
    *small, last = frame.arrays
    piece = replace(frame, arrays=[*small, last[:0]]).in_one_piece()
    return [memoryview(piece), memoryview(np.ascontiguousarray(last)).cast("B")]


def stream_in(path: Path, sink: ChunkSink) -> int:
    """Send a file's K and V to a cache, and wait until all are there. The
    sequences are open there, with room, and have what came before.

    Returns:
        Bytes of K and V.

    Raises:
        ConfigError: the file can't be read, isn't its reader's own, is damaged
            or torn, or is for another kind of cache. What comes before that
            has been sent: close those sequences.
        WorkerError: the cache is gone, or refuses.
    """
    num_bytes = 0
    for message in read_file(path, sink.kind):
        if isinstance(message, StoreChunk):
            sink.flush(message)
            num_bytes += len(message.data)
        else:
            expected = message.sequence_ids.tolist(), message.num_tokens.tolist()
            for sequence, num_tokens in zip(*expected, strict=True):
                sink.expect(sequence, num_tokens)
    sink.finish()
    return num_bytes


def read_file(path: Path, kind: CacheKind) -> Iterator[ExpectTokens | StoreChunk]:
    """What a file says, checked a record at a time.

    Raises:
        ConfigError: as ``stream_in``.
    """
    for number, message in enumerate(read_records(path)):
        if not isinstance(message, (ExpectTokens, StoreChunk)):
            what = f"it holds {type(message).__name__}, which moves no K and V"
            raise _refusal(path, f"record {number}: {what}")
        if isinstance(message, StoreChunk):
            found = CacheKind(message.model_hash, message.kv)
            if found != kind:
                raise _refusal(path, f"it is for a cache of {found}, not {kind}")
        yield message


def read_records(path: Path) -> Iterator[Message]:
    """A file's messages, up to where it ends.

    Raises:
        ConfigError: it can't be read, isn't its reader's own, or is damaged or torn.
    """
    fd = _open_own(path)
    try:
        reader = _Reader(fd, path)
        while (data := reader.next()) is not None:
            yield reader.message(data)
    finally:
        os.close(fd)


class _Reader:
    """Records of one file."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd = fd
        self._path = path
        self._buffers = BufferPool()
        self._codec = Codec()
        self._num_records = 0

    def next(self) -> Array | None:
        """The next record's message, uint8 [num_bytes]; None: that was all."""
        num_bytes, checksum = _PREFIX.unpack(bytes(self._take(_PREFIX.size)))
        if num_bytes > _MOST_BYTES:
            raise self._refuse(f"a record of {num_bytes} bytes can't be right")
        data = self._take(num_bytes or _NUMBER.size)
        if crc32(data) != checksum:
            raise self._refuse(f"record {self._num_records} is damaged (checksum)")
        if num_bytes:
            self._num_records += 1
            return data
        if _NUMBER.unpack(bytes(data)) != (self._num_records,) or os.read(self._fd, 1):
            raise self._refuse("it doesn't end where it says")
        return None

    def message(self, data: Array) -> Message:
        """What a record says."""
        try:
            return self._codec.decode(data)
        except ProtocolError as error:
            raise self._refuse(f"record {self._num_records - 1}: {error}") from None

    def _take(self, num_bytes: int) -> Array:
        data = self._buffers.take(num_bytes)
        view = data.data
        while view:
            try:
                count = os.readv(self._fd, [view])
            except OSError as error:
                raise self._refuse(error.strerror or str(error)) from None
            if not count:
                raise self._refuse("it is torn: it ends in the middle of a record")
            view = view[count:]
        return data

    def _refuse(self, reason: str) -> ConfigError:
        return _refusal(self._path, reason)


def _refusal(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"can't use the KV file {path}: {reason}", code="bad_kv_file")


def _open_own(path: Path) -> int:
    """Open a file that nobody else could have written."""

    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from None
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode):
        reason = ""
        if found.st_uid != os.geteuid():
            reason = "it is another user's"
        elif found.st_mode & 0o077:
            reason = "others may read or write it: chmod 600"
    else:
        reason = "it is not a file"
    if reason:
        os.close(fd)
        raise _refusal(path, reason)
    return fd

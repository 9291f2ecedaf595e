"""A job's files of lines: read within bounds, numbered as an editor does, and written."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import os
import shutil
import sys
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, TypeAlias, cast

import numpy as np

from fastdecode.core.errors import ConfigError
from fastdecode.core.files import STANDARD, open_output, write_whole
from fastdecode.core.os_errors import explained

MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_SHARDS = 1 << 20
_GZIP: Final = b"\x1f\x8b"  # no line of JSON begins so
LineId: TypeAlias = "str | int"
"""As the line gave it. 1 and "1" are the same."""
Identify: TypeAlias = Callable[[dict[str, Any]], tuple[int, bool]]
"""Returns which line an answer is for, and True if it is an error. Raises KeyError, ValueError or
TypeError if it is not an answer of the run."""


@dataclass(frozen=True)
class Shard:
    """Lines ``index``, ``index + count``, … of a file, whose first line is 1. For job arrays."""

    index: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str) -> Shard:
        """Return the shard of ``2/8``. Raises: ConfigError: If the text isn't a shard."""
        index, slash, count = text.partition("/")
        numbers = index.isdecimal() and count.isdecimal() and slash == "/"
        if not numbers or not 1 <= int(index) <= int(count) <= MAX_SHARDS:
            raise ConfigError(
                f"--shard {text!r} is not I/N with 1 <= I <= N <= {MAX_SHARDS}: "
                "give 1/8, 2/8, ... 8/8 to the eight jobs of an array"
            )
        return cls(int(index), int(count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def __contains__(self, number: int) -> bool:
        return number % self.count == self.index % self.count


WHOLE: Final = Shard()


class LineSource:
    """A file of lines, plain or gzip, that can be read several times. Close it. ``copy``, an
    unnamed file with the lines of standard input, is read in place of ``path``."""

    def __init__(self, path: Path, copy: IO[bytes] | None = None) -> None:
        self._path = path
        self._copy = copy
        self._reading: IO[bytes] | None = None

    def __str__(self) -> str:
        return "standard input" if self._copy is not None else str(self._path)

    @classmethod
    def of(cls, path: Path, directory: Path) -> LineSource:
        """Return a path's lines. Those of standard input are copied into the directory."""
        if path != STANDARD:
            return cls(path)
        try:
            copy = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (closed with the source)
            shutil.copyfileobj(sys.stdin.buffer, copy, 1 << 20)
            copy.flush()
        except OSError as error:
            text = f"can't copy standard input into {directory}: {explained(error)}"
            raise ConfigError(text) from None
        return cls(path, copy)

    @property
    def share(self) -> float:
        """How much of it the reader has read, 0 to 1."""
        if self._reading is None or self._reading.closed:
            return 1.0
        return self._reading.tell() / max(1, os.fstat(self._reading.fileno()).st_size)

    @contextlib.contextmanager
    def open(self) -> Iterator[LineReader]:
        """Open the lines from the first on, uncompressed, without a byte order mark. Raises
        ConfigError: If it isn't UTF-8, or while it is read, not a whole gzip file."""
        # A copy is opened by its descriptor, to have a place of its own.
        path = self._path if self._copy is None else f"/proc/self/fd/{self._copy.fileno()}"
        with open(path, "rb") as raw:
            self._reading = raw
            is_packed = raw.read(len(_GZIP)) == _GZIP
            raw.seek(0)
            if not is_packed:
                yield self._reader(raw)
                return
            try:
                with gzip.GzipFile(fileobj=raw) as file:
                    yield self._reader(cast("IO[bytes]", file))
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                text = f"the input {self} is a damaged gzip file: {error}: compress it again"
                raise ConfigError(text) from None

    def _reader(self, file: IO[bytes]) -> LineReader:
        first = file.read(4)
        if b"\0" in first or first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise ConfigError(
                f"the input {self} is not UTF-8 text but UTF-16, UTF-32 or binary: save it as "
                "UTF-8 (in PowerShell: Set-Content -Encoding utf8)"
            )
        file.seek(len(codecs.BOM_UTF8) if first.startswith(codecs.BOM_UTF8) else 0)
        return LineReader(file)

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()


class LineReader:
    """Lines of a file that aren't blank, each with its number. None in place of a line that is
    longer than ``MAX_LINE_BYTES``."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def __iter__(self) -> Iterator[tuple[int, bytes | None]]:
        number = 0
        while raw := self._read():
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                while raw and not raw.endswith(b"\n"):
                    raw = self._read()
                yield number, None
            elif not raw.isspace():
                yield number, raw

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def _read(self) -> bytes:
        raw = self._file.readline(MAX_LINE_BYTES + 1)
        self._hash.update(raw)
        return raw


class LineSink:
    """An output that is opened and emptied: a file, or standard output. ``packs`` compresses it by
    gzip; None decides by its suffix. Raises ConfigError: If it can't be opened."""

    def __init__(self, path: Path, packs: bool | None = None) -> None:
        self._fd = os.dup(1) if path == STANDARD else open_output(path, "output")
        self._packed: gzip.GzipFile | None = None
        if packs or (packs is None and path.suffix == ".gz"):
            self._file = os.fdopen(self._fd, "wb")
            self._packed = gzip.GzipFile("", "wb", fileobj=self._file, mtime=0)

    def write(self, line: bytes) -> None:
        """Write a line. Of a plain file, nothing of the line stays if that fails."""
        if self._packed is not None:
            self._packed.write(line)
        else:
            write_whole(self._fd, line)

    def close(self) -> None:
        if self._packed is None:
            os.close(self._fd)
            return
        with self._file:
            self._packed.close()


class LineSet:
    """A set of line numbers, one bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self._bits) and bool(self._bits[place] >> (number & 7) & 1)

    def add(self, number: int) -> None:
        if number in self:
            return
        place = number >> 3
        if place >= len(self._bits):
            self._bits.extend(bytes(max(place + 1 - len(self._bits), len(self._bits))))
        self._bits[place] |= 1 << (number & 7)
        self._num += 1


class DuplicateFinder:
    """Finds lines whose id an earlier line has, with 24 bytes a line: a digest and a number.

    Among a million different ids, two share a digest with a probability below 1e-26.
    """

    def __init__(self) -> None:
        self._digests = bytearray()
        self._numbers = array("q")

    def add(self, number: int, line_id: LineId) -> None:
        self._digests += hashlib.blake2b(str(line_id).encode(), digest_size=16).digest()
        self._numbers.append(number)

    def find(self) -> Iterator[tuple[int, int]]:
        """Yield each line whose id was used before, and the first line that used it, in order."""
        digests = np.frombuffer(self._digests, np.uint64).reshape(-1, 2)
        # Most files have no duplicates, and sorting halves alone takes 8 bytes a line.
        halves = np.sort(digests[:, 0])
        repeated = np.unique(halves[1:][halves[1:] == halves[:-1]])
        if not len(repeated):
            return
        first: dict[bytes, int] = {}
        for place in np.flatnonzero(np.isin(digests[:, 0], repeated)):
            number = self._numbers[place]
            earlier = first.setdefault(digests[place].tobytes(), number)
            if earlier != number:
                yield number, earlier

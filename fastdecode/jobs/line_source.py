"""Where a job's lines come from: a file, a gzip file, or standard input. They can
be read several times."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, cast

from fastdecode.core.errors import ConfigError
from fastdecode.core.files import STANDARD
from fastdecode.core.os_errors import explained

_GZIP: Final = b"\x1f\x8b"
"""No line of JSON begins so."""


class LineSource:
    """A file of lines; close it.

    Args:
        path: for messages, and what is read.
        copy: in place of the path, an unnamed file that is open for reading.
    """

    def __init__(self, path: Path, copy: IO[bytes] | None = None) -> None:
        self._path = path
        self._copy = copy
        self._reading: IO[bytes] | None = None

    def __str__(self) -> str:
        return "standard input" if self._copy is not None else str(self._path)

    @property
    def num_bytes(self) -> int:
        """As stored: those of a gzip file are fewer than its lines'."""
        with self._raw() as file:
            return os.fstat(file.fileno()).st_size

    @property
    def share(self) -> float:
        """How much of it the reader has read, 0 to 1."""
        if self._reading is None or self._reading.closed:
            return 1.0
        return self._reading.tell() / max(1, os.fstat(self._reading.fileno()).st_size)

    @contextlib.contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The lines from the first on, uncompressed, without a byte order mark.

        Raises:
            ConfigError: If it can't be read, or isn't UTF-8 or a whole gzip file; when
                it is opened or while it is read.
        """
        with self._raw() as raw:
            self._reading = raw
            is_packed = raw.read(len(_GZIP)) == _GZIP
            raw.seek(0)
            if not is_packed:
                yield self._as_utf8(raw)
                return
            try:
                with gzip.GzipFile(fileobj=raw) as file:
                    yield self._as_utf8(cast("IO[bytes]", file))
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ConfigError(
                    f"the input {self} is a damaged gzip file: {error}: compress it again"
                ) from None

    def _as_utf8(self, file: IO[bytes]) -> IO[bytes]:
        first = file.read(4)
        if b"\0" in first or first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise ConfigError(
                f"the input {self} is not UTF-8 text but UTF-16, UTF-32 or binary: save it as "
                "UTF-8 (in PowerShell: Set-Content -Encoding utf8)"
            )
        file.seek(len(codecs.BOM_UTF8) if first.startswith(codecs.BOM_UTF8) else 0)
        return file

    def close(self) -> None:
        """Forget a copy."""
        if self._copy is not None:
            self._copy.close()

    def _raw(self) -> IO[bytes]:
        if self._copy is None:
            return self._path.open("rb")
        return open(f"/proc/self/fd/{self._copy.fileno()}", "rb")  # at a place of its own


def open_source(path: Path, directory: Path) -> LineSource:
    """A path's lines; ``-``: those of standard input, which are copied into an
    unnamed file in the directory, since they are read twice.

    Raises:
        ConfigError: they can't be copied.
    """
    if path != STANDARD:
        return LineSource(path)
    copy = None
    try:
        copy = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (closed with the source)
        shutil.copyfileobj(sys.stdin.buffer, copy, 1 << 20)
        copy.flush()
    except OSError as error:
        if copy is not None:
            copy.close()
        raise ConfigError(
            f"can't copy standard input into {directory}: {explained(error)}"
        ) from None
    return LineSource(path, copy)

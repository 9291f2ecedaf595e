"""A file that lines are written to: plain, gzip, or standard output."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

from fastdecode.core.files import STANDARD, open_output, write_whole


class LineSink:
    """Opens an output and empties it; close it.

    Args:
        path: ``-``: standard output; ``….gz``: it is compressed.

    Raises:
        ConfigError: it can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.dup(1) if path == STANDARD else open_output(path, "output")
        self._packed: gzip.GzipFile | None = None
        if path.suffix == ".gz":
            self._file = os.fdopen(self._fd, "wb")
            self._packed = gzip.GzipFile("", "wb", fileobj=self._file, mtime=0)

    def write(self, line: bytes) -> None:
        """A whole line, or nothing of it where it is a plain file. Raises OSError."""
        if self._packed is not None:
            self._packed.write(line)
        else:
            write_whole(self._fd, line)

    def close(self) -> None:
        """Raises OSError: the end of a compressed file can't be written."""
        if self._packed is None:
            os.close(self._fd)
            return
        with self._file:
            self._packed.close()

"""A JSON line for every request: when, how large, how long, how it ended. Never
what was asked or answered. The lines serve as a trace of a workload."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from fastdecode.core.errors import ConfigError, Given


class RequestLog:
    """Appends lines to a file.

    Args:
        path: None: nowhere; "-": stdout.

    Raises:
        ConfigError: the file can't be opened.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._fd: int | None = None
        self.open()

    def open(self) -> None:
        """Open the file anew: it may have been moved away. Raises ConfigError."""
        self.close()
        if self._path is None:
            return
        if self._path == "-":
            self._fd = os.dup(sys.stdout.fileno())
            return
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
        except OSError as error:
            raise ConfigError(
                Given("request_log", self._path), f" can't be written: {error.strerror}"
            ) from None

    def write(self, line: dict[str, Any]) -> None:
        """One line, whole; that it can't be written ends no request."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.write(self._fd, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Safe to call twice."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

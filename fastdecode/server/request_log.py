"""A JSON line for every request: when, how large, how long, how it ended. Never
what was asked or answered. The lines serve as a trace of a workload."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
from typing import Any

from fastdecode.core.errors import ConfigError
from fastdecode.core.os_errors import explained

logger = logging.getLogger(__name__)

MAX_WAITING_LINES = 10_000
_LAST_LINES_S = 1.0


class RequestLog:
    """Appends lines to a file, from a thread of its own: a file that takes
    nothing holds up no request. Lines that it has no room for are left out.

    Args:
        path: None: nowhere; "-": stdout.

    Raises:
        ConfigError: the file can't be opened.
    """

    def __init__(self, path: str | None, max_waiting_lines: int = MAX_WAITING_LINES) -> None:
        self._path = path
        self._lines: queue.Queue[bytes | None] = queue.Queue(max_waiting_lines)
        self._lock = threading.Lock()
        self._next_fd: int | None = None
        """What the thread is to write to from now on."""
        self._num_left_out = 0
        self._thread: threading.Thread | None = None
        if path is not None:
            self._next_fd = _open(path)
            self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
            self._thread.start()

    def reopen(self) -> None:
        """Open the file anew: it may have been moved away. If it can't be
        opened, go on with the old one, and say so."""
        if self._path is None:
            return
        try:
            fd = _open(self._path)
        except ConfigError as error:
            logger.error("%s: the old file is written on", error)
            return
        with self._lock:
            passed_over, self._next_fd = self._next_fd, fd
        if passed_over is not None:
            os.close(passed_over)

    def write(self, line: dict[str, Any]) -> None:
        """One line, whole, soon; that it can't be written ends no request."""
        if self._thread is None:
            return
        try:
            self._lines.put_nowait(json.dumps(line).encode() + b"\n")
        except queue.Full:
            self._num_left_out += 1
            if self._num_left_out == 1:
                logger.error("the request log takes nothing: lines are left out")

    def close(self) -> None:
        """Write what is left, if that takes no more than a moment. Safe to call twice."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait(None)
                self._thread.join(_LAST_LINES_S)
        self._thread = None

    def _run(self) -> None:
        fd: int | None = None
        could_write = True
        while (line := self._lines.get()) is not None:
            fd = self._newest(fd)
            try:
                _write_all(fd, line)
                could_write = True
            except OSError as error:
                if could_write:
                    logger.error("the request log can't be written: %s", error.strerror)
                could_write = False
        os.close(self._newest(fd))

    def _newest(self, fd: int | None) -> int:
        """The file to write to; the one before is closed."""
        with self._lock:
            newest, self._next_fd = self._next_fd, None
        if newest is None:
            assert fd is not None, "the first is opened before the thread begins"
            return fd
        if fd is not None:
            os.close(fd)
        return newest


def _open(path: str) -> int:
    """Raises ConfigError."""
    if path == "-":
        return os.dup(sys.stdout.fileno())
    try:
        # Not to wait for a pipe's reader: without one, it fails.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise ConfigError(f"--request-log {path} can't be written: {explained(error)}") from None
    os.set_blocking(fd, True)
    return fd


def _write_all(fd: int, line: bytes) -> None:
    """Raises OSError."""
    while line:
        line = line[os.write(fd, line) :]

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
from logging.handlers import WatchedFileHandler
from typing import Any

from fastdecode.core.errors import ConfigError
from fastdecode.core.os_errors import explained

logger = logging.getLogger(__name__)

MAX_WAITING_LINES = 10_000
_LAST_LINES_S = 1.0


class RequestLog:
    """Appends lines to a file from a thread, so that a file that takes nothing delays no request.
    Lines without room are left out. A file that was moved away is reopened. The ``path`` "-" is
    stdout; None is nowhere. Raises ConfigError: If the file can't be opened."""

    def __init__(self, path: str | None, max_waiting_lines: int = MAX_WAITING_LINES) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(max_waiting_lines)
        self._is_full = False
        self._thread: threading.Thread | None = None
        if path is not None:
            target = logging.StreamHandler(sys.stdout) if path == "-" else _opened(path)
            target.handleError = _raise  # type: ignore[method-assign]
            self._thread = threading.Thread(target=self._write_all, args=(target,), daemon=True)
            self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Write one line, whole, soon; that it can't be written ends no request."""
        if self._thread is None:
            return
        try:
            self._lines.put_nowait(json.dumps(line))
        except queue.Full:
            if not self._is_full:
                logger.error("the request log takes nothing: lines are left out")
            self._is_full = True

    def close(self) -> None:
        """Write what is left, if that takes no more than a moment. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._lines.put_nowait(None)
            thread.join(_LAST_LINES_S)

    def _write_all(self, target: logging.Handler) -> None:
        """Write lines until None comes. Report the first one of those that can't be written."""
        is_failing = False
        while (line := self._lines.get()) is not None:
            try:
                target.emit(logging.makeLogRecord({"msg": line}))
                is_failing = False
            except Exception as error:
                if not is_failing:
                    logger.error("the request log can't be written: %s", error)
                is_failing = True


def _opened(path: str) -> logging.Handler:
    """Return a file, readable for its owner only. Raises: ConfigError: If it can't be opened."""
    try:
        # Not to wait for a pipe's reader: without one, it fails.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        text = f"--request-log {path} can't be written: {explained(error)}"
        raise ConfigError(text) from None
    os.close(fd)
    return WatchedFileHandler(path)


def _raise(record: logging.LogRecord) -> None:
    """Raise the error of a line that can't be written, which ``logging`` would print."""
    raise

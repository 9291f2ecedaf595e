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
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from typing import Any

from fastdecode.core.errors import ConfigError
from fastdecode.core.os_errors import explained

logger = logging.getLogger(__name__)

MAX_WAITING_LINES = 10_000
_LAST_LINES_S = 1.0


class RequestLog:
    """Appends lines to a file from a thread, so that a file that takes nothing delays no request.
    Lines without room are left out. A file that was moved away is reopened.

    Args:
        path: None: nowhere; "-": stdout.
        max_waiting_lines: More are left out.

    Raises:
        ConfigError: If the file can't be opened.
    """

    def __init__(self, path: str | None, max_waiting_lines: int = MAX_WAITING_LINES) -> None:
        self._listener: QueueListener | None = None
        if path is None:
            return
        target = _Stdout(sys.stdout) if path == "-" else _LogFile(path)
        lines: queue.Queue[Any] = queue.Queue(max_waiting_lines)
        self._handler = _Waiting(lines)
        self._listener = QueueListener(lines, target)
        self._listener.start()

    def write(self, line: dict[str, Any]) -> None:
        """Write one line, whole, soon; that it can't be written ends no request."""
        if self._listener is not None:
            self._handler.handle(logging.makeLogRecord({"msg": json.dumps(line)}))

    def close(self) -> None:
        """Write what is left, if that takes no more than a moment. Safe to call twice."""
        if self._listener is not None:
            stopping = threading.Thread(target=self._stop, args=(self._listener,), daemon=True)
            stopping.start()
            stopping.join(_LAST_LINES_S)
        self._listener = None

    def _stop(self, listener: QueueListener) -> None:
        with contextlib.suppress(queue.Full):
            listener.stop()


class _Waiting(QueueHandler):
    """Lines that wait for the thread."""

    is_full = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's)
        if not self.is_full:
            logger.error("the request log takes nothing: lines are left out")
        self.is_full = True


class _Reported(logging.Handler):
    """Reports lines that can't be written, once until a line could be."""

    is_failing = False
    reason: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        was_failing, self.is_failing = self.is_failing, False
        try:
            super().emit(record)
        except OSError:  # of reopening a file
            self.handleError(record)
        if self.is_failing and not was_failing:
            logger.error("the request log can't be written: %s", self.reason)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's)
        self.is_failing, self.reason = True, sys.exc_info()[1]


class _Stdout(_Reported, logging.StreamHandler):  # type: ignore[type-arg]  # until 3.11
    """The command's own output."""


class _LogFile(_Reported, WatchedFileHandler):
    """A file, readable for its owner only."""

    def __init__(self, path: str) -> None:
        try:
            # Not to wait for a pipe's reader: without one, it fails.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            text = f"--request-log {path} can't be written: {explained(error)}"
            raise ConfigError(text) from None
        super().__init__(path)
        os.close(fd)

"""Logs without what somebody asked: a traceback's values may hold a prompt."""

from __future__ import annotations

import logging
import threading


class NoTraces(logging.Filter):
    """Keeps tracebacks, whose values may be what somebody asked, out of a log."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[0] is not None:
            record.msg, record.args = f"{record.getMessage()}: {record.exc_info[0].__name__}", ()
            record.exc_info = record.exc_text = None
        return True


def keep_traces_out() -> None:
    """From now on, of what the root logger writes, and of threads that end with
    an error."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(NoTraces())
    threading.excepthook = _tell_of_thread


def _tell_of_thread(ended: threading.ExceptHookArgs) -> None:
    name = "?" if ended.thread is None else ended.thread.name
    logging.getLogger(__name__).error("thread %s ended: %s", name, ended.exc_type.__name__)

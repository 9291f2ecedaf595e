"""Logs without what somebody asked: a traceback's values may hold a prompt."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable


class NoTraces(logging.Filter):
    """Keeps tracebacks, whose values may be what somebody asked, out of a log."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[0] is not None:
            record.msg, record.args = f"{record.getMessage()}: {record.exc_info[0].__name__}", ()
            record.exc_info = record.exc_text = None
        return True


def keep_traces_out() -> Callable[[], None]:
    """Filter the root logger's records, and errors of threads. Return what undoes it."""
    handlers, hook, filter_ = logging.getLogger().handlers[:], threading.excepthook, NoTraces()
    for handler in handlers:
        handler.addFilter(filter_)

    def tell_of_thread(ended: threading.ExceptHookArgs) -> None:
        name = "?" if ended.thread is None else ended.thread.name
        logging.getLogger(__name__).error("thread %s ended: %s", name, ended.exc_type.__name__)

    threading.excepthook = tell_of_thread

    def undo() -> None:
        for handler in handlers:
            handler.removeFilter(filter_)
        threading.excepthook = hook

    return undo

"""Interrupts (Ctrl-C) of threads that wait for an engine."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType

from fastdecode.core.host.processes import Interrupted


def start(
    thread: threading.Thread,
    made: SimpleQueue[BaseException | None],
    ask_to_close: Callable[[], None],
) -> None:
    """Start the thread that makes the engine, and wait. Raise what making it raised."""
    try:
        thread.start()
        failed = made.get()
    except BaseException:
        # Interrupted. What would have stopped this thread, had it made the
        # engine, stops the one that makes it.
        ask_to_close()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Interrupted)
        )
        raise
    raise_if(failed)


def raise_if(failed: BaseException | None) -> None:
    """Raise what was caught elsewhere, if anything was."""
    try:
        if failed is not None:
            raise failed
    finally:
        del failed  # its traceback has this frame, which would keep it


@contextlib.contextmanager
def kept_interrupts() -> Iterator[Callable[[], bool]]:
    """Inside, Ctrl-C is kept until the end; a second one isn't. Gives whether
    one is kept. Where the signal has another handler than Python's own, or in
    another thread than the main one, nothing is changed."""
    before = signal.getsignal(signal.SIGINT)
    if (
        before is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield lambda: False
        return
    kept: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        if kept:
            signal.default_int_handler(number, frame)
        kept.append(number)

    signal.signal(signal.SIGINT, keep)
    try:
        yield lambda: bool(kept)
    finally:
        signal.signal(signal.SIGINT, before)
    if kept:
        raise KeyboardInterrupt

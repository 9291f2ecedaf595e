"""The loop of the one thread that owns an engine: steps while there is work,
and between two of them what others want."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic

from fastdecode.engine.engine_thread import EngineThread, T


class EngineLoop(Generic[T]):
    """Belongs to one thread, but for what is said to be for any.

    Args:
        at_end: called when the loop ends.
    """

    def __init__(self, at_end: Callable[[], object]) -> None:
        self._at_end = at_end
        # Waits are single calls in C: an interrupt leaves nothing half done,
        # and may come in a signal's handler.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._drained: list[SimpleQueue[None]] = []
        self._is_finished = threading.Event()  # from then on nobody looks into the inbox by himself
        self._seeing_off = threading.Lock()
        self.owner: EngineThread[T] | None = None
        self.is_closing = False
        """It ends as soon as the step in flight is over."""
        self.is_over = False
        """No step will be made any more."""
        self.closing_failed: BaseException | None = None
        """What closing the engine raised."""

    @property
    def owned(self) -> EngineThread[T]:
        assert self.owner is not None, "not open yet"
        return self.owner

    def run(self, make: Callable[[], T], made: SimpleQueue[BaseException | None]) -> None:
        """Make the engine, say what that raised, and go on to the end. One that
        was made is closed, even where an interrupt comes before that was said."""
        try:
            self.owner = EngineThread(make())
            made.put(None)
        except BaseException as error:
            self.is_closing = True
            self.is_over = self.owner is None
            made.put(error)
        finally:
            self.run_to_end()

    def run_to_end(self) -> None:
        """Until somebody asks it to close; then close the engine."""
        if self.owner is None or self.is_over:
            return
        try:
            while not self.is_closing:
                self.turn(None)
        finally:
            self.is_over = True
            self._at_end()
            del self._at_end  # it may know whoever made this loop
            try:
                self.owner.close()
            except BaseException as error:
                self.closing_failed = error
            self._is_finished.set()
            self._see_off()

    def turn(self, timeout_s: float | None) -> None:
        """Do what others want, and a step if there is work; if there is none,
        or it has to wait, wait so long for what they want."""
        owner = self.owned
        pause_s = owner.served.engine.pause_s if owner.has_work else None
        waits_s = [wait_s for wait_s in (pause_s, timeout_s) if wait_s is not None]
        try:
            self._obey(min(waits_s, default=None))
            if not self.is_closing:
                owner.step()
        except BaseException as error:
            owner.break_down(error)
        owner.hand_out()
        if not owner.has_open:
            self._tell_drained()

    def turn_alone(self, timeout_s: float) -> None:
        """One turn, where nobody runs it to its end; and to its end if that was
        asked for."""
        self.turn(timeout_s)
        if self.is_closing:
            self.run_to_end()

    def put(self, act: Callable[[], None]) -> None:
        """Have something done between two steps; any thread."""
        self._inbox.put(act)
        if self._is_finished.is_set():
            self._see_off()

    def putting(self, act: Callable[[], None]) -> Callable[[], None]:
        """A call that has something done, unless the loop has ended; any
        thread. It is one call in C: an interrupt comes before or after it."""
        return partial(self._inbox.put, act)

    def ask_to_close(self) -> None:
        """Have it end; doesn't wait; any thread."""
        if not self.is_over:  # or nobody would take it out, and it keeps this object
            self._inbox.put(self._close)

    def when_drained(self) -> SimpleQueue[None]:
        """Where None will be put once no request is open; any thread."""
        drained: SimpleQueue[None] = SimpleQueue()
        self.put(partial(self._drained.append, drained))
        return drained

    def _close(self) -> None:
        self.is_closing = True

    def _obey(self, timeout_s: float | None) -> None:
        with contextlib.suppress(Empty):
            self._inbox.get(timeout_s != 0, timeout_s)()
            for _ in range(self._inbox.qsize()):
                # And no more, or who asks much would starve the steps.
                self._inbox.get_nowait()()

    def _see_off(self) -> None:
        """The engine is closed: answer those who came too late; any thread."""
        with self._seeing_off:
            self._obey(0)
            self.owned.hand_out()
            self._tell_drained()

    def _tell_drained(self) -> None:
        while self._drained:
            self._drained.pop().put(None)

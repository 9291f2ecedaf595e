"""One way into an engine: requests in from any thread, deltas out, and one
thread that owns the engine.

That thread makes the engine, steps it while there is work, and sleeps while
there is none (``fastdecode.engine.loop``). What others want is put into its
inbox, and looked at between two steps. So an interrupt (Ctrl-C) of whoever
waits for an answer never comes in the middle of a step: the engine stays
usable.

The engine is made by the thread that steps it, since OpenMP's threads and
CUDA's current device belong to the thread that calls. Where only one certain
thread may do what a step does (an MPI library that doesn't let threads take
turns), the service has no thread of its own: whoever waits for deltas runs the
steps meanwhile, and an interrupt is kept until the step is over.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Generic, Literal

from msgspec import structs

from fastdecode.core.delta import Delta, DeltaQueue
from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.host.processes import Interrupted
from fastdecode.core.sequence import Request
from fastdecode.engine.engine_thread import EngineThread, T
from fastdecode.engine.loop import EngineLoop
from fastdecode.wire.instances import EngineNumbers, StatusReport

logger = logging.getLogger(__name__)

LEAVING_S = 10.0
"""How long a process that ends waits for the thread of an engine that nobody closed."""
_LOOK_EVERY_S = 0.2
"""How long an interrupt may wait where the waiting thread also runs the steps,
and there are none to run."""


@dataclass(frozen=True)
class Snapshot:
    """How a service is, and how its engine was after the last step."""

    state: Literal["starting", "ready", "draining", "broken", "closed"]
    engine: EngineNumbers
    error: FastDecodeError | None = None
    """Why it is broken."""

    def report(self, figures: Mapping[str, Any]) -> StatusReport:
        """The same as others report it, with what the engine has said between two steps."""
        code = None if self.error is None else self.error.code
        return StatusReport(
            **structs.asdict(self.engine), state=self.state, error=code, figures=figures
        )


class EngineService(Generic[T]):
    """Runs requests on one engine. All methods may be called from any thread,
    but not from a fork of the process.

    Args:
        make: makes the engine, in the thread that will own it.
        own_thread: whether the service has a thread of its own; without one,
            whoever calls ``open`` must also be who calls ``take``, ``call``,
            ``drain`` and ``close``.
        in_callers_thread: called before the engine is made, and before requests are
            queued; None: nothing is.
    """

    def __init__(
        self,
        make: Callable[[], T],
        *,
        own_thread: bool = True,
        in_callers_thread: Callable[[], object] | None = None,
    ) -> None:
        self._make = make
        self._in_callers_thread = in_callers_thread
        self._pid = os.getpid()
        self._loop: EngineLoop[T] = EngineLoop(lambda: atexit.unregister(self._leave))
        self._made: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if own_thread:
            live = partial(self._loop.run, make, self._made)
            self._thread = threading.Thread(target=live, name="engine", daemon=True)
        self._is_draining = False

    def open(self) -> T:
        """Make the engine. Returns it: what is known of it from its start on
        may be read by any thread.

        Raises:
            BaseException: what making it raised.
        """
        if self._in_callers_thread is not None:
            self._in_callers_thread()
        if self._thread is None:
            self._loop.owner = EngineThread(self._make())
        else:
            _start(self._thread, self._made, self.ask_to_close)
        atexit.register(self._leave)
        return self._loop.owned.served

    def submit(self, requests: Iterable[Request], reader: DeltaQueue) -> None:
        """Queue requests, whose ids are unique among the open ones; work on
        them begins at once.

        Every request comes to one last delta for each of its sequences, or to
        one error: a CapacityError if it could never fit, a RequestError if its
        id is in use.

        Raises:
            FastDecodeError: the engine is broken (why), closed, draining or
                another process's; nothing was queued.
        """
        self._check_usable()
        if self._in_callers_thread is not None:
            self._in_callers_thread()
        self._loop.put(partial(self._loop.owned.submit, list(requests), reader))

    def cancel(self, request_id: str) -> None:
        """End a request with the error ``cancelled``; what it holds is free
        when the step in flight is over. Ids of requests that are over, or of
        none, are no error."""
        self._loop.put(partial(self._loop.owned.cancel, request_id))

    def cancel_waiting(self, reader: DeltaQueue) -> None:
        """End those requests of a reader with the error ``cancelled`` of which nothing has run."""
        self._loop.put(partial(self._loop.owned.cancel_waiting, reader))

    def cancel_all(self, reader: DeltaQueue, error: FastDecodeError) -> None:
        """End all requests of a reader with an error."""
        self._loop.put(partial(self._loop.owned.cancel_all, reader, error))

    def forgetting(self, reader: DeltaQueue) -> Callable[[], None]:
        """A call that ends all requests of a reader, without a word. It is one
        call in C, so an interrupt comes before or after it; it may be made
        twice."""
        return self._loop.putting(partial(self._loop.owned.forget, reader))

    def take(self, reader: DeltaQueue, timeout_s: float | None = None) -> list[Delta]:
        """``reader.take``, whichever thread runs the steps."""
        if self._thread is not None:
            return reader.take(timeout_s)
        end_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with kept_interrupts() as is_interrupted:
            while not is_interrupted():
                deltas = reader.take(0)
                left_s = end_s - time.monotonic()
                if deltas or left_s <= 0:
                    return deltas
                self._loop.turn_alone(min(left_s, _LOOK_EVERY_S))
        return []

    def call(self, act: Callable[[T], None]) -> None:
        """Do something with the engine between two steps, and wait for it.
        Raises what that raises."""
        self._check_usable()
        done: SimpleQueue[BaseException | None] = SimpleQueue()

        def act_if_open() -> None:
            self._check_usable()
            act(self._loop.owned.served)

        self._loop.put(partial(_do, act_if_open, done))
        while self._thread is None and done.empty():
            self._loop.turn(0)
        _raise(done.get())

    def look(self, at: Callable[[T], None] = lambda served: None) -> None:
        """Have the engine find out how its R-workers are, if it has no work:
        otherwise it does so anyway. Then have ``at`` look at it, between two
        steps, unless it is broken or closed. Doesn't wait. If no R-worker is
        left, or ``at`` raises a FastDecodeError, it is broken from then on; any
        other exception of ``at`` is logged. May be called while the engine is
        being made, by what it has started already."""
        self._loop.put(lambda: self._loop.owned.look(at))

    def snapshot(self) -> Snapshot:
        """How it is; never waits for a step."""
        owner = self._loop.owner
        if owner is None:
            return Snapshot("closed" if self._loop.is_over else "starting", EngineNumbers())
        if self._loop.is_over:
            return Snapshot("closed", owner.numbers, owner.broken)
        if owner.broken is not None:
            return Snapshot("broken", owner.numbers, owner.broken)
        return Snapshot("draining" if self._is_draining else "ready", owner.numbers)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests, and wait until those that are open are over;
        False if they aren't in time."""
        self._is_draining = True
        drained = self._loop.when_drained()
        end_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while self._thread is None and drained.empty() and time.monotonic() < end_s:
            self._loop.turn_alone(_LOOK_EVERY_S)
        try:
            drained.get(timeout=None if timeout_s is None else max(0.0, end_s - time.monotonic()))
        except Empty:
            return False
        return True

    def ask_to_close(self) -> None:
        """Have the engine closed as soon as the step in flight is over; doesn't wait."""
        self._loop.ask_to_close()

    def close(self, timeout_s: float | None = None) -> None:
        """Close the engine; requests that are open end with an error. Safe to
        call twice. A thread that doesn't end in time is left to the end of the process,
        with a warning.

        Raises:
            WorkerError: an R-worker that wasn't lost did not stop in time.
        """
        if os.getpid() != self._pid:
            return  # a fork has neither the thread nor the R-workers
        self.ask_to_close()
        if self._thread is None:
            self._loop.run_to_end()
        elif self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("an engine has not stopped within %.0f s: it hangs", timeout_s)
        failed, self._loop.closing_failed = self._loop.closing_failed, None
        _raise(failed)

    def _check_usable(self) -> None:
        here = os.getpid()
        if here != self._pid:
            raise ConfigError(
                f"this LLM was made by process {self._pid}, and its fork {here} can't use it: "
                "make one after forking",
                code="forked",
            )
        if self._loop.owned.broken is not None:
            raise copy(self._loop.owned.broken)
        if self._loop.is_over:
            raise ConfigError("this LLM was closed: make another one", code="closed")
        if self._is_draining:
            raise ConfigError(
                "no more requests are taken: this LLM is about to end", code="draining"
            )

    def _leave(self) -> None:
        """The process ends, and nobody has closed the engine."""
        if os.getpid() == self._pid and self._thread is not None:
            self.ask_to_close()
            self._thread.join(LEAVING_S)


def _start(
    thread: threading.Thread,
    made: SimpleQueue[BaseException | None],
    ask_to_close: Callable[[], None],
) -> None:
    """Have the thread make the engine, and wait until it has. Raises what that raises."""
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
    _raise(failed)


def _do(act: Callable[[], None], done: SimpleQueue[BaseException | None]) -> None:
    try:
        act()
    except BaseException as error:
        done.put(error)
    else:
        done.put(None)


def _raise(failed: BaseException | None) -> None:
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

"""One way into an engine: requests in from any thread, deltas out, and one thread that owns the
engine.

That thread makes the engine, steps it while there is work, and sleeps otherwise. What
others want is put into its inbox, and looked at between two steps. So an interrupt (Ctrl-C) of a
thread that waits for an answer never comes in the middle of a step: the engine stays usable.

The engine is made by the thread that steps it, since OpenMP's threads and CUDA's current device
belong to the thread that calls.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Literal

from msgspec import structs

from fastdecode.core.delta import CANCELLED, Delta, DeltaQueue, Listener
from fastdecode.core.errors import (
    ConfigError,
    FastDecodeError,
    RequestError,
    duplicate_id,
    without_frames,
)
from fastdecode.core.host.processes import Interrupted
from fastdecode.core.sequence import Request
from fastdecode.wire.instances import EngineNumbers, StatusReport

logger = logging.getLogger(__name__)

LEAVING_S = 10.0
"""How long a process that ends waits for the thread of an engine that was not closed."""
NUM_LATEST_STEPS = 256


@dataclass(eq=False)
class _OpenRequest:
    """A request that isn't over."""

    reader: DeltaQueue
    num_left: int  # sequences that aren't over


@dataclass(frozen=True)
class Snapshot:
    """How a service is, and how its engine was after the last step."""

    state: Literal["starting", "ready", "draining", "broken", "closed"]
    engine: EngineNumbers
    error: FastDecodeError | None = None  # why it is broken

    def report(self, figures: Mapping[str, Any]) -> StatusReport:
        """The same as others report it, with what the engine has said between two steps."""
        code = None if self.error is None else self.error.code
        return StatusReport(
            **structs.asdict(self.engine), state=self.state, error=code, figures=figures
        )


class EngineService:
    """Runs requests on one engine. All public methods may be called from any thread,
    but not from a fork of the process. The others are for the thread that owns the engine.

    Args:
        make: Makes the engine and what is around it (``RunningEngine``, ``RunningCluster``), in
            the thread that will own them.
        in_callers_thread: Called before the engine is made, and before requests are queued.
        inbox: Where its thread gets what others want. None for a queue.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        in_callers_thread: Callable[[], object] | None = None,
        inbox: SimpleQueue[Callable[[], None]] | None = None,
    ) -> None:
        self._make = make
        self._in_callers_thread = in_callers_thread
        self._pid = os.getpid()
        # Waits are single calls in C: an interrupt leaves nothing half done,
        # and may come in a signal's handler.
        self._inbox = inbox or SimpleQueue[Callable[[], None]]()
        self._made: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self._served: Any = None
        self._open: dict[str, _OpenRequest] = {}
        self._fresh: dict[DeltaQueue, list[Delta]] = {}
        """Deltas that readers are given when the step is over."""
        self._drained: list[SimpleQueue[None]] = []
        self._num_steps = 0
        self._ended_s: float | None = None  # ``time.monotonic()`` at the end of the last step
        self._latest_s: deque[float] = deque(maxlen=NUM_LATEST_STEPS)  # what steps took
        self._numbers = EngineNumbers()
        self._is_draining = False
        self._is_closing = False  # it ends as soon as the step in flight is over
        self._is_over = False  # the last step has been made
        self._broken: FastDecodeError | None = None  # why steps cannot be made
        self._ended: FastDecodeError | None = None  # why requests are refused
        self._closing_failed: BaseException | None = None  # what closing the engine raised
        self._is_finished = threading.Event()  # then its thread looks into no inbox any more
        self._seeing_off = threading.Lock()

    @property
    def served(self) -> Any:
        assert self._served is not None, "not open yet"
        return self._served

    def open(self) -> Any:
        """Make the engine. Returns it: what is known of it from its start on
        may be read by any thread.

        Raises:
            BaseException: If making it raises it.
        """
        if self._in_callers_thread is not None:
            self._in_callers_thread()
        try:
            self._thread.start()
            failed = self._made.get()
        except BaseException:
            # Interrupted. What would have stopped this thread, had it made the
            # engine, stops the one that makes it.
            self.ask_to_close()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(Interrupted)
            )
            raise
        _raise_if(failed)
        atexit.register(self._leave)
        return self.served

    def submit(self, requests: Iterable[Request], reader: DeltaQueue) -> None:
        """Queue requests, whose ids are unique among the open ones. They start without delay.

        Every request ends with one last delta for each of its sequences, or with one error: a
        CapacityError if it could never fit, a RequestError if its id is in use.

        Raises:
            FastDecodeError: If the engine is broken (why), closed, draining or another process's;
                nothing was queued.
        """
        self._check_usable()
        if self._in_callers_thread is not None:
            self._in_callers_thread()
        self._put(partial(self._accept, list(requests), reader))

    def cancel(self, request_id: str) -> None:
        """End a request with the error ``cancelled``; what it holds is free when the step in
        flight is over. Unknown ids, and those of requests that are over, are ignored."""
        self._put(partial(self._cancel, request_id))

    def cancel_waiting(self, reader: DeltaQueue) -> None:
        """End those requests of a reader with the error ``cancelled`` of which nothing has run."""
        self._put(partial(self._cancel_waiting, reader))

    def cancel_all(self, reader: DeltaQueue, error: FastDecodeError) -> None:
        self._put(partial(self._cancel_all, reader, error))

    def forgetting(self, reader: DeltaQueue) -> Callable[[], None]:
        """Return a call that ends all requests of a reader silently. It is one call in C, so an
        interrupt comes before or after it; it may be made twice."""
        return partial(self._inbox.put, partial(self._forget_all, reader))

    def take(self, reader: DeltaQueue, timeout_s: float | None = None) -> list[Delta]:
        return reader.take(timeout_s)

    def call(self, act: Callable[[Any], None]) -> None:
        """Do something with the engine between two steps, and wait for it.
        Raises what that raises."""
        self._check_usable()
        done: SimpleQueue[BaseException | None] = SimpleQueue()

        def act_if_open() -> None:
            try:
                self._check_usable()
                act(self.served)
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)

        self._put(act_if_open)
        _raise_if(done.get())

    def look(self, at: Callable[[Any], None] = lambda served: None) -> None:
        """Have the engine find out how its R-workers are, if it has no work: otherwise it does
        so anyway. Then have ``at`` look at it, between two steps, unless it is broken or
        closed. Doesn't wait. If no R-worker is left, or ``at`` raises a FastDecodeError, it is
        broken afterwards; any other exception of ``at`` is logged. May be called while the
        engine is being made, by what it has started already."""
        self._put(partial(self._look, at))

    def snapshot(self) -> Snapshot:
        """How it is; never waits for a step."""
        longest_s = max(self._latest_s.copy(), default=0.0)  # the engine's thread adds to it
        numbers = structs.replace(self._numbers, longest_step_s=longest_s)
        if self._is_over:
            return Snapshot("closed", numbers, self._broken)
        if self._served is None:
            return Snapshot("starting", numbers)
        if self._broken is not None:
            return Snapshot("broken", numbers, self._broken)
        return Snapshot("draining" if self._is_draining else "ready", numbers)

    def when_drained(self) -> SimpleQueue[None]:
        """Where None will be put once no request is open."""
        drained: SimpleQueue[None] = SimpleQueue()
        self._put(partial(self._drained.append, drained))
        return drained

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests, and wait until those that are open are over;
        False if they aren't in time."""
        self._is_draining = True
        try:
            self.when_drained().get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except Empty:
            return False
        return True

    def ask_to_close(self) -> None:
        """Close the engine as soon as the step in flight is over; doesn't wait."""
        if not self._is_over:  # or it would stay in the inbox, and keep this object
            self._inbox.put(partial(setattr, self, "_is_closing", True))

    def close(self, timeout_s: float | None = None) -> None:
        """Close the engine; requests that are open end with an error. Safe to call twice. A thread
        that doesn't end in time is left to the end of the process, with a warning.

        Raises:
            WorkerError: If an R-worker that wasn't lost did not stop in time.
        """
        if os.getpid() != self._pid:
            return  # a fork has neither the thread nor the R-workers
        self.ask_to_close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("an engine has not stopped within %.0f s: it hangs", timeout_s)
        failed, self._closing_failed = self._closing_failed, None
        _raise_if(failed)

    def _check_usable(self) -> None:
        here = os.getpid()
        if here != self._pid:
            raise ConfigError(
                f"this LLM was made by process {self._pid}, and its fork {here} can't use it: "
                "make one after forking",
                code="forked",
            )
        if self._broken is not None:
            raise copy(self._broken)
        if self._is_over:
            raise ConfigError("this LLM was closed: make another one", code="closed")
        if self._is_draining:
            raise ConfigError(
                "no more requests are taken: this LLM is about to end", code="draining"
            )

    def _leave(self) -> None:
        if os.getpid() == self._pid:
            self.ask_to_close()
            self._thread.join(LEAVING_S)

    def _put(self, act: Callable[[], None]) -> None:
        """Queue a call to run between two steps; any thread."""
        self._inbox.put(act)
        if self._is_finished.is_set():
            self._see_off()

    def _live(self) -> None:
        """Make the engine, say what that raised, and run it to the end. One that
        was made is closed, even if an interrupt comes before ``open`` has returned."""
        try:
            served = self._make()
            self._note(served)
            self._served = served
            self._made.put(None)
        except BaseException as error:
            self._is_closing = True
            self._is_over = self._served is None
            self._made.put(error)
        finally:
            self._run_to_end()

    def _run_to_end(self) -> None:
        """Take turns until the service is to close; then close the engine."""
        if self._served is None or self._is_over:
            return
        try:
            while not self._is_closing:
                self._turn()
        finally:
            self._is_over = True
            atexit.unregister(self._leave)
            try:
                self._end()
            except BaseException as error:
                self._closing_failed = error
            self._is_finished.set()
            self._see_off()

    def _turn(self) -> None:
        """Do what others want, then a step. Without work, or in a pause, wait for others."""
        try:
            self._obey(self.served.engine.pause_s if self.has_work else None)
            if not self._is_closing:
                self._step()
        except BaseException as error:
            self._break_down(error)
        self._hand_out()

    def _obey(self, timeout_s: float | None) -> None:
        with contextlib.suppress(Empty):
            self._inbox.get(timeout_s != 0, timeout_s)()
            for _ in range(self._inbox.qsize()):
                # And no more, or a thread that asks much would starve the steps.
                self._inbox.get_nowait()()

    def _see_off(self) -> None:
        """Answer calls that arrived after the engine was closed. Thread-safe."""
        with self._seeing_off:
            self._obey(0)
            self._hand_out()

    def _step(self) -> None:
        stepped = self.has_work
        began_s = time.monotonic()
        try:
            if stepped:
                self.served.engine.step()
                stepped = not self.served.engine.pause_s  # else it only looked for R-workers
        except BaseException as error:
            self._break_down(error)
        if stepped:
            self._num_steps += 1
            self._ended_s = time.monotonic()
            self._latest_s.append(self._ended_s - began_s)
        self._note(self.served)

    @property
    def has_work(self) -> bool:
        return self._broken is None and self.served.engine.has_work

    def _note(self, served: Any) -> None:
        self._numbers = EngineNumbers(
            self._num_steps,
            self._ended_s,
            num_unfinished=served.engine.num_unfinished_sequences,
            num_running=served.engine.num_running,
            num_r_workers=served.num_r_workers,
            num_live_r_workers=served.num_live_r_workers,
            has_hung_r_workers=served.has_hung_r_workers,
        )

    def _break_down(self, error: BaseException) -> None:
        """End every open request with the reason why no step can be made."""
        if self._broken is None:
            if not isinstance(error, FastDecodeError):
                logger.error("a step broke down", exc_info=error)
                error = _typed_of("a step broke down before", error)
            self._broken = without_frames(error)
        try:
            self.served.engine.abandon(self._broken)
        except Exception:
            logger.exception("what the engine held could not be given up")
        for request_id in list(self._open):
            self._end_request(request_id, self._broken)

    def _end(self) -> None:
        """End what is open, leave nothing in flight, and close the engine."""
        self._ended = ConfigError("the LLM was closed before this request was over", code="closed")
        for request_id in list(self._open):
            try:
                self._forget(request_id)
            finally:
                self._end_request(request_id, self._ended)
        self._hand_out()
        while self.has_work:
            self._obey(self.served.engine.pause_s)
            self._step()
        self.served.close()
        self._note(self.served)

    def _accept(self, requests: Sequence[Request], reader: DeltaQueue) -> None:
        """Hand requests to the engine. Those that it refuses end with its reason."""
        listener = Listener(self._tell, reader.every_step)
        for request in requests:
            request_id = request.request_id
            if request_id in self._open:
                reader.put([Delta(request_id, 0, error=duplicate_id(request_id))])
                continue
            self._open[request_id] = _OpenRequest(reader, request.params.n)
            try:
                refusal = self._broken or self._ended
                if refusal is not None:
                    raise copy(refusal)
                self.served.engine.submit(request, listener)
            except FastDecodeError as error:
                self._end_request(request_id, without_frames(error))
            except Exception as error:
                logger.exception("a request can't be queued")
                self._forget(request_id)
                self._end_request(request_id, _typed_of("it can't be queued", error))

    def _tell(self, delta: Delta) -> None:
        """Keep a delta for its reader until the step is over (``_hand_out``)."""
        asked = self._open.get(delta.request_id)
        if asked is None:
            return
        self._fresh.setdefault(asked.reader, []).append(delta)
        asked.num_left -= delta.finish_reason is not None
        if delta.error is not None or not asked.num_left:
            del self._open[delta.request_id]

    def _end_request(self, request_id: str, error: FastDecodeError) -> None:
        self._tell(Delta(request_id, 0, error=error))

    def _requests_of(self, reader: DeltaQueue) -> list[str]:
        return [request_id for request_id, asked in self._open.items() if asked.reader is reader]

    def _cancel(self, request_id: str) -> None:
        if request_id in self._open:
            self._forget(request_id)
            self._end_request(request_id, _cancelled())

    def _cancel_waiting(self, reader: DeltaQueue) -> None:
        for request_id in self.served.engine.cancel_waiting(set(self._requests_of(reader))):
            self._end_request(request_id, _cancelled())

    def _cancel_all(self, reader: DeltaQueue, error: FastDecodeError) -> None:
        for request_id in self._requests_of(reader):
            self.served.engine.cancel(request_id)
            self._end_request(request_id, error)

    def _forget_all(self, reader: DeltaQueue) -> None:
        """End all requests of a reader, which gets no last delta."""
        self._fresh.pop(reader, None)
        for request_id in self._requests_of(reader):
            del self._open[request_id]
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        """Have the engine cancel a request. A bug in that ends no other request."""
        try:
            self.served.engine.cancel(request_id)
        except FastDecodeError:
            raise
        except Exception:
            logger.exception("a request can't be let go of")

    def _look(self, at: Callable[[Any], None]) -> None:
        if self._broken is not None or self._ended is not None:
            return
        if not self.has_work:
            self.served.engine.look()
        try:
            at(self.served)
        except FastDecodeError:
            raise
        except Exception:
            logger.exception("a look at the engine failed")

    def _hand_out(self) -> None:
        """Give readers what they haven't been given, and say that no request is open."""
        fresh, self._fresh = self._fresh, {}
        for reader, deltas in fresh.items():
            reader.put(deltas)
        while self._drained and (not self._open or self._is_finished.is_set()):
            self._drained.pop().put(None)


def _raise_if(failed: BaseException | None) -> None:
    """Raise what was caught elsewhere, if anything was."""
    try:
        if failed is not None:
            raise failed
    finally:
        del failed  # its traceback has this frame, which would keep it


def _cancelled() -> RequestError:
    return RequestError("the request was cancelled", code=CANCELLED)


def _typed_of(what: str, error: BaseException) -> FastDecodeError:
    """Return the error that readers get for a bug, which is its cause."""
    shown = FastDecodeError(f"{what}: {type(error).__name__}: {error}")
    shown.__cause__ = error
    return without_frames(shown)

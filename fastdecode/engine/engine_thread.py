"""The thread that owns an engine: its open requests, and the readers of their output."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fastdecode.core.delta import CANCELLED, Delta, DeltaQueue, Listener
from fastdecode.core.errors import (
    ConfigError,
    FastDecodeError,
    RequestError,
    duplicate_id,
    without_frames,
)
from fastdecode.core.sequence import Request
from fastdecode.wire.instances import EngineNumbers

logger = logging.getLogger(__name__)

NUM_LATEST_STEPS = 256


class ServedEngine(Protocol):
    """What a service asks of an engine."""

    @property
    def has_work(self) -> bool: ...
    @property
    def pause_s(self) -> float: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_unfinished_sequences(self) -> int: ...
    def submit(self, request: Request, listener: Listener | None = None) -> None: ...
    def step(self) -> None: ...
    def look(self) -> None: ...
    def cancel(self, request_id: str) -> bool: ...
    def cancel_waiting(self, among: Container[str] | None = None) -> list[str]: ...
    def abandon(self, error: FastDecodeError) -> None: ...


class Served(Protocol):
    """An engine and what is around it."""

    @property
    def engine(self) -> ServedEngine: ...
    @property
    def num_r_workers(self) -> int: ...
    @property
    def num_live_r_workers(self) -> int: ...
    @property
    def has_hung_r_workers(self) -> bool: ...
    def close(self) -> None: ...


T = TypeVar("T", bound=Served)


@dataclass(eq=False)
class _OpenRequest:
    """A request that isn't over."""

    reader: DeltaQueue
    num_left: int
    """Sequences that aren't over."""


class _Steps:
    """How many there were, and how long the latest took."""

    def __init__(self) -> None:
        self.num = 0
        self.ended_s: float | None = None
        """``time.monotonic()`` at the end of the last one."""
        self.longest_s = 0.0
        self._latest_s: deque[float] = deque([0.0] * NUM_LATEST_STEPS)

    def count(self, began_s: float) -> None:
        """One is over."""
        self.num += 1
        self.ended_s = time.monotonic()
        took_s = self.ended_s - began_s
        self._latest_s.append(took_s)
        if self._latest_s.popleft() < self.longest_s:
            self.longest_s = max(self.longest_s, took_s)
        else:  # the longest was the oldest
            self.longest_s = max(self._latest_s)


class EngineThread(Generic[T]):
    """Not thread-safe but for ``numbers`` and ``broken``, which others may read."""

    def __init__(self, served: T) -> None:
        self.served = served
        self.broken: FastDecodeError | None = None
        """Why no step can be made any more."""
        self._ended: FastDecodeError | None = None  # why no request is taken any more
        self.numbers = EngineNumbers()
        self._open: dict[str, _OpenRequest] = {}
        self._fresh: dict[DeltaQueue, list[Delta]] = {}
        self._steps = _Steps()
        self._note()

    @property
    def has_open(self) -> bool:
        """Whether any request isn't over."""
        return bool(self._open)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.broken is None and self.served.engine.has_work

    def submit(self, requests: Sequence[Request], reader: DeltaQueue) -> None:
        """Hand requests to the engine. Those that it refuses end with its reason."""
        listener = Listener(self._tell, reader.every_step)
        for request in requests:
            request_id = request.request_id
            if request_id in self._open:
                reader.put([Delta(request_id, 0, error=duplicate_id(request_id))])
                continue
            self._open[request_id] = _OpenRequest(reader, request.params.n)
            try:
                refusal = self.broken or self._ended
                if refusal is not None:
                    raise copy(refusal)
                self.served.engine.submit(request, listener)
            except FastDecodeError as error:
                self._end_with(request_id, without_frames(error))
            except Exception as error:
                logger.exception("a request can't be queued")
                self._forget(request_id)
                self._end_with(request_id, _typed_of("it can't be queued", error))

    def cancel(self, request_id: str) -> None:
        """End a request, if it is open, with the error ``cancelled``."""
        if request_id in self._open:
            self._forget(request_id)
            self._end_with(request_id, _cancelled())

    def cancel_waiting(self, reader: DeltaQueue) -> None:
        """Likewise those of a reader of which nothing has run."""
        its_own = {request_id for request_id, asked in self._open.items() if asked.reader is reader}
        for request_id in self.served.engine.cancel_waiting(its_own):
            self._end_with(request_id, _cancelled())

    def cancel_all(self, reader: DeltaQueue, error: FastDecodeError) -> None:
        """End all requests of a reader with an error."""
        for request_id in self._open_of(reader):
            self.served.engine.cancel(request_id)
            self._end_with(request_id, error)

    def _open_of(self, reader: DeltaQueue) -> list[str]:
        return [request_id for request_id, asked in self._open.items() if asked.reader is reader]

    def forget(self, reader: DeltaQueue) -> None:
        """End all requests of a reader, which gets no last delta."""
        for request_id in self._open_of(reader):
            del self._open[request_id]
            self._forget(request_id)
        self._fresh.pop(reader, None)

    def _forget(self, request_id: str) -> None:
        """The engine is to let go of a request. A mistake in that ends no other
        request."""
        try:
            self.served.engine.cancel(request_id)
        except FastDecodeError:
            raise
        except Exception:
            logger.exception("a request can't be let go of")

    def step(self) -> None:
        """Make a step, if it would do anything."""
        stepped = self.has_work
        began_s = time.monotonic()
        try:
            if stepped:
                self.served.engine.step()
                stepped = not self.served.engine.pause_s  # else it only looked for R-workers
        except BaseException as error:
            self.break_down(error)
        if stepped:
            self._steps.count(began_s)
        self._note()

    def look(self, at: Callable[[T], None]) -> None:
        """Look at the engine; before, find out how its R-workers are, where no
        step does. A mistake in ``at`` is logged, and breaks nothing.

        Raises:
            FastDecodeError: no R-worker is left, or ``at`` says that the engine
                can't go on.
        """
        if self.broken is not None or self._ended is not None:
            return
        if not self.has_work:
            self.served.engine.look()
        try:
            at(self.served)
        except FastDecodeError:
            raise
        except Exception:
            logger.exception("a look at the engine failed")

    def hand_out(self) -> None:
        """Give readers what they haven't been given."""
        fresh, self._fresh = self._fresh, {}
        for reader, deltas in fresh.items():
            reader.put(deltas)

    def break_down(self, error: BaseException) -> None:
        """No step can be made any more. Every open request ends with the reason."""
        if self.broken is None:
            self.broken = without_frames(_typed(error))
        try:
            self.served.engine.abandon(self.broken)
        except Exception:
            logger.exception("what the engine held could not be given up")
        for request_id in list(self._open):
            self._end_with(request_id, self.broken)

    def close(self) -> None:
        """End what is open, leave nothing in flight, and close the engine.
        Raises WorkerError, as that does."""
        error = ConfigError("the LLM was closed before this request was over", code="closed")
        self._ended = error
        for request_id in list(self._open):
            self.served.engine.cancel(request_id)
            self._end_with(request_id, error)
        self.hand_out()
        while self.has_work:
            self.step()
        self.served.close()
        self._note()

    def _tell(self, delta: Delta) -> None:
        """Keep a delta for its reader until the step is over."""
        asked = self._open.get(delta.request_id)
        if asked is None:
            return
        self._fresh.setdefault(asked.reader, []).append(delta)
        asked.num_left -= delta.finish_reason is not None
        if delta.error is not None or not asked.num_left:
            del self._open[delta.request_id]

    def _end_with(self, request_id: str, error: FastDecodeError) -> None:
        self._tell(Delta(request_id, 0, error=error))

    def _note(self) -> None:
        served, steps = self.served, self._steps
        self.numbers = EngineNumbers(
            steps.num,
            steps.ended_s,
            steps.longest_s,
            served.engine.num_unfinished_sequences,
            served.engine.num_running,
            served.num_r_workers,
            served.num_live_r_workers,
            served.has_hung_r_workers,
        )


def _cancelled() -> RequestError:
    return RequestError("the request was cancelled", code=CANCELLED)


def _typed(error: BaseException) -> FastDecodeError:
    """What readers are told of a step that broke down. A mistake of ours stands
    behind it as its cause."""
    if isinstance(error, FastDecodeError):
        return error
    logger.error("a step broke down", exc_info=error)
    return _typed_of("a step broke down before", error)


def _typed_of(what: str, error: BaseException) -> FastDecodeError:
    """A mistake of ours, as readers are told of it; its cause is the mistake."""
    told = FastDecodeError(f"{what}: {type(error).__name__}: {error}")
    told.__cause__ = error
    return without_frames(told)

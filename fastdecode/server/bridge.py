"""Between the HTTP process and an engine's service: requests in, deltas out.

Deltas wait in the service's own queue, where those of a sequence become one
while nobody reads: so an HTTP process that is slow, or stopped, costs no step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from fastdecode.core.delta import Delta, DeltaQueue, parted
from fastdecode.core.errors import FastDecodeError, ProtocolError, RequestError, without_frames
from fastdecode.core.sequence import Request, validate_for_vocab
from fastdecode.engine.service import EngineService
from fastdecode.server.channel import Channel
from fastdecode.server.messages import (
    Cancel,
    Deltas,
    Drained,
    Message,
    StatusAck,
    StatusReport,
    Submit,
)
from fastdecode.server.silence import Silence

logger = logging.getLogger(__name__)

SEEN_EVERY_S = 0.5


class Bridge:
    """Has three threads of its own from ``start`` on; they end with the channel.

    Args:
        service: runs the requests.
        channel: to the HTTP process.
        vocab_size: token ids are below it.
        figures: what else is to be told of the engine; called by its thread
            between two steps.
        silence: of the HTTP process; None: it may be silent for any time.
    """

    def __init__(
        self,
        service: EngineService[Any],
        channel: Channel,
        vocab_size: int,
        figures: Callable[[Any], dict[str, Any]] = lambda served: {},
        silence: Silence | None = None,
    ) -> None:
        self._service = service
        self._channel = channel
        self._vocab_size = vocab_size
        self._figures = figures
        self.silence = Silence() if silence is None else silence
        self._queue = DeltaQueue()
        self._asides: SimpleQueue[Message] = SimpleQueue()
        self._latest: dict[str, Any] = {}
        self.is_gone = threading.Event()
        """The HTTP process is."""
        self.drained = threading.Event()
        """It has no open request any more, and takes none."""
        self.num_cut = 0
        """Requests that it had to end."""

    def start(self) -> None:
        """From now on requests are taken."""
        parts = (("http-in", self._take_in), ("http-out", self._tell), ("http-aside", self._say))
        for name, run in parts:
            threading.Thread(target=self._watched, args=(run,), name=name, daemon=True).start()

    def _watched(self, run: Callable[[], None]) -> None:
        """One of the threads. However it ends, the HTTP process counts as gone:
        without any of them requests would wait for ever."""
        try:
            run()
        except Exception:
            logger.exception("the HTTP process can't be talked to any more")
        finally:
            self.is_gone.set()

    def send(self, message: Message) -> None:
        """Say something to the HTTP process; if it is gone, nobody hears it.
        Doesn't wait for it: it may have been stopped."""
        self._asides.put(message)

    def cancel_all(self, error: FastDecodeError) -> None:
        """End every request that the HTTP process has asked for. It gets the
        error once it reads again."""
        self._service.cancel_all(self._queue, error)

    def _say(self) -> None:
        while not self.is_gone.is_set():
            self._send(self._asides.get())

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except OSError:
            self.is_gone.set()

    def _take_in(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._obey(message)
        except ProtocolError as error:
            logger.error("%s", error)

    def _obey(self, message: Message) -> None:
        self.silence.heard()
        match message:
            case StatusAck():
                pass
            case Submit(requests):
                self._submit(requests)
            case Cancel(request_ids):
                for request_id in request_ids:
                    self._service.cancel(request_id)
            case Drained(num_cut):
                self.num_cut = num_cut
                self.drained.set()
            case _:
                raise ProtocolError(f"the HTTP process said {type(message).__name__}")

    def _submit(self, requests: Sequence[Request]) -> None:
        fit = [request for request in requests if self._fits(request)]
        try:
            self._service.submit(fit, self._queue)
        except FastDecodeError as error:
            self._queue.put([_ended(request, error) for request in fit])

    def _fits(self, request: Request) -> bool:
        """Whether the model can do it; the HTTP process has made sure already,
        but it is the one that others can reach."""
        ids = request.prompt_token_ids
        try:
            validate_for_vocab(request.params, self._vocab_size)
            if not (ids and min(ids) >= 0 and max(ids) < self._vocab_size):
                raise RequestError("there is no such token", code="invalid_token_id")
        except RequestError as error:
            self._queue.put([_ended(request, RequestError(str(error), code="invalid_token_id"))])
            return False
        except Exception as error:
            logger.exception("a request of the HTTP process can't be read")
            what = f"it can't be read: {type(error).__name__}: {error}"
            self._queue.put([_ended(request, RequestError(what, code="invalid_token_id"))])
            return False
        return True

    def _tell(self) -> None:
        due_s = time.monotonic()
        while not self.is_gone.is_set():
            deltas = self._queue.take(max(0.0, due_s - time.monotonic()))
            for part in parted(deltas):
                self._send(Deltas(part))
            if time.monotonic() >= due_s:
                self.silence.asked()
                self._send(self._seen())
                due_s = time.monotonic() + SEEN_EVERY_S

    def _seen(self) -> StatusReport:
        self._service.look(self._look)  # or an idle server wouldn't know that an R-worker is gone
        snapshot = self._service.snapshot()
        numbers = snapshot.engine
        return StatusReport(
            snapshot.state,
            numbers.num_steps,
            numbers.stepped_s,
            numbers.longest_step_s,
            numbers.num_running,
            numbers.num_waiting,
            numbers.num_r_workers,
            numbers.num_live_r_workers,
            None if snapshot.error is None else snapshot.error.code,
            self._latest,
        )

    def _look(self, served: Any) -> None:
        self._latest = self._figures(served)


def _ended(request: Request, error: FastDecodeError) -> Delta:
    return Delta(request.request_id, 0, error=without_frames(error))

"""Serves an engine to one client, the HTTP process or a router: requests in, deltas and status
reports out; and an instance to one controller after the other.

Deltas of a sequence become one while nothing is sent, so a client that is slow costs no step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastdecode.core.delta import Delta, DeltaQueue, parted
from fastdecode.core.errors import (
    FastDecodeError,
    ProtocolError,
    RequestError,
    WorkerError,
    without_frames,
)
from fastdecode.core.sequence import Request, validate_for_vocab
from fastdecode.engine.instances.client import status_of, status_to_json
from fastdecode.engine.instances.registry import FromInstance
from fastdecode.engine.service import EngineService
from fastdecode.engine.stats import EngineStats
from fastdecode.wire.instances import (
    Cancel,
    Deltas,
    EndConversation,
    FromEngine,
    InstanceHello,
    InstanceWelcome,
    SetRole,
    Submit,
    ToEngine,
    ToInstance,
)
from fastdecode.wire.messages import Failed
from fastdecode.wire.transport import CLOSED, PeerLostError

logger = logging.getLogger(__name__)

STATUS_EVERY_S: Final = 0.5
_LOOK_S: Final = 0.2


@dataclass(frozen=True)
class RequestLimits:
    """Limits of any request to an engine."""

    vocab_size: int  # token ids are below it
    max_model_len: int  # most tokens of prompt and completion together

    def check(self, request: Request) -> None:
        """Raise RequestError if the model cannot run it."""
        prompt, drawn = request.prompt_token_ids, request.drawn
        if not prompt or len(prompt) + request.max_tokens > self.max_model_len:
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and max_tokens={request.max_tokens} don't fit "
                f"the model's limit of {self.max_model_len} tokens"
            )
        tokens = [*prompt, *(token for each in drawn.values() for token in each)]
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            raise RequestError(
                f"a token is outside the vocabulary of {self.vocab_size}", code="invalid_token_id"
            )
        for index, each in drawn.items():
            if index >= request.params.n or len(each) >= request.max_tokens:
                raise RequestError("more tokens have been drawn than were asked for")
        validate_for_vocab(request.params, self.vocab_size)


class _Outlet(DeltaQueue):
    """Deltas of one client."""

    def __init__(self, server: EngineServer, *, every_step: bool) -> None:
        super().__init__(every_step=every_step)
        self._server = server

    def put(self, deltas: Iterable[Delta]) -> None:
        """Called by the engine's thread."""
        fresh = list(deltas)
        self._server.note(fresh)
        super().put(fresh)
        self._server.wake()

    def refuse(self, request: Request, error: FastDecodeError) -> None:
        """End a request that the engine has not got. Called by the thread that takes deltas."""
        super().put([Delta(request.request_id, 0, error=without_frames(error))])


class EngineServer:
    """Serves one client, without I/O of its own. The thread that has the channel calls ``obey``
    with each message that came, and sends what ``messages`` gives.

    Args:
        limits: A request beyond them ends with an error, and no other does.
        figures: Of the engine, for status reports. Its thread calls this between two steps.
        wake: Called by any thread when there is something to send.
        totals: Of the engine, for a status report that precedes the end of a request. Its thread
            calls this. If given, a report is what the engine has answered, so an engine that hangs
            reports nothing. If None, reports come on time in any case.
    """

    def __init__(
        self,
        service: EngineService,
        limits: RequestLimits,
        figures: Callable[[Any], Mapping[str, Any]],
        wake: Callable[[], None],
        *,
        totals: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._service = service
        self._limits = limits
        self._figures_of = figures
        self.wake = wake
        self._totals = totals
        self._outlets = {every: _Outlet(self, every_step=every) for every in (True, False)}
        self._figures: Mapping[str, Any] = {}
        self._is_asked = False  # the engine is asked for figures, and has not answered
        self._is_answered = False  # it has reported something that was not sent yet
        self._due_s = 0.0
        self._was_stranded = False  # it had no R-worker when it was asked last

    def obey(self, message: ToEngine) -> None:
        """Do what the client asks. Raises FastDecodeError: If the engine takes no requests."""
        match message:
            case Submit(requests, every_step):
                self._submit(requests, self._outlets[every_step])
            case Cancel(request_ids):
                for request_id in request_ids:
                    self._service.cancel(request_id)
            case SetRole(role):
                self._service.look(lambda served: served.engine.give_role(role))
            case EndConversation(token_ids, salt):
                self._service.look(lambda served: served.engine.end_conversation(token_ids, salt))

    def messages(self) -> Iterator[FromEngine]:
        """Yield what is to be sent now, in this order."""
        deltas = [delta for outlet in self._outlets.values() for delta in outlet.take(0)]
        if self._is_due():
            self._is_answered = False
            yield self._service.snapshot().report(self._figures)
        for part in parted(deltas):
            yield Deltas(tuple(part))

    @property
    def wait_s(self) -> float:
        """Seconds until a status report may be due though ``wake`` was not called."""
        return max(0.0, self._due_s - time.monotonic())

    def cancel_all(self, error: FastDecodeError) -> None:
        """End all requests of the client with an error. Thread-safe."""
        for outlet in self._outlets.values():
            self._service.cancel_all(outlet, error)

    def forget(self) -> None:
        """End all requests of a client that is gone."""
        for outlet in self._outlets.values():
            self._service.forgetting(outlet)()

    def _submit(self, requests: Sequence[Request], outlet: _Outlet) -> None:
        fit = [request for request in requests if self._fits(request, outlet)]
        if not fit:
            return
        try:
            self._service.submit(fit, outlet)
        except FastDecodeError as error:
            for request in fit:
                outlet.refuse(request, error)

    def _fits(self, request: Request, outlet: _Outlet) -> bool:
        """Return whether the model can run it. The client has checked already, but others may have
        lied to it."""
        try:
            self._limits.check(request)
            return True
        except RequestError as error:
            refusal = error
        except Exception as error:
            logger.exception("a request of a client can't be read")
            what = f"it can't be read: {type(error).__name__}: {error}"
            refusal = RequestError(what, code="invalid_token_id")
        outlet.refuse(request, refusal)
        return False

    def note(self, deltas: Sequence[Delta]) -> None:
        """Report totals before the end of a request. Called by the engine's thread."""
        if self._totals is not None and any(
            x.finish_reason or x.error or x.sources or x.has_fetched for x in deltas
        ):
            unsent = self._figures if self._is_answered else {}
            self._figures, self._is_answered = {**unsent, **self._totals()}, True

    def _is_due(self) -> bool:
        """Return whether a report is to be sent, and ask the engine for the next one. It is at
        once when the last R-worker is lost, or the first is back."""
        now = time.monotonic()
        is_stranded = self._service.snapshot().engine.num_live_r_workers == 0
        is_due = now >= self._due_s or is_stranded != self._was_stranded
        if is_due:
            self._was_stranded, self._due_s = is_stranded, now + STATUS_EVERY_S
        if is_due and not self._is_asked:
            self._is_asked = True
            self._service.look(self._look)  # or an idle one would not notice a lost R-worker
        return self._is_answered if self._totals is not None else is_due

    def _look(self, served: Any) -> None:
        self._figures, self._is_answered, self._is_asked = self._figures_of(served), True, False
        if self._totals is not None:
            self.wake()


class InstanceServer:
    """Serves an instance to a controller, and then to the next. Used by one thread.

    Args:
        listener: Hub where controllers connect.
        only_once: End when the first controller is gone, or any other peer of the listener.
    """

    def __init__(
        self,
        listener: Any,
        service: EngineService,
        welcome: InstanceWelcome,
        *,
        only_once: bool = False,
    ) -> None:
        self._only_once = only_once
        self._listener = listener
        self.service = service
        self._welcome = welcome
        self._controller: int | None = None
        self._server: EngineServer | None = None  # serves the present controller
        self._ready: EngineServer | None = None
        """The latest for which the engine is ready, and the latest that has sent the welcome."""
        self._welcomed: EngineServer | None = None
        self._is_ending = False

    @property
    def stats(self) -> EngineStats:
        stats: EngineStats = self.service.served.engine.stats
        return stats

    def run(self) -> FastDecodeError | None:
        """Serve until asked to end, or the engine breaks down: then return why."""
        while not self._is_ending:
            self._send_all()
            self._receive()
            error = self.service.snapshot().error
            if error is not None:
                self._say(self._controller, Failed(self._welcome.name, error.code, error.message))
                return error
        return None

    def end(self) -> None:
        """Ask it to end. Thread-safe, and for a signal's handler."""
        self._is_ending = True

    def _receive(self) -> None:
        try:
            peer, message = self._listener.receive_any(_LOOK_S)
        except PeerLostError as lost:
            if lost.code == CLOSED:
                self._lose(lost.index, lost)
            else:
                self._refuse(lost.index, lost)
            return
        except WorkerError:
            return  # woken, or nothing came
        try:
            self._obey(peer, message)
        except (ProtocolError, RequestError) as error:
            self._refuse(peer, error)
        except FastDecodeError as error:
            logger.error("instance %s: %s", self._welcome.name, error)  # ``run`` returns it
        except Exception as error:
            logger.error("what a controller said can't be dealt with", exc_info=error)
            self._refuse(peer, ProtocolError(f"{type(error).__name__}: {error}"))

    def _refuse(self, peer: int, error: FastDecodeError) -> None:
        """Hang up on a controller, and say why."""
        logger.error("instance %s gives up on its controller: %s", self._welcome.name, error)
        self._say(peer, Failed(self._welcome.name, error.code, error.message))
        self._lose(peer, error)

    def _obey(self, peer: int, message: ToInstance) -> None:
        if isinstance(message, InstanceHello):
            self._greet(peer, message)
        elif peer != self._controller or self._server is None:
            raise ProtocolError(f"{type(message).__name__} comes before InstanceHello")
        else:
            self._server.obey(message)

    def _greet(self, peer: int, hello: InstanceHello) -> None:
        if hello.model_hash != self._welcome.model_hash:
            raise ProtocolError("the controller means another model", code="other_model")
        if self._controller is not None:
            raise ProtocolError("a controller says hello once")
        self._controller = peer
        self._server = server = EngineServer(
            self.service,
            RequestLimits(self.service.served.spec.vocab_size, self._welcome.max_model_len),
            status_of,
            self._listener.wake,
            totals=lambda: status_to_json(self.stats, None),
        )
        self.service.look(lambda running: self._make_ready(running, server))
        logger.info("instance %s serves a controller", self._welcome.name)

    def _make_ready(self, running: Any, server: EngineServer) -> None:
        """Called by the engine's thread, once it has forgotten what others wanted. An engine that
        hangs welcomes no controller."""
        running.engine.give_role(self._welcome.role)
        running.engine.stats.begin_anew()
        self._ready = server
        self._listener.wake()

    def _send_all(self) -> None:
        """Send the controller what is new."""
        server = self._server
        if server is None or server is not self._ready:
            return
        if server is not self._welcomed:
            self._welcomed = server
            self._say(self._controller, self._welcome)
        for message in server.messages():
            self._say(self._controller, message)

    def _lose(self, peer: int, error: FastDecodeError) -> None:
        """Let go of all that is run for a controller that is gone."""
        self._listener.connections[peer].close()
        self._is_ending = self._is_ending or self._only_once
        if peer != self._controller:
            return
        is_idle = not self.service.snapshot().engine.num_unfinished
        if error.code == CLOSED and (self._only_once or is_idle):
            logger.info("instance %s is let go: %s", self._welcome.name, error)
        else:
            logger.warning("instance %s has lost its controller: %s", self._welcome.name, error)
        assert self._server is not None
        self._server.forget()
        self._controller = self._server = None

    def _say(self, peer: int | None, message: FromInstance) -> None:
        if peer is None:
            return
        try:
            self._listener.connections[peer].send(message)
        except WorkerError:
            logger.debug("the controller is gone, which the listener reports next")

"""An instance, a process or a thread: serves a controller, and then the next."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, Final, Protocol

from fastdecode.core.errors import FastDecodeError, ProtocolError, RequestError, WorkerError
from fastdecode.engine.instances.connections import FromInstance
from fastdecode.engine.instances.engine_server import EngineServer, RequestLimits
from fastdecode.engine.instances.status_report import status_of, status_to_json
from fastdecode.engine.service import EngineService
from fastdecode.engine.stats import EngineStats
from fastdecode.wire.instances import InstanceHello, InstanceWelcome, ToInstance
from fastdecode.wire.messages import PROTOCOL_VERSION, Failed
from fastdecode.wire.transport import CLOSED, Connection, PeerLostError

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.2


class ControllerHub(Protocol):
    """Where controllers connect; see ``fastdecode.wire.transport.Hub``."""

    @property
    def connections(self) -> Sequence[Connection[FromInstance, ToInstance]]: ...

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ToInstance]: ...

    def wake(self) -> None:
        """End the present or the next wait in ``receive_any``. From any thread."""


class InstanceServer:
    """Used by one thread.

    Args:
        listener: where controllers connect.
        service: runs the engine; it is open.
        running: what it runs.
        welcome: what is said to controllers.
        limits: of any request.
        only_once: the first controller is the only one, and when any of the
            listener's peers is gone it is over.
    """

    def __init__(
        self,
        listener: ControllerHub,
        service: EngineService[Any],
        running: Any,
        welcome: InstanceWelcome,
        limits: RequestLimits,
        *,
        only_once: bool = False,
    ) -> None:
        self._only_once = only_once
        self._listener = listener
        self._service = service
        self._running = running
        self._welcome = welcome
        self._limits = limits
        self._controller: int | None = None
        self._server: EngineServer | None = None
        """Of the present controller's requests."""
        self._welcomed: SimpleQueue[EngineServer] = SimpleQueue()
        """Of controllers for which the engine is ready."""
        self._is_welcomed = False
        """Whether the present one is among them."""
        self._is_ending = False

    @property
    def service(self) -> EngineService[Any]:
        """The engine's thread."""
        return self._service

    @property
    def stats(self) -> EngineStats:
        """The engine's totals."""
        stats: EngineStats = self._running.engine.stats
        return stats

    def run(self) -> FastDecodeError | None:
        """Until it is asked to end, or the engine breaks down: why."""
        while not self._is_ending:
            self._work()
            snapshot = self._service.snapshot()
            if snapshot.error is not None:
                self._say(Failed(self._welcome.name, snapshot.error.code, snapshot.error.message))
                return snapshot.error
        return None

    def end(self) -> None:
        """Have it end soon; any thread, or a signal's handler."""
        self._is_ending = True

    def _work(self) -> None:
        self._send_all()
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
            logger.error("instance %s: %s", self._welcome.name, error)  # ``run`` says so
        except Exception as error:
            logger.error("what a controller said can't be dealt with", exc_info=error)
            self._refuse(peer, ProtocolError(f"{type(error).__name__}: {error}"))

    def _refuse(self, peer: int, error: FastDecodeError) -> None:
        """Hang up on a controller, and say why."""
        logger.error("instance %s gives up on its controller: %s", self._welcome.name, error)
        self._say_to(peer, Failed(self._welcome.name, error.code, error.message))
        self._lose(peer, error)

    def _obey(self, peer: int, message: ToInstance) -> None:
        if isinstance(message, InstanceHello):
            self._greet(peer, message)
        elif peer != self._controller:
            raise ProtocolError(f"{type(message).__name__} comes before InstanceHello")
        else:
            assert self._server is not None
            self._server.obey(message)

    def _greet(self, peer: int, hello: InstanceHello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the controller speaks protocol version {hello.protocol_version}, this instance "
                f"{PROTOCOL_VERSION}: install the same version of fastdecode on both",
                code="protocol_version",
            )
        if hello.model_hash != self._welcome.model_hash:
            raise ProtocolError("the controller means another model", code="other_model")
        if self._controller is not None:
            raise ProtocolError("a controller says hello once")
        self._controller, self._is_welcomed = peer, False
        self._server = server = EngineServer(
            self._service,
            self._limits,
            status_of,
            self._listener.wake,
            totals=lambda: status_to_json(self.stats, None),
        )
        self._service.look(lambda running: self._make_ready(running, server))
        logger.info("instance %s serves a controller", self._welcome.name)

    def _make_ready(self, running: Any, server: EngineServer) -> None:
        """By the engine's thread, once it has forgotten what others wanted. One that
        hangs welcomes nobody."""
        running.engine.give_role(self._welcome.role)
        running.engine.stats.begin_anew()
        self._welcomed.put(server)
        self._listener.wake()

    def _send_all(self) -> None:
        """Tell the controller what is new."""
        while not self._welcomed.empty():
            if self._welcomed.get() is self._server:
                self._is_welcomed = True
                self._say(self._welcome)
        if self._server is not None and self._is_welcomed:
            for message in self._server.messages():
                self._say(message)

    def _lose(self, peer: int, error: FastDecodeError) -> None:
        """A peer is gone. If that is the controller, all that is run for it is
        let go of."""
        self._listener.connections[peer].close()
        self._is_ending = self._is_ending or self._only_once
        if peer != self._controller:
            return
        is_idle = not self._service.snapshot().engine.num_unfinished
        if error.code == CLOSED and (self._only_once or is_idle):
            logger.info("instance %s is let go: %s", self._welcome.name, error)
        else:
            logger.warning("instance %s has lost its controller: %s", self._welcome.name, error)
        assert self._server is not None
        self._server.forget()
        self._controller = self._server = None

    def _say(self, message: FromInstance) -> None:
        if self._controller is not None:
            self._say_to(self._controller, message)

    def _say_to(self, peer: int, message: FromInstance) -> None:
        try:
            self._listener.connections[peer].send(message)
        except WorkerError:
            logger.debug("the controller is gone; the listener says so next")

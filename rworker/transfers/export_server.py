"""Export servers: R-workers of other instances read the R-workers of this process
through them, over ZeroMQ.

A server is a thread with a socket. It passes readers' messages on to its R-worker,
which sees one peer a reader, and passes the answers back. It decides nothing: the
R-worker knows the tickets.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Final

from fastdecode.core.errors import ConfigError, Given, WorkerError
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.messages import FromRWorker, ToRWorker
from fastdecode.wire.traits import MOST_PEERS, Role
from fastdecode.wire.transport import PeerLostError
from fastdecode.wire.zmq.access import ClusterKey
from fastdecode.wire.zmq.connection import ZmqConnection
from fastdecode.wire.zmq.hub import DEFAULT_SILENCE_S
from fastdecode.wire.zmq.listener import ZmqListener
from fastdecode.wire.zmq.neighbours import ZmqNeighbours
from rworker.transfers.neighbours import Neighbours

logger = logging.getLogger(__name__)

_READERS: Final = {Role.READER: MOST_PEERS[Role.READER]}
_LOOK_S: Final = 1.0
_LEAVING_S: Final = 10.0
_MAX_PORT: Final = 65535


class _Inside(InprocHub[ToRWorker, FromRWorker]):
    """A gate's connections to its R-worker; ``wake`` is called when that says
    something."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(keeps_places=False)
        self._wake = wake

    def arrive(self, connection: InprocConnection[ToRWorker, FromRWorker], message: object) -> None:
        super().arrive(connection, message)  # type: ignore[arg-type]  # the end is its own
        self._wake()


class ExportServer(threading.Thread):
    """Of one R-worker. Close it once that has ended.

    Args:
        name: the R-worker's.
        address: tcp://HOST:PORT; the port may be * for any that is free.
        worker: its peers.
        key: of the cluster; None: readers of this host only.
        silence_s: a reader that gives no sign of life for so long is lost.

    Raises:
        ConfigError: the address is none, is in use, or may not be used without
            a key.
    """

    def __init__(
        self,
        name: str,
        address: str,
        worker: InprocHub[FromRWorker, ToRWorker],
        key: ClusterKey | None,
        silence_s: float,
    ) -> None:
        super().__init__(name=f"gate-{name}", daemon=True)
        self._listener = ZmqListener(
            address, name, key=key, silence_s=silence_s, most_peers=_READERS
        )
        self.address = self._listener.address
        self._whose = name
        self._worker = worker
        self._inside = _Inside(self._listener.wake)
        self._within: dict[int, InprocConnection[ToRWorker, FromRWorker]] = {}
        """By a reader's number at the listener."""
        self._outside: dict[int, ZmqConnection[FromRWorker, ToRWorker]] = {}
        """By its number within."""
        self._is_closing = False

    def run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        except Exception:
            logger.exception("nobody can fetch from R-worker %s any more", self._whose)
        finally:
            for connection in self._within.values():
                connection.close()
            self._listener.close()

    def close(self) -> None:
        """Hear no reader any more. Safe to call twice."""
        self._is_closing = True
        self._listener.wake()
        if self.is_alive():
            self.join(_LEAVING_S)

    def _turn(self) -> None:
        try:
            reader, message = self._listener.receive_any(_LOOK_S)
        except PeerLostError as lost:
            self._hang_up(lost.index)
        except WorkerError:
            pass  # woken, or nothing came
        else:
            self._pass_in(reader, message)
        self._pass_out()

    def _pass_in(self, reader: int, message: ToRWorker) -> None:
        outside = self._listener.connections[reader]
        within = self._within.get(reader)
        if within is None:
            within, _ = connect(self._inside, outside.peer, self._worker, f"R-worker {self._whose}")
            self._within[reader], self._outside[within.index] = within, outside
        try:
            within.send(message)
        except WorkerError:
            self._hang_up(reader)

    def _pass_out(self) -> None:
        while True:
            try:
                number, answer = self._inside.receive_any(0.0)
            except PeerLostError as lost:
                self._see_off(lost.index)
                continue
            except WorkerError:
                return  # that was all
            outside = self._outside.get(number)
            with contextlib.suppress(WorkerError):  # the listener says so next
                if outside is not None:
                    outside.send(answer)

    def _hang_up(self, reader: int) -> None:
        """A reader is gone."""
        self._listener.connections[reader].close()
        within = self._within.pop(reader, None)
        if within is not None:
            self._outside.pop(within.index, None)
            within.close()  # from here on its place is another's

    def _see_off(self, number: int) -> None:
        """The R-worker wants no more of a reader."""
        self._inside.connections[number].close()
        outside = self._outside.pop(number, None)
        if outside is not None:
            reader = next(i for i, each in enumerate(self._listener.connections) if each is outside)
            self._within.pop(reader, None)
            outside.close()


class ExportServers:
    """Of an engine's R-workers, which also reach others'. Close it once they
    have ended.

    Args:
        address: tcp://HOST:PORT of the first one, the next ones' ports follow
            upon it; or the port is * for any that are free.
        key: of the cluster; None: this host only.
        silence_s: who gives no sign of life for so long is lost.
    """

    def __init__(
        self, address: str, key: ClusterKey | None, silence_s: float = DEFAULT_SILENCE_S
    ) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._key = key
        self._silence_s = silence_s
        self._servers: dict[str, ExportServer] = {}
        self._ways: list[ZmqNeighbours] = []

    def add(self, name: str, hub: InprocHub[FromRWorker, ToRWorker]) -> Neighbours:
        """See ``rworker.transfers.neighbours.Neighbourhood``. Raises ConfigError."""
        address = f"{self._host}:{self._next_port()}"
        server = ExportServer(name, address, hub, self._key, self._silence_s)
        self._servers[name] = server
        server.start()
        self._ways.append(ZmqNeighbours(self._key, self._silence_s))
        return self._ways[-1]

    def address_of(self, name: str) -> str:
        """Where others reach an R-worker."""
        return self._servers[name].address

    def close(self) -> None:
        """Safe to call twice."""
        for server in self._servers.values():
            server.close()
        while self._ways:
            self._ways.pop().close()

    def _next_port(self) -> str:
        if not self._port.isdecimal() or self._port == "0":
            return self._port
        port = int(self._port) + len(self._servers)
        if port > _MAX_PORT:
            raise ConfigError(
                Given("export", f"{self._host}:{self._port}"),
                f" leaves no port for R-worker {len(self._servers)}: begin lower",
            )
        return str(port)

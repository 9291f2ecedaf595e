"""Export servers: R-workers of other instances read the R-workers of this process, or
its device's KV cache, through them, over ZeroMQ or MPI.

A server is a thread with a listener. It passes readers' messages on to its R-worker,
which sees one peer a reader, and passes the answers back. It decides nothing: the
R-worker knows which readers may read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Protocol

from fastdecode.core.errors import ConfigError, Given, WorkerError
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.messages import Failed, FromRWorker, ToRWorker
from fastdecode.wire.ranks import link_address
from fastdecode.wire.traits import MOST_PEERS, Role
from fastdecode.wire.transport import CLOSED, Connection, Hub, PeerLostError
from rworker.transfers.neighbours import Neighbours, ThreadHubs, ThreadNeighbours

if TYPE_CHECKING:
    from fastdecode.wire.mpi.hub import MpiJob
    from fastdecode.wire.zmq.hub import ZmqHub
    from fastdecode.wire.zmq.keys import ClusterKey

logger = logging.getLogger(__name__)

_READERS: Final = {Role.READER: MOST_PEERS[Role.READER]}
_LOOK_S: Final = 1.0
_LEAVING_S: Final = 10.0
_MAX_PORT: Final = 65535


class Listener(Hub[FromRWorker, ToRWorker], Protocol):
    """Where readers come and go."""

    def wake(self) -> None:
        """Wake the thread that waits in ``receive_any``; any thread."""

    def close(self) -> None:
        """Close every connection."""


class _Inside(InprocHub[ToRWorker, FromRWorker]):
    """An export server's connections to its R-worker, whose messages call ``wake``."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(keeps_places=False)
        self._wake = wake

    def arrive(self, connection: InprocConnection[ToRWorker, FromRWorker], message: object) -> None:
        super().arrive(connection, message)  # type: ignore[arg-type]  # the end is its own
        self._wake()


class ExportServer(threading.Thread):
    """The export server of one R-worker, ``name``. Close it once that has ended.

    Args:
        listener: Where readers come. The server closes it.
        worker: The R-worker's peers.
    """

    def __init__(
        self, name: str, listener: Listener, worker: InprocHub[FromRWorker, ToRWorker]
    ) -> None:
        super().__init__(name=f"export-{name}", daemon=True)
        self._listener = listener
        self._owner = name
        self._worker = worker
        self._inside = _Inside(self._listener.wake)
        self._within: dict[int, InprocConnection[ToRWorker, FromRWorker]] = {}  # by reader
        self._outside: dict[int, Connection[FromRWorker, ToRWorker]] = {}
        """By its number within."""
        self._is_closing = False

    def run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        except Exception:
            logger.exception("R-worker %s can no longer be read", self._owner)
        finally:
            for connection in self._within.values():
                connection.close()
            self._listener.close()

    def close(self) -> None:
        """Stop serving readers. Safe to call twice."""
        self._is_closing = True
        self._listener.wake()
        if self.is_alive():
            self.join(_LEAVING_S)

    def _turn(self) -> None:
        try:
            reader, message = self._listener.receive_any(_LOOK_S)
        except PeerLostError as lost:
            if lost.code != CLOSED:  # it broke the protocol
                failed = Failed(self._owner, lost.code, lost.message)
                with contextlib.suppress(WorkerError):
                    self._listener.connections[lost.index].send(failed)
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
            within, _ = connect(self._inside, outside.peer, self._worker, f"R-worker {self._owner}")
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
        self._listener.connections[reader].close()
        within = self._within.pop(reader, None)
        if within is not None:
            self._outside.pop(within.index, None)
            within.close()  # from here on its place is another's

    def _see_off(self, number: int) -> None:
        """End the connection to a reader that the R-worker has closed."""
        self._inside.connections[number].close()
        outside = self._outside.pop(number, None)
        if outside is not None:
            reader = next(i for i, each in enumerate(self._listener.connections) if each is outside)
            self._within.pop(reader, None)
            outside.close()


class ExportServers:
    """The export servers of an engine's R-workers over ZeroMQ. Close them once those have ended.

    ``address``: tcp://HOST:PORT of the first one. The next ports follow, or * stands for free ones.
    """

    def __init__(self, address: str, key: ClusterKey | None, silence_s: float = 5.0) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._key = key
        self._silence_s = silence_s
        self._servers: dict[str, ExportServer] = {}
        self._addresses: dict[str, str] = {}
        self._hubs: ThreadHubs = {}  # by address
        self._ways: list[ZmqHub] = []

    def add(self, name: str, hub: InprocHub[FromRWorker, ToRWorker]) -> Neighbours:
        """Serve readers of an R-worker. Raises ConfigError: If its address can't be used."""
        from fastdecode.wire.zmq.hub import ZmqHub, ZmqListener

        address, silence_s = f"{self._host}:{self._next_port()}", self._silence_s
        listener = ZmqListener(
            address, name, key=self._key, silence_s=silence_s, most_peers=_READERS
        )
        self._addresses[name] = listener.address
        self._hubs[listener.address] = hub
        self._servers[name] = ExportServer(name, listener, hub)
        self._servers[name].start()
        self._ways.append(ZmqHub(self._key, silence_s=silence_s))
        return ThreadNeighbours(self._hubs, self._ways[-1])

    def address_of(self, name: str) -> str:
        """Return the address at which others reach an R-worker."""
        return self._addresses[name]

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


class RankExports:
    """The export server of an S-worker's device, which is a rank of an MPI job. Close it once the
    engine has ended."""

    def __init__(self, job: MpiJob, silence_s: float) -> None:
        self._job = job
        self._silence_s = silence_s
        self._opened = ExitStack()

    def add(self, name: str, hub: InprocHub[FromRWorker, ToRWorker]) -> Neighbours:
        from fastdecode.wire.mpi.hub import neighbour_hub, r_worker_hub

        neighbours = neighbour_hub(self._job, self._silence_s)
        self._opened.callback(neighbours.close)
        server = ExportServer(name, r_worker_hub(self._job, is_hurried=False), hub)
        self._opened.callback(server.close)
        server.start()
        return neighbours

    def address_of(self, name: str) -> str:
        """Return the name by which other ranks reach it."""
        return link_address(self._job.rank)

    def close(self) -> None:
        """Safe to call twice."""
        self._opened.close()

"""Hubs over MPI: connections to other ranks that one thread serves together."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, get_args

from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.wire.codec import Array, Codec, kind_of
from fastdecode.wire.messages import Failed, FromRWorker, Greeting, Message, ToRWorker
from fastdecode.wire.mpi.connection import MpiConnection, MpiJob
from fastdecode.wire.ranks import S_RANK, StageRanks, link_address
from fastdecode.wire.stages import FromStage, StageMessage, stage_name
from fastdecode.wire.traits import MOST_PEERS, Role
from fastdecode.wire.transport import PeerLostError, ReceiveT, SendT, closed_error, timeout_error
from fastdecode.wire.waiting import T, look_until_found, sleep_precisely

TO_R_WORKER: Final = frozenset(get_args(ToRWorker))
FROM_R_WORKER: Final = frozenset(get_args(FromRWorker))
_GREETINGS: Final = frozenset(get_args(Greeting))
_BETWEEN_STAGES: Final = frozenset((*get_args(StageMessage), *get_args(FromStage)))
_STAGE_LINE: Final = 8  # between the stages of an engine
CONTROL_LINE: Final = 10  # between the controller and an instance

_LINGER_S: Final = 2.0
_LEAVING_S: Final = 5.0  # longest time for an S-worker to leave once rank 0 has left


class MpiHub(Generic[SendT, ReceiveT]):
    """Connections to other ranks; see ``fastdecode.wire.transport.Hub``. Close it when done.

    Args:
        receives: Messages that the peers may send.
        accepts: Others may open connections by a greeting, as at an R-worker. The place of one that
            is over goes to the next.
        silence_s: A peer is lost after this long without a sign of life. 0 if the caller checks it.
        is_hurried: The caller looks without a pause at first, and has a pump. If False it looks
            once a millisecond, and leaves its core to the engine beside it.
    """

    def __init__(
        self,
        job: MpiJob,
        receives: frozenset[type[Message]],
        *,
        accepts: bool = False,
        silence_s: float = 0.0,
        is_hurried: bool = True,
    ) -> None:
        self._job = job
        self.codec: Final = Codec(receives)
        self.ready: Final[deque[MpiConnection[SendT, ReceiveT]]] = deque()
        """Connections with something to receive. The job's lock is held around its use."""
        self.silence_s: Final = silence_s
        self.connections: Sequence[MpiConnection[SendT, ReceiveT]] = ()
        self._accepts = accepts
        self._woken = None if is_hurried else threading.Event()
        self.on_left: Final[Callable[[], object]] = job.on_left if is_hurried else lambda: None
        """To be called when the caller does something else."""
        if is_hurried:
            sleep_precisely()
        if accepts:
            with job.lock:
                job.acceptor = self
                job.claim()

    def connect(
        self, rank: int, peer: str, *, line: int | None = None
    ) -> MpiConnection[SendT, ReceiveT]:
        """Connect to a rank. Never waits. The connection keeps its index.

        Args:
            peer: What to call it.
            line: Line to which both sides connect. None if the first message opens the other end.
        """
        with self._job.lock:
            connection = self._job.open(rank, line)
            self._add(connection, peer)
        return connection

    def open(self, address: str) -> MpiConnection[SendT, ReceiveT]:
        """Connect without an index: the caller polls it.

        Raises:
            ConfigError: If the address is not another rank's.
        """
        ranks = {link_address(rank): rank for rank in range(1, self._job.size)}
        rank = ranks.get(address, self._job.rank)
        if rank == self._job.rank:
            raise ConfigError(f"{address!r} is not another R-worker of this MPI job")
        with self._job.lock:
            connection = self._job.open(rank, None)
            connection.hub, connection.peer = self, f"R-worker {address}"
        return connection

    def accept(self, connection: MpiConnection[SendT, ReceiveT], piece: Array) -> bool:
        """Take a connection that its peer has opened, if its first message is a greeting; the job's
        lock is held. One too many is answered ``Failed`` (busy)."""
        kind = kind_of(piece.data[:64])
        if kind is None or kind not in _GREETINGS:
            return False
        rank = connection.rank
        num_alike = sum(each.greeting is kind and each.is_open for each in self.connections)
        connection.greeting = kind
        self._add(connection, f"rank {rank}" if rank else f"the S-worker (rank {rank})")
        if num_alike >= MOST_PEERS[Role.READER]:
            name, why = f"rank {self._job.rank}", f"{num_alike} peers have sent {kind.__name__}"
            with contextlib.suppress(WorkerError):  # it has left
                connection.send(Failed(name, "busy", why))
            connection.close()
        return True

    def _add(self, connection: MpiConnection[SendT, ReceiveT], peer: str) -> None:
        """Give a connection the next index, or that of one that is over."""
        places = [i for i, each in enumerate(self.connections) if each.is_closed and self._accepts]
        index = connection.index = places[0] if places else len(self.connections)
        connection.hub, connection.peer = self, peer
        self.connections = *self.connections[:index], connection, *self.connections[index + 1 :]
        connection.note_ready()

    def wake(self) -> None:
        """Have the thread that waits in ``receive_any``, or does so next, look up, as if its time
        were over; any thread."""
        if self._woken is not None:
            self._woken.set()

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        return self.wait(self._look, timeout_s, self._open_peers)

    def wait(
        self, look: Callable[[], T | None], timeout_s: float | None, whom: Callable[[], str]
    ) -> T:
        """Return what ``look`` finds, as soon as it finds something."""
        if self._woken is not None:
            found = look_until_found(look, timeout_s, self._woken)
        else:
            self._job.waits_since = time.monotonic()
            try:
                found = look_until_found(look, timeout_s)
            finally:
                self._job.waits_since = None
                self.on_left()
        if found is None:
            raise timeout_error(whom(), timeout_s or 0.0)
        return found

    def close(self) -> None:
        """Close every connection, and send what is on its way, for a few seconds at most."""
        with self._job.lock:
            if self._job.acceptor is self:
                self._job.acceptor = None
            for connection in list(self._job.connections.values()):
                if getattr(connection, "hub", None) is self:
                    connection.close()
        look_until_found(self._job.has_all_left, _LINGER_S)

    def _open_peers(self) -> str:
        return " or ".join(x.peer for x in self.connections if x.is_open)

    def _look(self) -> tuple[int, ReceiveT] | None:
        """Take what has come, in order of arrival."""
        with self._job.lock:
            while True:
                for _ in range(len(self.ready)):
                    connection = self.ready.popleft()
                    if not connection.is_open or connection.index is None:
                        continue
                    try:
                        message = connection.take()
                    except WorkerError as error:
                        raise PeerLostError(connection.index, error) from None
                    connection.note_ready()
                    if message is not None:
                        return connection.index, message
                if not self._job.take_in():
                    break
            for connection in self.connections:
                if connection.is_open:
                    wait_s = _LEAVING_S
                    break
            else:
                wait_s = 0.0
            if self._accepts:  # then others may come until rank 0 has left
                left_s = self._job.left_s.get(S_RANK, math.inf)
                is_over = time.monotonic() - left_s > wait_s
            else:
                is_over = not wait_s
            if is_over:
                peers = ", ".join(x.peer for x in self.connections)
                raise closed_error(peers or link_address(S_RANK), by_peer=True)
        return None


def r_worker_hub(job: MpiJob, *, is_hurried: bool = True) -> MpiHub[FromRWorker, ToRWorker]:
    """Return the hub where peers of an R-worker, or of a device's KV cache, connect."""
    hub = MpiHub[FromRWorker, ToRWorker](job, TO_R_WORKER, accepts=True, is_hurried=is_hurried)
    if job.rank != S_RANK:
        with job.lock:
            job.give_sign(S_RANK)  # S-workers that meet see what this rank is
    return hub


def neighbour_hub(job: MpiJob, silence_s: float) -> MpiHub[ToRWorker, FromRWorker]:
    """Return the hub by which an R-worker reaches others."""
    return MpiHub(job, FROM_R_WORKER, silence_s=silence_s, is_hurried=False)


def connect_stage(
    job: MpiJob, ranks: StageRanks, stage: int, r_ranks: Sequence[int]
) -> tuple[MpiHub[Any, Any], dict[int, MpiConnection[Any, Any]]]:
    """Connect a stage to its R-workers, and behind them to other stages.

    Returns:
        All connections, and those to other stages by their numbers.
    """
    others = ranks.others(stage)
    receives = FROM_R_WORKER | _BETWEEN_STAGES | TO_R_WORKER if others else FROM_R_WORKER
    hub: MpiHub[Any, Any] = MpiHub(job, receives)
    for rank in r_ranks:
        hub.connect(rank, f"R-worker rank {rank}")
    connections = {}
    for other in others:
        rank = ranks.leader(other)
        name = f"{stage_name(other)} (rank {rank})"
        connections[other] = hub.connect(rank, name, line=_STAGE_LINE)
    return hub, connections

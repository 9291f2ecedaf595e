"""Hubs over MPI: connections to other ranks that one thread serves together.

Any hub's thread that looks takes in messages for all hubs. Over TCP MPI moves nothing by itself:
there, while the caller computes, the **pump**, a thread, looks now and then. Waiting is polite:
look a few times, then yield the core between looks, then sleep.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypeAlias, get_args

from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.wire.codec import Array, Codec, kind_of
from fastdecode.wire.messages import (
    Failed,
    FromRWorker,
    Greeting,
    Message,
    ToRWorker,
)
from fastdecode.wire.mpi.connection import MpiConnection
from fastdecode.wire.mpi.job import MpiJob
from fastdecode.wire.mpi.ranks import S_RANK, StageRanks, link_address
from fastdecode.wire.stages import FromStage, StageMessage, stage_name
from fastdecode.wire.traits import MOST_PEERS, Role
from fastdecode.wire.transport import (
    PeerLostError,
    ReceiveT,
    SendT,
    closed_error,
    timeout_error,
)
from fastdecode.wire.waiting import Pump, T, look_until_found

Greetings: TypeAlias = Mapping[type[Message], int]
"""First messages that open a connection, and how many of each may be open."""

TO_R_WORKER: Final = frozenset(get_args(ToRWorker))
FROM_R_WORKER: Final = frozenset(get_args(FromRWorker))
_R_WORKER_GREETINGS: Final[Greetings] = dict.fromkeys(get_args(Greeting), MOST_PEERS[Role.READER])
_BETWEEN_STAGES: Final = frozenset((*get_args(StageMessage), *get_args(FromStage)))
_STAGE_LINE: Final = 8  # between the stages of an engine
CONTROL_LINE: Final = 9
"""Between the controller and an instance."""

_PUMP_INTERVAL_S: Final = 250e-6
_PULSE_S: Final = 0.1
"""Between two signs of life."""
_PUMP_RESTS_AFTER_S: Final = 1.0
_PUMP_GIVES_UP_AFTER_S: Final = 30.0
_PUMP_RESTS_IN_WAIT_AFTER_S: Final = 0.01
_LINGER_S: Final = 2.0
_LOOK_S: Final = 1e-3
_LEAVING_S: Final = 5.0
"""Longest time for an S-worker to leave once rank 0 has left."""


class MpiHub(Generic[SendT, ReceiveT]):
    """Connections to other ranks; see ``fastdecode.wire.transport.Hub``. Close it when done.

    Args:
        receives: Messages that the peers may send.
        greetings: Connections that others may open. If there are any, the place of a connection
            that is over goes to the next one.
        gives_signs: Give the peers signs of life, whatever the caller does.
        takes_signs: The peers that this side connects to give signs of life.
        silence_s: Such a peer is lost after this long without one. 0 if the caller checks it.
        is_hurried: The caller looks without a pause at first, and has a pump. If False it looks
            once a millisecond, and leaves its core to the engine beside it.
    """

    def __init__(
        self,
        job: MpiJob,
        receives: frozenset[type[Message]],
        *,
        greetings: Greetings | None = None,
        gives_signs: bool = False,
        takes_signs: bool = False,
        silence_s: float = 0.0,
        is_hurried: bool = True,
    ) -> None:
        self._job = job
        self._exchange = job.exchange
        self.codec: Final = Codec(receives)
        self.ready: Final[deque[MpiConnection[SendT, ReceiveT]]] = deque()
        """Connections with something to receive. The job's lock is held around its use."""
        self.silence_s: Final = silence_s
        self.connections: Sequence[MpiConnection[SendT, ReceiveT]] = ()
        self._opened: list[MpiConnection[SendT, ReceiveT]] = []
        self._greetings = greetings or {}
        self._takes_signs = takes_signs and job.threads_may_take_turns
        self._is_hurried = is_hurried
        self._woken = threading.Event()
        self._waits_since: float | None = None
        self._left_s = 0.0
        self._pump: Pump | None = None
        self._pulse: Pump | None = None
        if is_hurried and job.threads_may_take_turns:
            self._pump = Pump(self._keep_going, _PUMP_INTERVAL_S)
        if gives_signs and job.threads_may_take_turns:
            self._pulse = Pump(self._give_signs, _PULSE_S)
            self._pulse.wake()
        with job.lock:
            self._exchange.hubs.append(self)
            self._exchange.claim()

    def connect(
        self, rank: int, peer: str, *, line: int | None = None, gives_signs: bool | None = None
    ) -> MpiConnection[SendT, ReceiveT]:
        """Connect to a rank. Never waits. The connection keeps its index.

        Args:
            peer: What to call it.
            line: That both sides connect to. None if the first message is to open the other end.
            gives_signs: As the hub's others, unless given.
        """
        with self._job.lock:
            connection = self._exchange.open(rank, line)
            signs = self._takes_signs if gives_signs is None else gives_signs
            connection.gives_signs = signs and self._job.threads_may_take_turns
            self._add(connection, peer)
        return connection

    def open(self, address: str) -> MpiConnection[SendT, ReceiveT]:
        """Connect without an index: the caller polls it.

        Raises:
            ConfigError: If the address is not another rank's.
        """
        number = address.removeprefix("rank ")
        rank = int(number) if number.isdecimal() and len(number) < 10 else -1
        if not 0 < rank < self._job.size or rank == self._job.rank:
            raise ConfigError(f"{address!r} is not another R-worker of this MPI job")
        with self._job.lock:
            connection = self._exchange.open(rank, None)
            connection.hub, connection.peer = self, f"R-worker {address}"
            connection.gives_signs = self._takes_signs
            self._opened = [each for each in self._opened if not each.is_closed]
            self._opened.append(connection)
        return connection

    def accept(self, connection: MpiConnection[SendT, ReceiveT], piece: Array) -> bool:
        """Take a connection that its peer has opened, if its first message is a greeting here; the
        job's lock is held. One too many is answered ``Failed`` (busy)."""
        kind = kind_of(piece.data[:64])
        if kind is None or kind not in self._greetings:
            return False
        rank = connection.rank
        num_alike = sum(each.greeting is kind for each in self.connections if each.is_open)
        connection.greeting = kind
        self._add(connection, f"rank {rank}" if rank else f"the S-worker (rank {rank})")
        if num_alike >= self._greetings[kind]:
            name, why = f"rank {self._job.rank}", f"{num_alike} peers have sent {kind.__name__}"
            with contextlib.suppress(WorkerError):  # it has left
                connection.send(Failed(name, "busy", why))
            connection.close()
        return True

    def _add(self, connection: MpiConnection[SendT, ReceiveT], peer: str) -> None:
        """Give a connection the next index, or that of one that is over."""
        connection.hub, connection.peer = self, peer
        index = len(self.connections)
        if self._greetings:
            places = (i for i, each in enumerate(self.connections) if each.is_closed)
            index = next(places, index)
        connection.index = index
        self.connections = *self.connections[:index], connection, *self.connections[index + 1 :]
        connection.note_ready()

    def wake(self) -> None:
        """Have the thread that waits in ``receive_any``, or does so next, look up, as if its time
        were over; any thread."""
        self._woken.set()

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        return self.wait(self._look, timeout_s, self._open_peers)

    def wait(
        self, look: Callable[[], T | None], timeout_s: float | None, whom: Callable[[], str]
    ) -> T:
        """Return what ``look`` finds, as soon as it finds something."""
        self._waits_since = began_s = time.monotonic()
        try:
            if self._is_hurried:
                found = look_until_found(look, timeout_s)
            else:
                end_s = math.inf if timeout_s is None else began_s + timeout_s
                while (found := look()) is None and time.monotonic() < end_s:
                    if self._woken.wait(_LOOK_S):
                        self._woken.clear()
                        break
        finally:
            self._waits_since = None
            self.on_left()
        if found is None:
            raise timeout_error(whom(), timeout_s or 0.0)
        return found

    def on_left(self) -> None:
        """Have the pump look after what is under way: the caller does something else."""
        if self._pump is not None:
            self._left_s = time.monotonic()
            if not self._pump.is_wanted:
                self._pump.wake()

    def close(self) -> None:
        """Close every connection, and send what is on its way, for a few seconds at most."""
        if self._pulse is not None:
            self._pulse.stop()
        connections = *self.connections, *self._opened
        for connection in connections:
            connection.close()

        def all_left() -> bool | None:
            with self._job.lock:
                self._exchange.advance()
            return None if any(each.leaving for each in connections) else True

        look_until_found(all_left, _LINGER_S)
        if self._pump is not None:
            self._pump.stop()
        with self._job.lock:
            self._exchange.hubs.remove(self)
            for connection in connections:
                connection.abandon()

    def _open_peers(self) -> str:
        return " or ".join(x.peer for x in self.connections if x.is_open)

    def _look(self) -> tuple[int, ReceiveT] | None:
        """Take what has come, in order of arrival."""
        with self._job.lock:
            if self.silence_s:
                for connection in self.connections:
                    connection.check_silence()
            while True:
                for _ in range(len(self.ready)):
                    connection = self.ready.popleft()
                    connection.is_ready = False
                    if not connection.is_open or connection.index is None:
                        continue
                    try:
                        message = connection.take()
                    except WorkerError as error:
                        raise PeerLostError(connection.index, error) from None
                    if connection.inbox or connection.end is not None:
                        connection.note_ready()
                    if message is not None:
                        return connection.index, message
                if not self._exchange.take_in():
                    break
            for connection in self.connections:
                if connection.is_open:
                    is_over = False
                    break
            else:
                is_over = True
            if self._greetings:  # then others may come until rank 0 has left
                left_s = self._exchange.left_s.get(S_RANK, math.inf)
                is_over = time.monotonic() - left_s > (0.0 if is_over else _LEAVING_S)
            if is_over:
                peers = ", ".join(x.peer for x in self.connections)
                raise closed_error(peers or link_address(S_RANK), by_peer=True)
        return None

    def _give_signs(self) -> bool:
        with self._job.lock:
            if self._job.is_over:
                return False
            self._exchange.advance()
            for rank in {x.rank for x in self.connections if x.is_open and x.end is None}:
                self._exchange.give_sign(rank)
        return True

    def _keep_going(self) -> bool:
        """Do the pump's work. Return True to come again soon."""
        now = time.monotonic()
        waits_since = self._waits_since
        if waits_since is not None:  # the caller looks after things itself
            return now - waits_since < _PUMP_RESTS_IN_WAIT_AFTER_S
        if self._job.lock.acquire(blocking=False):  # else another thread looks after things
            try:
                if self._job.is_over:
                    return False
                self._exchange.advance()
            finally:
                self._job.lock.release()
        is_sending = any(connection.leaving for connection in self.connections)
        longest_s = _PUMP_GIVES_UP_AFTER_S if is_sending else _PUMP_RESTS_AFTER_S
        return now - self._left_s < longest_s


class RWorkerHub(MpiHub[FromRWorker, ToRWorker]):
    """Where the peers of an R-worker, or of a device's KV cache, come."""

    def __init__(self, job: MpiJob, *, is_hurried: bool = True) -> None:
        super().__init__(
            job,
            TO_R_WORKER,
            greetings=_R_WORKER_GREETINGS,
            gives_signs=True,
            is_hurried=is_hurried,
        )
        if job.rank != S_RANK:
            with job.lock:
                self._exchange.give_sign(S_RANK)  # S-workers that meet see what this rank is


class MpiNeighbours(MpiHub[ToRWorker, FromRWorker]):
    """How an R-worker reaches others; see ``rworker.transfers.neighbours.Neighbours``.

    Args:
        silence_s: One that gives no sign of life for this long is lost. 0 if it gives none.
    """

    def __init__(self, job: MpiJob, silence_s: float) -> None:
        super().__init__(
            job, FROM_R_WORKER, takes_signs=silence_s > 0, silence_s=silence_s, is_hurried=False
        )


def connect_stage(
    job: MpiJob, ranks: StageRanks, stage: int, r_ranks: Sequence[int]
) -> tuple[MpiHub[Any, Any], dict[int, MpiConnection[Any, Any]]]:
    """Connect a stage to its R-workers, and behind them to other stages.

    Returns:
        All connections, and those to other stages by their numbers.
    """
    others = ranks.others(stage)
    receives = FROM_R_WORKER | _BETWEEN_STAGES | TO_R_WORKER if others else FROM_R_WORKER
    hub: MpiHub[Any, Any] = MpiHub(job, receives, gives_signs=stage > 0, takes_signs=True)
    for rank in r_ranks:
        hub.connect(rank, f"R-worker rank {rank}")
    connections = {}
    for other in others:
        rank = ranks.leader(other)
        name = f"{stage_name(other)} (rank {rank})"
        # Stages behind the first give it signs of life, and it gives none.
        connections[other] = hub.connect(rank, name, line=_STAGE_LINE, gives_signs=not stage)
    return hub, connections

"""Connections between the ranks of an MPI job. Point to point and buffers only;
no collective, no pickling.

How a message travels is in ``fastdecode.wire.mpi.connection``. Receives for the
next few messages are always posted, and a large body's is as soon as its head
is here. So the next message comes in while the present one is worked on, as far
as MPI moves anything by itself. Over TCP it doesn't: there, while the caller
computes, the **pump**, a thread, looks after what is under way every so often,
in both directions. Waiting is polite: look a few times, then yield the core
between looks, then sleep.

Nobody is trusted to be alive. MPI tells of a dead rank where it can (Open MPI
under ``--with-ft ulfm``) or ends the job. It says nothing of a rank that hangs
or can't be reached. So R-workers give signs of life all the time, whatever
their main thread does, and the caller has deadlines (``heard_s``). MPI itself
may never return when a peer on the same host was stopped in the middle of
writing to shared memory; a watchdog ends the process then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, Generic, TypeVar, get_args

from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.wire.messages import FromRWorker, Message, ToRWorker
from fastdecode.wire.mpi.caller import Caller
from fastdecode.wire.mpi.connection import MpiConnection
from fastdecode.wire.mpi.job import DEFAULT_TAG, S_RANK, MpiJob
from fastdecode.wire.mpi.leaving import leave_stuck
from fastdecode.wire.mpi.siblings import ranks_here, stopped_siblings
from fastdecode.wire.transport import PeerLostError, closed_error
from fastdecode.wire.waiting import Pump, Watchdog, look_until_found

SendT = TypeVar("SendT", bound=Message)
ReceiveT = TypeVar("ReceiveT", bound=Message)

PUMP_INTERVAL_S: Final = 250e-6
PULSE_S: Final = 0.1
"""Between two signs of life."""
_PUMP_RESTS_AFTER_S: Final = 1.0
_PUMP_GIVES_UP_AFTER_S: Final = 30.0
_PUMP_RESTS_IN_WAIT_AFTER_S: Final = 0.01
_LINGER_S: Final = 2.0
STUCK_AFTER_S: Final = 15.0
"""A call of MPI's that takes longer never returns, whatever the ranks look like."""
_STUCK_TICKS: Final = 20
"""In which the watchdog counts that."""


class MpiHub(Generic[SendT, ReceiveT]):
    """Connections to other ranks; see ``fastdecode.wire.transport.Hub``. Close
    it when done.

    Args:
        job: this process's part in the job.
        peers: the other ranks, and what to call them.
        receives: the messages that they may send.
        tag: this and the next one are used; two hubs of a rank need tags of
            their own.
        pump_interval_s: how often the pump looks while the caller computes; 0:
            there is no pump.
        pulse_s: how often to give the peers a sign of life; 0: never.
        peers_give_signs: whether the peers give this side signs of life.
        stuck_after_s: end the process when a call of MPI's takes longer, and a
            rank on this host has been stopped or has ended. Calls that move
            large messages take a second. Where all ranks run, MPI gets
            ``STUCK_AFTER_S`` if that is more: one that compiles, on a host with
            much else to do, keeps others waiting for seconds.
        keeps_places: a connection that is over keeps its index; otherwise the
            next connection gets it, as where peers come and go.
    """

    def __init__(
        self,
        job: MpiJob,
        peers: Iterable[tuple[int, str]],
        receives: frozenset[type[Message]],
        *,
        tag: int = DEFAULT_TAG,
        pump_interval_s: float = PUMP_INTERVAL_S,
        pulse_s: float = 0.0,
        peers_give_signs: bool = False,
        stuck_after_s: float = STUCK_AFTER_S,
        keeps_places: bool = True,
    ) -> None:
        self._job = job
        self._caller = Caller()
        self._keeps_places = keeps_places
        self._receives = receives
        self._peers_give_signs = peers_give_signs and job.threads_may_take_turns
        self.connections: tuple[MpiConnection[SendT, ReceiveT], ...] = ()
        for rank, peer in peers:
            self.add(rank, peer, tag=tag)
        self._first = 0
        self._tick_s = stuck_after_s / _STUCK_TICKS
        self._ranks_here = ranks_here()
        self._watchdog = Watchdog(
            self._caller.looks, self._note_stuck, tick_s=self._tick_s, num_ticks=_STUCK_TICKS
        )
        self._watchdog.start()
        self._pulse: Pump | None = None
        if pump_interval_s > 0 and job.threads_may_take_turns:
            self._caller.pump = Pump(self._keep_going, pump_interval_s)
            self._caller.pump.start()
        if pulse_s > 0 and job.threads_may_take_turns:
            self._pulse = Pump(self._give_sign, pulse_s)
            self._pulse.start()
            self._pulse.wake()

    def _note_stuck(self, num_ticks: int) -> bool:
        """Leave, unless MPI may still return."""
        waited_s = num_ticks * self._tick_s
        all_run = not stopped_siblings() and self._ranks_here <= ranks_here()
        if all_run and waited_s < STUCK_AFTER_S:
            return False
        leave_stuck(waited_s)
        return True

    def add(
        self,
        rank: int,
        peer: str,
        *,
        tag: int,
        receives: frozenset[type[Message]] | None = None,
        gives_signs: bool | None = None,
        takes_signs: bool = True,
    ) -> MpiConnection[SendT, ReceiveT]:
        """A connection more, at any time: to a rank, over this tag and the
        next. What it may send, and whether it gives signs of life: as the
        hub's others, unless it is said. ``takes_signs``: it listens for ours;
        where nobody does, they would pile up."""
        signs = self._peers_give_signs if gives_signs is None else gives_signs
        job = self._job
        with job.lock:
            job.peers.add(rank)
            connection = MpiConnection[SendT, ReceiveT](
                job,
                self._caller,
                rank,
                peer,
                self._receives if receives is None else receives,
                tag=tag,
                gives_signs=signs and job.threads_may_take_turns,
            )
            connection.takes_signs = takes_signs
            place = self._free_place()
            for over in self.connections[place : place + 1]:
                over.outgoing.abandon()
            self.connections = (
                *self.connections[:place],
                connection,
                *self.connections[place + 1 :],
            )
        return connection

    def _free_place(self) -> int:
        """Where the next connection goes; the job's lock is held."""
        if not self._keeps_places:
            for index, connection in enumerate(self.connections):
                if not connection.is_open:
                    connection.advance()  # where nobody else does, what was sent leaves now
                if connection.is_over:
                    return index
        return len(self.connections)

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        return self._caller.wait(self._look_at_all, timeout_s, self._open_peers)

    def close(self) -> None:
        """Close every connection, and see off what was sent over them, for a
        few seconds at most."""
        if self._pulse is not None:
            self._pulse.stop()
        for connection in self.connections:
            connection.close()
        look_until_found(self._all_left, _LINGER_S)
        if self._caller.pump is not None:
            self._caller.pump.stop()
        with self._job.lock:
            for connection in self.connections:
                connection.outgoing.abandon()
        self._watchdog.stop()

    def _all_left(self) -> bool | None:
        with self._caller, self._job.lock:
            for connection in self.connections:
                connection.advance()
        return None if self._is_sending else True

    @property
    def _is_sending(self) -> bool:
        return any(connection.outgoing.leaving for connection in self.connections)

    def _open_peers(self) -> str:
        return " or ".join(x.peer for x in self.connections if x.is_open)

    def _look_at_all(self) -> tuple[int, ReceiveT] | None:
        """Asks every open connection, each call starting behind the one that answered last."""
        connections, any_open = self.connections, False
        num = len(connections)
        self._caller.num_looks += 1
        with self._job.lock:
            for i in range(self._first, self._first + num):
                index = i % num
                connection = connections[index]
                if connection.is_open:
                    any_open = True
                    try:
                        message = connection.look()
                    except WorkerError as error:
                        raise PeerLostError(index, error) from None
                    if message is not None:
                        self._first = index + 1
                        return index, message
        if not any_open:
            raise closed_error(", ".join(x.peer for x in connections) or "every peer", by_peer=True)
        return None

    def _give_sign(self) -> bool:
        with self._job.lock:
            if self._job.over.is_set():
                return False
            for connection in self.connections:
                if connection.takes_signs:
                    connection.give_sign()
        return True

    def _keep_going(self) -> bool:
        """The pump's work. Returns whether to come again soon."""
        now = time.monotonic()
        waits_since = self._caller.waits_since
        if waits_since is not None:  # the caller looks after things itself
            return now - waits_since < _PUMP_RESTS_IN_WAIT_AFTER_S
        if self._job.lock.acquire(blocking=False):
            try:
                if self._job.over.is_set():
                    return False
                for connection in self.connections:
                    connection.advance()
            finally:
                self._job.lock.release()
        longest_s = _PUMP_GIVES_UP_AFTER_S if self._is_sending else _PUMP_RESTS_AFTER_S
        return now - self._caller.left_s < longest_s


def connect_workers(
    job: MpiJob, *, tag: int = DEFAULT_TAG, stuck_after_s: float = STUCK_AFTER_S
) -> MpiHub[ToRWorker, FromRWorker]:
    """A sole S-worker's side: a connection to every other rank of the job, in their order.
    Never waits.

    Args:
        stuck_after_s: see ``MpiHub``.

    Raises:
        ConfigError: this isn't the first rank, or the only one.
    """
    if job.rank != S_RANK:
        raise ConfigError(
            f"this is rank {job.rank}: in an MPI job the S-worker is rank {S_RANK}, the first "
            "that starts"
        )
    if not job.r_ranks:
        raise ConfigError(
            "this is the only MPI rank: start more, which will be R-workers", code="too_few_ranks"
        )
    peers = [(rank, f"R-worker rank {rank}") for rank in job.r_ranks]
    receives = frozenset(get_args(FromRWorker))
    return MpiHub(job, peers, receives, tag=tag, peers_give_signs=True, stuck_after_s=stuck_after_s)


def connect_to_s_workers(
    job: MpiJob, *, tag: int = DEFAULT_TAG, make: type[MpiHub[FromRWorker, ToRWorker]] = MpiHub
) -> MpiHub[FromRWorker, ToRWorker]:
    """An R-worker's side: a connection to the S-worker. Never waits.

    Raises:
        ConfigError: this is the S-worker's rank.
    """
    if job.rank == S_RANK:
        raise ConfigError(
            f"an R-worker was started as rank {job.rank}, the S-worker's: begin the mpirun line "
            "with -n 1 fastdecode generate ... and let the R-workers follow behind a colon"
        )
    peers = [(S_RANK, f"the S-worker (rank {S_RANK})")]
    receives = frozenset(get_args(ToRWorker))
    return make(job, peers, receives, tag=tag, pulse_s=PULSE_S, keeps_places=False)

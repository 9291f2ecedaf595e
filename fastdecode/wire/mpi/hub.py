"""MPI as a pipe: connections between the ranks of a job, hubs that one thread serves, and the job,
where the messages of all ranks arrive.

A connection is a rank and an even **line**, which is the MPI tag of its messages. The side that
opens it chooses the line, and what it sends first makes the other end, if that is a greeting there.
Lines that both sides know have the same number on both. ::

    tag GOODBYE | (nothing)                 the rank leaves the job
    tag SIGN    | (nothing)                 the rank lives
    line        | head, body                a message of up to 256 KiB
    line + 1    | head         line | body  a larger one, or a lent one from 64 KiB on
    line        | (nothing)                 this side has closed

There is one probe for all ranks and lines, and any thread that looks takes in messages for all. A
large body leaves from a copy in buffers that MPI reads quickly (``fastdecode.wire.buffers``), but
for lent arrays that lie in one: those leave from there.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, get_args

from fastdecode.core.errors import ConfigError, ProtocolError, WorkerError
from fastdecode.wire.buffers import BufferPool, in_one_array
from fastdecode.wire.codec import ALIGNMENT, MAX_BODY_BYTES, Array, Codec, kind_of
from fastdecode.wire.messages import Failed, FromRWorker, Greeting, Message, ToRWorker
from fastdecode.wire.mpi.job import load_mpi
from fastdecode.wire.ranks import S_RANK, StageRanks, link_address
from fastdecode.wire.stages import FromStage, StageMessage, stage_name
from fastdecode.wire.traits import MOST_PEERS, Role
from fastdecode.wire.transport import (
    CLOSED,
    TIMEOUT,
    PeerLostError,
    ReceiveT,
    SendT,
    closed_error,
    timeout_error,
    unreadable,
)
from fastdecode.wire.waiting import T, look_until_found, sleep_precisely

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    MPI = load_mpi()

logger = logging.getLogger(__name__)

TO_R_WORKER: Final = frozenset(get_args(ToRWorker))
FROM_R_WORKER: Final = frozenset(get_args(FromRWorker))
_GREETINGS: Final = frozenset(get_args(Greeting))
_BETWEEN_STAGES: Final = frozenset((*get_args(StageMessage), *get_args(FromStage)))
_STAGE_LINE: Final = 8  # between the stages of an engine
CONTROL_LINE: Final = 10  # between the controller and an instance
MEETING_LINE: Final = 12  # between S-workers of one stage, when the job begins

_LINGER_S: Final = 2.0
_LEAVING_S: Final = 5.0  # longest time for an S-worker to leave once rank 0 has left
_JOINED_BYTES: Final = 1 << 16  # a body of up to this size is joined to its head as bytes,
_SMALL_BYTES: Final = 1 << 18  # one of up to this in a buffer, if it is not lent
_GOODBYE, _SIGN = range(2)
SIGN: Final = bytearray()  # what a sign of life sends
_LINES: Final = range(16, 32_000, 2)
"""Lines that the side that opens a connection chooses from. Lower ones are fixed."""
_SIGN_INTERVAL_S: Final = 0.1
_FIRST_SIGN_S: Final = 120.0
"""Longest time to a peer's first sign of life: it may load torch before."""
_GOODBYE_S: Final = 1.0
_PUMP_INTERVAL_S: Final = 250e-6
_PUMP_RESTS_AFTER_S: Final = 1.0
_PUMP_GIVES_UP_AFTER_S: Final = 30.0
_PUMP_RESTS_IN_WAIT_AFTER_S: Final = 0.01


class MpiConnection(Generic[SendT, ReceiveT]):
    """A connection to another rank; see ``fastdecode.wire.transport.Connection``."""

    hub: Any = None  # the ``MpiHub`` that has claimed it
    index: int | None = None  # its place in the hub; None if the hub doesn't receive from it
    greeting: type[Message] | None = None  # the peer's first, if that made the connection
    is_open = True  # false once this side has closed it, or its end was received
    is_closed = False
    is_gone = False  # true if the rank has closed the connection, left or died
    end: WorkerError | None = None  # why nothing follows what is in the inbox

    def __init__(self, job: MpiJob, rank: int, line: int) -> None:
        self.job: Final = job
        self.rank: Final = rank
        self.line: Final = line
        self.peer = f"rank {rank}"
        self.inbox: Final[deque[tuple[MPI.Request, Array, bool]]] = deque()  # bool: it is a head
        self.pool: Final = BufferPool()
        self._began_s = time.monotonic()
        self._head: Array | None = None

    @property
    def heard_s(self) -> float:
        return max(self._began_s, self.job.heard_s.get(self.rank, 0.0))

    @property
    def is_reached(self) -> bool:
        return self.heard_s > self._began_s

    def send(self, message: SendT | Failed) -> None:
        with self.job.lock:
            frame = self.hub.codec.encode(message)
            self.job.let_go()
            if self.is_closed or self.is_gone:
                raise closed_error(self.peer, by_peer=not self.is_closed)
            if frame.body_bytes <= _JOINED_BYTES:
                piece: Any = frame.in_one_piece()
            else:
                lends = message.lends  # type: ignore[union-attr]
                piece = in_one_array(frame.arrays, ALIGNMENT) if lends else None
                is_whole = piece is None and frame.body_bytes <= _SMALL_BYTES
                if not is_whole:  # the receiver takes it in while the body is copied
                    self.job.isend(self.rank, self.line + 1, frame.head)
                if piece is None:
                    piece = frame.copied(self.pool, whole=is_whole)
            self.job.isend(self.rank, self.line, piece)
            if self.is_gone:
                raise closed_error(self.peer, by_peer=True)
        self.hub.on_left()

    def receive(self, timeout_s: float | None = None) -> Any:
        return self.hub.wait(self._poll, timeout_s, [self])

    def poll(self) -> Any:
        try:
            return self._poll()
        finally:
            self.hub.on_left()

    def _poll(self) -> Any:
        with self.job.lock:
            if self.is_closed:
                raise closed_error(self.peer, by_peer=False)
            self.job.let_go()
            while (message := self.take()) is None and self.job.take_in():
                pass
            return message

    def close(self) -> None:
        """Close this side. The hub's ``close`` waits until what was sent before has left."""
        with self.job.lock:
            if not self.is_closed:
                self.is_closed, self.is_open = True, False
                if not self.is_gone:
                    self.job.isend(self.rank, self.line, b"")
                self._drop_inbox()
                self.pool.release()

    def give_up(self) -> None:
        """Close it. Unless it is gone, it hangs: the launcher ends it when this rank leaves."""
        if not self.is_gone:
            self.job.hanging.add(self.rank)
        self.close()

    def take(self) -> Any:
        """Return the next message if all of it is here.

        Raises:
            WorkerError: If nothing more will come.
        """
        try:
            while self.inbox and self.inbox[0][0].Test():
                _, piece, is_head = self.inbox.popleft()
                if is_head:
                    self._head = piece
                elif self._head is None:
                    return self.hub.codec.decode(piece)
                else:
                    head, self._head = self._head, None
                    return self.hub.codec.decode(head, piece)
        except MPI.Exception as error:
            self.job.on_error(error, self.rank)
            self._drop_inbox()
        except Exception as error:
            self.fail(unreadable(self.peer, error))
        if self.end is not None and not self.inbox:
            self.is_open = False
            raise self.end
        return None

    def check_silence(self) -> None:
        """Lose a peer that has given no sign of life for too long: it hangs."""
        limit_s = self.hub.silence_s if self.is_reached else max(self.hub.silence_s, _FIRST_SIGN_S)
        silent_s = time.monotonic() - self.heard_s
        if self.hub.silence_s and silent_s > limit_s:
            self.job.hanging.add(self.rank)
            why = f"{self.peer} has given no sign of life for {silent_s:.3g} s: it hangs"
            self.fail(WorkerError(why, code=TIMEOUT))

    def lose(self, why: str | None = None) -> None:
        """Note that the peer is gone. ``why``: None if it has closed or left."""
        self.is_gone = True
        if self.end is None:
            lost = WorkerError(f"{self.peer} is lost: {why}", code=CLOSED)
            self.fail(lost if why else closed_error(self.peer, by_peer=True))

    def fail(self, error: WorkerError) -> None:
        """Receive nothing more; what arrived before the peer has closed is received first."""
        self.end = error
        if error.code != CLOSED:
            self._drop_inbox()
        self.note_ready()

    def note_ready(self) -> None:
        """Queue it at the hub if there is something to receive."""
        is_due = self.index is not None and self.is_open and (self.inbox or self.end is not None)
        if is_due and self not in self.hub.ready:
            self.hub.ready.append(self)

    def _drop_inbox(self) -> None:
        """Receive what is under way without reading it."""
        self.job.in_flight.extend((*piece[:2], self.rank) for piece in self.inbox)
        self.inbox.clear()


class MpiJob:
    """This process's part in an MPI job, where the messages of all ranks arrive. MPI was asked for
    calls by several threads, one at a time: ``lock`` is held around each."""

    num_looks = 0
    is_over = False
    """Set under the lock when this process leaves: no other thread calls MPI then."""
    waits_since: float | None = None  # since when a thread waits without pauses
    acceptor: MpiHub[Any, Any] | None = None  # the hub where others may open connections

    def __init__(self, library: str) -> None:
        self.comm: Final = MPI.COMM_WORLD.Dup()
        self.rank: Final[int] = self.comm.rank
        self.size: Final[int] = self.comm.size
        self.library: Final = library  # name and version of the MPI library
        self.host: Final = MPI.Get_processor_name()
        self.lock: Final = threading.RLock()
        self.connections: Final[dict[tuple[int, int], MpiConnection[Any, Any]]] = {}
        self.in_flight: Final[deque[tuple[MPI.Request, Any, int]]] = deque()
        """Pieces that were sent, or are received and not read, and their ranks."""
        self.peers: Final[set[int]] = set()  # ranks that wait for this one's goodbye, beside rank 0
        self.hanging: Final[set[int]] = set()
        """Ranks that were given up though MPI has not reported them dead."""
        self.dead: Final[set[int]] = set()  # ranks that MPI reports dead
        self.left_s: Final[dict[int, float]] = {}
        """When each rank that is gone has left or died."""
        self.heard_s: Final[dict[int, float]] = {}  # when each rank last gave a sign of life
        self._status, self._numbers = MPI.Status(), itertools.count()
        self._left_s, self._rests, self._woken = 0.0, False, threading.Event()
        threading.Thread(target=self._pump, name="mpi-pump", daemon=True).start()

    def open(self, rank: int, line: int | None) -> MpiConnection[Any, Any]:
        """Return this side of a connection. ``line``: None for one that is new on both sides."""
        self.peers.add(rank)
        if line is None:
            lines = (_LINES[(2 * i + (self.rank < rank)) % len(_LINES)] for i in self._numbers)
            line = next(each for each in lines if (rank, each) not in self.connections)
        connection = self._find(rank, line)
        return self._add(rank, line) if connection.hub else connection

    def _find(self, rank: int, line: int) -> MpiConnection[Any, Any]:
        return self.connections.get((rank, line)) or self._add(rank, line)

    def _add(self, rank: int, line: int) -> MpiConnection[Any, Any]:
        connection = self.connections[rank, line] = MpiConnection[Any, Any](self, rank, line)
        if rank in self.left_s:
            connection.lose("its process has died" if rank in self.dead else None)
        return connection

    def isend(self, rank: int, line: int, data: Any) -> None:
        """Send a piece to a rank, which is lost if MPI can't reach it."""
        try:
            self.in_flight.append((self.comm.Isend([data, MPI.BYTE], rank, line), data, rank))
        except MPI.Exception as error:
            self.on_error(error, rank)

    def let_go(self) -> None:
        """Free the memory of pieces that have left, up to the first that hasn't."""
        in_flight = self.in_flight
        try:
            while in_flight and in_flight[0][0].Test():
                in_flight.popleft()
        except MPI.Exception as error:
            self.on_error(error, in_flight.popleft()[2])

    def take_in(self) -> bool:
        """Take in the next message of any rank. Return False if none is here. Never raises."""
        status = self._status
        self.num_looks += 1
        try:
            found = self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if found is None:
                return False
            rank, line, num_bytes = status.source, status.tag, status.Get_count(MPI.BYTE)
            if num_bytes:
                self._take(found, rank, line, num_bytes)
                return True
            found.Recv([bytearray(), MPI.BYTE])
        except MPI.Exception as error:
            self.on_error(error)
            return False
        if line == _SIGN:
            self.heard_s[rank] = time.monotonic()
        elif line == _GOODBYE:
            self._lose_rank(rank)
        elif line < _LINES.start or (rank, line) in self.connections:
            self._find(rank, line).lose()
        return True

    def _take(self, found: MPI.Message, rank: int, line: int, num_bytes: int) -> None:
        """Take in a piece of a connection's message."""
        line, is_head = line & -2, bool(line & 1)
        connection = self.connections.get((rank, line)) or self._add(rank, line)
        if num_bytes > MAX_BODY_BYTES:
            error = ProtocolError(f"it sends {num_bytes} bytes at once")
            connection.fail(unreadable(connection.peer, error))
        elif connection.is_closed or connection.end is not None:
            unwanted = bytearray(num_bytes)
            self.in_flight.append((found.Irecv([unwanted, MPI.BYTE]), unwanted, rank))
        else:
            buffer = connection.pool.take(num_bytes)
            connection.inbox.append((found.Irecv([buffer, MPI.BYTE]), buffer, is_head))
            connection.note_ready()
            if connection.hub is None:
                self._claim(connection)

    def _claim(self, connection: MpiConnection[Any, Any]) -> None:
        """Give a connection that its peer has opened to the hub that it greets."""
        try:
            if self.acceptor and connection.inbox and connection.inbox[0][0].Test():
                self.acceptor.accept(connection, connection.inbox[0][1])
        except MPI.Exception as error:
            self.on_error(error, connection.rank)

    def advance(self) -> None:
        """Take in all that is here. Free pieces that have left, and connections that are over."""
        with self.lock:
            while self.take_in():
                pass
            for _ in range(len(self.in_flight)):
                self.let_go()
                self.in_flight.rotate(-1)
            for place, connection in list(self.connections.items()):
                if connection.hub is None:
                    self._claim(connection)
                if connection.is_closed and connection.is_gone:
                    del self.connections[place]

    def on_left(self) -> None:
        """Wake the pump, which moves what is under way: the caller does something else."""
        self._left_s = time.monotonic()
        if self._rests:
            self._woken.set()

    def _pump(self) -> None:
        """Give signs of life. While the caller computes, move what is under way: over TCP MPI
        moves nothing by itself."""
        signed_s, has_failed = 0.0, False
        while True:
            self._rests = True  # a later `on_left` is noticed
            began_s, waits_since = time.monotonic(), self.waits_since
            is_due = began_s - signed_s >= _SIGN_INTERVAL_S
            # A caller that waits looks after things itself, and so does a thread that is in MPI.
            if (is_due or waits_since is None) and self.lock.acquire(blocking=is_due):
                try:
                    if self.is_over:
                        return
                    self.advance()  # signs that arrived while this process was stopped count
                    if is_due:
                        signed_s = began_s
                        self._give_signs()
                except Exception:  # others rely on this thread
                    if not has_failed:
                        logger.exception("work in the background failed, and continues")
                    has_failed = True
                finally:
                    self.lock.release()
            longest_s = _PUMP_GIVES_UP_AFTER_S if self.in_flight else _PUMP_RESTS_AFTER_S
            if waits_since is not None:
                longest_s = _PUMP_RESTS_IN_WAIT_AFTER_S
            if began_s - (waits_since or self._left_s) < longest_s:
                self._rests = False
                time.sleep(_PUMP_INTERVAL_S)
            else:
                self._woken.wait(_SIGN_INTERVAL_S)
            self._woken.clear()

    def _give_signs(self) -> None:
        """Tell the peers that this rank lives, and see which of them hang."""
        ranks = set()
        for connection in self.connections.values():
            if connection.hub and connection.is_open and connection.end is None:
                connection.check_silence()
                ranks.add(connection.rank)
        # A rank gets no sign while the one before is still under way.
        for rank in ranks - {rank for _, data, rank in self.in_flight if data is SIGN}:
            self.isend(rank, _SIGN, SIGN)

    def has_all_left(self) -> bool | None:
        """Return True if nothing is in flight, else None."""
        self.advance()
        return None if self.in_flight else True

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Wait until rank 0 has left or died. Return False if it has died: it sets no exit code."""

        def has_left() -> bool | None:
            self.advance()
            return S_RANK in self.left_s or None

        look_until_found(has_left, timeout_s)
        return S_RANK not in self.dead

    def say_goodbye(self) -> None:
        """Tell the ranks that may wait for this one, and wait until that has left."""
        with contextlib.suppress(Exception), self.lock:
            if not self.is_over:
                self.is_over = True
                ranks = {S_RANK, *self.peers} if self.rank else {*range(self.size)}
                for rank in ranks - {self.rank, *self.left_s}:
                    self.isend(rank, _GOODBYE, b"")
                look_until_found(self.has_all_left, _GOODBYE_S)

    def on_error(self, error: MPI.Exception, reached: int | None = None) -> None:
        """Find out which ranks have died. If the library can't tell, all are lost. ``reached``
        is lost in any case: a rank that MPI can't reach."""
        ranks, why = list(range(self.size)), error.Get_error_string()
        with contextlib.suppress(MPI.Exception, NotImplementedError):
            failed = self.comm.Get_failed()
            ranks = failed.Translate_ranks(list(range(failed.size)), self.comm.Get_group())
            self.comm.Ack_failed(failed.size)
            why = "its process has died"
        for rank in {*ranks} - {*self.left_s}:
            self.dead.add(rank)
            self._lose_rank(rank, why)
        if reached is not None:
            self._lose_rank(reached, error.Get_error_string())

    def _lose_rank(self, rank: int, why: str | None = None) -> None:
        self.left_s.setdefault(rank, time.monotonic())
        for connection in self.connections.values():
            if connection.rank == rank and not connection.is_gone:
                connection.lose(why)


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
        self._accepts, self._woken = accepts, None if is_hurried else threading.Event()
        self.on_left: Final[Callable[[], object]] = job.on_left if is_hurried else lambda: None
        """To be called when the caller does something else."""
        if is_hurried:
            sleep_precisely()
        if accepts:
            job.acceptor = self
            job.advance()

    def connect(
        self, rank: int, peer: str, *, line: int | None = None
    ) -> MpiConnection[SendT, ReceiveT]:
        """Connect to a rank, called ``peer``. The connection keeps its index. ``line``: None if the
        first message opens the other end."""
        with self._job.lock:
            connection = self._job.open(rank, line)
            self._add(connection, peer)
        return connection

    def open(self, address: str) -> MpiConnection[SendT, ReceiveT]:
        """Connect without an index: the caller polls it. Raises ConfigError: If the address is not
        another rank's."""
        ranks = {link_address(rank): rank for rank in range(1, self._job.size)}
        if address not in ranks or ranks[address] == self._job.rank:
            raise ConfigError(f"{address!r} is not another R-worker of this MPI job")
        with self._job.lock:
            connection = self._job.open(ranks[address], None)
            connection.hub, connection.peer = self, f"R-worker {address}"
        return connection

    def accept(self, connection: MpiConnection[SendT, ReceiveT], piece: Array) -> None:
        """Take a connection that its peer has opened, if its first message is a greeting; the job's
        lock is held. One too many is answered ``Failed`` (busy)."""
        kind = kind_of(piece.data[:64])
        if kind is None or kind not in _GREETINGS:
            return
        rank = connection.rank
        num_alike = sum(each.greeting is kind and each.is_open for each in self.connections)
        connection.greeting = kind
        self._add(connection, f"rank {rank}" if rank else f"the S-worker (rank {rank})")
        if num_alike >= MOST_PEERS[Role.READER]:
            name, why = f"rank {self._job.rank}", f"{num_alike} peers have sent {kind.__name__}"
            with contextlib.suppress(WorkerError):  # it has left
                connection.send(Failed(name, "busy", why))
            connection.close()

    def _add(self, connection: MpiConnection[SendT, ReceiveT], peer: str) -> None:
        """Give a connection the next index, or that of one that is over."""
        places = [i for i, each in enumerate(self.connections) if each.is_closed and self._accepts]
        index = connection.index = places[0] if places else len(self.connections)
        connection.hub, connection.peer = self, peer
        self.connections = *self.connections[:index], connection, *self.connections[index + 1 :]
        connection.note_ready()

    def wake(self) -> None:
        """End the current or next wait in ``receive_any`` as if its time were over. Thread-safe."""
        if self._woken is not None:
            self._woken.set()

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        return self.wait(self._look, timeout_s, self.connections)

    def wait(self, look: Callable[[], T | None], timeout_s: float | None, ends: Iterable[Any]) -> T:
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
            raise timeout_error(" or ".join(x.peer for x in ends if x.is_open), timeout_s or 0.0)
        return found

    def close(self) -> None:
        """Close every connection, and send what is on its way, for a few seconds at most."""
        with self._job.lock:
            if self._job.acceptor is self:
                self._job.acceptor = None
            for connection in list(self._job.connections.values()):
                if connection.hub is self:
                    connection.close()
        look_until_found(self._job.has_all_left, _LINGER_S)

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
            wait_s = 0.0
            for connection in self.connections:
                if connection.is_open:
                    if not self._accepts:
                        return None
                    wait_s = _LEAVING_S
                    break
            # Where others may connect, they may until rank 0 has left.
            left_s = self._job.left_s.get(S_RANK, math.inf) if self._accepts else 0.0
            if time.monotonic() - left_s > wait_s:
                peers = ", ".join(x.peer for x in self.connections)
                raise closed_error(peers or link_address(S_RANK), by_peer=True)
        return None


def r_worker_hub(job: MpiJob, *, is_hurried: bool = True) -> MpiHub[FromRWorker, ToRWorker]:
    """Return the hub where peers of an R-worker, or of a device's KV cache, connect."""
    hub = MpiHub[FromRWorker, ToRWorker](job, TO_R_WORKER, accepts=True, is_hurried=is_hurried)
    if job.rank != S_RANK:
        with job.lock:
            job.isend(S_RANK, MEETING_LINE, b"")  # this rank meets no S-workers
    return hub


def neighbour_hub(job: MpiJob, silence_s: float) -> MpiHub[ToRWorker, FromRWorker]:
    """Return the hub by which an R-worker reaches others."""
    return MpiHub(job, FROM_R_WORKER, silence_s=silence_s, is_hurried=False)


def connect_stage(
    job: MpiJob, ranks: StageRanks, stage: int, r_ranks: Sequence[int]
) -> tuple[MpiHub[Any, Any], dict[int, MpiConnection[Any, Any]]]:
    """Connect a stage to its R-workers, and behind them to other stages. Return all connections,
    and those to other stages by their numbers."""
    others = ranks.others(stage)
    receives = FROM_R_WORKER | _BETWEEN_STAGES | TO_R_WORKER if others else FROM_R_WORKER
    hub: MpiHub[Any, Any] = MpiHub(job, receives)
    for rank in r_ranks:
        hub.connect(rank, f"R-worker rank {rank}")
    return hub, {
        other: hub.connect(rank, f"{stage_name(other)} (rank {rank})", line=_STAGE_LINE)
        for other, rank in zip(others, map(ranks.leader, others), strict=True)
    }

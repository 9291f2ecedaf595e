"""Connections between the ranks of an MPI job, and the job, where all their messages arrive.

A connection is a rank and an even **line**, which is the MPI tag of its messages. The side that
opens it chooses the line, and what it sends first makes the other end, if that is a greeting there.
Lines that both sides know have the same number on both. ::

    tag GOODBYE | (nothing)                 the rank leaves the job
    tag SIGN    | (nothing)                 the rank lives
    tag TEXT    | text                      S-workers that meet when the job begins
    line        | head, body                a small message
    line + 1    | head         line | body  a large one
    line        | (nothing)                 this side has closed

There is one probe for all ranks and lines, and any thread that looks takes in messages for all. A
large body leaves from a copy in buffers that MPI reads quickly (``fastdecode.wire.buffers``), but
for lent arrays that lie in one: those leave from there.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Final, Generic

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.wire.buffers import BufferPool, in_one_array
from fastdecode.wire.codec import ALIGNMENT, MAX_BODY_BYTES, Array
from fastdecode.wire.messages import Failed, Message
from fastdecode.wire.mpi.job import load_mpi
from fastdecode.wire.ranks import S_RANK
from fastdecode.wire.transport import CLOSED, TIMEOUT, ReceiveT, SendT, closed_error, unreadable
from fastdecode.wire.waiting import look_until_found

if TYPE_CHECKING:
    from mpi4py import MPI

    from fastdecode.wire.mpi.hub import MpiHub
else:
    MPI = load_mpi()

logger = logging.getLogger(__name__)

_INLINE_BYTES: Final = 1 << 16  # a message of up to this size travels in one piece
_GOODBYE, _SIGN, _TEXT = range(3)
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

    hub: MpiHub[SendT, ReceiveT]  # set once a hub has claimed the connection
    index: int | None = None
    """Its place in the hub. None if the hub doesn't receive from it."""
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
            frame = self.hub.codec.encode(message)  # type: ignore[arg-type]
            self.job.let_go()
            if self.is_closed or self.is_gone:
                raise closed_error(self.peer, by_peer=not self.is_closed)
            if frame.num_bytes <= _INLINE_BYTES or not frame.body_bytes:
                self.job.isend(self.rank, self.line, frame.in_one_piece())
            else:
                self.job.isend(self.rank, self.line + 1, frame.head)
                lends = message.lends  # type: ignore[union-attr]
                body = in_one_array(frame.arrays, ALIGNMENT) if lends else None
                if body is None:
                    body = self.pool.take(frame.body_bytes)
                    frame.write_body(body.data)
                self.job.isend(self.rank, self.line, body)
            if self.is_gone:
                raise closed_error(self.peer, by_peer=True)
        self.hub.on_left()

    def receive(self, timeout_s: float | None = None) -> ReceiveT:
        return self.hub.wait(self._poll, timeout_s, lambda: self.peer)

    def poll(self) -> ReceiveT | None:
        try:
            return self._poll()
        finally:
            self.hub.on_left()

    def _poll(self) -> ReceiveT | None:
        with self.job.lock:
            if self.is_closed:
                raise closed_error(self.peer, by_peer=False)
            self.job.let_go()
            while (message := self.take()) is None and self.job.take_in():
                pass
            return message

    def close(self) -> None:
        """See ``Connection``. What was sent before still leaves; the hub's ``close`` waits for
        that."""
        with self.job.lock:
            if not self.is_closed:
                self.is_closed, self.is_open = True, False
                if not self.is_gone:
                    self.job.isend(self.rank, self.line, b"")
                self._drop_inbox()
                self.pool.release()

    def give_up(self) -> None:
        """Close it, and have the launcher end the peer when this rank leaves, unless it is gone:
        it hangs."""
        if not self.is_gone:
            self.job.hanging.add(self.rank)
        self.close()

    def take(self) -> ReceiveT | None:
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
                    return self.hub.codec.decode(piece)  # type: ignore[return-value]
                else:
                    head, self._head = self._head, None
                    return self.hub.codec.decode(head, piece)  # type: ignore[return-value]
        except MPI.Exception as error:
            self.job.on_error(error, self.rank)
            self._drop_inbox()
        except ProtocolError as error:
            self.fail(WorkerError(f"{self.peer} broke the protocol: {error}", code=error.code))
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
        """Receive nothing more; what came before the peer has closed is received first."""
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
        self._unclaimed: list[MpiConnection[Any, Any]] = []
        self._status = MPI.Status()
        self._numbers = itertools.count()
        self._signs: dict[int, MPI.Request | None] = {}
        self._texts: defaultdict[int, deque[str]] = defaultdict(deque)
        self._left_s = 0.0
        self._woken = threading.Event()
        self._rests = False
        threading.Thread(target=self._pump, name="mpi-pump", daemon=True).start()

    def open(self, rank: int, line: int | None) -> MpiConnection[Any, Any]:
        """Return this side of a connection. ``line``: None for one that is new on both sides."""
        self.peers.add(rank)
        if line is None:
            line = _LINES[(2 * next(self._numbers) + (self.rank < rank)) % len(_LINES)]
        connection = self.connections.get((rank, line))
        if connection is None or connection not in self._unclaimed:
            return self._add(rank, line)
        self._unclaimed.remove(connection)
        return connection

    def _add(self, rank: int, line: int) -> MpiConnection[Any, Any]:
        connection = self.connections[rank, line] = MpiConnection[Any, Any](self, rank, line)
        if rank in self.left_s:
            connection.lose("its process has died" if rank in self.dead else None)
        return connection

    def isend(self, rank: int, line: int, data: Any) -> MPI.Request | None:
        """Send a piece to a rank. Return None if MPI can't reach it."""
        try:
            request = self.comm.Isend([data, MPI.BYTE], rank, line)
        except MPI.Exception as error:
            self.on_error(error, rank)
            return None
        self.in_flight.append((request, data, rank))
        return request

    def let_go(self) -> None:
        """Free the memory of pieces that have left, up to the first that hasn't."""
        in_flight = self.in_flight
        try:
            while in_flight and in_flight[0][0].Test():
                in_flight.popleft()
        except MPI.Exception as error:
            self.on_error(error, in_flight.popleft()[2])

    def _is_done(self, request: MPI.Request, rank: int) -> bool:
        try:
            return request.Test()
        except MPI.Exception as error:
            self.on_error(error, rank)
            return True

    def take_in(self) -> bool:
        """Take in the next message of any rank. Return False if none is here. Never raises."""
        status = self._status
        self.num_looks += 1
        try:
            found = self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if found is None:
                return False
            rank, line, num_bytes = status.source, status.tag, status.Get_count(MPI.BYTE)
            if num_bytes and line > _TEXT:
                self._take(found, rank, line, num_bytes)
                return True
            data = bytearray(num_bytes)
            found.Recv([data, MPI.BYTE])
        except MPI.Exception as error:
            self._note_deaths(error)
            return False
        if line == _SIGN:
            self.heard_s[rank] = time.monotonic()
        elif line == _TEXT:
            self._texts[rank].append(data.decode(errors="replace"))
        elif line == _GOODBYE:
            self._lose_rank(rank)
        elif (rank, line) in self.connections:
            self.connections[rank, line].lose()
        return True

    def _take(self, found: MPI.Message, rank: int, line: int, num_bytes: int) -> None:
        """Take in a piece of a connection's message."""
        line, is_head = line & -2, bool(line & 1)
        connection = self.connections.get((rank, line))
        if connection is None:
            connection = self._add(rank, line)
            self._unclaimed.append(connection)
        if num_bytes > MAX_BODY_BYTES:
            why = f"rank {rank} wants to send {num_bytes} bytes at once"
            connection.fail(WorkerError(why, code=ProtocolError.default_code))
        elif connection.is_closed or connection.end is not None:
            unwanted = bytearray(num_bytes)
            self.in_flight.append((found.Irecv([unwanted, MPI.BYTE]), unwanted, rank))
        else:
            buffer = connection.pool.take(num_bytes)
            connection.inbox.append((found.Irecv([buffer, MPI.BYTE]), buffer, is_head))
            connection.note_ready()
            if self._unclaimed:
                self.claim()

    def claim(self) -> None:
        """Give connections that others have opened to the hub that they greet."""
        if self.acceptor is None:
            return
        for connection in list(self._unclaimed):
            is_here = connection.inbox and self._is_done(connection.inbox[0][0], connection.rank)
            if is_here and self.acceptor.accept(connection, connection.inbox[0][1]):
                self._unclaimed.remove(connection)

    def advance(self) -> None:
        """Take in all that is here. Free pieces that have left, and connections that are over."""
        while self.take_in():
            pass
        self.claim()
        for _ in range(len(self.in_flight)):
            piece = self.in_flight.popleft()
            if not self._is_done(piece[0], piece[2]):
                self.in_flight.append(piece)
        for place, connection in list(self.connections.items()):
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
            self._rests = True  # `on_left` from here on is noticed
            began_s, waits_since = time.monotonic(), self.waits_since
            is_due = began_s - signed_s >= _SIGN_INTERVAL_S
            # A caller that waits looks after things itself, and so does a thread that is in MPI.
            if (is_due or waits_since is None) and self.lock.acquire(blocking=is_due):
                try:
                    if self.is_over:
                        return
                    self.advance()  # signs that came while this process was stopped count
                    if is_due:
                        signed_s = began_s
                        self._give_signs()
                except Exception:  # others rely on this thread
                    if not has_failed:
                        logger.exception("work in the background failed, and continues")
                    has_failed = True
                finally:
                    self.lock.release()
            if waits_since is not None:
                is_busy = began_s - waits_since < _PUMP_RESTS_IN_WAIT_AFTER_S
            else:
                longest_s = _PUMP_GIVES_UP_AFTER_S if self.in_flight else _PUMP_RESTS_AFTER_S
                is_busy = began_s - self._left_s < longest_s
            if is_busy:
                self._rests = False
                time.sleep(_PUMP_INTERVAL_S)
            else:
                self._woken.wait(_SIGN_INTERVAL_S)
            self._woken.clear()

    def _give_signs(self) -> None:
        """Tell the peers that this rank lives, and see which of them hang."""
        claimed = {*self.connections.values()} - {*self._unclaimed}
        peers = [each for each in claimed if each.is_open and each.end is None]
        for connection in peers:
            connection.check_silence()
        for rank in {connection.rank for connection in peers}:
            self.give_sign(rank)

    def give_sign(self, rank: int) -> None:
        """Tell a rank that this one lives, unless the sign before is still under way."""
        before = self._signs.get(rank)
        if before is None or self._is_done(before, rank):
            self._signs[rank] = self.isend(rank, _SIGN, b"")

    def send_text(self, rank: int, text: str) -> None:
        """Send a short text to another S-worker's rank, when the job begins."""
        with self.lock:
            self.isend(rank, _TEXT, text.encode())

    def receive_text(self, rank: int, timeout_s: float) -> str:
        """Wait for the next text of a rank.

        Raises:
            WorkerError: If the rank has left, gives signs of life as R-workers do, or sends none
                in time.
        """

        def has_come() -> bool | None:
            return self.has_left(rank) or rank in self.heard_s or bool(self._texts[rank]) or None

        is_lost = look_until_found(has_come, timeout_s)
        if self._texts[rank]:
            return self._texts[rank].popleft()
        if is_lost:
            raise WorkerError(
                f"rank {rank} has ended before it met the other S-workers, as its own output then "
                "says, or was started as an R-worker: the first tp ranks are S-workers",
                code="tp_rank_lost",
            )
        raise WorkerError(
            f"rank {rank} hasn't come to meet the other S-workers in {timeout_s:g} s: does it "
            "hang, or was it started with other options than rank 0?",
            code="tp_connect_failed",
        )

    def has_left(self, rank: int) -> bool:
        """Return True if a rank has left or died."""
        with self.lock:
            self.advance()
            return rank in self.left_s

    def has_all_left(self) -> bool | None:
        """Return True if nothing is in flight, else None."""
        with self.lock:
            self.advance()
        return None if self.in_flight else True

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Wait until rank 0 has left or died. Return False if it has died; else it decides the
        exit code."""
        look_until_found(lambda: self.has_left(S_RANK) or None, timeout_s)
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

    def on_error(self, error: MPI.Exception, rank: int) -> None:
        """Note why MPI can't reach a rank."""
        self._note_deaths(error)
        self._lose_rank(rank, error.Get_error_string())

    def _note_deaths(self, error: MPI.Exception) -> None:
        """Find out which ranks have died. Without a library that says so, all are lost."""
        ranks, why = list(range(self.size)), error.Get_error_string()
        with contextlib.suppress(MPI.Exception, NotImplementedError):
            failed = self.comm.Get_failed()
            ranks = failed.Translate_ranks(list(range(failed.size)), self.comm.Get_group())
            self.comm.Ack_failed(failed.size)
            why = "its process has died"
        for rank in {*ranks} - {*self.left_s}:
            self.dead.add(rank)
            self._lose_rank(rank, why)

    def _lose_rank(self, rank: int, why: str | None = None) -> None:
        self.left_s.setdefault(rank, time.monotonic())
        for connection in self.connections.values():
            if connection.rank == rank and not connection.is_gone:
                connection.lose(why)

"""Connections between ranks, and the place where the messages of all of them arrive.

A connection is a rank and a **line**, which is the MPI tag of its messages. The side that opens it
chooses the line, and what it sends first makes the other end, if that is a greeting there. Lines
that both sides know have the same number on both. ::

    tag GOODBYE | (nothing)                 the rank leaves the job
    tag SIGN    | (nothing)                 the rank lives
    tag TEXT    | text                      S-workers that meet when the job begins
    line        | head, body                a small message
    line        | head         line | body  a large one
    line        | (nothing)                 this side has closed

There is one probe for all ranks and lines. A large body leaves from a copy in buffers that MPI
reads quickly (``fastdecode.wire.buffers``), but for lent arrays that lie in one: those leave from
there.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.wire.buffers import BufferPool, in_one_array
from fastdecode.wire.codec import (
    ALIGNMENT,
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    Array,
    read_prefix,
)
from fastdecode.wire.messages import Failed, Message
from fastdecode.wire.mpi.job import MpiJob, load_mpi
from fastdecode.wire.transport import (
    CLOSED,
    TIMEOUT,
    ReceiveT,
    SendT,
    closed_error,
    unreadable,
)
from fastdecode.wire.waiting import look_until_found

if TYPE_CHECKING:
    from mpi4py import MPI

    from fastdecode.wire.mpi.hub import MpiHub
else:
    MPI = load_mpi()

InFlight: TypeAlias = "tuple[MPI.Request, Any]"
"""What MPI isn't done with, and the memory that it needs for that."""

_INLINE_BYTES: Final = MAX_HEAD_BYTES  # a message of up to this size travels in one piece
_GOODBYE, _SIGN, _TEXT = range(3)
_LINES: Final = range(16, 32_000)
"""Lines that the side that opens a connection chooses from. Lower ones are fixed."""
_FIRST_SIGN_S: Final = 120.0
"""Longest time to a peer's first sign of life: it may load torch before."""


class MpiConnection(Generic[SendT, ReceiveT]):
    """A connection to another rank; see ``fastdecode.wire.transport.Connection``."""

    hub: MpiHub[SendT, ReceiveT]  # set once a hub has claimed the connection

    def __init__(self, exchange: Exchange, rank: int, line: int) -> None:
        self.rank: Final = rank
        self.line: Final = line
        self.peer = f"rank {rank}"
        self.inbox: Final[deque[InFlight]] = deque()
        self.leaving: Final[deque[InFlight]] = deque()
        self.pool: Final = BufferPool()
        self.index: int | None = None
        """Its place in the hub. None if the hub doesn't receive from it."""
        self.greeting: type[Message] | None = None  # the peer's first, if that made the connection
        self.is_open = True  # false once this side has closed it, or its end was received
        self.is_closed = False
        self.is_gone = False  # true if the rank has closed the connection, left or died
        self.is_ready = False  # true while the hub is about to look at it
        self.gives_signs = False  # true if the peer gives signs of life
        self.end: WorkerError | None = None  # why nothing follows what is in the inbox
        self._exchange = exchange
        self._began_s = time.monotonic()
        self._head: Array | None = None

    @property
    def heard_s(self) -> float | None:
        heard_s = self._exchange.heard_s[self.rank]
        return max(self._began_s, heard_s) if self.gives_signs else None

    @property
    def is_reached(self) -> bool:
        return not self.gives_signs or self._exchange.heard_s[self.rank] > self._began_s

    def send(self, message: SendT | Failed) -> None:
        with self._exchange.lock:
            frame = self.hub.codec.encode(message)  # type: ignore[arg-type]
            if self.leaving:
                self.let_go()
            if self.is_closed or self.is_gone:
                raise closed_error(self.peer, by_peer=not self.is_closed)
            if frame.num_bytes <= _INLINE_BYTES:
                whole = self.pool.take(frame.num_bytes)
                frame.write(whole.data)
                self.isend(whole)
            else:
                self.isend(frame.head)
                lends = message.lends  # type: ignore[union-attr]
                body = in_one_array(frame.arrays, ALIGNMENT) if lends else None
                if body is None:
                    body = self.pool.take(frame.body_bytes)
                    frame.write_body(body.data)
                self.isend(body)
        self.hub.on_left()

    def isend(self, data: Any) -> None:
        try:
            request = self._exchange.comm.Isend([data, MPI.BYTE], self.rank, self.line)
            self.leaving.append((request, data))
        except MPI.Exception as error:
            self._exchange.on_error(self, error)
            raise closed_error(self.peer, by_peer=True) from None

    def receive(self, timeout_s: float | None = None) -> ReceiveT:
        return self.hub.wait(self._poll, timeout_s, lambda: self.peer)

    def poll(self) -> ReceiveT | None:
        try:
            return self._poll()
        finally:
            self.hub.on_left()

    def _poll(self) -> ReceiveT | None:
        with self._exchange.lock:
            if self.is_closed:
                raise closed_error(self.peer, by_peer=False)
            if self.leaving:
                self.let_go()
            while (message := self.take()) is None and self._exchange.take_in():
                pass
            return message

    def close(self) -> None:
        """See ``Connection``. What was sent before still leaves; the hub's ``close`` waits for
        that."""
        with self._exchange.lock:
            if not self.is_closed:
                self.is_closed, self.is_open = True, False
                if self.rank not in self._exchange.left_s:
                    with contextlib.suppress(WorkerError):
                        self.isend(b"")
                self._exchange.abandoned.extend(self.inbox)
                self.inbox.clear()
                self.let_go()

    def give_up(self) -> None:
        """Close it, and have the launcher end the peer when this rank leaves, unless it is gone:
        it hangs."""
        if not self.is_gone:
            self._exchange.job.hanging.add(self.rank)
        self.close()

    def take(self) -> ReceiveT | None:
        """Return the next message if all of it is here.

        Raises:
            WorkerError: If nothing more will come.
        """
        try:
            while self.inbox and self.inbox[0][0].Test():
                piece = self.inbox.popleft()[1]
                if self._head is not None:
                    head, self._head = self._head, None
                    return self.hub.codec.decode(head, piece)  # type: ignore[return-value]
                head_bytes, body_bytes = read_prefix(piece.data)
                if not body_bytes or len(piece) != head_bytes:
                    return self.hub.codec.decode(piece)  # type: ignore[return-value]
                self._head = piece  # its body follows
        except MPI.Exception as error:
            self._exchange.on_error(self, error)
        except ProtocolError as error:
            self.fail(WorkerError(f"{self.peer} broke the protocol: {error}", code=error.code))
        except Exception as error:
            self.fail(unreadable(self.peer, error))
        if not self.inbox:
            if self.gives_signs:
                self.check_silence()
            if self.end is not None:
                self.is_open = False
                raise self.end
        return None

    def check_silence(self) -> None:
        """Lose a peer that has given no sign of life for too long: it hangs."""
        heard_s, silence_s = self.heard_s, self.hub.silence_s
        if self.end is None and heard_s is not None and silence_s and self.is_open:
            silent_s = time.monotonic() - heard_s
            if silent_s > (silence_s if self.is_reached else max(silence_s, _FIRST_SIGN_S)):
                self._exchange.job.hanging.add(self.rank)
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
            self._exchange.abandoned.extend(self.inbox)
            self.inbox.clear()
        self.note_ready()

    def note_ready(self) -> None:
        """Have the hub look at it if there is something to receive."""
        is_due = self.inbox or self.end is not None
        if is_due and self.index is not None and self.is_open and not self.is_ready:
            self.is_ready = True
            self.hub.ready.append(self)

    def let_go(self) -> None:
        """Let go of what has left."""
        try:
            while self.leaving and self.leaving[0][0].Test():
                self.leaving.popleft()
        except MPI.Exception as error:
            self._exchange.on_error(self, error)

    def abandon(self) -> None:
        """Keep the memory of what is under way until the process ends: MPI may still touch it."""
        self._exchange.abandoned.extend((*self.leaving, *self.inbox))
        self.leaving.clear()
        self.inbox.clear()
        self.pool.release()


def _is_done(sent: InFlight) -> bool:
    """Return True if MPI needs this memory no longer."""
    try:
        return bool(sent[0].Test())
    except MPI.Exception:  # of a rank that has died
        return False


class Exchange:
    """Where the messages of all ranks of a job arrive, whichever thread looks. The job's lock is
    held around every call but ``send_text``, ``look_for_text`` and ``has_left``."""

    def __init__(self, job: MpiJob) -> None:
        self.job: Final = job
        self.lock: Final = job.lock
        self.num_looks = 0
        self.heard_s: Final[defaultdict[int, float]] = defaultdict(float)
        """When each rank last gave a sign of life."""
        self.left_s: Final[dict[int, float]] = {}
        """When each rank that isn't there any more has left or died."""
        self.hubs: Final[list[MpiHub[Any, Any]]] = []
        self.abandoned: Final[list[InFlight]] = []
        self.comm = job.comm.Dup()
        self._status = MPI.Status()
        self._connections: dict[tuple[int, int], MpiConnection[Any, Any]] = {}
        self._unclaimed: list[MpiConnection[Any, Any]] = []
        self._numbers = itertools.count()
        self._signs: dict[int, InFlight] = {}
        self._texts: defaultdict[int, deque[str]] = defaultdict(deque)

    def open(self, rank: int, line: int | None) -> MpiConnection[Any, Any]:
        """Return this side of a connection. ``line``: None for one that is new on both sides."""
        self.job.peers.add(rank)
        if line is None:
            own = 2 * next(self._numbers) + (self.job.rank < rank)
            line = _LINES[own % len(_LINES)]
        connection = self._connections.get((rank, line))
        if connection is None or connection not in self._unclaimed:
            return self._add(rank, line)
        self._unclaimed.remove(connection)
        return connection

    def take_in(self) -> bool:
        """Take in the next message of any rank. Return False if none is here. Never raises."""
        status = self._status
        self.num_looks += 1
        try:
            found = self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if found is None:
                return False
            self._take(found, status.source, status.tag, status.Get_count(MPI.BYTE))
        except MPI.Exception as error:
            self._note_deaths(error)
            return False
        return True

    def _take(self, found: MPI.Message, rank: int, line: int, num_bytes: int) -> None:
        """Take in a message that was found."""
        connection = self._connections.get((rank, line))
        if num_bytes and line > _TEXT:
            if connection is None:
                connection = self._add(rank, line)
                self._unclaimed.append(connection)
            if num_bytes > MAX_BODY_BYTES:
                error = ProtocolError(f"rank {rank} wants to send {num_bytes} bytes at once")
                connection.fail(WorkerError(error.message, code=error.code))
                return
            is_wanted = not connection.is_closed and connection.end is None
            buffer = connection.pool.take(num_bytes) if is_wanted else bytearray(num_bytes)
            piece = found.Irecv([buffer, MPI.BYTE]), buffer
            (connection.inbox if is_wanted else self.abandoned).append(piece)
            connection.note_ready()
            if self._unclaimed:
                self.claim()
            return
        data = bytearray(num_bytes)
        found.Recv([data, MPI.BYTE])
        if line == _SIGN:
            self.heard_s[rank] = time.monotonic()
        elif line == _TEXT:
            self._texts[rank].append(data.decode(errors="replace"))
        elif line == _GOODBYE:
            self._lose_rank(rank)
        elif connection is not None:
            connection.lose()
            self._forget_if_over(connection)

    def _forget_if_over(self, connection: MpiConnection[Any, Any]) -> None:
        connection.let_go()
        if connection.is_closed and connection.is_gone and not connection.leaving:
            self._connections.pop((connection.rank, connection.line), None)

    def claim(self) -> None:
        """Give connections that others have opened to the hubs that they greet."""
        for connection in list(self._unclaimed):
            request, piece = connection.inbox[0] if connection.inbox else (None, None)
            is_here = request is not None and request.Test()
            if is_here and any(hub.accept(connection, piece) for hub in self.hubs):
                self._unclaimed.remove(connection)

    def advance(self) -> None:
        """Take in all that is here. Let go of what has left, and of connections that are over."""
        while self.take_in():
            pass
        self.claim()
        for connection in list(self._connections.values()):
            self._forget_if_over(connection)
        if self.abandoned:
            self.abandoned[:] = [each for each in self.abandoned if not _is_done(each)]

    def on_error(self, connection: MpiConnection[Any, Any], error: MPI.Exception) -> None:
        """Note why MPI can't reach a connection's peer."""
        self._note_deaths(error)
        connection.lose(error.Get_error_string())
        connection.abandon()

    def _post(self, rank: int, tag: int, data: bytes = b"") -> InFlight | None:
        """Send a rank what belongs to no connection. Return None if it has died."""
        try:
            self.abandoned.append((self.comm.Isend([data, MPI.BYTE], rank, tag), data))
        except MPI.Exception as error:
            self._note_deaths(error)
            return None
        return self.abandoned[-1]

    def give_sign(self, rank: int) -> None:
        """Tell a rank that this one lives, unless the sign before is still under way."""
        try:
            if rank in self._signs and not self._signs[rank][0].Test():
                return
        except MPI.Exception as error:
            self._note_deaths(error)
            return
        if (sign := self._post(rank, _SIGN)) is not None:
            self._signs[rank] = sign

    def send_text(self, rank: int, text: str) -> None:
        """Send a short text to another S-worker's rank, when the job begins."""
        with self.lock:
            self._post(rank, _TEXT, text.encode())

    def look_for_text(self, rank: int) -> str | None:
        """Return the next text of a rank, if it is here.

        Raises:
            WorkerError: If the rank has left, or gives signs of life as R-workers do.
        """
        is_missing = self.has_left(rank) or bool(self.heard_s.get(rank))
        if not self._texts[rank] and is_missing:
            raise WorkerError(
                f"rank {rank} has ended before it met the other S-workers, as its own output then "
                "says, or was started as an R-worker: the first tp ranks are S-workers",
                code="tp_rank_lost",
            )
        return self._texts[rank].popleft() if self._texts[rank] else None

    def has_left(self, rank: int) -> bool:
        """Return True if a rank has left or died."""
        with self.lock:
            self.advance()
            return rank in self.left_s

    def say_goodbye(self, timeout_s: float) -> None:
        """Tell the ranks that may wait for this one, and wait until that has left."""
        others = range(self.job.size) if not self.job.rank else {0, *self.job.peers}
        ranks = sorted({*others} - {self.job.rank, *self.left_s})
        sent = [each for rank in ranks if (each := self._post(rank, _GOODBYE)) is not None]

        def all_left() -> bool | None:
            self.take_in()  # which moves what is under way
            return all(map(_is_done, sent)) or None

        look_until_found(all_left, timeout_s)

    def _add(self, rank: int, line: int) -> MpiConnection[Any, Any]:
        connection = MpiConnection[Any, Any](self, rank, line)
        if (old := self._connections.get((rank, line))) is not None:
            self.abandoned.extend(old.leaving)
        self._connections[rank, line] = connection
        if rank in self.left_s:
            connection.lose("its process has died" if rank in self.job.dead else None)
        return connection

    def _lose_rank(self, rank: int, why: str | None = None) -> None:
        self.left_s.setdefault(rank, time.monotonic())
        for connection in self._connections.values():
            if connection.rank == rank:
                connection.lose(why)

    def _note_deaths(self, error: MPI.Exception) -> None:
        """Find out which ranks have died. Without a library that says so, all are lost."""
        ranks, why = list(range(self.job.size)), error.Get_error_string()
        try:
            failed = self.comm.Get_failed()
            ranks = failed.Translate_ranks(list(range(failed.size)), self.comm.Get_group())
            self.comm.Ack_failed(failed.size)
            why = "its process has died"
        except (MPI.Exception, NotImplementedError):
            pass
        for rank in {*ranks} - {*self.left_s}:
            self.job.dead.add(rank)
            self._lose_rank(rank, why)

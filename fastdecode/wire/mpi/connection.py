"""One rank's connection to another: messages cut to MPI's measure, and what
becomes of them.

A small message is one MPI message: head and body in one piece. A large one is
two, its head and its body. Both leave from a copy in buffers that MPI reads
quickly (``fastdecode.wire.buffers``), but for q, k and v that were packed for
the way: those leave from where they lie. Closing is an empty message::

    tag | head, body                        small
    tag | head          tag + 1 | body      large
    tag | (nothing)                         this side has closed
    tag | one byte                          a sign of life
"""

from __future__ import annotations

import contextlib
import time
from typing import Final, Generic, TypeVar

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.codec import Codec
from fastdecode.wire.messages import Attend, Message
from fastdecode.wire.mpi.caller import Caller
from fastdecode.wire.mpi.job import MpiJob
from fastdecode.wire.mpi.library import MPI
from fastdecode.wire.mpi.pieces import SIGN_OF_LIFE, Incoming, Outgoing, RankLink
from fastdecode.wire.transport import CLOSED, closed_error, unreadable

SendT = TypeVar("SendT", bound=Message)
ReceiveT = TypeVar("ReceiveT", bound=Message)

_PROCESS_FAILED: Final[int] = getattr(MPI, "ERR_PROC_FAILED", -1)


class MpiConnection(Generic[SendT, ReceiveT]):
    """A link to one rank; see ``fastdecode.wire.transport.Connection``. Made by
    its hub, with the job's lock held.

    Args:
        caller: whoever uses the hub.
        peer: what to call the rank.
        receives: the messages that it may send.
        gives_signs: whether it gives signs of life.
    """

    def __init__(
        self,
        job: MpiJob,
        caller: Caller,
        rank: int,
        peer: str,
        receives: frozenset[type[Message]],
        *,
        tag: int,
        gives_signs: bool,
    ) -> None:
        self._job = job
        self._caller = caller
        self.peer: Final = peer
        self._way = RankLink(job, rank, tag, BufferPool())
        self._codec = Codec(receives)
        self._incoming = Incoming(self._way, self._codec)
        self.outgoing: Final = Outgoing(self._way)
        self._closed = False
        self._gone = False  # the peer has closed, or died
        self._end: WorkerError | None = None  # nothing more will be received, because of this
        # Before its first sign of life, when it might have begun to give them.
        self.heard_s: float | None = time.monotonic() if gives_signs else None
        self.takes_signs = True
        """Whether the peer listens for signs of life."""
        self.is_open = True
        """Whether this side has not closed it, nor been told the end."""
        self._tidy()  # the rank may be dead already: MPI says so at the first receive

    is_reached = True
    """As far as MPI tells: a job's ranks are all there, or dead."""

    @property
    def is_over(self) -> bool:
        """Whether this side has closed it, and all has left that was sent, or
        nobody is there to take it."""
        return self._closed and (self._gone or not self.outgoing.leaving)

    def send(self, message: SendT) -> None:
        with self._caller, self._job.lock:
            frame = self._codec.encode(message)
            if self._closed or self._gone:
                raise closed_error(self.peer, by_peer=not self._closed)
            try:
                self.outgoing.let_go()
                self.outgoing.send(frame, is_lent=isinstance(message, Attend))
            except MPI.Exception as error:
                self._lose(error)
                raise closed_error(self.peer, by_peer=True) from None

    def receive(self, timeout_s: float | None = None) -> ReceiveT:
        return self._caller.wait(self._poll, timeout_s, lambda: self.peer)

    def poll(self) -> ReceiveT | None:
        with self._caller:
            return self._poll()

    def _poll(self) -> ReceiveT | None:
        self._caller.num_looks += 1
        if self._closed:
            raise closed_error(self.peer, by_peer=False)
        with self._job.lock:
            return self.look()

    def look(self) -> ReceiveT | None:
        """The next message if it is here. Raises WorkerError: nothing more will
        come. The job's lock is held."""
        incoming = self._incoming
        if incoming.arrived and (message := self._take()) is not None:
            return message
        if not self._take_in() and incoming.lacks_posts:
            self._tidy()  # else the caller wants to go on at once
        return self._take() if incoming.arrived or self._end is not None else None

    def close(self) -> None:
        """See ``Connection``. What was sent before still leaves; the hub's
        ``close`` waits for that."""
        with self._caller, self._job.lock:
            if self._closed:
                return
            self._closed, self.is_open = True, False
            if not self._gone:
                with contextlib.suppress(MPI.Exception):
                    self.outgoing.say_goodbye()
            self.outgoing.see_off(self._incoming.take_back())
            self._tidy()
            self._way.pool.release()  # MPI's requests refer to the buffers that they still need

    @property
    def buffer_bytes(self) -> int:
        """Memory of its buffers; 0 once it is closed."""
        return self._way.pool.num_bytes

    def give_up(self) -> None:
        """Close, and have the launcher end the peer when this rank leaves,
        unless it is dead already: it hangs."""
        if not self._gone:
            self._job.hanging.add(self._way.rank)
        self.close()

    def give_sign(self) -> None:
        """Tell the peer that this process lives, unless it hasn't taken in yet
        that it did; lock held."""
        if self._closed or self._gone:
            return
        with contextlib.suppress(MPI.Exception):  # whoever sends or receives next will see it
            self.outgoing.give_sign()

    def advance(self) -> None:
        """Take in what has arrived, and let go of what has left. Never raises;
        the job's lock is held."""
        while self._take_in():
            pass
        self._tidy()

    def _take(self) -> ReceiveT | None:
        """The next message if it has been taken in; lock held."""
        if self._incoming.arrived:
            try:
                message: ReceiveT | None = self._incoming.take()
                return message
            except Exception as error:
                self._fail(error)
        if self._end is not None:
            self.is_open = False
            raise self._end
        return None

    def _take_in(self) -> bool:
        """Note what came next, if anything did; lock held. Never raises."""
        if self._closed or self._end is not None:
            return False
        incoming = self._incoming
        try:
            if not incoming.posted:
                incoming.post()
            if not incoming.posted[0][0].Test(incoming.status):
                return False
            piece = incoming.next_piece()
            if len(piece) > len(SIGN_OF_LIFE):
                incoming.note(piece)
            elif len(piece):
                self.heard_s = time.monotonic()
            else:
                self._gone = True
                self._end = closed_error(self.peer, by_peer=True)
        except Exception as error:
            self._fail(error)
        return True

    def _fail(self, error: Exception) -> None:
        """Nothing more is received, because of this."""
        if isinstance(error, MPI.Exception):
            self._lose(error)
        elif isinstance(error, ProtocolError):
            self._end = WorkerError(f"{self.peer} broke the protocol: {error}", code=error.code)
        else:
            self._end = unreadable(self.peer, error)

    def _tidy(self) -> None:
        """Let go of what has left, and see to it that receives are posted if
        more is wanted; lock held. Never raises."""
        try:
            self.outgoing.let_go()
            if self._incoming.lacks_posts and not self._closed and self._end is None:
                self._incoming.post()
        except MPI.Exception as error:
            self._lose(error)

    def _lose(self, error: MPI.Exception) -> None:
        """MPI says that the peer is no longer there."""
        self._gone = True
        has_died = error.Get_error_class() == _PROCESS_FAILED
        if has_died:
            self._job.dead.add(self._way.rank)
        reason = "its process has died" if has_died else error.Get_error_string()
        self._end = WorkerError(f"{self.peer} is lost: {reason}", code=CLOSED)
        self.outgoing.see_off(self._incoming.take_back())
        self.outgoing.abandon()

"""One rank's connection to another: messages cut to MPI's measure, and what
becomes of them.

A small message is one MPI message: head and body in one piece. A large one is
two, its head and its body. Both leave from a copy in buffers that MPI reads
quickly (``fastdecode.wire.buffers``). Closing is an empty message::

    tag | head, body                        small
    tag | head          tag + 1 | body      large
    tag | (nothing)                         this side has closed
    tag | one byte                          a sign of life
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.wire import codec
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.messages import Message
from fastdecode.wire.transport import CLOSED, closed_error

if TYPE_CHECKING:
    from fastdecode.wire.mpi.hub import MpiHub

SendT = TypeVar("SendT", bound=Message)
ReceiveT = TypeVar("ReceiveT", bound=Message)

INLINE_BYTES: Final = codec.MAX_HEAD_BYTES
"""Messages of up to so many bytes travel in one piece: receives for heads,
which are always posted, have that room."""
_NUM_POSTED: Final = 4
_SIGN_OF_LIFE: Final = b"\0"
_PROCESS_FAILED: Final[int] = getattr(MPI, "ERR_PROC_FAILED", -1)


class Arrived(NamedTuple):
    """A message whose head is here."""

    head: codec.Head
    body: NDArray[np.uint8]
    request: MPI.Request | None
    """The body's; None: it is here."""

    def message(self) -> Message:
        """Once the body is here."""
        return self.head.message(self.body)


class _Posted(NamedTuple):
    """A receive."""

    buffer: NDArray[np.uint8]
    request: MPI.Request


class MpiConnection(Generic[SendT, ReceiveT]):
    """A link to one rank; see ``fastdecode.wire.transport.Connection``. Made by its hub."""

    def __init__(
        self, hub: MpiHub[SendT, ReceiveT], rank: int, peer: str, receives: frozenset[type[Message]]
    ) -> None:
        self._hub = hub
        self._job = hub.job
        self._rank = rank
        self._tag = hub.tag
        self._peer = peer
        self._receives = receives
        self._status = MPI.Status()
        self._pool = BufferPool()
        self._posted: deque[_Posted] = deque()  # in the order in which they are filled
        self._arrived: deque[Arrived] = deque()
        # What MPI isn't done with, and the memory that it needs for that.
        self._leaving: deque[tuple[MPI.Request, object]] = deque()
        self._closed = False
        self._gone = False  # the peer has closed, or died
        self._end: WorkerError | None = None  # nothing more will be received, because of this
        self._pulse: MPI.Request | None = None
        # Before its first sign of life, when it might have begun to give them.
        self.heard_s: float | None = time.monotonic() if hub.peers_give_signs else None
        self.told = False
        """Whether the caller has been told the end."""
        self._post_receives()

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def is_open(self) -> bool:
        return not (self._closed or self.told)

    @property
    def is_sending(self) -> bool:
        return bool(self._leaving)

    def send(self, message: SendT) -> None:
        frame = codec.encode(message)
        self._hub.enter_mpi()
        try:
            with self._job.lock:
                if self._closed or self._gone:
                    raise closed_error(self._peer, by_peer=not self._closed)
                try:
                    self._post(frame)
                except MPI.Exception as error:
                    self._lose(error)
                    raise closed_error(self._peer, by_peer=True) from None
                self._tidy()
        finally:
            self._hub.leave_mpi()
        self._hub.stir()

    def receive(self, timeout_s: float | None = None) -> ReceiveT:
        return self._hub.wait(self._poll, timeout_s, lambda: self._peer)

    def poll(self) -> ReceiveT | None:
        self._hub.enter_mpi()
        try:
            return self._poll()
        finally:
            self._hub.leave_mpi()

    def _poll(self) -> ReceiveT | None:
        if self._closed:
            raise closed_error(self._peer, by_peer=False)
        with self._job.lock:
            arrived = self.look()
        return None if arrived is None else cast(ReceiveT, arrived.message())

    def look(self) -> Arrived | None:
        """The next message if it is here. Raises WorkerError: nothing more will
        come. The job's lock is held."""
        if self._arrived and (arrived := self._take()) is not None:
            return arrived
        if not self._take_in():  # else the caller wants to go on at once
            self._tidy()
        return self._take()

    def close(self) -> None:
        """See ``Connection``. What was sent before still leaves; the hub's
        ``close`` waits for that."""
        self._hub.enter_mpi()
        try:
            with self._job.lock:
                if self._closed:
                    return
                self._closed = True
                if not self._gone:
                    with contextlib.suppress(MPI.Exception):
                        self._leaving.append((self._isend(b"", self._tag), None))
                self._take_back_receives()
                self._tidy()
        finally:
            self._hub.leave_mpi()
        self._hub.stir()

    def give_up(self) -> None:
        """Close, and have the launcher end the peer when this rank leaves,
        unless it is dead already: it hangs."""
        if not self._gone:
            self._job.hanging.add(self._rank)
        self.close()

    def give_sign(self) -> None:
        """Tell the peer that this process lives, unless it hasn't taken in yet
        that it did; lock held."""
        if self._closed or self._gone:
            return
        with contextlib.suppress(MPI.Exception):  # whoever sends or receives next will see it
            if self._pulse is None or self._pulse.Test():
                self._pulse = self._isend(_SIGN_OF_LIFE, self._tag)

    def advance(self) -> None:
        """Take in what has arrived, and let go of what has left. Never raises;
        the job's lock is held."""
        while self._take_in():
            pass
        self._tidy()

    def abandon(self) -> None:
        """Give up what hasn't left. Its memory is kept until the process ends; lock held."""
        self._job.abandoned.extend(self._leaving)
        self._leaving.clear()

    def _take(self) -> Arrived | None:
        """The next message if it has been taken in; lock held."""
        if self._arrived:
            request = self._arrived[0].request
            try:
                if request is None or request.Test():
                    return self._arrived.popleft()
                return None
            except MPI.Exception as error:
                self._lose(error)
        if self._end is not None:
            self.told = True
            raise self._end
        return None

    def _take_in(self) -> bool:
        """Note what came next, if anything did; lock held. Never raises."""
        if self._closed or self._end is not None:
            return False
        try:
            if not self._posted:
                self._post_receives()
            if not self._posted[0].request.Test(self._status):
                return False
            buffer, _ = self._posted.popleft()
            num_bytes = self._status.Get_count(MPI.BYTE)
            if num_bytes > len(_SIGN_OF_LIFE):
                self._arrived.append(self._read(buffer[:num_bytes]))
            elif num_bytes:
                self.heard_s = time.monotonic()
            else:
                self._gone = True
                self._end = closed_error(self._peer, by_peer=True)
        except MPI.Exception as error:
            self._lose(error)
        except ProtocolError as error:
            self._end = WorkerError(f"{self._peer} broke the protocol: {error}", code=error.code)
        return True

    def _read(self, data: NDArray[np.uint8]) -> Arrived:
        """What came first of a message: all of it, or its head."""
        head = codec.read_head(data.data)
        if head.kind not in self._receives:
            raise ProtocolError(f"{head.kind.__name__} is not for this side")
        if len(data) == head.num_bytes:
            return Arrived(head, data[head.body_at :], None)
        if len(data) == head.head_bytes:
            body = self._pool.take(head.body_bytes)
            return Arrived(
                head, body, self._job.comm.Irecv([body, MPI.BYTE], self._rank, self._tag + 1)
            )
        raise ProtocolError(f"{head.kind.__name__}: {len(data)} bytes came, not {head.num_bytes}")

    def _post(self, frame: codec.Frame) -> None:
        if frame.num_bytes <= INLINE_BYTES:
            whole = self._pool.take(frame.num_bytes)
            frame.write(whole.data)
            self._leaving.append((self._isend(whole, self._tag), whole))
            return
        self._leaving.append((self._isend(frame.head, self._tag), frame.head))
        body = self._pool.take(frame.body_bytes)
        frame.write_body(body.data)
        self._leaving.append((self._isend(body, self._tag + 1), body))

    def _isend(self, data: Any, tag: int) -> MPI.Request:
        return self._job.comm.Isend([data, MPI.BYTE], self._rank, tag)

    def _tidy(self) -> None:
        """Let go of what has left, and see to it that receives are posted; lock
        held. Never raises."""
        try:
            while self._leaving and self._leaving[0][0].Test():
                self._leaving.popleft()
            if len(self._posted) < _NUM_POSTED:
                self._post_receives()
        except MPI.Exception as error:
            self._lose(error)

    def _post_receives(self) -> None:
        """For the next few messages, unless nothing more is wanted."""
        while len(self._posted) < _NUM_POSTED and not self._closed and self._end is None:
            buffer = self._pool.take(INLINE_BYTES)
            self._posted.append(
                _Posted(buffer, self._job.comm.Irecv([buffer, MPI.BYTE], self._rank, self._tag))
            )

    def _lose(self, error: MPI.Exception) -> None:
        """MPI says that the peer is no longer there."""
        self._gone = True
        has_died = error.Get_error_class() == _PROCESS_FAILED
        if has_died:
            self._job.dead.add(self._rank)
        reason = "its process has died" if has_died else error.Get_error_string()
        self._end = WorkerError(f"{self._peer} is lost: {reason}", code=CLOSED)
        self._take_back_receives()
        self.abandon()

    def _take_back_receives(self) -> None:
        """Nothing more is wanted: cancel what is posted, and see it off like what is being sent."""
        for posted in self._posted:
            with contextlib.suppress(MPI.Exception):
                posted.request.Cancel()
            self._leaving.append((posted.request, posted.buffer))
        self._posted.clear()
        self._leaving.extend((x.request, x.body) for x in self._arrived if x.request is not None)
        self._arrived.clear()

"""One rank's connection to another: messages cut to MPI's measure, and what becomes of them.

A small message is one MPI message: head and body in one piece, copied into a buffer. A large one is two: its head, and
its body, sent from where it lies if it lies in one piece (``Frame.whole_body``), else from a copy. Closing is an empty
message::

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
from fastdecode.wire.arrays import aligned
from fastdecode.wire.messages import Message
from fastdecode.wire.transport import CLOSED, closed_error

if TYPE_CHECKING:
    from fastdecode.wire.mpi import MpiHub

SendT = TypeVar("SendT", bound=Message)
ReceiveT = TypeVar("ReceiveT", bound=Message)

INLINE_BYTES: Final = 1 << 16
"""Messages of up to so many bytes travel in one piece: copying them costs less than a second MPI message."""
_SLOT_BYTES: Final = max(INLINE_BYTES, codec.MAX_HEAD_BYTES)
_NUM_SLOTS: Final = 4
_SIGN_OF_LIFE: Final = b"\0"
_NOTHING: Final = np.empty(0, np.uint8)
_PROCESS_FAILED: Final[int] = getattr(MPI, "ERR_PROC_FAILED", -1)


class _Arriving(NamedTuple):
    """A message whose head is here."""

    head: codec.Head
    body: NDArray[np.uint8]
    request: MPI.Request | None
    """The body's; None: it is here."""


class _Slot(NamedTuple):
    """A posted receive."""

    buffer: memoryview
    request: MPI.Prequest


class MpiConnection(Generic[SendT, ReceiveT]):
    """A link to one rank; see ``fastdecode.wire.transport.Connection``. Made by its hub."""

    def __init__(self, hub: MpiHub[SendT, ReceiveT], rank: int, peer: str, receives: frozenset[type[Message]]) -> None:
        self._hub = hub
        self._job = hub.job
        self._rank = rank
        self._tag = hub.tag
        self._peer = peer
        self._receives = receives
        self._status = MPI.Status()
        self._slots = deque(self._post_slot() for _ in range(_NUM_SLOTS))  # in the order in which they are filled
        self._arriving: deque[_Arriving] = deque()
        # What MPI isn't done with, and the memory that it needs for that.
        self._leaving: deque[tuple[MPI.Request, object]] = deque()
        self._closed = False
        self._gone = False  # the peer has closed, or died
        self._end: WorkerError | None = None  # nothing more will be received, because of this
        self._pulse: MPI.Request | None = None
        self.heard_s: float | None = None
        self.told = False
        """Whether the caller has been told the end."""

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
                self.advance()
        finally:
            self._hub.leave_mpi()
        self._hub.stir()

    def receive(self, timeout_s: float | None = None) -> ReceiveT:
        return self._hub.wait(self.poll, timeout_s, lambda: self._peer)

    def poll(self) -> ReceiveT | None:
        if self._closed:
            raise closed_error(self._peer, by_peer=False)
        self._hub.enter_mpi()
        try:
            with self._job.lock:
                arrived = self._take()
                if arrived is None:
                    if not self._take_in():  # else the caller wants to go on at once
                        self._let_leave()
                    arrived = self._take()
        finally:
            self._hub.leave_mpi()
        return None if arrived is None else cast(ReceiveT, arrived.head.message(arrived.body))

    def close(self) -> None:
        """See ``Connection``. What was sent before still leaves; the hub's ``close`` waits for that."""
        self._hub.enter_mpi()
        with self._job.lock:
            if self._closed:
                self._hub.leave_mpi()
                return
            self._closed = True
            if not self._gone:
                with contextlib.suppress(MPI.Exception):
                    self._leaving.append((self._isend(b"", self._tag), None))
            self._take_back_receives()
            self._let_leave()
        self._hub.leave_mpi()
        self._hub.stir()

    def give_up(self) -> None:
        """Close, and have the launcher end the peer when this rank leaves, unless it is dead already: it hangs."""
        if not self._gone:
            self._job.hanging.add(self._rank)
        self.close()

    def give_sign(self) -> None:
        """Tell the peer that this process lives, unless it hasn't taken in yet that it did; lock held."""
        if self._closed or self._gone:
            return
        with contextlib.suppress(MPI.Exception):  # whoever sends or receives next will see it
            if self._pulse is None or self._pulse.Test():
                self._pulse = self._isend(_SIGN_OF_LIFE, self._tag)

    def advance(self) -> None:
        """Take in what has arrived, and let go of what has left. Never raises; the job's lock is held."""
        while self._take_in():
            pass
        self._let_leave()

    def abandon(self) -> None:
        """Give up what hasn't left. Its memory is kept until the process ends; lock held."""
        self._job.abandoned.extend(self._leaving)
        self._leaving.clear()

    def _take(self) -> _Arriving | None:
        """The next message if it is here; lock held."""
        if self._arriving:
            arriving = self._arriving[0]
            try:
                if arriving.request is None or arriving.request.Test():
                    return self._arriving.popleft()
                return None
            except MPI.Exception as error:
                self._lose(error)
        if self._end is not None:
            self.told = True
            raise self._end
        return None

    def _post_slot(self) -> _Slot:
        buffer = np.empty(_SLOT_BYTES, np.uint8)
        slot = _Slot(buffer.data, self._job.comm.Recv_init([buffer, MPI.BYTE], self._rank, self._tag))
        slot.request.Start()
        return slot

    def _take_in(self) -> bool:
        """Note what came next, if anything did, and post its slot again; lock held. Never raises."""
        if self._closed or self._end is not None:
            return False
        slot = self._slots[0]
        try:
            if not slot.request.Test(self._status):
                return False
            num_bytes = self._status.Get_count(MPI.BYTE)
            if num_bytes:
                if num_bytes == len(_SIGN_OF_LIFE):
                    self.heard_s = time.monotonic()
                else:
                    self._arriving.append(self._read(slot.buffer, num_bytes))
                self._slots.rotate(-1)
                slot.request.Start()
            else:
                self._gone = True
                self._end = closed_error(self._peer, by_peer=True)
        except MPI.Exception as error:
            self._lose(error)
        except ProtocolError as error:
            self._end = WorkerError(f"{self._peer} broke the protocol: {error}", code=error.code)
        return True

    def _read(self, buffer: memoryview, num_bytes: int) -> _Arriving:
        """What came into a slot."""
        head = codec.read_head(buffer[:num_bytes])
        if head.kind not in self._receives:
            raise ProtocolError(f"{head.kind.__name__} is not for this side")
        if not head.body_bytes:
            return _Arriving(head, _NOTHING, None)
        body = self._hub.pool.take(head.body_bytes)
        start = aligned(head.head_bytes)
        if head.head_bytes == num_bytes:
            return _Arriving(head, body, self._job.comm.Irecv([body, MPI.BYTE], self._rank, self._tag + 1))
        if start + head.body_bytes != num_bytes:
            raise ProtocolError(f"{head.kind.__name__}: {num_bytes} bytes came, not {start} + {head.body_bytes}")
        body.data[:] = buffer[start:num_bytes]
        return _Arriving(head, body, None)

    def _post(self, frame: codec.Frame) -> None:
        if frame.num_bytes <= INLINE_BYTES:
            whole = frame.whole()
            self._leaving.append((self._isend(whole, self._tag), whole))
            return
        self._leaving.append((self._isend(frame.head, self._tag), frame.head))
        if frame.body_bytes:
            body = frame.whole_body()
            if body is None:
                body = self._hub.pool.take(frame.body_bytes)
                frame.write_body(body.data)
            self._leaving.append((self._isend(body, self._tag + 1), body))

    def _isend(self, data: Any, tag: int) -> MPI.Request:
        return self._job.comm.Isend([data, MPI.BYTE], self._rank, tag)

    def _let_leave(self) -> None:
        try:
            while self._leaving and self._leaving[0][0].Test():
                request, _ = self._leaving.popleft()
                if isinstance(request, MPI.Prequest):
                    request.Free()  # others are free once they are complete
        except MPI.Exception as error:
            self._lose(error)

    def _lose(self, error: MPI.Exception) -> None:
        """MPI says that the peer is no longer there."""
        self._gone = True
        reason = "its process has died" if error.Get_error_class() == _PROCESS_FAILED else error.Get_error_string()
        self._end = WorkerError(f"{self._peer} is lost: {reason}", code=CLOSED)
        self._take_back_receives()
        self.abandon()

    def _take_back_receives(self) -> None:
        """Nothing more is wanted: cancel what is posted, and see it off like what is being sent."""
        for slot in self._slots:
            with contextlib.suppress(MPI.Exception):
                slot.request.Cancel()
            self._leaving.append((slot.request, slot.buffer))
        self._slots.clear()
        self._leaving.extend((x.request, x.body) for x in self._arriving if x.request is not None)
        self._arriving.clear()

"""What is under way between two ranks: the pieces of messages, and the memory
that MPI needs for them.

The job's lock is held around every call; where MPI says that the peer is lost,
``MPI.Exception`` is passed on.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.wire import codec
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.messages import Message
from fastdecode.wire.mpi.job import MpiJob
from fastdecode.wire.mpi.library import MPI

INLINE_BYTES: Final = codec.MAX_HEAD_BYTES
"""Messages of up to so many bytes travel in one piece: receives for heads,
which are always posted, have that room."""
_NUM_POSTED: Final = 4
SIGN_OF_LIFE: Final = b"\0"


class RankLink(NamedTuple):
    """From this rank to another and back."""

    job: MpiJob
    rank: int
    tag: int
    """Of heads and small messages; the next one is of bodies."""
    pool: BufferPool

    def isend(self, data: Any, tag: int) -> MPI.Request:
        return self.job.comm.Isend([data, MPI.BYTE], self.rank, tag)

    def irecv(self, buffer: NDArray[np.uint8], tag: int) -> MPI.Request:
        return self.job.comm.Irecv([buffer, MPI.BYTE], self.rank, tag)


class InFlight(NamedTuple):
    """What MPI isn't done with, and the memory that it needs for that."""

    request: MPI.Request
    memory: object


class Outgoing:
    """What leaves."""

    def __init__(self, way: RankLink) -> None:
        self._way = way
        self.leaving: Final[deque[InFlight]] = deque()
        """What has not left yet, in its order."""
        self._sign: MPI.Request | None = None

    def send(self, frame: codec.Frame, *, is_lent: bool = False) -> None:
        """A message. ``is_lent``: its arrays are left alone until it is
        answered, so that they may leave from where they lie."""
        way = self._way
        if frame.num_bytes <= INLINE_BYTES:
            whole = way.pool.take(frame.num_bytes)
            frame.write(whole.data)
            self._send(whole, way.tag)
            return
        self._send(frame.head, way.tag)
        body = frame.body_in_place() if is_lent else None
        if body is None:
            body = way.pool.take(frame.body_bytes)
            frame.write_body(body.data)
        self._send(body, way.tag + 1)

    def say_goodbye(self) -> None:
        self._send(b"", self._way.tag)

    def give_sign(self) -> None:
        """Unless the peer hasn't taken in the one before."""
        if self._sign is None or self._sign.Test():
            self._sign = self._way.isend(SIGN_OF_LIFE, self._way.tag)

    def see_off(self, pieces: Iterator[InFlight]) -> None:
        """Keep the memory of what was cancelled, too, until MPI is done with it."""
        self.leaving.extend(pieces)

    def let_go(self) -> None:
        """Of what has left."""
        while self.leaving and self.leaving[0].request.Test():
            self.leaving.popleft()

    def abandon(self) -> None:
        """Give up what hasn't left. Its memory is kept until the process ends."""
        self._way.job.abandoned.extend(self.leaving)
        self.leaving.clear()

    def _send(self, data: Any, tag: int) -> None:
        self.leaving.append(InFlight(self._way.isend(data, tag), data))


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


class Incoming:
    """What comes, of the kinds in ``receives``."""

    def __init__(self, way: RankLink, receives: frozenset[type[Message]]) -> None:
        self._way = way
        self._receives = receives
        self._status = MPI.Status()
        self._posted: deque[_Posted] = deque()  # in the order in which they are filled
        self.arrived: Final[deque[Arrived]] = deque()
        """Messages that have begun to come, in their order."""
        self.lacks_posts = True
        """Whether ``post`` has something to do."""

    def post(self) -> None:
        """Receives, for the next few messages."""
        self.lacks_posts = False
        while len(self._posted) < _NUM_POSTED:
            buffer = self._way.pool.take(INLINE_BYTES)
            self._posted.append(_Posted(buffer, self._way.irecv(buffer, self._way.tag)))

    def next_piece(self) -> NDArray[np.uint8] | None:
        """What came next, if anything did; of a message, all of it or its head."""
        if not self._posted:
            self.post()
        if not self._posted[0].request.Test(self._status):
            return None
        self.lacks_posts = True
        return self._posted.popleft().buffer[: self._status.Get_count(MPI.BYTE)]

    def note(self, piece: NDArray[np.uint8]) -> None:
        """A message has begun to come.

        Raises:
            ProtocolError: it is none, or none for this side.
        """
        head = codec.read_head(piece.data)
        if head.kind not in self._receives:
            raise ProtocolError(f"{head.kind.__name__} is not for this side")
        if len(piece) == head.num_bytes:
            self.arrived.append(Arrived(head, piece[head.body_at :], None))
        elif len(piece) == head.head_bytes:
            body = self._way.pool.take(head.body_bytes)
            self.arrived.append(Arrived(head, body, self._way.irecv(body, self._way.tag + 1)))
        else:
            raise ProtocolError(
                f"{head.kind.__name__}: {len(piece)} bytes came, not {head.num_bytes}"
            )

    def take(self) -> Arrived | None:
        """The first message, if all of it is here."""
        request = self.arrived[0].request
        return self.arrived.popleft() if request is None or request.Test() else None

    def take_back(self) -> Iterator[InFlight]:
        """Nothing more is wanted: cancel what is posted. What has to be seen off then."""
        for posted in self._posted:
            with contextlib.suppress(MPI.Exception):
                posted.request.Cancel()
            yield InFlight(posted.request, posted.buffer)
        self._posted.clear()
        for arrived in self.arrived:
            if arrived.request is not None:
                yield InFlight(arrived.request, arrived.body)
        self.arrived.clear()

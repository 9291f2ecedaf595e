"""What is under way between two ranks: the pieces of messages, and the memory
that MPI needs for them.

The job's lock is held around every call; where MPI says that the peer is lost,
``MPI.Exception`` is passed on.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.wire.buffers import BufferPool, in_one_array
from fastdecode.wire.codec import (
    ALIGNMENT,
    MAX_HEAD_BYTES,
    Codec,
    Frame,
    piece_bytes,
    read_prefix,
)
from fastdecode.wire.messages import Message
from fastdecode.wire.mpi.job import MpiJob
from fastdecode.wire.mpi.library import MPI

INLINE_BYTES: Final = MAX_HEAD_BYTES
"""Messages of up to so many bytes travel in one piece: receives for heads,
which are always posted, have that room."""
_NUM_POSTED: Final = 4
SIGN_OF_LIFE: Final = b"\0"

InFlight: TypeAlias = "tuple[MPI.Request, Any]"
"""What MPI isn't done with, and the memory that it needs for that."""


class RankLink(NamedTuple):
    """From this rank to another and back."""

    job: MpiJob
    rank: int
    tag: int
    """Of heads and small messages; the next one is of bodies."""
    pool: BufferPool

    def isend(self, data: Any, tag: int) -> InFlight:
        return self.job.comm.Isend([data, MPI.BYTE], self.rank, tag), data

    def irecv(self, buffer: NDArray[np.uint8], tag: int) -> InFlight:
        return self.job.comm.Irecv([buffer, MPI.BYTE], self.rank, tag), buffer


class Outgoing:
    """What leaves."""

    def __init__(self, way: RankLink) -> None:
        self._way = way
        self.leaving: Final[deque[InFlight]] = deque()
        """What has not left yet, in its order."""
        self._sign: MPI.Request | None = None

    def send(self, frame: Frame, *, is_lent: bool = False) -> None:
        """A message. ``is_lent``: its arrays are left alone until it is
        answered, so that they may leave from where they lie."""
        way, num_bytes = self._way, frame.num_bytes
        if num_bytes <= INLINE_BYTES:
            whole = way.pool.take(num_bytes)
            frame.write(whole.data)
            self.leaving.append(way.isend(whole, way.tag))
            return
        self.leaving.append(way.isend(frame.head, way.tag))
        body = in_one_array(frame.arrays, ALIGNMENT) if is_lent else None
        if body is None:
            body = way.pool.take(frame.body_bytes)
            frame.write_body(body.data)
        self.leaving.append(way.isend(body, way.tag + 1))

    def say_goodbye(self) -> None:
        self.leaving.append(self._way.isend(b"", self._way.tag))

    def give_sign(self) -> None:
        """Unless the peer hasn't taken in the one before."""
        if self._sign is None or self._sign.Test():
            self._sign, _ = self._way.isend(SIGN_OF_LIFE, self._way.tag)

    def see_off(self, pieces: Iterable[InFlight]) -> None:
        """Keep the memory of what was cancelled, too, until MPI is done with it."""
        self.leaving.extend(pieces)

    def let_go(self) -> None:
        """Of what has left."""
        while self.leaving and self.leaving[0][0].Test():
            self.leaving.popleft()

    def abandon(self) -> None:
        """Give up what hasn't left. Its memory is kept until the process ends."""
        self._way.job.abandoned.extend(self.leaving)
        self.leaving.clear()


class Coming(NamedTuple):
    """A message whose head is here, and its body may not be yet."""

    head: NDArray[np.uint8]
    body: InFlight


class Incoming:
    """Messages that come, as ``codec`` decodes them."""

    def __init__(self, way: RankLink, codec: Codec) -> None:
        self._way = way
        self._codec = codec
        self.status: Final = MPI.Status()
        """Of the first receive, once it is filled."""
        self.posted: Final[deque[InFlight]] = deque()
        """Receives, in the order in which they are filled."""
        self.arrived: Final[deque[Message | Coming]] = deque()
        """Messages that have begun to come, in their order."""
        self.lacks_posts = True
        """Whether ``post`` has something to do."""

    def post(self) -> None:
        """Receives, for the next few messages."""
        self.lacks_posts = False
        while len(self.posted) < _NUM_POSTED:
            buffer = self._way.pool.take(INLINE_BYTES)
            self.posted.append(self._way.irecv(buffer, self._way.tag))

    def next_piece(self) -> NDArray[np.uint8]:
        """What filled the first receive; of a message, all of it or its head."""
        self.lacks_posts = True
        buffer: NDArray[np.uint8] = self.posted.popleft()[1]
        return buffer[: self.status.Get_count(MPI.BYTE)]

    def note(self, piece: NDArray[np.uint8]) -> None:
        """Take in a message, or its head.

        Raises:
            ProtocolError: If this side does not receive it.
        """
        head_bytes, body_bytes = read_prefix(piece.data)
        if len(piece) == piece_bytes(head_bytes, body_bytes):
            self.arrived.append(self._codec.decode(piece))
        else:
            body = self._way.pool.take(body_bytes)
            self.arrived.append(Coming(piece, self._way.irecv(body, self._way.tag + 1)))

    def take(self) -> Any:
        """The first message, if all of it is here; else None.

        Raises:
            ProtocolError: it makes no sense.
        """
        first = self.arrived[0]
        if not isinstance(first, Coming):
            self.arrived.popleft()
            return first
        request, body = first.body
        if not request.Test():
            return None
        self.arrived.popleft()
        return self._codec.decode(first.head, body)

    def take_back(self) -> list[InFlight]:
        """Nothing more is wanted: cancel what is posted. What has to be seen off then."""
        for request, _ in self.posted:
            with contextlib.suppress(MPI.Exception):
                request.Cancel()
        bodies = [each.body for each in self.arrived if isinstance(each, Coming)]
        pieces = [*self.posted, *bodies]
        self.posted.clear()
        self.arrived.clear()
        return pieces

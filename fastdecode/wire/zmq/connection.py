"""One side of a connection over ZeroMQ, whichever end began it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
import zmq

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.codec import Array, Codec, Prefix
from fastdecode.wire.messages import Message
from fastdecode.wire.transport import CLOSED, closed_error, timeout_error, unreadable
from fastdecode.wire.zmq.line import (
    GOODBYE,
    MAX_FRAME_BYTES,
    Line,
    LostError,
    NoLine,
    Socket,
    wait_for,
)

SendT = TypeVar("SendT", bound=Message)
ReceiveT = TypeVar("ReceiveT", bound=Message)
_COPIED_BYTES: Final = 1 << 18
"""ZeroMQ copies messages up to this size: that is quicker than to tell when
larger ones have left."""
_ITEM_ALIGNMENT: Final = 8


@dataclass(eq=False)
class _Partial:
    """A long message that is coming in."""

    head: Array
    body: Array
    num_filled: int = 0


class ZmqConnection(Generic[SendT, ReceiveT]):
    """A link to one peer; see ``fastdecode.wire.transport.Connection``. Made by
    a hub or a listener.

    Args:
        line: to the peer.
        peer: its name.
        receives: the messages that it may send.
        lock: held while the line is used.
        on_close: called with the connection when this side closes it.
    """

    def __init__(
        self,
        line: Line,
        peer: str,
        receives: frozenset[type[Message]],
        lock: threading.RLock,
        on_close: Callable[[ZmqConnection[SendT, ReceiveT]], None] = lambda connection: None,
    ) -> None:
        self._line = line
        self.peer: Final = peer
        self._codec = Codec(receives)
        self._lock = lock
        self._on_close = on_close
        self._pool = BufferPool()
        self._partial: _Partial | None = None  # a message of which some chunks are still to come
        self._closed = False
        self._gone = False
        self._end: WorkerError | None = None
        self.is_open = True
        """Whether this side has not closed it, nor been told the end."""

    heard_s = None
    """ZeroMQ's threads look after silent peers."""

    @property
    def is_closed(self) -> bool:
        """Whether this side has closed it: nobody will use it any more."""
        return self._closed

    @property
    def is_reached(self) -> bool:
        """Whether the peer's side of the line is known to be there."""
        return self._line.is_reached

    @property
    def sockets(self) -> Sequence[Socket]:
        return self._line.sockets

    def check(self) -> None:
        """Note what has happened to the line; what has arrived stays. Raises
        WorkerError if the peer is lost."""
        with self._lock:
            try:
                self._line.check()
            except LostError as lost:
                self._gone = True
                raise self._lost(lost) from None

    @property
    def buffer_bytes(self) -> int:
        """Memory of its buffers; 0 once it is closed."""
        return self._pool.num_bytes

    def send(self, message: SendT) -> None:
        if self._closed:
            raise closed_error(self.peer, by_peer=False)
        frame = self._codec.encode(message, self._line.epoch)
        num_bytes = frame.num_bytes
        if num_bytes <= MAX_FRAME_BYTES:
            whole = self._pool.take(num_bytes)
            frame.write(whole.data)
            pieces = [whole]
        else:
            body = self._pool.take(frame.body_bytes)
            frame.write_body(body.data)
            chunks = [
                body[at : at + MAX_FRAME_BYTES] for at in range(0, len(body), MAX_FRAME_BYTES)
            ]
            pieces = [np.frombuffer(frame.head, np.uint8), *chunks]
        with self._lock:
            if self._closed or self._gone:
                raise closed_error(self.peer, by_peer=not self._closed)
            try:
                for piece in pieces:
                    self._line.send(piece, copy=len(piece) <= _COPIED_BYTES)
            except LostError as lost:
                self._gone = True
                raise self._lost(lost) from None

    def receive(self, timeout_s: float | None = None) -> ReceiveT:
        received = wait_for(self.poll, lambda: self.sockets, self._lock, timeout_s)
        if received is None:
            assert timeout_s is not None
            raise timeout_error(self.peer, timeout_s)
        return received

    def poll(self) -> ReceiveT | None:
        with self._lock:
            if self._closed:
                raise closed_error(self.peer, by_peer=False)
            while self._end is None:
                try:
                    frame = self._line.receive()
                    if frame is None:
                        return None
                    message: ReceiveT | None = self._read(frame)
                except LostError as lost:
                    self._gone = True
                    self._end = self._lost(lost)
                except ProtocolError as error:
                    self._end = WorkerError(
                        f"{self.peer} broke the protocol: {error}", code=error.code
                    )
                except Exception as error:
                    self._end = unreadable(self.peer, error)
                else:
                    if message is not None:
                        return message
            self.is_open = False
            raise self._end

    def close(self) -> None:
        """See ``Connection``. Its buffers are given back, and its hub forgets it."""
        self.is_open = False
        self._closed = True  # before the lock is asked for: a thread that waits lets it go then
        with self._lock:
            if not isinstance(self._line, NoLine):
                line, self._line = self._line, NoLine()
                if not self._gone:
                    with contextlib.suppress(LostError):
                        line.send(GOODBYE, copy=True)
                line.close()
            self._partial = None
            self._pool.release()
        self._on_close(self)

    def _read(self, frame: zmq.Frame) -> Any:
        """A message; None: it was a sign of life, or a chunk that isn't the last."""
        data: Array = np.frombuffer(frame, np.uint8)
        if self._partial is not None:
            return self._read_chunk(self._partial, data)
        if not len(data):
            self._gone = True
            self._end = closed_error(self.peer, by_peer=True)
            return None
        if len(data) == 1:
            return None
        if data.__array_interface__["data"][0] % _ITEM_ALIGNMENT:
            # Small messages lie where they lay in the stream.
            aligned = self._pool.take(len(data))
            aligned[:] = data
            data = aligned
        prefix = Prefix.of(data.data)
        if prefix.epoch != self._line.epoch:
            raise ProtocolError(
                f"a message of another connection (epoch {prefix.epoch}, not {self._line.epoch})"
            )
        if prefix.is_whole(len(data)):
            return self._codec.decode(data, prefix)
        self._partial = _Partial(data, self._pool.take(prefix.body_bytes))
        return None

    def _read_chunk(self, partial: _Partial, data: Array) -> Message | None:
        end = partial.num_filled + len(data)
        if not len(data) or end > len(partial.body):
            raise ProtocolError(f"a chunk of {len(data)} bytes doesn't fit its message")
        partial.body[partial.num_filled : end] = data
        partial.num_filled = end
        if end < len(partial.body):
            return None
        self._partial = None
        return self._codec.decode_apart(partial.head, partial.body)

    def _lost(self, lost: LostError) -> WorkerError:
        return WorkerError(f"{self.peer} is lost: {lost}", code=CLOSED)

"""The link between the HTTP process and the process of the engine: messages as ``wire.codec``
writes them, framed as ``multiprocessing.connection`` frames them, over a socket pair.

============  ============  ====================================================
Opening       engine        the first: what to serve
Listening     HTTP          the address is bound; nothing is answered yet
Unfit         HTTP          it can't serve: why; it ends
Ready         engine        it takes requests
Submit        HTTP          requests to run
Cancel        HTTP          these requests' clients have disconnected
Deltas        engine        new output of requests
StatusReport  engine        how the engine is; twice a second
Keys          engine        the keys that admit clients have changed
Drain         engine        take no more requests, or end the open ones; report when none is left
Drained       HTTP          no request is open any more
StatusAck     HTTP          it reads: the answer to StatusReport
============  ============  ====================================================

Either end may close the socket: the other one ends, too. Threads use a ``Channel`` at the engine's
end, and an event loop an ``AsyncChannel`` at the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, Final, TypeAlias, cast, get_args

import numpy as np
from msgspec import field

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.codec import Codec
from fastdecode.wire.instances import Cancel as Cancel
from fastdecode.wire.instances import Deltas as Deltas
from fastdecode.wire.instances import StatusReport as StatusReport
from fastdecode.wire.instances import Submit as Submit
from fastdecode.wire.traits import Message

MAX_MESSAGE_BYTES: Final = 512 << 20
_LENGTH: Final = struct.Struct("!i")  # before each message, as ``multiprocessing`` has it


class Opening(Message, frozen=True, tag=201):
    is_long = True
    model: str  # directory, as given
    options: Mapping[str, Any]  # ``ServeOptions``
    sampling: Mapping[str, Any]  # sampling parameters of requests that don't set them
    max_model_len: int
    vocab_size: int
    expected_output_tokens: int
    """Tokens that are expected of a request that doesn't set max_tokens."""
    keys: tuple[str, ...]  # SHA-256, in hex
    keeping: Mapping[str, Any] = field(default_factory=dict)  # ``Keeping``, of conversations
    no_reuse: str = ""
    """Why no turn of a conversation reuses KV. Empty if they do."""
    model_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of the model's generation_config.json."""


class Listening(Message, frozen=True, tag=202):
    address: str


class Unfit(Message, frozen=True, tag=203):
    is_long = True
    message: str


class Ready(Message, frozen=True, tag=204):
    kv_tokens: int  # tokens that the KV caches hold together


class Keys(Message, frozen=True, tag=205):
    is_long = True
    keys: tuple[str, ...]


class Drain(Message, frozen=True, tag=206):
    cuts: bool = False  # end the open requests with an error


class Drained(Message, frozen=True, tag=208):
    num_cut: int  # requests that ended with an error meanwhile


class StatusAck(Message, frozen=True, tag=209):
    pass


ServerMessage: TypeAlias = (
    Opening | Listening | Unfit | Ready | Submit | Cancel | Deltas | StatusReport | Keys | Drain
    | Drained | StatusAck
)  # fmt: skip


class Packing:
    """Messages as bytes. One thread encodes at a time, and one decodes."""

    def __init__(self) -> None:
        self._codec = Codec(get_args(ServerMessage))

    def packed(self, message: ServerMessage) -> bytes:
        return self._codec.encode(message).in_one_piece()

    def parsed(self, raw: bytes) -> ServerMessage:
        """Raises: ProtocolError: If these bytes are not a message."""
        return cast(ServerMessage, self._codec.decode(np.frombuffer(raw, np.uint8)))


class Channel:
    """The engine's end. One thread receives; any may send, wake and close."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._connection = Connection(os.dup(connected.fileno()))
        self._sending = threading.Lock()
        self._packing = Packing()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._connection, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def send(self, message: ServerMessage) -> None:
        """Send, once the other end has room. Raises: OSError: If it is gone."""
        with self._sending:
            self._connection.send_bytes(self._packing.packed(message))

    def receive(self, timeout_s: float | None = None) -> ServerMessage | None:
        """Return the next message, or None if none came in time or ``wake`` was called. Raises
        OSError: If the other end is gone, or ``end`` was called. ProtocolError: If it sent anything
        else."""
        ready = [fd for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1e3)]
        if self._connection.closed:
            raise BrokenPipeError("the channel is closed")
        if self._woken.fileno() in ready:
            self._woken.recv(1 << 12)
        if self._connection.fileno() not in ready:
            return None
        try:
            return self._packing.parsed(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
        except EOFError:
            raise BrokenPipeError("the other end is gone") from None

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will return
            self._waker.send(b"\0")

    def end(self) -> None:
        """End ``receive`` and ``send`` of all threads. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the channel, after ``end``. Safe to call twice."""
        for each in (self._socket, self._connection, self._waker, self._woken):
            each.close()


class AsyncChannel:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._packing = Packing()

    @classmethod
    async def over(cls, connected: socket.socket) -> AsyncChannel:
        return cls(*await asyncio.open_connection(sock=connected, limit=1 << 20))

    def send(self, message: ServerMessage) -> None:
        """Send without waiting. The message is lost if the other end is gone."""
        if not self._writer.is_closing():
            raw = self._packing.packed(message)
            self._writer.write(_LENGTH.pack(len(raw)) + raw)

    async def receive(self) -> ServerMessage | None:
        """Return the next message, or None at the end. Raises ProtocolError: If unreadable."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if not 0 <= length <= MAX_MESSAGE_BYTES:
                raise ProtocolError(f"the other process wants to send {length} bytes at once")
            raw = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return None
        return self._packing.parsed(raw)

    async def close(self) -> None:
        """Close once the messages are sent, if the other end still reads."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 1.0)
        self._writer.close()

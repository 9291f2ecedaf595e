"""Messages over a socket: by threads on the engine's side, by an event loop on
that of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
import threading
import time
from typing import Any, cast, get_args

import numpy as np

from fastdecode.core.errors import ProtocolError
from fastdecode.server.messages import ServerMessage
from fastdecode.wire.codec import Codec

LENGTH = struct.Struct("<I")
"""Length of a message in bytes, which stands before it."""
MAX_MESSAGE_BYTES = 512 << 20


class _Framed:
    """Messages as they travel. One thread encodes at a time, and one decodes."""

    def __init__(self) -> None:
        self._codec = Codec(get_args(ServerMessage))

    def encode(self, message: ServerMessage) -> bytes:
        """Return a message behind its length."""
        frame = self._codec.encode(message)
        raw = bytearray(LENGTH.size + frame.num_bytes)
        LENGTH.pack_into(raw, 0, frame.num_bytes)
        frame.write(memoryview(raw)[LENGTH.size :])
        return bytes(raw)

    def decode(self, raw: bytes) -> ServerMessage:
        """Return the message. Raises ProtocolError: If it is none."""
        message: Any = self._codec.decode(np.frombuffer(raw, np.uint8))
        return cast(ServerMessage, message)


def _length(head: bytes) -> int:
    length: int = LENGTH.unpack(head)[0]
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"the other process wants to say {length} bytes at once")
    return length


class Channel:
    """The engine's side. One thread receives, any may send, wake and close."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._framed_as = _Framed()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._received = bytearray()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        self._is_closed = False

    def send(self, message: ServerMessage) -> None:
        """Waits until the other side has room for it. Raises OSError: it is gone."""
        with self._sending:
            self._socket.sendall(self._framed_as.encode(message))

    def receive(self, timeout_s: float | None = None) -> ServerMessage | None:
        """The next message; None: none came in time, or ``wake`` was called. Raises
        OSError: the other side is gone; ProtocolError."""
        with self._receiving:
            end_s = None if timeout_s is None else time.monotonic() + timeout_s
            while (raw := self._framed()) is None:
                if not self._read(None if end_s is None else max(0.0, end_s - time.monotonic())):
                    return None
        return self._framed_as.decode(raw)

    def wake(self) -> None:
        """Have ``receive`` return, or its next call."""
        with contextlib.suppress(OSError):  # full: it will return
            self._waker.send(b"\0")

    def close(self) -> None:
        """Ends ``receive`` and ``send``, too. Safe to call twice."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.wake()
        with self._receiving:
            for each in (self._socket, self._waker, self._woken):
                each.close()

    def _framed(self) -> bytes | None:
        """The next whole message; None: more of it has to come."""
        head = LENGTH.size
        if len(self._received) < head:
            return None
        end = head + _length(bytes(self._received[:head]))
        if len(self._received) < end:
            return None
        raw = bytes(self._received[head:end])
        del self._received[:end]
        return raw

    def _read(self, timeout_s: float | None) -> bool:
        """Wait for more. False: nothing came, or ``wake`` was called."""
        if self._is_closed:
            raise BrokenPipeError("the channel is closed")
        own = self._socket.fileno()
        ready = [fd for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1e3)]
        if own in ready:
            piece = self._socket.recv(1 << 20)
            if not piece:
                raise BrokenPipeError("the other side is gone")
            self._received += piece
            return True
        if ready:
            self._woken.recv(1 << 12)
        return False


class AsyncChannel:
    """The side of HTTP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._framed_as = _Framed()

    @classmethod
    async def over(cls, connected: socket.socket) -> AsyncChannel:
        """Over a connected socket."""
        return cls(*await asyncio.open_connection(sock=connected, limit=1 << 20))

    def send(self, message: ServerMessage) -> None:
        """Doesn't wait. What is said to nobody is lost."""
        if not self._writer.is_closing():
            self._writer.write(self._framed_as.encode(message))

    async def receive(self) -> ServerMessage | None:
        """The next message; None: the other side is gone. Raises ProtocolError."""
        try:
            head = await self._reader.readexactly(LENGTH.size)
            raw = await self._reader.readexactly(_length(head))
        except (asyncio.IncompleteReadError, OSError):
            return None
        return self._framed_as.decode(raw)

    async def close(self) -> None:
        """What was sent gets there, as far as the other side still reads."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 1.0)
        self._writer.close()

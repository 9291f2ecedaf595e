"""Messages over a socket: by threads on the engine's side, by an event loop on
that of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from fastdecode.core.errors import ProtocolError
from fastdecode.server.messages import Message, from_json, to_json
from fastdecode.text.child_words import LENGTH, pack, unpack

MAX_MESSAGE_BYTES = 512 << 20


def frame(message: Message) -> bytes:
    """A message as it travels."""
    raw = pack(to_json(message))
    return LENGTH.pack(len(raw)) + raw


def _parsed(raw: bytes) -> Message:
    try:
        return from_json(unpack(raw))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the other process said what is no JSON: {error}") from None


def _length(head: bytes) -> int:
    length: int = LENGTH.unpack(head)[0]
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"the other process wants to say {length} bytes at once")
    return length


class Channel:
    """The engine's side. One thread receives, any may send."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Waits until the other side has room for it. Raises OSError: it is gone."""
        raw = frame(message)
        with self._sending:
            self._socket.sendall(raw)

    def receive(self) -> Message | None:
        """The next message; None: the other side is gone. Raises ProtocolError."""
        head = self._read(LENGTH.size)
        raw = None if head is None else self._read(_length(head))
        return None if raw is None else _parsed(raw)

    def close(self) -> None:
        """Ends whoever waits in it, too. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, num_bytes: int) -> bytes | None:
        raw = bytearray()
        while len(raw) < num_bytes:
            try:
                piece = self._socket.recv(min(num_bytes - len(raw), 1 << 20))
            except OSError:
                return None
            if not piece:
                return None
            raw += piece
        return bytes(raw)


class AsyncChannel:
    """The side of HTTP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connected: socket.socket) -> AsyncChannel:
        """Over a connected socket."""
        return cls(*await asyncio.open_connection(sock=connected, limit=1 << 20))

    def send(self, message: Message) -> None:
        """Doesn't wait. What is said to nobody is lost."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def receive(self) -> Message | None:
        """The next message; None: the other side is gone. Raises ProtocolError."""
        try:
            head = await self._reader.readexactly(LENGTH.size)
            raw = await self._reader.readexactly(_length(head))
        except (asyncio.IncompleteReadError, OSError):
            return None
        return _parsed(raw)

    async def close(self) -> None:
        """What was sent gets there, as far as the other side still reads."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 1.0)
        self._writer.close()

"""The link between the HTTP process and the process of the engine: messages as JSON, each behind
its length, over a socket pair.

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
Drain         engine        take no more requests; report when none is open
CutOff        engine        end the open requests with an error
Drained       HTTP          no request is open any more
StatusAck     HTTP          it reads: the answer to StatusReport
============  ============  ====================================================


Either end may close the socket: the other one ends, too. Threads use a ``Channel`` at the engine's
end, and an event loop an ``AsyncChannel`` at the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeAlias, get_args

from fastdecode.core.errors import ProtocolError, RequestError
from fastdecode.text.child import pack, unpack
from fastdecode.wire.instances.messages import Cancel as Cancel
from fastdecode.wire.instances.messages import Deltas as Deltas
from fastdecode.wire.instances.messages import StatusReport as StatusReport
from fastdecode.wire.instances.messages import Submit as Submit
from fastdecode.wire.json_fields import AsJson, json_fields

MAX_MESSAGE_BYTES: Final = 512 << 20
_LENGTH: Final = struct.Struct("!i")
"""Stands before each message."""
_MOST_AT_ONCE: Final = 1 << 20


@dataclass(frozen=True)
class Opening:
    model: str
    """Directory, as given."""
    options: Mapping[str, Any]
    """``ServeOptions``."""
    sampling: Mapping[str, Any]
    """Sampling parameters of requests that don't set them."""
    max_model_len: int
    vocab_size: int
    expected_output_tokens: int
    """Tokens that are expected of a request that doesn't set max_tokens."""
    keys: Sequence[str]
    """SHA-256, in hex."""
    keeping: Mapping[str, Any] = field(default_factory=dict)
    """``Keeping``, of conversations."""
    no_reuse: str = ""
    """``why_no_reuse`` of the engine."""
    model_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of the model's generation_config.json."""


@dataclass(frozen=True)
class Listening:
    address: str


@dataclass(frozen=True)
class Unfit:
    message: str


@dataclass(frozen=True)
class Ready:
    kv_tokens: int
    """Tokens that the KV caches hold together."""


@dataclass(frozen=True)
class Keys:
    keys: Sequence[str]


@dataclass(frozen=True)
class Drain:
    timeout_s: float


@dataclass(frozen=True)
class CutOff:
    pass


@dataclass(frozen=True)
class Drained:
    num_cut: int
    """Requests that ended with an error meanwhile."""


@dataclass(frozen=True)
class StatusAck:
    pass


Message: TypeAlias = (
    Opening | Listening | Unfit | Ready | Submit | Cancel | Deltas | StatusReport | Keys
    | Drain | CutOff | Drained | StatusAck
)  # fmt: skip
_KINDS: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}
_PLAIN = AsJson(lambda value: value, lambda said: said)
_FIELDS: Mapping[str, Mapping[str, AsJson]] = {
    name: {f.name: json_fields(kind).get(f.name, _PLAIN) for f in fields(kind)}
    for name, kind in _KINDS.items()
}


def packed(message: Message) -> bytes:
    """Return a message as it travels, behind its length."""
    kind = type(message).__name__
    values = {name: x.to_json(getattr(message, name)) for name, x in _FIELDS[kind].items()}
    raw = pack({"kind": kind, **values})
    return _LENGTH.pack(len(raw)) + raw


def parsed(raw: bytes) -> Message:
    """Return a message without its length. Raises: ProtocolError: If it is invalid."""
    try:
        said = unpack(raw)
        kind = said.pop("kind")
        values = {name: _FIELDS[kind][name].value(value) for name, value in said.items()}
        message: Message = _KINDS[kind](**values)
        return message
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        RequestError,
    ) as error:
        raise ProtocolError(f"the other process sent an invalid message: {error}") from None


def _length(head: bytes | bytearray) -> int:
    (length,) = _LENGTH.unpack(head)
    if not 0 <= length <= MAX_MESSAGE_BYTES:
        raise ProtocolError(f"the other process wants to send {length} bytes at once")
    return int(length)


class Channel:
    """The engine's end. One thread receives; any may send, wake and close."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received = bytearray()
        self._sending = threading.Lock()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def send(self, message: Message) -> None:
        """Send, once the other end has room. Raises: OSError: If it is gone."""
        raw = packed(message)
        with self._sending:
            self._socket.sendall(raw)

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, or None if none was complete in time or ``wake`` was called.

        Raises:
            OSError: If the other end is gone, or ``end`` was called.
            ProtocolError: If it sent anything else.
        """
        message = self._next()
        if message is not None:
            return message
        ready = [fd for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1e3)]
        if self._socket.fileno() < 0:
            raise BrokenPipeError("the channel is closed")
        if self._woken.fileno() in ready:
            self._woken.recv(1 << 12)
        if self._socket.fileno() in ready:
            received = self._socket.recv(_MOST_AT_ONCE)
            if not received:
                raise BrokenPipeError("the other end is gone")
            self._received += received
        return self._next()

    def _next(self) -> Message | None:
        """Take the next message out of what was received, if it is complete."""
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _length(self._received[: _LENGTH.size])
        if len(self._received) < end:
            return None
        raw = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return parsed(raw)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will return
            self._waker.send(b"\0")

    def end(self) -> None:
        """End ``receive`` and ``send`` of all threads. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the channel, after ``end``. Safe to call twice."""
        for each in (self._socket, self._waker, self._woken):
            each.close()


class AsyncChannel:
    """The end of the HTTP process."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, connected: socket.socket) -> AsyncChannel:
        return cls(*await asyncio.open_connection(sock=connected, limit=1 << 20))

    def send(self, message: Message) -> None:
        """Send without waiting. The message is lost if the other end is gone."""
        if not self._writer.is_closing():
            self._writer.write(packed(message))

    async def receive(self) -> Message | None:
        """Return the next message, or None if the other end is gone.

        Raises:
            ProtocolError: If it sent anything else.
        """
        try:
            length = _length(await self._reader.readexactly(_LENGTH.size))
            raw = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return None
        return parsed(raw)

    async def close(self) -> None:
        """Close once the messages are sent, if the other end still reads."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.drain(), 1.0)
        self._writer.close()

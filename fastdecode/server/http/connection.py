"""Bounds of connections that uvicorn lacks, around its own protocol class."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Final

from fastdecode.server.http.errors import SERVER, HttpRefusal, new_request_id

MAX_HEADER_BYTES: Final = 64 << 10
MOST_UNREAD_BYTES: Final = 64 << 20
"""Most bytes of a body that are read although its request was answered."""
MOST_UNREAD_CHUNKS: Final = 256 << 10
"""The same of a body whose length was not announced: its end is not known here."""
CONNECTION: ContextVar[Connection] = ContextVar("connection")
"""The connection of the request that a task answers."""
_CHUNKED: Final = b"transfer-encoding: chunked\r\n"
_CLOSE: Final = b"connection: close\r\n"
_OLD = re.compile(rb"[^\r\n]* HTTP/1\.0\r?\n")
_UPGRADE = re.compile(rb"(?<=\n)upgrade(?=:)", re.IGNORECASE)


def bounded(
    kind: Callable[..., asyncio.Protocol], most: int, header_timeout_s: float
) -> Callable[..., Connection]:
    """Return a factory of connections that refuses more than ``most`` at a time. ``kind`` makes the
    protocol that speaks HTTP. A request's header may take ``header_timeout_s``."""
    opened: set[Connection] = set()
    return lambda **given: Connection(kind(**given), opened, most, header_timeout_s)


class _WithoutChunks:
    """A transport to a client of HTTP/1.0, which reads no chunks: a stream ends its connection.
    uvicorn writes a header as a whole, and each chunk."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._is_streaming = transport, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not (self._is_streaming and data):
            self._is_streaming |= _CHUNKED in data
            close = b"" if _CLOSE in data else _CLOSE
            self._transport.write(data.replace(_CHUNKED, close, 1))
            return
        size, _, rest = data.partition(b"\r\n")
        num_bytes = int(size, 16)
        self._transport.write(rest[:num_bytes])
        if not num_bytes or rest[num_bytes:] != b"\r\n":  # the last chunk is in it
            self._transport.close()


class Connection(asyncio.Protocol):
    """Bounds a connection's headers in time and size, and the bytes that arrive before an answer.
    ``inner`` speaks HTTP. It is left out if more than ``most`` connections are ``opened``."""

    def __init__(
        self, inner: asyncio.Protocol, opened: set[Connection], most: int, header_timeout_s: float
    ) -> None:
        self._inner, self._opened, self._most = inner, opened, most
        self._header_timeout_s = header_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._awaits_header = self._has_whole_body = self._is_new = True
        self._is_answering = False
        self._unread_bytes = 0
        self._num_bytes = 0  # bytes that came since ``_most_bytes`` was set
        self._most_bytes: float = MAX_HEADER_BYTES

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._opened.add(self)
        if len(self._opened) > self._most:
            self._inner = asyncio.Protocol()
            self._end(
                HttpRefusal(
                    503, "too many connections: try again", "too_many_connections", kind=SERVER,
                    headers={"retry-after": "1"},
                )
            )  # fmt: skip
        else:
            self._inner.connection_made(transport)
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._opened.discard(self)
        self._disarm()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._num_bytes and not self._is_answering and self._deadline is None:
            self._arm()
        self._num_bytes += len(data)
        if self._is_new and _OLD.match(data):
            transport: Any = _WithoutChunks(self._transport)
            self._inner.connection_made(transport)
        self._is_new = False
        CONNECTION.set(self)
        self._inner.data_received(_without_upgrade(data) if self._awaits_header else data)
        if self._num_bytes > self._most_bytes:
            # Once a request that is whole has begun to be answered: its bytes don't count.
            asyncio.get_running_loop().call_soon(self._check_size)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def begin(self, body_bytes: int | None) -> None:
        """Note that a header is complete. ``body_bytes`` is None if no length was announced."""
        self._disarm()
        self._is_answering, self._awaits_header = True, False
        self._has_whole_body = body_bytes == 0
        most = MOST_UNREAD_CHUNKS if body_bytes is None else min(body_bytes, MOST_UNREAD_BYTES)
        self._unread_bytes = most
        self._allow(MAX_HEADER_BYTES if self._has_whole_body else math.inf)

    def end_body(self) -> None:
        """The request's body is whole: what comes next is ahead of its answer."""
        self._has_whole_body = True
        self._allow(MAX_HEADER_BYTES)

    def end_answer(self) -> None:
        """The answer is written. The rest of a body is still read, so that clients see it."""
        self._is_answering, self._awaits_header = False, self._has_whole_body
        self._allow(MAX_HEADER_BYTES + (0 if self._has_whole_body else self._unread_bytes))

    def _allow(self, most_bytes: float) -> None:
        self._num_bytes, self._most_bytes = 0, most_bytes

    def _check_size(self) -> None:
        if self._num_bytes > self._most_bytes:
            self._end(header_too_large())

    def _arm(self) -> None:
        text = f"the header didn't come within {self._header_timeout_s:g} s"
        late = HttpRefusal(408, text, "header_timeout")
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._header_timeout_s, self._end, late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self, error: HttpRefusal) -> None:
        """Close the connection, with an error if a client could take it for an answer."""
        if self._awaits_header and not self._transport.is_closing():
            body = json.dumps(error.body).encode()
            head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
            head += [f"{name}: {value}" for name, value in error.headers.items()]
            head += ["content-type: application/json", f"content-length: {len(body)}"]
            head += [f"x-request-id: {new_request_id()}", "connection: close", "", ""]
            self._transport.write("\r\n".join(head).encode() + body)
        self._transport.close()


def header_too_large() -> HttpRefusal:
    text = f"the header has more than {MAX_HEADER_BYTES} bytes"
    return HttpRefusal(431, text, "header_too_large")


def _without_upgrade(data: bytes) -> bytes:
    """Rename the header that asks for another protocol: the parser would read no body after it.
    Java's and curl's clients ask for HTTP/2, and can do without."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"ignored", head) + end + rest if b"pgrade" in head else data

"""A connection with deadlines and limits that uvicorn lacks: time and size of
headers, number of connections, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias

from fastdecode.server.http.connection import WatchfulProtocol
from fastdecode.server.http.errors import HttpRefusal
from fastdecode.server.http.exchange import CONNECTION
from fastdecode.server.http.guard import new_request_id

Headers: TypeAlias = "list[tuple[bytes, bytes]]"

MAX_HEADER_BYTES = 64 << 10
_AROUND_BYTES = 4
"""Around a header's name and value: ": " and the line's end."""
_UPGRADE = re.compile(rb"(?<=\n)upgrade(?=:)", re.IGNORECASE)
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)


@dataclass(frozen=True)
class ConnectionLimits:
    header_timeout_s: float
    write_timeout_s: float
    most_connections: int


class GuardedProtocol(WatchfulProtocol):
    """A connection."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **more: Any) -> None:
        super().__init__(*args, write_timeout_s=limits.write_timeout_s, **more)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        """That came since a header or a piece of a body was complete."""
        self._is_in_header = True
        self._refusal = HttpRefusal(400, "this is no HTTP request", "invalid_http")
        """Of what the parser takes no more of."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > self._limits.most_connections:
            error = HttpRefusal(503, "too many connections: try again", "too_many_connections")
            error.kind = "server_error"
            error.headers["retry-after"] = "1"
            self._end_with(error)
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_deaf:
            return
        self._num_header_bytes += len(data)
        super().data_received(_without_upgrade(data) if self._is_in_header else data)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._end_with(_too_large())
        elif self._is_in_header and not self.is_answering:
            # Whatever came has ended uvicorn's time-out between two requests.
            self._arm()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]  # ours
        self._is_in_header = True
        self._arm()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_header:  # and not in a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm()
        self._is_in_header = False
        self._num_header_bytes = 0
        lines = sum(len(name) + len(value) + _AROUND_BYTES for name, value in self.headers)
        self.headers[:] = _as_targeted(self.url, self.headers)
        if len(self.url) + lines > MAX_HEADER_BYTES:  # it came all at once
            self._refusal = _too_large()
            raise self._refusal
        if self.parser.should_upgrade() or not _is_plain(self.headers):
            raise self._refusal
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._disarm()
        self._num_header_bytes = 0
        self._is_in_header = True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.is_answering and self.cycle.more_body and not self.is_deaf:
            self._arm()  # the rest of the body is for nobody

    def send_400_response(self, msg: str) -> None:
        self._end_with(self._refusal)

    def _arm(self) -> None:
        if self._deadline is None:
            after_s = self._limits.header_timeout_s
            self._deadline = self.loop.call_later(after_s, self._is_late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self) -> None:
        self._deadline = None
        if not self._is_in_header:
            self.end()  # it is answered: who still sends is to see that
            return
        text = f"the header didn't come within {self._limits.header_timeout_s:g} s"
        self._end_with(HttpRefusal(408, text, "header_timeout"))

    def _end_with(self, error: HttpRefusal) -> None:
        """Answer what hasn't got as far as a route, and close the connection.
        An answer under way to a whole request is ended first, in place of it."""
        if self.transport.is_closing() or self.is_deaf:
            return
        answering = self._answering
        if answering is not None and self.is_answering:
            if not answering.more_body:
                self.read_no_more()
                return
            # Its body is what can't be read: this is its answer.
            answering.disconnected = True
            answering.waiting_for_100_continue = False
            answering.message_event.set()
            if answering.response_started:
                self.transport.close()
                return
        body = json.dumps(error.body).encode()
        head = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
        head += [f"{name}: {value}" for name, value in error.headers.items()]
        head += ["content-type: application/json", f"content-length: {len(body)}"]
        head += [f"x-request-id: {new_request_id()}", "connection: close", "", ""]
        self.transport.write("\r\n".join(head).encode() + body)
        if error.status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.REQUEST_TIMEOUT):
            self.transport.close()  # there are too many already, or it has waited enough
        else:
            self.is_deaf = True
            self.end()
        self.watch_unsent()


def protocol_of(limits: ConnectionLimits) -> Callable[..., asyncio.Protocol]:
    """What makes connections with these limits."""
    return partial(GuardedProtocol, limits=limits)


def _without_upgrade(data: bytes) -> bytes:
    """With the header renamed that asks for another protocol: whoever can do
    without may be answered by this one, but the parser would read no body."""
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    renamed = _UPGRADE.sub(b"ignored", head)
    return data if renamed == head else renamed + data[len(head) :]


def _as_targeted(url: bytes, headers: Headers) -> Headers:
    """With the host that a target names in place of Host, as RFC 9112 has it."""
    target = _ABSOLUTE.match(url)
    if target is None:
        return headers
    return [*[each for each in headers if each[0] != b"host"], (b"host", target[1])]


def _is_plain(headers: Headers) -> bool:
    """Whether the body is coded in no way but by chunks."""
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    return all(coding.strip().lower() == b"chunked" for coding in codings)


def _too_large() -> HttpRefusal:
    text = f"the header has more than {MAX_HEADER_BYTES} bytes"
    return HttpRefusal(431, text, "header_too_large")

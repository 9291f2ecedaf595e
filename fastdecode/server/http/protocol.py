"""uvicorn's HTTP/1.1, with deadlines and limits that it lacks: time and size of
headers, number of connections, errors in OpenAI's form; and a way to cut a
connection whose reader has stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fastdecode.server.http.errors import Refused
from fastdecode.server.http.exchange import CONNECTION

MAX_HEADER_BYTES = 64 << 10
_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


@dataclass(frozen=True)
class ConnectionLimits:
    header_timeout_s: float
    most_connections: int


class GuardedProtocol(HttpToolsProtocol):
    """A connection."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **more: Any) -> None:
        super().__init__(*args, **more)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        self._is_in_header = True

    @property
    def is_writable(self) -> bool:
        """Whether it takes more at once."""
        return not self.flow.write_paused

    def abort(self) -> None:
        """Cut it, with what hasn't been taken."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > self._limits.most_connections:
            error = Refused(503, "too many connections: try again", "too_many_connections")
            error.kind = "server_error"
            error.headers["retry-after"] = "1"
            self._end_with(error)
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_header:
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._is_in_header and self._num_header_bytes > MAX_HEADER_BYTES:
            text = f"the header has more than {MAX_HEADER_BYTES} bytes"
            self._end_with(Refused(431, text, "header_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]  # ours
        self._is_in_header = True
        self._arm()

    def on_headers_complete(self) -> None:
        self._disarm()
        self._is_in_header = False
        self._num_header_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_header = True

    def send_400_response(self, msg: str) -> None:
        self._end_with(Refused(400, "this is no HTTP request", "invalid_http"))

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
        text = f"the header didn't come within {self._limits.header_timeout_s:g} s"
        self._end_with(Refused(408, text, "header_timeout"))

    def _end_with(self, error: Refused) -> None:
        """Answer what hasn't got as far as a route, unless another answer is
        under way, and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = json.dumps(error.body).encode()
            head = [f"HTTP/1.1 {error.status} {_PHRASES[error.status]}"]
            head += [f"{name}: {value}" for name, value in error.headers.items()]
            head += ["content-type: application/json", f"content-length: {len(body)}"]
            head += ["connection: close", "", ""]
            self.transport.write("\r\n".join(head).encode() + body)
        self.transport.close()


def protocol_of(limits: ConnectionLimits) -> Callable[..., asyncio.Protocol]:
    """What makes connections with these limits."""
    return partial(GuardedProtocol, limits=limits)

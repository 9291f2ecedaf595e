"""One request and its answer, over ASGI."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from fastdecode.server.http.errors import HttpRefusal

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CONNECTION = "fastdecode.connection"
"""Among a scope's extensions: the connection, as ``WatchfulProtocol``."""
REFUSED = "fastdecode.refused"
"""In a scope: the code of the error that was its answer."""
IS_LOGGED = "fastdecode.is_logged"
"""In a scope: true if the request log has a line for it."""


class WriteTimeout(Exception):  # noqa: N818  (nobody is left to be told)
    """The client takes nothing any more."""


class Exchange:
    """A request and what is answered to it.

    Args:
        scope, receive, send: of ASGI.
        write_timeout_s: whoever takes nothing for so long is cut off.
    """

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
        write_timeout_s: float = 60.0,
    ) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self._write_timeout_s = write_timeout_s
        self._connection = scope.get("extensions", {}).get(CONNECTION)
        self.began_s = time.monotonic()
        self.status: int | None = None
        """Of the answer, once it has begun."""

    @property
    def request_id(self) -> str:
        """What answer, log and errors call it."""
        return str(self.scope.get("request_id", ""))

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The request's."""
        headers: list[tuple[bytes, bytes]] = self.scope["headers"]
        return headers

    async def answer_json(self, body: Mapping[str, Any], status: int = 200, **more: str) -> None:
        """The whole answer. ``more``: headers, with _ for -."""
        headers = {name.replace("_", "-"): value for name, value in more.items()}
        await self.answer_raw(json.dumps(body).encode(), status, headers)

    async def answer_raw(
        self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """The same, of what is JSON already."""
        await self.answer(body, "application/json", status, headers)

    async def answer(
        self, body: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole answer."""
        await self.begin(kind, status, {**(headers or {}), "content-length": str(len(body))})
        await self.send_part(body, more=False)

    async def refuse(self, error: HttpRefusal) -> None:
        """The whole answer."""
        self.scope[REFUSED] = error.code
        await self.answer_json(error.body, error.status, **_as_names(error.headers))

    async def begin(self, kind: str, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers of an answer that comes in parts."""
        self.status = status
        every = {"content-type": kind, **headers}
        took_ms = (time.monotonic() - self.began_s) * 1e3
        every["openai-processing-ms"] = f"{took_ms:.0f}"
        await self._sent({
            "type": "http.response.start",
            "status": status,
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in every.items()],
        })  # fmt: skip

    async def send_part(self, body: bytes, *, more: bool = True) -> None:
        """A part of the answer, perhaps the last. Raises WriteTimeout."""
        await self._sent({"type": "http.response.body", "body": body, "more_body": more})

    def abort(self) -> None:
        """Cut the connection, with whatever it hasn't taken."""
        if self._connection is not None:
            self._connection.abort()

    async def _sent(self, message: MutableMapping[str, Any]) -> None:
        if self._connection is None or self._connection.is_writable:
            await self._send(message)
            return
        sending = asyncio.ensure_future(self._send(message))
        try:
            while not sending.done():
                before = self._connection.num_unsent_bytes
                await asyncio.wait({sending}, timeout=self._write_timeout_s)
                if not sending.done() and self._connection.num_unsent_bytes >= before:
                    self.abort()
                    raise WriteTimeout
            await sending
        finally:
            sending.cancel()


async def send_error(send: Send, error: HttpRefusal) -> None:
    """An error as a whole answer, where there is no exchange."""
    raw = json.dumps(error.body).encode()
    headers = {
        "content-type": "application/json", "content-length": str(len(raw)), **error.headers
    }  # fmt: skip
    await send({
        "type": "http.response.start",
        "status": error.status,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
    })  # fmt: skip
    await send({"type": "http.response.body", "body": raw, "more_body": False})


def _as_names(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("-", "_"): value for name, value in headers.items()}

"""Whom the guard doesn't let in, counted and logged as other refusals are."""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping
from typing import Any

from fastdecode.server.front import Front, log_line
from fastdecode.server.http.exchange import Receive, Send
from fastdecode.server.http.guard import Guard

_CODES: Mapping[int, str] = {401: "invalid_api_key", 403: "forbidden"}
"""No route answers with these; the guard does."""
_SHOWN = 64


class Refusals:
    """An ASGI application around the guard.

    Args:
        guard: lets in, or doesn't.
        front: has the counters and the log.
    """

    def __init__(self, guard: Guard, front: Front) -> None:
        self._guard = guard
        self._front = front

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        began_s = time.monotonic()

        async def watched(message: MutableMapping[str, Any]) -> None:
            if message.get("status") in _CODES:
                self._note(scope, message["status"], began_s)
            await send(message)

        await self._guard(scope, receive, watched)

    def _note(self, scope: MutableMapping[str, Any], status: int, began_s: float) -> None:
        code = _CODES[status]
        self._front.observations.rejected.add(1, code)
        self._front.log.write(
            log_line(self._front, None, began_s, {
                "id": scope.get("request_id", ""),
                "route": scope["path"][:_SHOWN],
                "status": status,
                "finish": code,
                "key": None,
            })
        )  # fmt: skip

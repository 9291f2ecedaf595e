"""A line in the request log for every request that isn't for completions, which
write their own; and a count of those that were refused."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any

from fastdecode.server.front import Front, log_line
from fastdecode.server.http.exchange import IS_LOGGED, REFUSED, Receive, Send
from fastdecode.server.http.guard import METRICS_PATHS, OPEN_PATHS, Guard

NOT_LET_IN = (401, 403)
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
        status: int | None = None

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._guard(scope, receive, watched)
        finally:
            # Health, figures and the page are asked for all the time.
            is_watcher = scope.get("path") in OPEN_PATHS | METRICS_PATHS
            if not scope.get(IS_LOGGED) and (not is_watcher or status in NOT_LET_IN):
                self._note(scope, status, began_s)

    def _note(self, scope: MutableMapping[str, Any], status: int | None, began_s: float) -> None:
        front, code = self._front, scope.get(REFUSED, "")
        if status in NOT_LET_IN:
            front.observations.rejected.add(1, code)
        elif status is not None and 400 <= status < 429:
            front.observations.rejected.add(1, "invalid")
        front.log.write(
            log_line(front, None, began_s, {
                "id": scope.get("request_id", ""),
                "route": scope.get("path", "")[:_SHOWN],
                "status": status,
                "finish": "abort" if status is None else code or None,
                "key": scope.get("key"),
            })
        )  # fmt: skip

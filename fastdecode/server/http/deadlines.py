"""How long a request may take."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from fastdecode.server.http.errors import NOT_AGAIN, SERVER, HttpRefusal
from fastdecode.server.options import ServeOptions

QUEUE_TIMEOUT = "queue_timeout"


class Timed(Protocol):
    """What a client waits for."""

    accepted_s: float
    first_s: float | None
    """When the first token came."""


@dataclass(frozen=True)
class RequestDeadlines:
    """Those of one request, from when it was accepted."""

    options: ServeOptions
    opened: Timed

    def patience_s(self, silence_s: float | None) -> float | None:
        """How long to wait for what is next; None: for ever.

        Args:
            silence_s: and no longer than this.
        """
        options, opened, now = self.options, self.opened, time.monotonic()
        limits = [] if silence_s is None else [silence_s]
        if options.request_timeout_s is not None:
            limits.append(opened.accepted_s + options.request_timeout_s - now)
        if options.queue_timeout_s is not None and opened.first_s is None:
            limits.append(opened.accepted_s + options.queue_timeout_s - now)
        return max(0.0, min(limits)) if limits else None

    def check(self) -> None:
        """Raises Refused: it has taken too long."""
        options, opened = self.options, self.opened
        elapsed_s = time.monotonic() - opened.accepted_s
        most_s = options.request_timeout_s
        if most_s is not None and elapsed_s >= most_s:
            text = f"the answer took more than {most_s:g} s"
            raise HttpRefusal(408, text, "request_timeout", kind=SERVER, headers=NOT_AGAIN)
        most_s = options.queue_timeout_s
        if most_s is not None and opened.first_s is None and elapsed_s >= most_s:
            text = f"no token came within {most_s:g} s"
            raise HttpRefusal(503, text, QUEUE_TIMEOUT, kind=SERVER, headers=NOT_AGAIN)

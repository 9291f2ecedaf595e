"""uvicorn's HTTP/1.1 connection, with what it lacks when requests are sent
ahead of their turn, and when whoever asked stops reading."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fastdecode.core.errors import ConfigError

FIRST_VERSION, AFTER_VERSIONS = (0, 46), (0, 55)
"""Of uvicorn: those that this was tried with, as setup.cfg has them."""
MAX_REQUESTS_AHEAD = 64
MAX_BYTES_AHEAD = 64 << 10


def check_version(version: str = uvicorn.__version__) -> None:
    """Raises ConfigError: uvicorn's connections may be of another make than
    those that are extended here, so that the end of one would go unnoticed."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not FIRST_VERSION <= numbers < AFTER_VERSIONS:
        first, after = (".".join(map(str, each)) for each in (FIRST_VERSION, AFTER_VERSIONS))
        raise ConfigError(
            f"uvicorn {version} isn't one that this server was tried with: "
            f'pip install "uvicorn>={first},<{after}"'
        )


class WatchfulProtocol(HttpToolsProtocol):
    """A connection that is read all the time, so that its end is noticed
    whatever was sent before.

    Requests that come while another is being answered wait for their turn, up
    to a bound; then the connection ends with the answer under way.

    Args:
        write_timeout_s: cut off who takes nothing of the last bytes for so long.
    """

    def __init__(self, *args: Any, write_timeout_s: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self._write_timeout_s = write_timeout_s
        self._unsent_check: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None
        self._num_bytes_ahead = 0
        self.is_deaf = False
        """Whether what comes is thrown away."""

    @property
    def is_answering(self) -> bool:
        """Whether an answer is under way."""
        return self._answering is not None and not self._answering.response_complete

    @property
    def is_writable(self) -> bool:
        """Whether it takes more at once."""
        return not self.flow.write_paused

    @property
    def num_unsent_bytes(self) -> int:
        """What hasn't been taken of what was written."""
        return self.transport.get_write_buffer_size()

    def abort(self) -> None:
        """Cut it, with what hasn't been taken."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_unsent()
        # uvicorn tells only the last request; this one may be before it.
        if self._answering is not None and self.is_answering:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_ahead = bool(self.pipeline)
        super().data_received(data)
        if not self.pipeline:
            self._num_bytes_ahead = 0
            return
        self._num_bytes_ahead += len(data) * was_ahead
        if len(self.pipeline) > MAX_REQUESTS_AHEAD or self._num_bytes_ahead > MAX_BYTES_AHEAD:
            self.read_no_more()
        self.flow.resume_reading()

    def read_no_more(self) -> None:
        """Close after the answer under way; until then only the end matters of
        what comes."""
        assert self._answering is not None
        self.is_deaf = True
        self._answering.keep_alive = False
        self.pipeline.clear()
        self.cycle = self._answering
        self.flow.resume_reading()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: it would tell to install what this server has no use for."""

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.is_answering:
            self.watch_unsent()

    def watch_unsent(self) -> None:
        """Cut the connection if what was written isn't taken."""
        self._forget_unsent()
        num_bytes = self.num_unsent_bytes
        if num_bytes:
            self._unsent_check = self.loop.call_later(
                self._write_timeout_s, self._check_unsent, num_bytes
            )

    def _check_unsent(self, before: int) -> None:
        if self.num_unsent_bytes < before:
            self.watch_unsent()
        else:
            self.abort()

    def _forget_unsent(self) -> None:
        if self._unsent_check is not None:
            self._unsent_check.cancel()
            self._unsent_check = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._forget_unsent()  # its own answer has a time-out
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

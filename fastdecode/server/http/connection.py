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
LINGERS_S, MOST_SILENCE_S = 30.0, 2.0
MOST_UNHEARD_BYTES = 64 << 20
"""Who still sends though he has his answer is heard out within these."""


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

    def end(self) -> None:
        """Close it once what was written is taken. Whoever still sends is heard
        out first, for a while, or what was written would be lost."""
        is_sending = self.is_deaf or (self._answering is not None and self._answering.more_body)
        self.is_deaf = True
        self.pipeline.clear()
        if is_sending:
            _linger(self.transport, self)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_unsent()
        # uvicorn tells only the last request; this one may be before it.
        if self._answering is not None and self.is_answering:
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.pipeline.clear()
        self._unset_keepalive_if_required()  # uvicorn lets it run where a client resets
        if self._answering is not None:
            # Or they would hold each other until the garbage collector comes.
            self._answering.transport = self.transport
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
        cycle.transport = _AnswersTransport(self)
        if cycle.scope["http_version"] == "1.0":  # which knows no chunks
            cycle.chunked_encoding, cycle.expected_content_length = False, _AnyLength()
        super()._start_asgi_task(cycle, app)


class _AnyLength(int):
    """What uvicorn expects of an answer without chunks that ends with its connection."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> _AnyLength:
        return self


class _AnswersTransport(asyncio.Transport):
    """What an answer knows of its connection."""

    def __init__(self, connection: WatchfulProtocol) -> None:
        super().__init__()
        self._connection = connection

    def write(self, data: Any) -> None:
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.end()


def _linger(transport: asyncio.Transport, connection: asyncio.Protocol) -> None:
    """Say that no more comes, throw away what does, and close once the client
    does, or has sent for too long or too much. Were it closed with bytes
    unread, the system would tell the client that it was reset, and most would
    never see their answer. ``connection`` is told when it is lost."""
    if transport.is_closing() or isinstance(transport.get_protocol(), _Lingering):
        return
    transport.set_protocol(_Lingering(transport, connection))
    if transport.can_write_eof():
        transport.write_eof()
    transport.resume_reading()


class _Lingering(asyncio.Protocol):
    """A connection's second and last protocol."""

    def __init__(self, transport: asyncio.Transport, before: asyncio.Protocol) -> None:
        self._transport = transport
        self._before = before
        self._num_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._end_s = self._loop.time() + LINGERS_S
        self._check = self._loop.call_later(MOST_SILENCE_S, self._end_if_silent, 0)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > MOST_UNHEARD_BYTES:
            self._transport.close()

    def pause_writing(self) -> None:
        self._before.pause_writing()

    def resume_writing(self) -> None:
        self._before.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._check.cancel()
        self._before.connection_lost(exc)

    def _end_if_silent(self, num_before: int) -> None:
        if self._num_bytes == num_before or self._loop.time() >= self._end_s:
            self._transport.close()
        else:
            self._check = self._loop.call_later(
                MOST_SILENCE_S, self._end_if_silent, self._num_bytes
            )

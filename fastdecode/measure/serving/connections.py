"""Connections to a server that are used again, as clients of OpenAI's API do: to
open one takes longer than some tokens do, and isn't the server's time."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

_MAX_LINE = 1 << 24


@dataclass(frozen=True)
class HttpConnection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    was_used: bool
    """For another request before: so the server may have closed it by now."""


class Connections:
    """To one address, over TLS or not."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._idle: list[HttpConnection] | None = None

    @property
    def are_kept(self) -> bool:
        return self._idle is not None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, which is in one event loop, they are used again."""
        self._idle = []
        try:
            yield
        finally:
            for connection in self._idle:
                connection.writer.close()
            self._idle = None

    async def take(self) -> HttpConnection:
        """One that nobody else has. Raises OSError."""
        while self._idle:
            connection = self._idle.pop()
            if not (connection.reader.at_eof() or connection.writer.is_closing()):
                return connection
            connection.writer.close()
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls, limit=_MAX_LINE
        )
        return HttpConnection(reader, writer, was_used=False)

    def give_back(self, connection: HttpConnection) -> None:
        """Once all of an answer was read."""
        if self._idle is None:
            connection.writer.close()
        else:
            self._idle.append(HttpConnection(connection.reader, connection.writer, was_used=True))

"""A client of OpenAI's API that costs little and takes times: HTTP/1.1 over
asyncio's streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fastdecode.core.errors import ConfigError
from fastdecode.core.os_errors import explained
from fastdecode.measure.serving import KEY_VARIABLE, TIMEOUT_S
from fastdecode.measure.serving.answer import (
    AnswerHead,
    lines,
    message_of,
    read_body,
    read_head,
    read_message,
    shown,
)
from fastdecode.measure.serving.connections import Connections, HttpConnection
from fastdecode.measure.serving.load import Planned

_MAX_MODELS_BYTES = 8 << 20
_MODELS_WITHIN_S = 30.0
_ENDS_WITHIN_S = 1.0
"""The body of a stream, after its last event; else the connection isn't used again."""


@dataclass
class Record:
    """What became of a request. Times are seconds after the start of the load."""

    due_s: float
    sent_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    """When chunks with choices came."""
    num_prompt: int = 0
    num_tokens: int = 0
    """As the server counts them, or else the chunks."""
    error: str | None = None
    """Its kind."""
    message: str = ""
    """What the server, or the system, says of it."""
    has_usage: bool = False
    """Whether the server has counted the tokens."""

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.chunk_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None where there was one token only."""
        if self.num_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_tokens - 1)


class Endpoint:
    """A server.

    Args:
        url: http://HOST:PORT, perhaps with a path before /v1.
        key: sent with every request.
        timeout_s: a request that takes longer is given up.

    Raises:
        ConfigError: that is no address.
    """

    def __init__(self, url: str, key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise ConfigError(f"--base-url has a name or key before @: give it in {KEY_VARIABLE}")
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(f"{KEY_VARIABLE} has a space, or a character that is not ASCII")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {url} is not like http://HOST:PORT")
        self._host = parts.hostname
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if tls else 80)
        self._connections = Connections(self._host, self._port, tls)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._key = key
        self._timeout_s = timeout_s
        self.num_done = self.num_failed = 0
        """Requests that are over, and those of them with an error."""

    async def model(self) -> str:
        """The first that it serves. Raises ConfigError: it doesn't say."""
        try:
            why = await asyncio.wait_for(self._models(), min(self._timeout_s, _MODELS_WITHIN_S))
            if not isinstance(why, str):
                return str(why["data"][0]["id"])
        except asyncio.TimeoutError:
            why = "it doesn't answer"
        except OSError as error:
            raise self._unreached(explained(error)) from None
        except (ValueError, LookupError, TypeError, asyncio.IncompleteReadError):
            why = "what it answers is no list of models; is this a server of OpenAI's API?"
        where = f"{self._host}:{self._port}{self._path}/v1/models"
        raise ConfigError(f"{where} doesn't name a model: {why}")

    async def reach(self) -> None:
        """Raises ConfigError: nothing accepts connections there."""
        try:
            connection = await asyncio.wait_for(self._connections.take(), self._timeout_s)
        except asyncio.TimeoutError:
            raise self._unreached("no connection was accepted in time") from None
        except OSError as error:
            raise self._unreached(explained(error)) from None
        connection.writer.close()

    def _unreached(self, why: str) -> ConfigError:
        return ConfigError(f"--base-url: nothing answers at {self._host}:{self._port}: {why}")

    async def _models(self) -> Any:
        """The list of models, or the words why there is none."""
        connection, head = await self._ask("GET", "/v1/models", b"")
        try:
            if head.status != 200:
                return self._refusal(head, await read_message(connection.reader, head))
            said = json.loads(await read_body(connection.reader, head, _MAX_MODELS_BYTES))
            return said if isinstance(said, dict) else {}
        finally:
            connection.writer.close()

    def _refusal(self, head: AnswerHead, message: str) -> str:
        """Return why a server refuses, without the key that it may repeat."""
        message = message.replace(self._key, "(the key)") if self._key else message
        told = f"{head.status}: {message}" if message else str(head.status)
        return f"{told} (set {KEY_VARIABLE})" if head.status == 401 else told

    def keeping_connections(self) -> contextlib.AbstractContextManager[None]:
        """Inside, which is in one event loop, requests use connections again."""
        return self._connections.kept()

    async def run(self, planned: Planned, model: str, start_s: float) -> Record:
        """Send a request, and read its stream to the end."""
        body = {
            "model": model,
            "prompt": planned.prompt,
            "max_tokens": planned.output_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        raw = json.dumps(body).encode()
        record = Record(planned.due_s, sent_s=time.monotonic() - start_s)
        record.num_prompt = len(planned.prompt)
        try:
            await asyncio.wait_for(self._stream(raw, record, start_s), self._timeout_s)
        except asyncio.TimeoutError:
            record.error = "timeout"
            record.message = f"the answer took more than {self._timeout_s:g} s: see --timeout-s"
        except OSError as error:
            record.error, record.message = type(error).__name__, explained(error)
        except asyncio.IncompleteReadError:
            record.error = "cut off"
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            record.error, record.message = "malformed", shown(f"{type(error).__name__}: {error}")
        if record.error is None and not record.chunk_s:
            record.error = "empty"
        if not record.has_usage:
            record.num_tokens = len(record.chunk_s)
        self.num_done += 1
        self.num_failed += record.error is not None
        return record

    async def _stream(self, raw: bytes, record: Record, start_s: float) -> None:
        connection, head = await self._ask("POST", "/v1/completions", raw)
        try:
            if head.status == 200:
                every = lines(connection.reader, head)
                await _read_events(every, record, start_s)
                if record.error is None and head.is_kept and await _is_over(every):
                    self._connections.give_back(connection)
                    return
            else:
                record.error = f"status {head.status}"
                record.message = self._refusal(head, await read_message(connection.reader, head))
        except BaseException:
            connection.writer.close()
            raise
        connection.writer.close()

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[HttpConnection, AnswerHead]:
        """Send a request. Returns the head of its answer, and where the rest is read.
        Raises OSError, ValueError."""
        sent = self._head(method, path, body) + body
        while True:
            connection = await self._connections.take()
            try:
                connection.writer.write(sent)
                await connection.writer.drain()
                return connection, await read_head(connection.reader)
            except BaseException as error:
                connection.writer.close()
                # A server may close one that is idle just when it is used again.
                if not (connection.was_used and isinstance(error, (OSError, ValueError))):
                    raise

    def _head(self, method: str, path: str, body: bytes) -> bytes:
        host = f"[{self._host}]" if ":" in self._host else self._host
        head = [f"{method} {self._path}{path} HTTP/1.1", f"host: {host}:{self._port}"]
        head += ["accept: */*", f"content-length: {len(body)}"]
        head += [] if self._connections.are_kept else ["connection: close"]
        head += ["content-type: application/json"] if body else []
        head += [] if self._key is None else [f"authorization: Bearer {self._key}"]
        return "\r\n".join([*head, "", ""]).encode()


async def _read_events(every: AsyncIterator[bytes], record: Record, start_s: float) -> None:
    """The lines of a stream, to the last event."""
    async for line in every:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data:"):
            now_s = time.monotonic() - start_s
            _take(json.loads(line[5:]), record, now_s)
    record.error = record.error or "cut off"


async def _is_over(every: AsyncIterator[bytes]) -> bool:
    """Whether a body ends by itself."""

    async def rest() -> None:
        async for _ in every:
            pass

    try:
        await asyncio.wait_for(rest(), _ENDS_WITHIN_S)
    except (asyncio.TimeoutError, OSError, ValueError, asyncio.IncompleteReadError):
        return False
    return True


def _take(said: Any, record: Record, now_s: float) -> None:
    """Raises ValueError, LookupError, TypeError: it is no event of OpenAI's."""
    if not isinstance(said, dict):
        raise ValueError("an event is no JSON object")
    if "error" in said:
        record.error, record.message = "error event", shown(message_of(said))
    elif said.get("choices"):
        record.chunk_s.append(now_s)
    if said.get("usage"):
        record.num_tokens = int(said["usage"]["completion_tokens"])
        record.has_usage = True

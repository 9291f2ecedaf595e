"""Clients of OpenAI's API that take times, and run a load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from fastdecode.core.errors import ConfigError
from fastdecode.core.os_errors import explained
from fastdecode.measure.serving import KEY_VARIABLE, TIMEOUT_S
from fastdecode.measure.serving.load import Planned

_MAX_MODELS_BYTES = 8 << 20
_MALFORMED = ValueError, LookupError, TypeError, AttributeError, RecursionError, aiohttp.ClientError
_MODELS_WITHIN_S = 30.0
_MOST_OF_AN_ERROR = 64 << 10
_LINE_BYTES = 1 << 24
_SHOWN = 300


@dataclass
class Record:
    """Outcome of a request. Times are seconds after the start of the load."""

    due_s: float
    sent_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    """Arrivals of chunks with choices."""
    num_prompt: int = 0
    num_tokens: int = 0
    """Counted by the server, or else the chunks."""
    error: str | None = None
    message: str = ""
    """Words of the server, or of the operating system, about the error."""
    has_usage: bool = False

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.chunk_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token."""
        if self.num_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_tokens - 1)


class Endpoint:
    """A server at http://HOST:PORT, perhaps with a path before /v1. Raises ConfigError: If ``url``
    is not such an address."""

    def __init__(self, url: str, key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"--base-url {url} is not an address: {error}") from None
        if "@" in parts.netloc:
            raise ConfigError(f"--base-url has a name or key before @: give it in {KEY_VARIABLE}")
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(f"{KEY_VARIABLE} has a space, or a character that is not ASCII")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {url} is not like http://HOST:PORT")
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        host = f"[{self._host}]" if ":" in self._host else self._host
        path = parts.path.rstrip("/").removesuffix("/v1")
        self._url = f"{parts.scheme}://{host}:{self._port}{path}/v1"
        # Compressed events would arrive late.
        self._headers = {"accept-encoding": "identity", "content-type": "application/json"}
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._key, self._timeout_s = key, timeout_s

    async def model(self, named: str | None = None) -> str:
        """Return the first model that the server names, or the one that the user has ``named``.
        Raises ConfigError: If nothing answers, or none is named."""
        within = aiohttp.ClientTimeout(total=min(self._timeout_s, _MODELS_WITHIN_S))
        url = f"{self._url}/models"
        try:
            async with self.session() as session, session.get(url, timeout=within) as answer:
                if answer.status == 200 and named is None:
                    said = json.loads(await _body(answer, _MAX_MODELS_BYTES))
                    return str(said["data"][0]["id"])
                why = await self._refusal(answer)
        except asyncio.TimeoutError:
            why = "it doesn't answer"
        except OSError as error:
            place = f"{self._host}:{self._port}"
            raise ConfigError(
                f"--base-url: nothing answers at {place}: {explained(error)}"
            ) from None
        except _MALFORMED:
            why = "its answer is not a list of models. Is this a server of OpenAI's API?"
        if named is not None:
            return named
        raise ConfigError(f"{url} doesn't name a model: {why}")

    async def _refusal(self, answer: aiohttp.ClientResponse) -> str:
        """Return why a server refuses, without the key that it may repeat."""
        message = ""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            body = await _body(answer, _MOST_OF_AN_ERROR)
            try:
                message = message_of(json.loads(body))
            except (ValueError, RecursionError):
                message = body.decode("utf-8", "replace")
        message = message.replace(self._key, "(the key)") if self._key else message
        told = f"{answer.status}: {shown(message)}" if message else str(answer.status)
        return f"{told} (set {KEY_VARIABLE})" if answer.status == 401 else told

    def session(self) -> aiohttp.ClientSession:
        """Return what reuses connections, as clients do. It is to be closed."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            read_bufsize=_LINE_BYTES,
        )

    async def run(
        self, planned: Planned, model: str, start_s: float, session: aiohttp.ClientSession
    ) -> Record:
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
        sent_s = time.monotonic() - start_s
        record = Record(planned.due_s, sent_s, num_prompt=len(planned.prompt))
        try:
            try:
                await self._stream(session, raw, record, start_s)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                # A server may close an idle connection just when it is used again.
                async with self.session() as fresh:
                    await self._stream(fresh, raw, record, start_s)
        except asyncio.TimeoutError:
            record.error = "timeout"
            record.message = f"the answer took more than {self._timeout_s:g} s: see --timeout-s"
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError):
            record.error = "cut off"
        except OSError as error:
            record.error, record.message = type(error).__name__, explained(error)
        except _MALFORMED as error:
            record.error, record.message = "malformed", shown(f"{type(error).__name__}: {error}")
        if record.error is None and not record.chunk_s:
            record.error = "empty"
        if not record.has_usage:
            record.num_tokens = len(record.chunk_s)
        return record

    async def _stream(
        self, session: aiohttp.ClientSession, raw: bytes, record: Record, start_s: float
    ) -> None:
        async with session.post(f"{self._url}/completions", data=raw) as answer:
            if answer.status != 200:
                record.error = f"status {answer.status}"
                record.message = await self._refusal(answer)
                return
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data:"):
                    _take(json.loads(line[5:]), record, time.monotonic() - start_s)
            record.error = record.error or "cut off"


def _take(said: Any, record: Record, now_s: float) -> None:
    if not isinstance(said, dict):
        raise ValueError("an event is no JSON object")
    if "error" in said:
        record.error, record.message = "error event", shown(message_of(said))
    elif said.get("choices"):
        record.chunk_s.append(now_s)
    if said.get("usage"):
        record.num_tokens = int(said["usage"]["completion_tokens"])
        record.has_usage = True


async def _body(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    body = b""
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) >= most_bytes:
            break
    return body[:most_bytes]


def message_of(said: Any) -> str:
    """Return what an error says, in the forms that servers give it."""
    while isinstance(said, dict):
        said = said.get("error") or said.get("message") or said.get("detail") or ""
    return said if isinstance(said, str) else json.dumps(said)


def shown(text: str) -> str:
    """Return a server's words on one line of a terminal."""
    line = " ".join(text.split())[:_SHOWN]
    return "".join(letter if letter.isprintable() else "?" for letter in line)


async def run_open(endpoint: Endpoint, model: str, load: Sequence[Planned]) -> list[Record]:
    """Send every request when it is due, without waiting for answers."""
    async with endpoint.session() as session:
        start_s, tasks = time.monotonic(), []
        for planned in load:
            wait_s = planned.due_s - (time.monotonic() - start_s)
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(endpoint.run(planned, model, start_s, session)))
        return list(await asyncio.gather(*tasks))


async def run_closed(
    endpoint: Endpoint, model: str, load: Sequence[Planned], concurrency: int
) -> list[Record]:
    """Run ``concurrency`` clients, each of which sends the next request after its answer."""
    start_s = time.monotonic()
    records: list[Record] = []
    waiting = iter(load)

    async def client(session: aiohttp.ClientSession) -> None:
        for planned in waiting:
            record = await endpoint.run(planned, model, start_s, session)
            record.due_s = record.sent_s
            records.append(record)

    async with endpoint.session() as session:
        await asyncio.gather(*[client(session) for _ in range(concurrency)])
    return records

"""A client of OpenAI's API that costs little and takes times: HTTP/1.1 over
asyncio's streams."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fastdecode.core.errors import ConfigError
from fastdecode.measure.serving.load import Planned

_MAX_LINE = 1 << 24


@dataclass
class Record:
    """What became of a request. Times are seconds after the start of the load."""

    due_s: float
    sent_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    """When chunks with choices came."""
    num_prompt: int = 0
    num_tokens: int = 0
    """As the server counts them."""
    error: str | None = None

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

    Raises:
        ConfigError: that is no address.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {url} is not like http://HOST:PORT")
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._key = key

    async def model(self) -> str:
        """The first that it serves. Raises ConfigError: it doesn't say."""
        try:
            reader, writer = await self._send("GET", "/v1/models", b"")
            raw = await reader.read()
            writer.close()
            body = raw.split(b"\r\n\r\n", 1)[1]
            return str(json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            where = f"{self._host}:{self._port}{self._path}/v1/models"
            raise ConfigError(f"{where} doesn't name a model: {error}") from None

    async def run(self, planned: Planned, model: str, start_s: float) -> Record:
        """Send a request, and read its stream to the end."""
        record = Record(planned.due_s, sent_s=time.monotonic() - start_s)
        record.num_prompt = len(planned.prompt)
        body = {
            "model": model,
            "prompt": planned.prompt,
            "max_tokens": planned.output_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            reader, writer = await self._send("POST", "/v1/completions", json.dumps(body).encode())
            try:
                await _read_stream(reader, record, start_s)
            finally:
                writer.close()
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            record.error = type(error).__name__
        if record.error is None and not record.chunk_s:
            record.error = "empty"
        return record

    async def _send(
        self, method: str, path: str, body: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._tls, limit=_MAX_LINE
        )
        lines = [f"{method} {self._path}{path} HTTP/1.1", f"host: {self._host}:{self._port}"]
        lines += ["connection: close", "accept: */*", f"content-length: {len(body)}"]
        lines += ["content-type: application/json"] if body else []
        lines += [] if self._key is None else [f"authorization: Bearer {self._key}"]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        return reader, writer


async def _read_stream(reader: asyncio.StreamReader, record: Record, start_s: float) -> None:
    status = (await reader.readline()).split()
    if len(status) < 2 or status[1] != b"200":
        record.error = f"status {status[1].decode() if len(status) > 1 else '?'}"
        return
    # Sizes of HTTP's chunks are lines like any others, which don't begin with "data:".
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data:"):
            now_s = time.monotonic() - start_s
            _take(json.loads(line[5:]), record, now_s)
    record.error = record.error or "cut off"


def _take(said: Mapping[str, Any], record: Record, now_s: float) -> None:
    if "error" in said:
        record.error = "error event"
    elif said.get("choices"):
        record.chunk_s.append(now_s)
    if said.get("usage"):
        record.num_tokens = int(said["usage"]["completion_tokens"])

"""HTTP/1.1 answers, as far as a client needs them: head, and a body that comes
in chunks, in one piece or until the connection ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

_MAX_HEADERS = 256
_MAX_CHUNK = 1 << 30
_MAX_LINE = 1 << 24
_MOST_OF_AN_ERROR = 64 << 10
_SHOWN = 300


@dataclass(frozen=True)
class AnswerHead:
    status: int
    is_chunked: bool
    length: int | None
    """Bytes of the body; None: it doesn't say."""
    is_kept: bool
    """Whether the connection can be used again after the body."""


async def read_head(reader: asyncio.StreamReader) -> AnswerHead:
    """Raises ValueError, OSError: it is no answer of HTTP."""
    words = (await reader.readline()).split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise ValueError("what came is no answer of HTTP")
    headers: dict[bytes, bytes] = {}
    for _ in range(_MAX_HEADERS):
        line = await reader.readline()
        if not line.strip():
            break
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip().lower()
    length = headers.get(b"content-length")
    is_chunked = b"chunked" in headers.get(b"transfer-encoding", b"")
    is_closed = words[0] == b"HTTP/1.0" or b"close" in headers.get(b"connection", b"")
    is_kept = not is_closed and (is_chunked or length is not None)
    return AnswerHead(
        int(words[1]), is_chunked, int(length) if length and not is_chunked else None, is_kept
    )


async def pieces(reader: asyncio.StreamReader, head: AnswerHead) -> AsyncIterator[bytes]:
    """The body, as it comes. Raises ValueError, asyncio.IncompleteReadError."""
    if not head.is_chunked:
        num_left = _MAX_CHUNK if head.length is None else head.length
        while num_left and (piece := await reader.read(min(num_left, 1 << 16))):
            num_left -= len(piece)
            yield piece
        return
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        if not 0 < size <= _MAX_CHUNK:
            raise ValueError("a chunk of HTTP is too large")
        yield (await reader.readexactly(size + 2))[:-2]
    for _ in range(_MAX_HEADERS):
        if not (await reader.readline()).strip():
            return


async def lines(reader: asyncio.StreamReader, head: AnswerHead) -> AsyncIterator[bytes]:
    """The lines of a body, wherever its chunks end. Raises as ``pieces``."""
    rest = b""
    async for piece in pieces(reader, head):
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > _MAX_LINE:
            raise ValueError("a line is too long")
    if rest:
        yield rest


async def read_body(reader: asyncio.StreamReader, head: AnswerHead, most_bytes: int) -> bytes:
    """The body, or as much of it. Raises as ``pieces``."""
    body = b""
    async for piece in pieces(reader, head):
        body += piece
        if len(body) >= most_bytes:
            break
    return body[:most_bytes]


async def read_message(reader: asyncio.StreamReader, head: AnswerHead) -> str:
    """What an answer that is an error says to a person."""
    try:
        body = await read_body(reader, head, _MOST_OF_AN_ERROR)
    except (OSError, ValueError, asyncio.IncompleteReadError):
        return ""
    try:
        said = message_of(json.loads(body))
    except (ValueError, RecursionError):
        said = body.decode("utf-8", "replace")
    return shown(said)


def message_of(said: Any) -> str:
    """What an error says, in the forms that servers give it."""
    while isinstance(said, dict):
        said = said.get("error") or said.get("message") or said.get("detail") or ""
    return said if isinstance(said, str) else json.dumps(said)


def shown(text: str) -> str:
    """A server's words on one line of a terminal."""
    line = " ".join(text.split())[:_SHOWN]
    return "".join(letter if letter.isprintable() else "?" for letter in line)

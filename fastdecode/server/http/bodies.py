"""Bodies of requests: bounded in size, time and depth, and strictly JSON."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from typing import Any, NoReturn

from fastdecode.server.http.errors import NOT_AGAIN, HttpRefusal
from fastdecode.server.http.exchange import Receive

MAX_DEPTH = 64


class Disconnected(Exception):  # noqa: N818  (nobody is left to be told)
    """The client is gone."""


@dataclass(frozen=True)
class BodyLimits:
    most_bytes: int
    timeout_s: float


async def read_body(
    headers: list[tuple[bytes, bytes]], receive: Receive, limits: BodyLimits
) -> bytes:
    """What a request carries.

    Raises:
        Refused: it says to be no JSON, doesn't come in time, or is too large.
        Disconnected: the client has gone.
    """
    _check_headers(headers, limits.most_bytes)
    try:
        return await asyncio.wait_for(_read(receive, limits.most_bytes), limits.timeout_s)
    except asyncio.TimeoutError:
        text = f"the body didn't come within {limits.timeout_s:g} s"
        raise HttpRefusal(408, text, "body_timeout", headers=NOT_AGAIN, closes=True) from None


def _check_headers(headers: list[tuple[bytes, bytes]], most_bytes: int) -> None:
    given = dict(headers)
    kind = given.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        text = "the body must be JSON, with content-type: application/json"
        raise HttpRefusal(415, text, "unsupported_media_type", closes=True)
    if given.get(b"content-encoding", b"identity").lower() != b"identity":
        text = "bodies that are encoded (gzip, …) aren't read: leave content-encoding out"
        raise HttpRefusal(415, text, "unsupported_media_type", closes=True)
    length = given.get(b"content-length", b"0")
    if length.isdigit() and (len(length) > 18 or int(length) > most_bytes):
        raise _too_large(most_bytes)


def _too_large(most_bytes: int) -> HttpRefusal:
    text = f"the body is larger than {most_bytes} bytes"
    return HttpRefusal(413, text, "body_too_large", closes=True)


async def _read(receive: Receive, most_bytes: int) -> bytes:
    raw = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Disconnected
        raw += message.get("body", b"")
        if len(raw) > most_bytes:
            raise _too_large(most_bytes)
        if not message.get("more_body", False):
            return bytes(raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object, of finite numbers and bounded depth. Raises Refused."""
    try:
        said = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise HttpRefusal(
            400, f"the body is not valid JSON: {_why(error)}", "invalid_json"
        ) from None
    if not isinstance(said, dict):
        raise HttpRefusal(400, "the body must be a JSON object", "invalid_body")
    if _depth_exceeds(said, MAX_DEPTH):
        text = f"the body is nested more than {MAX_DEPTH} deep"
        raise HttpRefusal(400, text, "invalid_json")
    return said


def _why(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    # Python's words go on about a setting of its own.
    return "a number has too many digits" if "int_max_str_digits" in str(error) else str(error)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too great")
    return number


def _depth_exceeds(said: object, most: int) -> bool:
    level = [said]
    for _ in range(most):
        inner: list[object] = []
        for each in level:
            values = each.values() if isinstance(each, dict) else each
            if isinstance(values, str):
                continue
            inner += [one for one in values if isinstance(one, (dict, list))]  # type: ignore[attr-defined]
        if not inner:
            return False
        level = inner
    return True

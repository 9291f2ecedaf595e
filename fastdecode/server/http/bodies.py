"""Bodies of requests: strictly JSON, and bounded in size, time and depth."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from fastdecode.server.http.connection import CONNECTION
from fastdecode.server.http.errors import NOT_AGAIN, HttpRefusal
from fastdecode.server.options import ServeOptions

MAX_DEPTH = 64


async def read_body(request: Request, options: ServeOptions) -> bytes:
    """Return what a request carries.

    Raises:
        HttpRefusal: If it isn't JSON by its header, comes too late, or is too large.
        ClientDisconnect: If the client has disconnected.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        text = "the body must be JSON, with content-type: application/json"
        raise HttpRefusal(415, text, "unsupported_media_type")
    codings = (request.headers.get("content-encoding"), request.headers.get("transfer-encoding"))
    if any(coding and coding.lower() not in ("identity", "chunked") for coding in codings):
        text = "bodies that are encoded (gzip, …) aren't read: leave content-encoding out"
        raise HttpRefusal(415, text, "unsupported_media_type")
    most_bytes = options.max_body_bytes
    too_large = HttpRefusal(413, f"the body is larger than {most_bytes} bytes", "body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and (len(length) > 18 or int(length) > most_bytes):
        raise too_large
    end_s = time.monotonic() + options.body_timeout_s
    raw, is_whole = bytearray(), False
    while not is_whole:
        try:
            message = await asyncio.wait_for(request.receive(), end_s - time.monotonic())
        except asyncio.TimeoutError:
            text = f"the body didn't come within {options.body_timeout_s:g} s"
            raise HttpRefusal(408, text, "body_timeout", headers=NOT_AGAIN) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        raw += message.get("body", b"")
        if len(raw) > most_bytes:
            raise too_large
        is_whole = not message.get("more_body", False)
    connection = CONNECTION.get(None)
    if connection is not None:
        connection.end_body()
    return bytes(raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return a JSON object, of finite numbers and bounded depth.

    Raises:
        HttpRefusal: If the bytes are anything else.
    """
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

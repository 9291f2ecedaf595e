"""A client of a server that may die at any moment."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jobs import LIMIT_S

AGAIN = ("no_r_worker", "rate_limit_exceeded", "starting")
"""Errors after which a client asks again."""


@dataclass
class Answer:
    """What came of it."""

    token_ids: list[int] = field(default_factory=list)
    is_whole: bool = False
    error: str | None = None
    """Its code, or: no connection, cut off, timeout."""


def ask(
    port: int,
    line: dict[str, Any],
    is_stream: bool,
    is_over: threading.Event,
    opened: Callable[[socket.socket], None] = lambda _: None,
) -> Answer:
    """Ask for the answer to a line of ``jobs.lines``; again where there is
    no R-worker for the moment, until ``is_over``. ``opened``: told each connection."""
    body = {name: value for name, value in line.items() if name not in ("id", "prompt_token_ids")}
    body.update(prompt=line["prompt_token_ids"], stream=is_stream)
    while True:
        answer = _asked(port, json.dumps(body).encode(), opened)
        if answer.error not in AGAIN or answer.token_ids or is_over.wait(0.2):
            return answer


def _asked(port: int, body: bytes, opened: Callable[[socket.socket], None]) -> Answer:
    answer = Answer(error="no connection")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.connect()
        opened(connection.sock)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        came = connection.getresponse()
        answer.error = "cut off"
        is_stream = came.headers.get_content_type() == "text/event-stream"
        while text := came.readline() if is_stream else came.read():
            if text.startswith(b"data: [DONE]"):
                answer.is_whole, answer.error = True, None
            elif text.startswith(b"data: ") or not is_stream:  # and no comment, as of silence
                _take(answer, json.loads(text.removeprefix(b"data: ")), is_stream=is_stream)
    except TimeoutError:
        answer.error = "timeout"
    except (OSError, http.client.HTTPException):
        pass
    finally:
        connection.close()
    return answer


def _take(answer: Answer, said: dict[str, Any], *, is_stream: bool) -> None:
    if "error" in said:
        answer.error = said["error"]["code"]
    elif not is_stream:
        answer.is_whole, answer.error = True, None
    for choice in said.get("choices", ()):
        answer.token_ids += choice["token_ids"]

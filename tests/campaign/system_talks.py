"""Conversations with a whole system: in this process, or over HTTP with a server,
which may be an MPI job; and whether what it said is right."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from jobs import LIMIT_S
from server_process import Server

from fastdecode import LLM, SamplingParams

NUM_CONVERSATIONS, NUM_TURNS, NUM_NEW, NUM_DRAWN = 6, 3, 20, 40
_FREE_WITHIN_S = 20.0
Turns: TypeAlias = list[tuple[int, ...] | None]
"""Turn after turn, a conversation each; None: it failed, or was cancelled."""


def prompts_of(turn: int) -> list[list[int]]:
    """What is new in it, of each conversation."""
    return [
        [(11 * i + 5 * turn + 3 * j) % 500 + 1 for j in range(NUM_NEW)]
        for i in range(NUM_CONVERSATIONS)
    ]


def drawing(conversation: int) -> dict[str, Any]:
    """Return sampling parameters: every other conversation is sampled, the others are greedy."""
    return {
        "temperature": 0.9 * (conversation % 2), "seed": conversation, "max_tokens": NUM_DRAWN,
        "ignore_eos": True,
    }  # fmt: skip


AGAIN = ("no_r_worker", "rate_limit_exceeded", "starting")
"""Errors after which a client asks again."""


@dataclass
class Answer:
    """What came of it."""

    token_ids: list[int] = field(default_factory=list)
    is_whole: bool = False
    error: str | None = None  # its code, or: no connection, cut off, timeout


def ask(
    port: int,
    line: dict[str, Any],
    is_over: threading.Event,
    opened: Callable[[socket.socket], None] = lambda _: None,
) -> Answer:
    """Ask for the answer to a line of ``jobs.lines``; again where there is
    no R-worker for the moment, until ``is_over``. ``opened``: told each connection."""
    body = {name: value for name, value in line.items() if name not in ("id", "prompt_token_ids")}
    body.update(prompt=line["prompt_token_ids"], stream=True)
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
                said = json.loads(text.removeprefix(b"data: "))
                if "error" in said:
                    answer.error = said["error"]["code"]
                for choice in said.get("choices", ()):
                    answer.token_ids += choice["token_ids"]
    except TimeoutError:
        answer.error = "timeout"
    except (OSError, http.client.HTTPException):
        pass
    finally:
        connection.close()
    return answer


class LocalTalks:
    """Conversations with an engine in this process. ``talk`` returns the tokens of all turns.

    Args:
        llm: the engine.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        drawn = [drawing(i) for i in range(NUM_CONVERSATIONS)]
        self._params = [SamplingParams(**each) for each in drawn]

    def talk(self, name: str) -> Turns:
        names = [f"{name}-{i}" for i in range(NUM_CONVERSATIONS)]
        said: Turns = []
        for turn in range(NUM_TURNS):
            outputs = self._llm.generate(prompts_of(turn), self._params, conversation_id=names)
            answers = [each.completions if each.ok else () for each in outputs]
            said += [completions[0].token_ids if completions else None for completions in answers]
        return said

    def cancel(self, conversation: int) -> None:
        self._llm.service.cancel(str(conversation))  # as ``LLM.generate`` numbers them

    def num_kept(self) -> int:
        """Return blocks in use. Those of a broken engine are 0: its turns have failed."""
        if self._llm.service.snapshot().state == "broken":
            return 0
        found: list[int] = []
        has_looked = threading.Event()

        def look(running: Any) -> None:
            found.append(_blocks_in_use(asdict(running.engine.figures())["r_workers"]))
            has_looked.set()

        self._llm.service.look(look)
        assert has_looked.wait(LIMIT_S), "the engine's thread hangs"
        return found[0]

    def counts(self) -> Counter[str]:
        stats = self._llm.stats
        return Counter(resumed=stats.resumed.num_sequences, recomputed=stats.num_recomputed)


class ServedTalks:
    """With a server, over HTTP; conversations at once, and turn after turn.

    Args:
        server: one that is ready.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._sockets: dict[int, socket.socket] = {}

    def talk(self, name: str) -> Turns:
        is_over = threading.Event()
        end_s = time.monotonic() + LIMIT_S
        with ThreadPoolExecutor(NUM_CONVERSATIONS) as clients:
            timer = threading.Timer(end_s - time.monotonic(), is_over.set)
            timer.start()
            said: Turns = []
            for turn in range(NUM_TURNS):
                lines = [
                    {**drawing(i), "prompt_token_ids": prompt,
                     "conversation_id": f"{name}-{i}"}
                    for i, prompt in enumerate(prompts_of(turn))
                ]  # fmt: skip
                asked = [clients.submit(self._ask, i, x, is_over) for i, x in enumerate(lines)]
                answers = [each.result() for each in asked]
                said += [tuple(x.token_ids) if x.is_whole else None for x in answers]
            timer.cancel()
        return said

    def cancel(self, conversation: int) -> None:
        """Close the connection of the conversation's client."""
        with contextlib.suppress(KeyError, OSError):
            self._sockets[conversation].shutdown(socket.SHUT_RDWR)

    def num_kept(self) -> int:
        """Return blocks in use, once what has just ended had time to be closed everywhere."""
        end_s = time.monotonic() + _FREE_WITHIN_S
        while (used := self._blocks_in_use()) and time.monotonic() < end_s:
            threading.Event().wait(0.2)
        return used

    def counts(self) -> Counter[str]:
        figures = self._server.status()["figures"]
        resumed = figures["resumed"]["num_sequences"]
        moved = {"moved": figures["num_moved"]} if figures.get("num_moved") else {}
        return Counter(resumed=resumed, recomputed=figures["num_recomputed"], **moved)

    def _ask(self, conversation: int, line: dict[str, Any], is_over: threading.Event) -> Answer:
        def opened(found: socket.socket) -> None:
            self._sockets[conversation] = found

        return ask(self._server.port, line, is_over=is_over, opened=opened)

    def _blocks_in_use(self) -> int:
        said = self._server.status()
        used = _blocks_in_use(said["figures"].get("r_workers", []))
        return used or int(said["num_open"]) + int(said["num_queued"])


def _blocks_in_use(r_workers: Sequence[dict[str, Any]]) -> int:
    return sum(each["kv_blocks_used"] for each in r_workers if each["lost"] is None)


Talks: TypeAlias = "LocalTalks | ServedTalks"

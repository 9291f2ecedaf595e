"""From a body to requests for the engine: read within bounds, parsed, rendered, tokenised, checked.

For a body that is large or has text this runs beside the event loop, and counts as queued. There
is a pool of threads for each kind of work: slow templates don't delay tokenising.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from fastdecode.conversations.order import OpenTurn
from fastdecode.conversations.turns import Turn, TurnPrompt, TurnPrompter, as_turn_error
from fastdecode.core.errors import CHILD_DIED, FastDecodeError, RequestError
from fastdecode.core.sequence import PromptRequest, Request
from fastdecode.openai.body_errors import BodyError, blamed
from fastdecode.openai.requests import SAMPLING_FIELDS, BodyRequest
from fastdecode.server.front import Front
from fastdecode.server.http.connection import CONNECTION
from fastdecode.server.http.errors import NOT_AGAIN, HttpRefusal, unavailable
from fastdecode.server.options import ServeOptions
from fastdecode.text.chats import Chat, PromptOrChat

MOST_SEQUENCES: Final = 2048  # most sequences that one HTTP request may ask for
ORDINARY_BYTES_PER_TOKEN: Final = 16
MAX_DEPTH: Final = 64  # deepest nesting of a body's JSON
SMALL_BYTES: Final = 16 << 10
"""Smaller bodies are parsed on the event loop: to hand them to a thread takes longer."""

_OF_CONVERSATIONS = (
    "conversation_expired", "conversation_too_long", "invalid_conversation", "previous_turn_failed",
)  # fmt: skip
_OF_FORMATS = ("invalid_structured_outputs", "missing_extra")
"""Codes of errors that ``conversation_id`` is to blame for, or the field of the format."""

T = TypeVar("T")


class Preparation:
    """One body on its way. Belongs to the event loop. From the first thing that takes a while the
    queue has a place for it, by the request's ``number``."""

    def __init__(self, front: Front, number: int) -> None:
        self._front, self._number = front, number
        self._num_bytes = 0
        self._has_place = False
        self.turn: OpenTurn | None = None
        """Set if the body is a turn of a conversation; to be left at the end."""

    async def requests(self, url: str, raw: bytes) -> tuple[BodyRequest, list[Request]]:
        """Return what a body that was posted to ``url`` asks for. Raises RequestError: If it can't
        be answered. HttpRefusal: If the queue is full."""
        asked = await self.read(raw, partial(self._front.reader.read, url))
        num_sequences = len(asked.prompts) * asked.params.n
        if num_sequences > MOST_SEQUENCES:
            text = f"the body asks for {num_sequences} sequences, n of each prompt: ask for"
            raise HttpRefusal(400, f"{text} {MOST_SEQUENCES} at most", "too_many_sequences")
        if asked.conversation_id is not None:
            return asked, [await self._turn_of(asked, asked.conversation_id)]
        requests = []
        for place, prompt in enumerate(asked.prompts):
            with _blaming_the_prompt(asked):
                token_ids = await self.tokens_of(prompt)
                name = f"{self._number}.{place}"
                arrived = PromptRequest(name, token_ids, asked.params, asked.cache)
                check = partial(self._front.checker.check, arrived, token_ids)
                if asked.params.bad_words:  # words to be tokenised
                    requests.append(await self.queued(self._front.tokenizer_thread, check))
                else:
                    requests.append(check())
        return asked, requests

    async def _turn_of(self, asked: BodyRequest, conversation_id: str) -> Request:
        """Return the request of a turn of a conversation, once the turns before it are over."""
        (prompt,) = asked.prompts
        front = self._front
        is_chat = isinstance(prompt, Chat)
        threads = front.template_thread if is_chat else front.tokenizer_thread
        with _blaming_the_prompt(asked):
            new = TurnPrompter(prompt, front.codec, front.template)
            turn = Turn(f"{self._number}.0", conversation_id, new, asked.params, asked.cache)
            self._take_place()
            opened = self.turn = front.turns.arrive(turn)
            if (why_not := await opened.is_due) is not None:
                trouble = front.trouble()
                raise why_not if trouble is None else unavailable(trouble)
            history = await opened.begin()

            def make() -> TurnPrompt:
                made = new(history)
                front.checker.tokenise(made.token_ids)
                return made

            try:
                made = await asyncio.get_running_loop().run_in_executor(threads, make)
                return front.checker.check(opened.asks(history, made), made.token_ids)
            except FastDecodeError as error:
                raise as_turn_error(error) from None

    async def read(self, raw: bytes, read: Callable[[dict[str, Any]], T]) -> T:
        """Return what ``read`` makes of the JSON object in a body. Raises as ``requests``."""
        self._num_bytes = len(raw)
        return await self._maybe_beside(lambda: read(parse_object(raw)))

    async def tokens_of(self, prompt: PromptOrChat) -> tuple[int, ...]:
        """Return a prompt's or a chat's token ids. Raises RequestError, and as ``requests``."""
        front = self._front
        if isinstance(prompt, Chat):
            assert front.template is not None, "the reader refuses chats without a template"
            render = partial(front.template.render, prompt.messages, datetime.now(), prompt.how)
            text = await self.queued(front.template_thread, render)
            return await self.encoded(text, add_special_tokens=False)
        tokenise = partial(front.checker.tokenise, prompt)
        if isinstance(prompt, str):
            return await self.queued(front.tokenizer_thread, tokenise)
        return await self._maybe_beside(tokenise)

    async def encoded(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return a text's token ids. Raises as ``tokens_of``."""
        front = self._front
        encode = partial(front.codec.encode, text, add_special_tokens=add_special_tokens)
        return await self.queued(front.tokenizer_thread, lambda: front.checker.tokenise(encode()))

    async def queued(self, threads: Executor, act: Callable[[], T]) -> T:
        """Call ``act`` in one of these threads, with a place in the queue. Raises HttpRefusal."""
        self._take_place()
        return await asyncio.get_running_loop().run_in_executor(threads, act)

    def _take_place(self) -> None:
        if not self._has_place:
            self._has_place = True
            self._front.enter(self._number, 1, self._num_bytes // ORDINARY_BYTES_PER_TOKEN)

    async def _maybe_beside(self, act: Callable[[], T]) -> T:
        if self._num_bytes <= SMALL_BYTES:
            return act()
        return await self.queued(self._front.body_threads, act)


@contextlib.contextmanager
def _blaming_the_prompt(asked: BodyRequest) -> Iterator[None]:
    """Name the field of the body that caused an error."""
    try:
        yield
    except RequestError as error:
        param: str | None = None
        if error.code in _OF_CONVERSATIONS:
            param = "conversation_id"
        elif error.code == "invalid_sampling_params":
            param = blamed(error, SAMPLING_FIELDS)
        elif error.code in _OF_FORMATS:
            param = asked.format_field
        elif error.code != CHILD_DIED:
            param = blamed(error, ("tools",)) or asked.prompt_field
        said = str(error)
        if error.code in _OF_FORMATS and param not in (None, "structured_outputs"):
            said = f"{param}: {said}"
        raise BodyError(said, code=error.code, param=param) from None


async def read_body(request: HttpRequest, options: ServeOptions) -> bytes:
    """Return what a request carries. Raises HttpRefusal: If it isn't JSON by its header, comes too
    late, or is too large. ClientDisconnect: If the client has disconnected."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        text = "the body must be JSON, with content-type: application/json"
        raise HttpRefusal(415, text, "unsupported_media_type")
    codings = (request.headers.get("content-encoding"), request.headers.get("transfer-encoding"))
    if any(coding and coding.lower() not in ("identity", "chunked") for coding in codings):
        text = "bodies that are encoded (gzip, …) aren't read: leave content-encoding out"
        raise HttpRefusal(415, text, "unsupported_media_type")
    most_bytes = int(options.max_body_mb * (1 << 20))
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
    """Return an object of finite numbers and bounded depth. Raises HttpRefusal: If it isn't one."""
    try:
        said = json.loads(raw.decode("utf-8"), parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        if "int_max_str_digits" in why:  # a setting that clients don't have
            why = "a number has too many digits"
        raise HttpRefusal(400, f"the body is not valid JSON: {why}", "invalid_json") from None
    if not isinstance(said, dict):
        raise HttpRefusal(400, "the body must be a JSON object", "invalid_body")
    if _is_deeper(said, MAX_DEPTH):
        text = f"the body is nested more than {MAX_DEPTH} deep"
        raise HttpRefusal(400, text, "invalid_json")
    return said


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        why = "a number is too great" if text[-1].isdigit() else f"{text} is not a number in JSON"
        raise ValueError(why)
    return number


def _is_deeper(said: dict[str, Any] | list[Any], most: int) -> bool:
    if not most:
        return True
    values = said.values() if isinstance(said, dict) else said
    return any(_is_deeper(each, most - 1) for each in values if isinstance(each, (dict, list)))

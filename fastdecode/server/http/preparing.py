"""From a body's bytes to requests that the engine may have: parsed, rendered,
tokenised, found valid for the model.

All of that takes a while for a body that is large or has text, and then goes on
beside the event loop, counted as queued. There is a pool of threads for each
sort of work: templates that never end keep nobody from being tokenised.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from datetime import datetime
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect

from fastdecode.conversations.history import History
from fastdecode.conversations.open_turns import OpenTurn
from fastdecode.conversations.turns import ChatTurn, PromptTurn, Turn, TurnPrompt, told_of_turn
from fastdecode.core.errors import CHILD_DIED, FastDecodeError, RequestError
from fastdecode.core.sequence import PromptRequest, Request
from fastdecode.openai.body_errors import BodyError, blamed
from fastdecode.openai.chat import Chat
from fastdecode.openai.chat import Turn as PromptOrChat
from fastdecode.openai.requests import SAMPLING_FIELDS, BodyRequest
from fastdecode.server.admission import QueueFull
from fastdecode.server.front import Front
from fastdecode.server.http.bodies import parse_object
from fastdecode.server.http.errors import NOT_AGAIN, SERVER, HttpRefusal, refused, unavailable
from fastdecode.server.options import ServeOptions

QUEUE_TIMEOUT = "queue_timeout"
MOST_SEQUENCES = 2048
"""Of one HTTP request."""
ORDINARY_BYTES_PER_TOKEN = 16
SMALL_BYTES = 16 << 10
"""Bodies of so many are parsed at once: to hand them to a thread takes longer."""

_OF_CONVERSATIONS = (
    "conversation_expired", "conversation_too_long", "invalid_conversation", "previous_turn_failed",
)  # fmt: skip
"""Codes of errors that are the field's ``conversation_id``."""

_OF_FORMATS = ("invalid_structured_outputs", "missing_extra")
"""Codes of errors that are the field's that says what the answer must look like."""

T = TypeVar("T")


class Preparation:
    """One body on its way. Belongs to the event loop.

    Args:
        front: what all share; its queue has a place for this body from the
            first thing that takes a while.
        number: of the request, by which the queue knows it.
    """

    def __init__(self, front: Front, number: int) -> None:
        self._front = front
        self._number = number
        self._num_bytes = 0
        self._has_place = False
        self._pending: asyncio.Future[Any] | None = None
        self._is_left = False
        self.turn: OpenTurn | None = None
        """That the body is of a conversation, if it is; to be left at the end."""
        self.accepted_s = time.monotonic()
        self.first_s: float | None = None
        """See ``Timed``: no token comes before there is a request."""

    async def requests(self, url: str, raw: bytes) -> tuple[BodyRequest, list[Request]]:
        """What a body asks that was posted to ``url``.

        Raises:
            HttpRefusal: it can't be answered, or the queue is full.
            ClientDisconnect: ``leave`` was called.
        """
        asked = await self.read(raw, partial(self._front.reader.read, url))
        num_sequences = len(asked.prompts) * asked.params.n
        if num_sequences > MOST_SEQUENCES:
            raise HttpRefusal(
                400,
                f"the body asks for {num_sequences} sequences, n of each prompt: ask for "
                f"{MOST_SEQUENCES} at most",
                "too_many_sequences",
            )
        if asked.conversation_id is not None:
            return asked, [await self._turn_of(asked, asked.conversation_id)]
        requests = []
        for place, prompt in enumerate(asked.prompts):
            with typed(), _blaming_the_prompt(asked):
                token_ids = await self.tokens_of(prompt)
                arrived = PromptRequest(
                    f"{self._number}.{place}", token_ids, asked.params, asked.cache
                )
                requests.append(await self._checked(arrived, token_ids))
        return asked, requests

    async def _checked(self, arrived: PromptRequest, token_ids: tuple[int, ...]) -> Request:
        """Raises RequestError, and as ``requests``."""
        check = partial(self._front.checker.check, arrived, token_ids)
        if arrived.params.bad_words:  # words to be tokenised
            return await self.queued(self._front.threads.tokenizer, check)
        return check()

    async def _turn_of(self, asked: BodyRequest, conversation_id: str) -> Request:
        """The request that a turn of a conversation is, once it is due. Raises
        as ``requests``."""
        (prompt,) = asked.prompts
        checker = self._front.checker
        with typed(), _blaming_the_prompt(asked):
            new = self._prompter(prompt)
            turn = Turn(f"{self._number}.0", conversation_id, new, asked.params, asked.cache)
            self._take_place()
            opened = self.turn = self._front.turns.arrive(turn)
            await self._until_due(opened)
            history = await self._done(opened.begin())
            try:
                prompt_asked = await self._prompted(new, history)
                arrived = opened.asks(history, prompt_asked)
                return checker.check(arrived, prompt_asked.token_ids)
            except FastDecodeError as error:
                raise told_of_turn(error) from None

    def _prompter(self, prompt: PromptOrChat) -> ChatTurn | PromptTurn:
        """Makes a turn's prompt. Raises RequestError: it is no prompt."""
        front = self._front
        if not isinstance(prompt, Chat):
            return PromptTurn(prompt, front.codec)
        assert front.template is not None, "the reader refuses chats without a template"
        return ChatTurn(tuple(prompt.messages), front.codec, front.template, prompt.how)

    async def _until_due(self, opened: OpenTurn) -> None:
        """Wait for the turns before this one."""
        options = self._front.options
        self._pending = opened.is_due
        while not (self._is_left or opened.is_due.done()):
            await asyncio.wait({opened.is_due}, timeout=patience_s(options, self))
            if not self._is_left:
                check_deadlines(options, self)
        if self._is_left:
            raise ClientDisconnect
        why_not = opened.is_due.result()
        if why_not is not None:
            trouble = self._front.trouble()
            raise why_not if trouble is None else unavailable(trouble)

    async def _prompted(self, prompter: ChatTurn | PromptTurn, history: History) -> TurnPrompt:
        """A turn's prompt, with all tokens such as the model has."""
        front, checker = self._front, self._front.checker
        is_chat = isinstance(prompter, ChatTurn)

        def make() -> TurnPrompt:
            asked = prompter(history)
            checker.tokenise(asked.token_ids)
            return asked

        return await self.beside(
            front.threads.templates if is_chat else front.threads.tokenizer, make
        )

    async def read(self, raw: bytes, read: Callable[[dict[str, Any]], T]) -> T:
        """What ``read`` makes of the JSON object in a body. Raises as ``requests``."""
        self._num_bytes = len(raw)
        with typed():
            return await self._maybe_beside(lambda: read(parse_object(raw)))

    async def tokens_of(self, prompt: PromptOrChat) -> tuple[int, ...]:
        """A prompt's or a conversation's token ids. Raises RequestError, and as
        ``requests``."""
        front = self._front
        if isinstance(prompt, Chat):
            assert front.template is not None, "the reader refuses chats without a template"
            render = partial(front.template.render, prompt.messages, datetime.now(), prompt.how)
            text = await self.queued(front.threads.templates, render)
            return await self.encoded(text, add_special_tokens=False)
        tokenise = partial(front.checker.tokenise, prompt)
        if isinstance(prompt, str):
            return await self.queued(front.threads.tokenizer, tokenise)
        return await self._maybe_beside(tokenise)

    async def encoded(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """A text's token ids, that the model has. Raises as ``tokens_of``."""
        front = self._front

        def encode() -> tuple[int, ...]:
            ids = front.codec.encode(text, add_special_tokens=add_special_tokens)
            return front.checker.tokenise(ids)

        return await self.queued(front.threads.tokenizer, encode)

    async def queued(self, threads: Executor, act: Callable[[], T]) -> T:
        """The same as ``beside`` of a body that is only being prepared: from
        the first time on it has a place in the queue. Raises HttpRefusal, too."""
        self._take_place()
        return await self.beside(threads, act)

    def _take_place(self) -> None:
        if not self._has_place:
            self._has_place = True
            enter(self._front, self._number, 1, self._num_bytes // ORDINARY_BYTES_PER_TOKEN)

    async def beside(self, threads: Executor, act: Callable[[], T]) -> T:
        """What ``act`` returns, from one of these threads. Raises what that
        raises, and ClientDisconnect; what hasn't begun then never does."""
        if self._is_left:
            raise ClientDisconnect
        return await self._done(asyncio.get_running_loop().run_in_executor(threads, act))

    async def _done(self, pending: asyncio.Future[T]) -> T:
        """What it comes to. Raises as ``beside``."""
        self._pending = pending
        try:
            done = await pending
        except asyncio.CancelledError:
            if self._is_left:
                raise ClientDisconnect from None
            raise
        return done

    def leave(self) -> None:
        """Nobody waits for it any more."""
        self._is_left = True
        if self._pending is not None:
            self._pending.cancel()

    async def _maybe_beside(self, act: Callable[[], T]) -> T:
        if self._num_bytes <= SMALL_BYTES:
            return act()
        return await self.queued(self._front.threads.bodies, act)


class Timed(Protocol):
    """What a client waits for."""

    accepted_s: float
    first_s: float | None
    """When the first token came."""


def patience_s(options: ServeOptions, opened: Timed, most_s: float = math.inf) -> float | None:
    """Return how long to wait for what is next, ``most_s`` at most. None: without end."""
    end_s = opened.accepted_s + (options.request_timeout_s or math.inf)
    if opened.first_s is None:
        end_s = min(end_s, opened.accepted_s + (options.queue_timeout_s or math.inf))
    wait_s = min(most_s, end_s - time.monotonic())
    return None if wait_s == math.inf else max(0.0, wait_s)


def check_deadlines(options: ServeOptions, opened: Timed) -> None:
    """Raises: HttpRefusal: If a request has taken too long."""
    elapsed_s = time.monotonic() - opened.accepted_s
    most_s = options.request_timeout_s
    if most_s is not None and elapsed_s >= most_s:
        text = f"the answer took more than {most_s:g} s"
        raise HttpRefusal(408, text, "request_timeout", kind=SERVER, headers=NOT_AGAIN)
    most_s = options.queue_timeout_s
    if most_s is not None and opened.first_s is None and elapsed_s >= most_s:
        text = f"no token came within {most_s:g} s"
        raise HttpRefusal(503, text, QUEUE_TIMEOUT, kind=SERVER, headers=NOT_AGAIN)


def enter(front: Front, number: int, num_sequences: int, num_tokens: int) -> None:
    """Into the queue, or again with its size known. Raises HttpRefusal."""
    try:
        front.admission.enter(number, num_sequences, num_tokens, time.monotonic())
    except QueueFull as full:
        front.metrics.rejected["queue_full"] += 1
        raise HttpRefusal(
            429,
            f"too many requests wait: try again in {full.retry_after_s} s",
            "rate_limit_exceeded",
            kind="rate_limit_error",
            headers={"retry-after": str(full.retry_after_s)},
        ) from None


@contextlib.contextmanager
def typed() -> Iterator[None]:
    """Inside, our errors become refusals."""
    try:
        yield
    except FastDecodeError as error:
        raise refused(error) from None


@contextlib.contextmanager
def _blaming_the_prompt(asked: BodyRequest) -> Iterator[None]:
    """Inside, errors name the field of the body that they come of."""
    try:
        yield
    except RequestError as error:
        param: str | None = asked.prompt_field
        if error.code == CHILD_DIED:
            param = None
        elif error.code in _OF_CONVERSATIONS:
            param = "conversation_id"
        elif error.code == "invalid_sampling_params":
            param = blamed(error, SAMPLING_FIELDS)
        elif error.code in _OF_FORMATS:
            param = asked.format_field
        else:
            param = blamed(error, ("tools",)) or asked.prompt_field
        said = str(error)
        if error.code in _OF_FORMATS and param not in (None, "structured_outputs"):
            said = f"{param}: {said}"
        raise BodyError(said, code=error.code, param=param) from None

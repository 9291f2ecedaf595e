"""From a body's bytes to requests that the engine may have: parsed, rendered,
tokenised, found valid for the model.

All of that takes a while for a body that is large or has text, and then goes on
beside the event loop, counted as queued. There is a pool of threads for each
sort of work: templates that never end keep nobody from being tokenised.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from fastdecode.core.errors import FastDecodeError, RequestError
from fastdecode.core.sequence import PromptRequest, Request
from fastdecode.openai.chat import Chat, Turn
from fastdecode.openai.requests import SAMPLING_FIELDS, BodyError, BodyRequest, blamed
from fastdecode.server.admission import QueueFull
from fastdecode.server.front import Front
from fastdecode.server.http.bodies import Disconnected, parse_object
from fastdecode.server.http.errors import Refused, refused
from fastdecode.text.encoder import ORDINARY_BYTES_PER_TOKEN

MOST_SEQUENCES = 2048
"""Of one HTTP request."""
SMALL_BYTES = 16 << 10
"""Bodies of so many are parsed at once: to hand them to a thread takes longer."""

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

    async def requests(self, url: str, raw: bytes) -> tuple[BodyRequest, list[Request]]:
        """What a body asks that was posted to ``url``.

        Raises:
            Refused: it can't be answered, or the queue is full.
            Disconnected: ``leave`` was called.
        """
        asked = await self.read(raw, partial(self._front.reader.read, url))
        num_sequences = len(asked.prompts) * asked.params.n
        if num_sequences > MOST_SEQUENCES:
            raise Refused(
                400,
                f"the body asks for {num_sequences} sequences, n of each prompt: ask for "
                f"{MOST_SEQUENCES} at most",
                "too_many_sequences",
            )
        requests = []
        for place, turn in enumerate(asked.prompts):
            with typed(), _blaming_the_prompt(is_chat=asked.is_chat):
                token_ids = await self.tokens_of(turn)
                arrived = PromptRequest(
                    f"{self._number}.{place}", token_ids, asked.params, asked.cache
                )
                requests.append(self._front.checker.check(arrived, token_ids))
        return asked, requests

    async def read(self, raw: bytes, read: Callable[[dict[str, Any]], T]) -> T:
        """What ``read`` makes of the JSON object in a body. Raises as ``requests``."""
        self._num_bytes = len(raw)
        with typed():
            return await self._maybe_beside(lambda: read(parse_object(raw)))

    async def tokens_of(self, turn: Turn) -> tuple[int, ...]:
        """A prompt's or a conversation's token ids. Raises RequestError, and as
        ``requests``."""
        front = self._front
        if isinstance(turn, Chat):
            assert front.template is not None, "the reader refuses chats without a template"
            render = partial(
                front.template.render,
                turn.messages,
                datetime.now(),
                add_generation_prompt=turn.add_generation_prompt,
                variables=turn.variables,
            )
            text = await self.queued(front.threads.templates, render)
            return await self.encoded(text, add_special_tokens=False)
        tokenise = partial(front.checker.tokenise, turn)
        if isinstance(turn, str):
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
        the first time on it has a place in the queue. Raises Refused, too."""
        if not self._has_place:
            self._has_place = True
            enter(self._front, self._number, 1, self._num_bytes // ORDINARY_BYTES_PER_TOKEN)
        return await self.beside(threads, act)

    async def beside(self, threads: Executor, act: Callable[[], T]) -> T:
        """What ``act`` returns, from one of these threads. Raises what that
        raises, and Disconnected; what hasn't begun then never does."""
        if self._is_left:
            raise Disconnected
        self._pending = asyncio.get_running_loop().run_in_executor(threads, act)
        try:
            done: T = await self._pending
        except asyncio.CancelledError:
            if self._is_left:
                raise Disconnected from None
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


def enter(front: Front, number: int, num_sequences: int, num_tokens: int) -> None:
    """Into the queue, or again with its size known. Raises Refused."""
    try:
        front.admission.enter(number, num_sequences, num_tokens, time.monotonic())
    except QueueFull as full:
        front.observations.rejected.add(1, "queue_full")
        raise Refused(
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
def _blaming_the_prompt(*, is_chat: bool) -> Iterator[None]:
    """Inside, errors name the field of the body that they come of."""
    try:
        yield
    except RequestError as error:
        if error.code == "invalid_sampling_params":
            param = blamed(error, SAMPLING_FIELDS)
        else:
            param = "messages" if is_chat else "prompt"
        raise BodyError(str(error), code=error.code, param=param) from None

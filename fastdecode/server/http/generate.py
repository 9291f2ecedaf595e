"""``/v1/completions``, ``/v1/chat/completions`` and ``/v1/responses``, whole and in
streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fastdecode.conversations.reuse import why_none_of
from fastdecode.core.delta import Delta, OutputFold
from fastdecode.core.sequence import RequestOutput
from fastdecode.openai.answers import answer_body
from fastdecode.openai.chunks import ChunkWriter
from fastdecode.openai.requests import BodyRequest
from fastdecode.openai.responses import ResponseWriter, response_body
from fastdecode.server.client import OpenRequests
from fastdecode.server.front import Front, log_line
from fastdecode.server.http.bodies import BodyLimits, Disconnected, read_body
from fastdecode.server.http.deadlines import QUEUE_TIMEOUT, RequestDeadlines
from fastdecode.server.http.errors import HttpRefusal, refused, unavailable
from fastdecode.server.http.exchange import IS_LOGGED, Exchange, WriteTimeout
from fastdecode.server.http.preparing import Preparation, enter, typed

PING_S = 15.0
"""A stream that has nothing to say for so long says a comment, or proxies would
take it for dead."""
_DRAIN_RETRY_S = 5
MOST_WORDS_AT_ONCE = 4000
"""Tokens and their likeliest others: more than so many are written out beside
the event loop."""

T = TypeVar("T")


class CompletionExchange:
    """One request for completions, from its body to the end of its answer.

    Args:
        front: what all share.
        exchange: the request.
        url: which of the three.
        ping_s: see ``PING_S``.
    """

    def __init__(self, front: Front, exchange: Exchange, url: str, ping_s: float = PING_S) -> None:
        self._front = front
        self._exchange = exchange
        self._url = url
        self._ping_s = ping_s
        self._number = front.next_number()
        self._preparation = Preparation(front, self._number)
        self._opened: OpenRequests | None = None
        self._is_read = False
        self._finish = "error"

    async def run(self) -> None:
        """Answer, whatever happens."""
        watch: asyncio.Task[None] | None = None
        code: str | None = None
        try:
            raw = await self._read()
            self._is_read = True
            self._front.num_exchanges += 1
            watch = asyncio.create_task(self._watch())
            await self._answer(raw)
        except HttpRefusal as error:
            code = error.code
            await self._refuse(error)
        except (Disconnected, WriteTimeout):
            self._finish = "abort"
        finally:
            if watch is not None:
                watch.cancel()
                self._front.num_exchanges -= 1
            self._close(code)

    async def _read(self) -> bytes:
        front, exchange = self._front, self._exchange
        trouble = front.trouble()
        if trouble is not None:
            front.observations.rejected.add(1, trouble)
            error = unavailable(trouble, _DRAIN_RETRY_S)
            error.headers["connection"] = "close"
            raise error
        limits = BodyLimits(front.options.max_body_bytes, front.options.body_timeout_s)
        return await read_body(exchange.headers, exchange.receive, limits)

    async def _watch(self) -> None:
        """Until the client has gone: then nobody waits for its answer."""
        while (await self._exchange.receive())["type"] != "http.disconnect":
            pass
        self._preparation.leave()
        if self._opened is not None:
            self._opened.leave()

    async def _answer(self, raw: bytes) -> None:
        front = self._front
        asked, requests = await self._preparation.requests(self._url, raw)
        trouble = front.trouble()
        if trouble is not None:
            front.observations.rejected.add(1, trouble)
            raise unavailable(trouble, _DRAIN_RETRY_S)
        opened = OpenRequests(requests, front.observations)
        enter(front, self._number, opened.num_sequences, front.expected_tokens(requests))
        self._opened = opened
        front.client.submit(opened)
        if asked.stream is None:
            await self._answer_whole(asked, opened)
        else:
            await self._stream(asked, opened)

    async def _answer_whole(self, asked: BodyRequest, opened: OpenRequests) -> None:
        folds = [
            OutputFold(request.request_id, None, request.prompt_token_ids, request.params.n)
            for request in opened.requests
        ]
        outputs: dict[int, RequestOutput] = {}
        while len(outputs) < len(folds):
            for place, delta in await self._take(opened, None):
                output = folds[place].add(delta)
                if output is not None:
                    outputs[place] = output
        ordered = [outputs[place] for place in range(len(folds))]
        write = partial(self._written, asked, ordered)
        raw_answer = await self._beside_if_long(write, opened.num_tokens)
        await self._exchange.answer_raw(raw_answer, headers=self._warnings(asked))

    def _written(self, asked: BodyRequest, outputs: Sequence[RequestOutput]) -> bytes:
        write = answer_body if asked.echo is None else response_body
        body = write(asked, outputs, self._front.codec, **self._named(asked))
        return json.dumps(body).encode()

    async def _beside_if_long(self, write: Callable[[], T], num_tokens: int) -> T:
        """What ``write`` returns, perhaps from a thread."""
        assert self._opened is not None, "something has been answered"
        params = self._opened.requests[0].params
        num_words = num_tokens * (1 + (params.logprobs or 0))
        if params.prompt_logprobs is not None:  # written once: streams refuse them
            num_of_prompts = sum(len(asked.prompt_token_ids) for asked in self._opened.requests)
            num_words += num_of_prompts * (1 + params.prompt_logprobs)
        if num_words <= MOST_WORDS_AT_ONCE:
            return write()
        return await self._preparation.beside(self._front.threads.bodies, write)

    async def _stream(self, asked: BodyRequest, opened: OpenRequests) -> None:
        prompts = [request.prompt_token_ids for request in opened.requests]
        kind = ChunkWriter if asked.echo is None else ResponseWriter
        writer = kind(asked, prompts, self._front.codec, **self._named(asked))
        exchange, num_left = self._exchange, opened.num_left
        while num_left:
            # Until something is known, the status isn't told: a refusal has one of its own.
            deltas = await self._take(opened, self._ping_s)
            num_left -= sum(delta.finish_reason is not None for _, delta in deltas)
            num_tokens = sum(len(delta.token_ids) for _, delta in deltas)
            text = await self._beside_if_long(partial(_events, writer, deltas), num_tokens)
            if exchange.status is None and text:
                await self._begin_stream(asked)
            if text:
                await exchange.send_part(text.encode())
        await exchange.send_part(writer.end().encode(), more=False)

    def _warnings(self, asked: BodyRequest) -> dict[str, str]:
        """Headers of an answer whose request can't do what it seems to want."""
        why = ""
        if asked.conversation_id is not None:
            why = why_none_of(asked.cache, self._front.opening.no_reuse)
        return {"x-fastdecode-warning": why} if why else {}

    async def _begin_stream(self, asked: BodyRequest) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **self._warnings(asked)}
        await self._exchange.begin("text/event-stream; charset=utf-8", 200, headers)

    async def _take(self, opened: OpenRequests, silence_s: float | None) -> list[tuple[int, Delta]]:
        """What is new, or nothing after so long a silence.

        Raises:
            Disconnected: the client has gone.
            Refused: the request has failed, or taken too long.
        """
        had_begun = opened.all_begun
        deadlines = RequestDeadlines(self._front.options, opened)
        deltas = await opened.take(deadlines.patience_s(silence_s))
        if opened.is_left:
            raise Disconnected
        for _, delta in deltas:
            if delta.error is not None:
                raise refused(delta.error)
            self._finish = delta.finish_reason or self._finish
        if self._preparation.turn is not None:
            with typed():
                await self._preparation.turn.hear([delta for _, delta in deltas])
        if opened.all_begun and not had_begun:
            self._front.admission.begun(self._number, time.monotonic())
        if not deltas:
            deadlines.check()
        return deltas

    @property
    def _stage(self) -> str:
        """How far the request has come."""
        if self._opened is None:
            return "preparing" if self._is_read else "reading"
        return "waiting" if self._opened.first_s is None else "decoding"

    def _named(self, asked: BodyRequest) -> dict[str, Any]:
        """Return what an answer says of itself."""
        model = asked.model or self._front.names[0]
        return {"answer_id": self._answer_id, "created_s": int(time.time()), "model": model}

    @property
    def _answer_id(self) -> str:
        return f"{self._front.run_id}-{self._number}"

    async def _refuse(self, error: HttpRefusal) -> None:
        """As the whole answer, or as the stream's last event."""
        with contextlib.suppress(WriteTimeout):
            if self._exchange.status is None:
                await self._exchange.refuse(error)
            else:
                event = f"data: {json.dumps(error.body)}\n\n"
                await self._exchange.send_part(event.encode(), more=False)

    def _close(self, code: str | None) -> None:
        """Leave nothing behind, and say how it went."""
        front, opened, exchange = self._front, self._opened, self._exchange
        front.admission.gone(self._number)
        if self._preparation.turn is not None:
            self._preparation.turn.leave(has_failed=self._finish != "abort")
        if self._finish == "abort":
            front.observations.aborted.add(1, self._stage)
        if opened is not None:
            front.client.leave(opened)
            front.observations.finished(opened, self._finish if code is None else "error")
            if code == QUEUE_TIMEOUT:
                front.observations.rejected.add(1, code)
        elif code is not None and exchange.status is not None and exchange.status < 429:
            front.observations.rejected.add(1, "invalid")
        exchange.scope[IS_LOGGED] = True
        front.log.write(
            log_line(front, opened, exchange.began_s, {
                "id": exchange.request_id,
                "route": self._url,
                "status": exchange.status,
                "finish": self._finish if code is None else code,
                "stage": self._stage if self._finish == "abort" else None,
                "key": exchange.scope.get("key"),
            })
        )  # fmt: skip


def _events(writer: ChunkWriter | ResponseWriter, deltas: list[tuple[int, Delta]]) -> str:
    if not deltas:
        return ": ping\n\n"
    return "".join([writer.events(place, delta) for place, delta in deltas])

"""``/v1/completions``, ``/v1/chat/completions`` and ``/v1/responses``, whole and in
streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fastdecode.conversations.turns import no_reuse_warning
from fastdecode.core.delta import Delta, OutputFold
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.sequence import RequestOutput
from fastdecode.openai.answers import AnswerHead, ChunkWriter, answer_body
from fastdecode.openai.requests import BodyRequest
from fastdecode.openai.responses import ResponseWriter, response_body
from fastdecode.server.client import OpenRequests
from fastdecode.server.front import Front
from fastdecode.server.http.errors import NOT_AGAIN, SERVER, HttpRefusal, refused, unavailable
from fastdecode.server.http.preparing import Preparation, read_body

QUEUE_TIMEOUT: Final = "queue_timeout"
REQUEST_TIMEOUT: Final = "request_timeout"
PING_S = 15.0  # a silent stream sends a comment this often, or proxies would take it for dead
_DRAIN_RETRY_S = 5
MOST_WORDS_AT_ONCE = 4000
"""More tokens, each with its alternatives, are written beside the event loop."""

T = TypeVar("T")


class Completion:
    def __init__(self, front: Front, request: Request, ping_s: float = PING_S) -> None:
        self._front, self._request, self._ping_s = front, request, ping_s
        self._number = front.next_number()
        self.answer_id = f"{front.run_id}-{self._number}"
        self._preparation = Preparation(front, self._number)
        self._opened: OpenRequests | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """``QUEUE_TIMEOUT`` ends with the first token, ``REQUEST_TIMEOUT`` with the last."""
        self._is_read = self._is_streaming = False
        self._finish = "error"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        front = self._front
        code: str | None = None
        try:
            self._check_engine()
            raw = await read_body(self._request, front.options)
            self._is_read = True
            with self._interruptible(receive):
                asked, requests = await self._preparation.requests(self._request.url.path, raw)
                self._check_engine()
                opened = OpenRequests(requests, front.metrics)
                length = front.opening.expected_output_tokens
                expected = sum(
                    len(each.prompt_token_ids) + each.params.n * min(each.max_tokens, length)
                    for each in requests
                )
                front.enter(self._number, opened.num_sequences, expected)
                self._opened = opened
                front.client.submit(opened)
                if asked.stream is None:
                    response = await self._whole(asked, opened)
                    await response(scope, receive, send)
                else:
                    await self._stream(asked, opened, send)
        except (HttpRefusal, FastDecodeError) as error:
            shown = refused(error)
            code = shown.code
            if not self._is_streaming:
                raise shown from None
            await _send_part(send, f"data: {json.dumps(shown.body)}\n\n", more=False)
        except ClientDisconnect:
            self._finish = "abort"
        finally:
            self._close(code)

    def _check_engine(self) -> None:
        """Raises: HttpRefusal: If the engine can generate no token."""
        trouble = self._front.trouble()
        if trouble is not None:
            self._front.metrics.rejected[trouble] += 1
            raise unavailable(trouble, _DRAIN_RETRY_S)

    @contextlib.contextmanager
    def _interruptible(self, receive: Receive) -> Iterator[None]:
        """Inside, interrupt the task once its client disconnects, or it takes too long. Raises
        ClientDisconnect: If the client has disconnected. HttpRefusal: If a time-out is over."""
        front, task, loop = self._front, asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        reasons: list[Exception] = []

        def interrupt(reason: Exception) -> None:
            reasons.append(reason)
            task.cancel()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            interrupt(ClientDisconnect())

        options = front.options
        for code, status, most_s, text in (
            (QUEUE_TIMEOUT, 503, options.queue_timeout_s, "no token came within"),
            (REQUEST_TIMEOUT, 408, options.request_timeout_s, "the answer took more than"),
        ):
            if most_s is not None:
                text = f"{text} {most_s:g} s"
                late = HttpRefusal(status, text, code, kind=SERVER, headers=NOT_AGAIN)
                self._timers[code] = loop.call_later(most_s, interrupt, late)
        watching = asyncio.create_task(watch())
        front.num_exchanges += 1
        try:
            yield
        except asyncio.CancelledError:
            if not reasons:
                raise
            raise reasons[0] from None
        finally:
            front.num_exchanges -= 1
            watching.cancel()
            for timer in self._timers.values():
                timer.cancel()

    async def _whole(self, asked: BodyRequest, opened: OpenRequests) -> Response:
        folds = [
            OutputFold(request.request_id, None, request.prompt_token_ids, request.params.n)
            for request in opened.requests
        ]
        outputs: dict[int, RequestOutput] = {}
        while len(outputs) < len(folds):
            for place, delta in await self._take(opened):
                output = folds[place].add(delta)
                if output is not None:
                    outputs[place] = output
        ordered = [outputs[place] for place in range(len(folds))]
        make = answer_body if asked.echo is None else response_body
        head = self._head(asked)

        def write() -> bytes:
            return json.dumps(make(asked, ordered, self._front.codec, head)).encode()

        raw = await self._beside_if_long(write, opened.num_tokens)
        return Response(raw, media_type="application/json", headers=self._warnings(asked))

    async def _beside_if_long(self, write: Callable[[], T], num_tokens: int) -> T:
        assert self._opened is not None, "something has been answered"
        params = self._opened.requests[0].params
        num_words = num_tokens * (1 + (params.logprobs or 0))
        if params.prompt_logprobs is not None:  # written once: streams refuse them
            num_of_prompts = sum(len(asked.prompt_token_ids) for asked in self._opened.requests)
            num_words += num_of_prompts * (1 + params.prompt_logprobs)
        if num_words <= MOST_WORDS_AT_ONCE:
            return write()
        threads = self._front.body_threads
        return await asyncio.get_running_loop().run_in_executor(threads, write)

    async def _stream(self, asked: BodyRequest, opened: OpenRequests, send: Send) -> None:
        prompts = [request.prompt_token_ids for request in opened.requests]
        kind = ChunkWriter if asked.echo is None else ResponseWriter
        writer = kind(asked, prompts, self._front.codec, self._head(asked))
        num_left = opened.num_left
        while num_left:
            # Until something is known, the status isn't sent: a refusal has one of its own.
            deltas = await self._take(opened, self._ping_s)
            num_left -= sum(delta.finish_reason is not None for _, delta in deltas)
            num_tokens = sum(len(delta.token_ids) for _, delta in deltas)
            text = await self._beside_if_long(partial(_events, writer, deltas), num_tokens)
            if not text:
                continue
            if not self._is_streaming:
                self._is_streaming = True
                headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
                headers |= self._warnings(asked)
                raw = Response(media_type="text/event-stream", headers=headers).raw_headers
                raw = [each for each in raw if each[0] != b"content-length"]
                await send({"type": "http.response.start", "status": 200, "headers": raw})
            await _send_part(send, text)
        await _send_part(send, writer.end(), more=False)

    def _warnings(self, asked: BodyRequest) -> dict[str, str]:
        """Headers of an answer whose request can't do what it seems to want."""
        why = ""
        if asked.conversation_id is not None:
            why = no_reuse_warning(self._front.opening.no_reuse, asked.cache)
        return {"x-fastdecode-warning": why} if why else {}

    async def _take(
        self, opened: OpenRequests, silence_s: float | None = None
    ) -> list[tuple[int, Delta]]:
        """Return new output, or nothing after ``silence_s`` without any. Raises HttpRefusal: If the
        request has failed. FastDecodeError: If the turn of a conversation can't be kept."""
        had_begun = opened.all_begun
        deltas = await opened.take(silence_s)
        for _, delta in deltas:
            if delta.error is not None:
                raise refused(delta.error)  # the error may be other requests' too
            self._finish = delta.finish_reason or self._finish
        for code, is_over in (
            (QUEUE_TIMEOUT, opened.first_s is not None), (REQUEST_TIMEOUT, not opened.num_left),
        ):  # fmt: skip
            if is_over and code in self._timers:
                self._timers[code].cancel()
        if self._preparation.turn is not None:
            await self._preparation.turn.add([delta for _, delta in deltas])
        if opened.all_begun and not had_begun:
            self._front.admission.remove(self._number, time.monotonic())
        return deltas

    def _head(self, asked: BodyRequest) -> AnswerHead:
        return AnswerHead(self.answer_id, int(time.time()), asked.model or self._front.names[0])

    def _close(self, code: str | None) -> None:
        """Leave nothing behind, and note how it went."""
        front, opened = self._front, self._opened
        line = self._request.state.line
        line["finish"] = self._finish if code is None else code
        front.admission.remove(self._number)
        if self._preparation.turn is not None:
            self._preparation.turn.leave(has_failed=self._finish != "abort")
        if self._finish == "abort":
            stage = "preparing" if self._is_read else "reading"
            if opened is not None:
                stage = "waiting" if opened.first_s is None else "decoding"
            line["stage"] = stage
            front.metrics.aborted[stage] += 1
        if opened is not None:
            line.update(opened.figures)
            front.client.leave(opened)
            front.metrics.finished(opened, self._finish if code is None else "error")
            if code == QUEUE_TIMEOUT:
                front.metrics.rejected[code] += 1


async def _send_part(send: Send, text: str, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


def _events(writer: ChunkWriter | ResponseWriter, deltas: list[tuple[int, Delta]]) -> str:
    if not deltas:
        return ": ping\n\n"
    return "".join([writer.events(place, delta) for place, delta in deltas])

"""``/v1/completions`` and ``/v1/chat/completions``, whole and in streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from fastdecode.core.delta import Delta, OutputFold
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.sequence import Request, RequestOutput
from fastdecode.openai.answers import answer_body
from fastdecode.openai.chunks import ChunkWriter
from fastdecode.openai.requests import BodyRequest
from fastdecode.server.admission import QueueFull
from fastdecode.server.client import OpenRequests
from fastdecode.server.front import Front, log_line
from fastdecode.server.http.bodies import BodyLimits, Disconnected, read_object
from fastdecode.server.http.errors import SERVER, Refused, refused, unavailable
from fastdecode.server.http.exchange import Exchange, WriteTimeout

PING_S = 15.0
"""A stream that has nothing to say for so long says a comment, or proxies would
take it for dead."""
_DRAIN_RETRY_S = 5


class Generation:
    """One request for completions, from its body to the end of its answer.

    Args:
        front: what all share.
        exchange: the request.
        url: which of the two.
    """

    def __init__(self, front: Front, exchange: Exchange, url: str) -> None:
        self._front = front
        self._exchange = exchange
        self._url = url
        self._number = front.next_number()
        self._opened: OpenRequests | None = None
        self._is_gone = False
        self._finish = "error"

    async def run(self) -> None:
        """Answer, whatever happens."""
        watch: asyncio.Task[None] | None = None
        code: str | None = None
        try:
            body = await self._read()
            self._front.num_exchanges += 1
            watch = asyncio.create_task(self._watch())
            await self._answer(body)
        except Refused as error:
            code = error.code
            await self._refuse(error)
        except (Disconnected, WriteTimeout):
            self._finish = "abort"
        finally:
            if watch is not None:
                watch.cancel()
                self._front.num_exchanges -= 1
            self._close(code)

    async def _read(self) -> dict[str, Any]:
        front, exchange = self._front, self._exchange
        trouble = front.trouble()
        if trouble is not None:
            front.observations.rejected.add(1, trouble)
            error = unavailable(trouble, _DRAIN_RETRY_S)
            error.headers["connection"] = "close"
            raise error
        limits = BodyLimits(front.options.max_body_bytes, front.options.body_timeout_s)
        return await read_object(exchange.headers, exchange.receive, limits)

    async def _watch(self) -> None:
        """Until the client has gone: then nobody waits for its answer."""
        while (await self._exchange.receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        if self._opened is not None:
            self._opened.leave()

    async def _answer(self, body: dict[str, Any]) -> None:
        front = self._front
        with _typed():
            asked, requests = await asyncio.to_thread(self._understand, body)
        if self._is_gone:
            raise Disconnected
        trouble = front.trouble()
        if trouble is not None:
            front.observations.rejected.add(1, trouble)
            raise unavailable(trouble, _DRAIN_RETRY_S)
        opened = OpenRequests(requests, front.observations)
        self._enter(opened)
        self._opened = opened
        front.client.submit(opened)
        if asked.stream is None:
            await self._answer_whole(asked, opened)
        else:
            await self._stream(asked, opened)

    def _understand(self, body: dict[str, Any]) -> tuple[BodyRequest, list[Request]]:
        """What a body asks. Takes a while. Raises RequestError."""
        asked = self._front.reader.read(self._url, body)
        return asked, self._front.checked(asked, self._number)

    def _enter(self, opened: OpenRequests) -> None:
        """Into the queue. Raises Refused."""
        front = self._front
        num_tokens = front.expected_tokens(list(opened.requests))
        try:
            front.admission.enter(self._number, opened.num_sequences, num_tokens, time.monotonic())
        except QueueFull as full:
            front.observations.rejected.add(1, "queue_full")
            raise Refused(
                429,
                f"too many requests wait: try again in {full.retry_after_s} s",
                "rate_limit_exceeded",
                kind="rate_limit_error",
                headers={"retry-after": str(full.retry_after_s)},
            ) from None

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
        body = answer_body(
            asked,
            [outputs[place] for place in range(len(folds))],
            self._front.codec,
            answer_id=self._answer_id,
            created_s=int(time.time()),
            model=asked.model or self._front.names[0],
        )
        await self._exchange.answer_json(body)

    async def _stream(self, asked: BodyRequest, opened: OpenRequests) -> None:
        prompts = [request.prompt_token_ids for request in opened.requests]
        writer = ChunkWriter(
            asked,
            prompts,
            self._front.codec,
            answer_id=self._answer_id,
            created_s=int(time.time()),
            model=asked.model or self._front.names[0],
        )
        exchange, num_left = self._exchange, opened.num_left
        while num_left:
            # Until something is known, the status isn't told: a refusal has one of its own.
            deltas = await self._take(opened, PING_S)
            num_left -= sum(delta.finish_reason is not None for _, delta in deltas)
            text = _events(writer, deltas) if deltas else ": ping\n\n"
            if exchange.status is None and text:
                await self._begin_stream()
            if text:
                await exchange.send_part(text.encode())
        usage = writer.usage_chunk()
        last = "" if usage is None else f"data: {usage}\n\n"
        await exchange.send_part(f"{last}data: [DONE]\n\n".encode(), more=False)

    async def _begin_stream(self) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        await self._exchange.begin("text/event-stream; charset=utf-8", 200, headers)

    async def _take(self, opened: OpenRequests, silence_s: float | None) -> list[tuple[int, Delta]]:
        """What is new, or nothing after so long a silence.

        Raises:
            Disconnected: the client has gone.
            Refused: the request has failed, or taken too long.
        """
        had_begun = opened.all_begun
        deltas = await opened.take(self._patience_s(opened, silence_s))
        if opened.is_left:
            raise Disconnected
        for _, delta in deltas:
            if delta.error is not None:
                raise refused(delta.error)
            self._finish = delta.finish_reason or self._finish
        if opened.all_begun and not had_begun:
            self._front.admission.begun(self._number, time.monotonic())
        if not deltas:
            self._check_time(opened)
        return deltas

    def _patience_s(self, opened: OpenRequests, silence_s: float | None) -> float | None:
        """How long to wait for the next delta; None: for ever."""
        options, now = self._front.options, time.monotonic()
        limits = [] if silence_s is None else [silence_s]
        if options.request_timeout_s is not None:
            limits.append(opened.accepted_s + options.request_timeout_s - now)
        if options.queue_timeout_s is not None and opened.first_s is None:
            limits.append(opened.accepted_s + options.queue_timeout_s - now)
        return max(0.0, min(limits)) if limits else None

    def _check_time(self, opened: OpenRequests) -> None:
        """Raises Refused: it has taken too long."""
        options, elapsed_s = self._front.options, time.monotonic() - opened.accepted_s
        most_s = options.request_timeout_s
        if most_s is not None and elapsed_s >= most_s:
            text = f"the answer took more than {most_s:g} s"
            raise Refused(408, text, "request_timeout", kind=SERVER)
        most_s = options.queue_timeout_s
        if most_s is not None and opened.first_s is None and elapsed_s >= most_s:
            text = f"no token came within {most_s:g} s"
            raise Refused(503, text, "queue_timeout", kind=SERVER, headers={"retry-after": "1"})

    @property
    def _answer_id(self) -> str:
        return f"{self._front.started_s:x}-{self._number}"

    async def _refuse(self, error: Refused) -> None:
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
        if opened is not None:
            front.client.leave(opened)
            if self._finish == "abort":
                stage = "waiting" if opened.first_s is None else "decoding"
                front.observations.aborted.add(1, stage)
            front.observations.finished(opened, self._finish if code is None else "error")
        elif code is not None and exchange.status is not None and exchange.status < 429:
            front.observations.rejected.add(1, "invalid")
        front.log.write(
            log_line(front, opened, exchange.began_s, {
                "id": exchange.request_id,
                "route": self._url,
                "status": exchange.status,
                "finish": self._finish if code is None else code,
                "key": exchange.scope.get("key"),
            })
        )  # fmt: skip


def _events(writer: ChunkWriter, deltas: list[tuple[int, Delta]]) -> str:
    chunks = [writer.chunk(place, delta) for place, delta in deltas]
    return "".join([f"data: {chunk}\n\n" for chunk in chunks if chunk is not None])


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    """Inside, our errors become refusals."""
    try:
        yield
    except FastDecodeError as error:
        raise refused(error) from None

"""Slow work runs beside the event loop, each kind in its own thread, and counts as queued.
No test needs a socket or an engine."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason='needs the server: pip install ".[server]"')

from starlette.requests import Request

from fastdecode.core.delta import Delta
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.sequence import SamplingParams
from fastdecode.engine.checker import RequestChecker
from fastdecode.openai.requests import CHAT_URL, COMPLETIONS_URL
from fastdecode.server.client import RequestTable
from fastdecode.server.front import Front, Outlook, QueueAdmission
from fastdecode.server.http.errors import HttpRefusal, refused
from fastdecode.server.http.generate import MOST_WORDS_AT_ONCE, Completion
from fastdecode.server.http.preparing import Preparation
from fastdecode.server.link import Opening, ServerMessage, StatusReport, Submit
from fastdecode.server.options import ServeOptions
from fastdecode.server.request_log import RequestLog
from fastdecode.text.chat_format import AnswerFormat
from fastdecode.text.child import ChildDiedError
from fastdecode.text.codec import TextCodec

CHAT = b'{"messages": [{"role": "user", "content": "x"}]}'
TEXT = b'{"prompt": "abc"}'
PING = b": ping\n\n"
WITHIN_S = 30


class Template:
    """Renders nothing until it may."""

    source, takes_tools = "", False

    def __init__(self) -> None:
        self.may_render = threading.Event()
        self.has_begun = threading.Event()
        self.num_rendered = 0

    def render(self, messages: Sequence[Any], now: datetime, *more: Any) -> str:
        self.has_begun.set()
        assert self.may_render.wait(WITHIN_S)
        self.num_rendered += 1
        return "ab"

    def probe(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> None:
        return None

    def close(self) -> None:
        self.may_render.set()


class Codec(TextCodec):
    """A token for each letter. Knows who looks at its vocabulary."""

    def __init__(self) -> None:
        super().__init__(None)
        self.num_encoded = 0
        self.looked_at_by: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_encoded += 1
        return [ord(letter) for letter in text]

    def vocabulary_of(self, params: SamplingParams) -> None:
        self.looked_at_by.append(threading.current_thread().name)


class Queue(QueueAdmission):
    """Knows who has entered it, each time."""

    def __init__(self, max_requests: int) -> None:
        super().__init__(max_requests, 1 << 40)
        self.entered: list[Hashable] = []

    def enter(self, key: Hashable, num_requests: int, num_tokens: int, now: float) -> None:
        self.entered.append(key)
        super().enter(key, num_requests, num_tokens, now)


@dataclass
class Setting:
    """A front without an engine."""

    num_queued: int = 100
    send: Callable[[ServerMessage], None] = print
    template: Template = field(default_factory=Template)
    codec: Codec = field(default_factory=Codec)

    def __post_init__(self) -> None:
        self.front = Front(
            Opening("m", {}, {}, 1 << 20, 1000, 16, ()),
            ServeOptions(max_queued_requests=self.num_queued),
            self.codec,
            self.template,  # type: ignore[arg-type]  # as far as a front goes
            RequestTable(self.send),
            RequestLog(None),
        )
        self.front.admission = self.queue = Queue(self.num_queued)

    def prepare(self, url: str, raw: bytes) -> tuple[Preparation, asyncio.Task[Any]]:
        preparation = Preparation(self.front, self.front.next_number())

        async def prepared() -> Any:
            try:
                return await preparation.requests(url, raw)
            except FastDecodeError as error:
                raise refused(error) from None

        return preparation, asyncio.create_task(prepared())

    async def until_rendering(self) -> None:
        """The first chat has the template's thread."""
        begun = asyncio.get_running_loop().run_in_executor(None, self.template.has_begun.wait)
        assert await asyncio.wait_for(begun, WITHIN_S)


def run(test: Callable[[Setting], Awaitable[None]], setting: Setting) -> None:
    """A test in a loop of its own, with an end to it."""

    async def bounded() -> None:
        try:
            await asyncio.wait_for(test(setting), WITHIN_S)
        finally:
            setting.front.close()

    asyncio.run(bounded())


def test_templates_that_never_end_keep_nobody_from_being_tokenised() -> None:
    async def test(setting: Setting) -> None:
        chats = [setting.prepare(CHAT_URL, CHAT)[1] for _ in range(40)]
        _, text = setting.prepare(COMPLETIONS_URL, TEXT)
        _, large = setting.prepare(COMPLETIONS_URL, json.dumps({"prompt": [7] * 9000}).encode())
        for task, tokens in ((text, (97, 98, 99)), (large, (7,) * 9000)):
            asked, requests = await task
            assert not asked.is_chat and requests[0].prompt_token_ids == tokens
        assert not any(chat.done() for chat in chats)
        setting.template.may_render.set()
        for chat in chats:
            assert (await chat)[1][0].prompt_token_ids == (97, 98)

    run(test, Setting())


def test_what_is_being_prepared_is_queued_and_more_is_refused_before_it_is() -> None:
    async def test(setting: Setting) -> None:
        (_, waits), _ = (setting.prepare(CHAT_URL, CHAT) for _ in range(2))
        await setting.until_rendering()
        assert setting.front.admission.num_requests == 2
        for url, raw in ((CHAT_URL, CHAT), (COMPLETIONS_URL, TEXT)):
            with pytest.raises(HttpRefusal, match="too many requests wait") as caught:
                await setting.prepare(url, raw)[1]
            assert caught.value.status == 429 and "retry-after" in caught.value.headers
        assert setting.codec.num_encoded == 0, "it wasn't tokenised to be refused"
        # Token ids cost nothing to look at; their size decides when they enter the queue.
        assert (await setting.prepare(COMPLETIONS_URL, b'{"prompt": [7]}')[1])[1]
        with pytest.raises(HttpRefusal, match="not a token id"):
            await setting.prepare(COMPLETIONS_URL, b'{"prompt": [-7]}')[1]
        setting.template.may_render.set()
        await waits

    run(test, Setting(num_queued=2))


def test_who_leaves_before_his_turn_is_never_rendered() -> None:
    async def test(setting: Setting) -> None:
        _, first = setting.prepare(CHAT_URL, CHAT)
        _, second = setting.prepare(CHAT_URL, CHAT)
        await setting.until_rendering()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        setting.template.may_render.set()
        await first
        assert setting.template.num_rendered == 1

    run(test, Setting())


def test_answer_ids_differ_between_servers_that_start_together() -> None:
    fronts = [Setting().front for _ in range(50)]
    for front in fronts:
        front.started_s = 1795337367
    request = Request({"type": "http"})
    ids = {Completion(front, request).answer_id for front in fronts}
    calls = {AnswerFormat().call_id(f"{each}/0", 0) for each in ids}
    assert len(ids) == len(calls) == 50
    for front in fronts:
        front.close()


PHRASES = ("this model's maximum context length is", "prompt is too long")
"""By which LiteLLM and LangChain know a prompt that is too long."""


@pytest.mark.parametrize("body", [{"prompt": [7] * 99}, {"prompt": "x" * 99}])
def test_prompt_too_long_is_refused_in_the_words_that_clients_know(body: dict[str, Any]) -> None:
    async def test(setting: Setting) -> None:
        setting.front.checker = RequestChecker(setting.codec, 1000, 64)
        with pytest.raises(HttpRefusal) as caught:
            await setting.prepare(COMPLETIONS_URL, json.dumps(body).encode())[1]
        assert caught.value.code == "context_length_exceeded"
        assert all(phrase in str(caught.value) for phrase in PHRASES)
        assert "99" in str(caught.value) and "64" in str(caught.value)

    run(test, Setting())


@pytest.mark.parametrize("url", [CHAT_URL, COMPLETIONS_URL])
def test_request_whose_child_died_may_be_sent_again(url: str) -> None:
    def dies(*given: Any, **more: Any) -> Any:
        raise ChildDiedError("it broke off (exit status -9)").as_request_error()

    async def test(setting: Setting) -> None:
        setting.template.render = dies  # type: ignore[method-assign]
        setting.codec.encode = dies  # type: ignore[method-assign]
        with pytest.raises(HttpRefusal, match="died: try again") as caught:
            await setting.prepare(url, CHAT if url == CHAT_URL else TEXT)[1]
        error = caught.value
        assert (error.status, error.kind, error.param) == (500, "server_error", None)
        assert error.code == "child_died" and "x-should-retry" not in error.headers

    run(test, Setting())


def answered(body: dict[str, Any], num_tokens: int, num_pings: int = 0) -> tuple[Setting, bytes]:
    """Return what is sent for a body, if the engine sends ``num_tokens`` after ``num_pings``."""
    sent: list[bytes] = []
    asked: list[str] = []

    def say() -> None:
        delta = Delta(asked[0], 0, "x", (5,) * num_tokens, None, "stop")
        setting.front.client.deliver([delta])

    def send(message: ServerMessage) -> None:
        if isinstance(message, Submit):
            asked.append(message.requests[0].request_id)
            if not num_pings:
                asyncio.get_running_loop().call_soon(say)

    async def take(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))
        if sent.count(PING) == num_pings and sent[-1] == PING:
            say()

    raw = json.dumps(body).encode()
    bodies = iter([{"type": "http.request", "body": raw, "more_body": False}])

    async def receive() -> MutableMapping[str, Any]:
        for body in bodies:
            return body
        return await asyncio.get_running_loop().create_future()  # he stays

    async def test(setting: Setting) -> None:
        setting.front.outlook = Outlook(
            True, seen=StatusReport(state="ready"), seen_s=time.monotonic()
        )
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "path": COMPLETIONS_URL, "headers": headers, "state": {"line": {}}}
        ping_s = 0.001 if num_pings else WITHIN_S
        completion = Completion(setting.front, Request(scope, receive), ping_s)
        await completion(scope, receive, take)

    setting = Setting(send=send)
    run(test, setting)
    return setting, b"".join(sent)


@pytest.mark.parametrize("num_tokens", [MOST_WORDS_AT_ONCE, MOST_WORDS_AT_ONCE + 1])
def test_long_answers_are_put_together_beside_the_loop(num_tokens: int) -> None:
    setting, sent = answered({"prompt": [7]}, num_tokens)
    said = json.loads(sent)
    assert said["usage"]["completion_tokens"] == num_tokens
    (who,) = setting.codec.looked_at_by
    assert who.startswith("bodies") is (num_tokens > MOST_WORDS_AT_ONCE)
    assert setting.queue.entered == [1], "whoever is being answered queues for nothing"


@pytest.mark.parametrize("count", [None, 0, 100])
def test_logprobs_of_a_long_prompt_are_written_beside_the_loop(count: int | None) -> None:
    prompt = [7] * (MOST_WORDS_AT_ONCE // 100)
    setting, _ = answered({"prompt": prompt, "prompt_logprobs": count}, 1)
    (who,) = setting.codec.looked_at_by
    assert who.startswith("bodies") is (count == 100)


def test_a_stream_that_is_silent_says_comments_before_it_says_anything() -> None:
    _, sent = answered({"prompt": [7], "stream": True}, 3, num_pings=3)
    assert sent.startswith(PING * 3) and sent.endswith(b"data: [DONE]\n\n")
    chunk, done = (part for part in sent.split(b"\n\n") if part.startswith(b"data: "))
    assert json.loads(chunk[6:])["choices"][0]["text"] == "x" and done == b"data: [DONE]"

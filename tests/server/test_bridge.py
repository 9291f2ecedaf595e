"""The threads between the HTTP process and an engine: none ends without the server
noticing, and a request that can't be read costs no other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from counting_engine import Counting

from fastdecode.core.delta import MOST_VALUES, Delta, DeltaQueue
from fastdecode.core.sequence import Request, SamplingParams, TokenLogprob
from fastdecode.engine.instances.server import RequestLimits
from fastdecode.engine.service import EngineService
from fastdecode.server.link import Deltas, Keys, Opening, Packing, StatusAck, StatusReport, Submit
from fastdecode.server.options import MAX_KEYS
from fastdecode.server.serving import Bridge

WAIT_S = 60.0
GOOD = Request("good", (1, 2), SamplingParams(), 3, seed=0)


class Channel:
    """To a HTTP process that a test speaks for."""

    def __init__(self) -> None:
        self.said: SimpleQueue[Any] = SimpleQueue()
        self.heard: SimpleQueue[Any] = SimpleQueue()
        self.refuses: Exception | None = None

    def receive(self, timeout_s: float) -> Any:
        with contextlib.suppress(Empty):
            said = self.said.get(timeout=timeout_s)
            if isinstance(said, Exception):
                raise said
            return said

    def wake(self) -> None:
        self.said.put(None)

    def send(self, message: Any) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.heard.put(message)


@pytest.fixture
def service() -> Iterator[EngineService]:
    service: EngineService = EngineService(Counting)
    service.open()
    yield service
    service.close()


@pytest.fixture
def channel() -> Iterator[Channel]:
    channel = Channel()
    yield channel
    channel.said.put(BrokenPipeError())


def bridge_of(service: EngineService, channel: Channel) -> Bridge:
    bridge = Bridge(service, channel, RequestLimits(100, 100))  # type: ignore[arg-type]
    bridge.start()
    return bridge


@pytest.mark.parametrize("error", [OverflowError("inf"), MemoryError(), ValueError("no JSON")])
@pytest.mark.parametrize("receives", [True, False])
def test_a_message_that_cannot_pass_means_that_the_http_process_is_gone(
    service: EngineService, channel: Channel, receives: bool, error: Exception
) -> None:
    channel.said.put(error if receives else None)
    channel.refuses = None if receives else error
    assert bridge_of(service, channel).is_gone.wait(WAIT_S)


def test_is_open_once_the_http_process_has_read_the_engines_status(
    service: EngineService, channel: Channel
) -> None:
    bridge = bridge_of(service, channel)
    assert isinstance(channel.heard.get(timeout=WAIT_S), StatusReport)
    assert not bridge.is_open.is_set()
    channel.said.put(StatusAck())
    assert bridge.is_open.wait(WAIT_S) and not bridge.is_gone.is_set()


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, request_id="bad", prompt_token_ids=(1, "2")),  # type: ignore[arg-type]
        replace(GOOD, request_id="bad", prompt_token_ids=5),  # type: ignore[arg-type]
        replace(GOOD, request_id="bad", params=None),  # type: ignore[arg-type]
    ],
)
def test_a_request_that_cannot_be_read_ends_alone(
    service: EngineService, channel: Channel, bad: Request
) -> None:
    bridge = bridge_of(service, channel)
    channel.said.put(Submit([bad, GOOD]))
    ended: dict[str, bool] = {}
    while len(ended) < 2:
        message = channel.heard.get(timeout=WAIT_S)
        for delta in message.deltas if isinstance(message, Deltas) else ():
            if delta.error is not None or delta.finish_reason is not None:
                ended[delta.request_id] = delta.error is not None
    assert ended == {"bad": True, "good": False}
    assert not bridge.is_gone.is_set() and threading.active_count() > 1


@pytest.mark.parametrize("kind", [Keys, partial(Opening, "m", {}, {}, 9, 9, 1)])
def test_the_link_carries_as_many_keys_as_are_allowed(kind: Callable[..., Any]) -> None:
    message = kind(keys=("f" * 64,) * MAX_KEYS)
    packing = Packing()
    assert packing.parsed(bytes(packing.packed(message))) == message


def test_many_logprobs_are_sent_as_several_messages(
    service: EngineService, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = (None, *(MOST_VALUES // 2 + 1) * (TokenLogprob(1, -1.0),))
    answers = [Delta(name, 0, finish_reason="length", prompt_logprobs=steps) for name in "abc"]

    def submit(requests: list[Request], queue: DeltaQueue) -> None:
        queue.put(answers)

    monkeypatch.setattr(service, "submit", submit)
    bridge_of(service, channel)
    channel.said.put(Submit([GOOD]))
    told: list[int] = []
    while sum(told) < len(answers):
        message = channel.heard.get(timeout=WAIT_S)
        told += [len(message.deltas)] if isinstance(message, Deltas) else []
    assert told == [1, 1, 1]

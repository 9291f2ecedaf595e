"""The connections of a router: whatever is raised about an instance, that one is lost; whatever
else is raised ends all requests, and none waits for ever."""

from __future__ import annotations

from functools import partial
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from messages_for_tests import INSTANCE_WELCOME
from values import replace

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.delta import DeltaQueue
from fastdecode.core.errors import FastDecodeError, WorkerError
from fastdecode.core.sequence import Request, SamplingParams
from fastdecode.engine.instances.client import EngineClient
from fastdecode.engine.instances.registry import Inbox, Registry, greet, identity_of
from fastdecode.engine.instances.router import Router
from fastdecode.engine.service import EngineService
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.instances import Cancel, Deltas, InstanceHello, SetRole, StatusReport
from fastdecode.wire.transport import CLOSED, TIMEOUT, timeout_error

WAIT_S = 60.0
SEEN = StatusReport(1, state="ready", num_live_r_workers=1)
WELCOME = replace(INSTANCE_WELCOME, role=InstanceRole.BOTH)
HELLO = InstanceHello(WELCOME.model_hash)


class Line:
    """A connection to an instance that accepts every message but ``SetRole``."""

    def __init__(self, number: int) -> None:
        self.peer = f"instance {number}"
        self.sent: list[Any] = []
        self.is_open = True

    def send(self, message: Any) -> None:
        if isinstance(message, SetRole):
            raise OverflowError("it doesn't fit")
        self.sent.append(message)

    def close(self) -> None:
        self.is_open = False


class Hub:
    def __init__(self) -> None:
        self.connections: Any = [Line(0), Line(1)]
        self.arrivals: SimpleQueue[Any] = SimpleQueue()

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, Any]:
        try:
            arrival = self.arrivals.get(timeout=timeout_s)
        except Empty:
            raise timeout_error("instances", timeout_s or 0.0) from None
        if arrival is None:
            raise timeout_error("woken", 0.0)
        if isinstance(arrival, Exception):
            raise arrival
        return arrival  # type: ignore[no-any-return]

    def wake(self) -> None:
        self.arrivals.put(None)

    def close(self) -> None: ...


@pytest.fixture
def registry() -> Registry:
    hub, spec = Hub(), SimpleNamespace(vocab_size=9, num_kv_heads=1, num_layers=1)
    clients = [
        EngineClient(f"i{i}", partial(Line.send, line), WELCOME, WELCOME)
        for i, line in enumerate(hub.connections)
    ]
    router = Router(clients, spec, batch_tokens=64, block_size=16)  # type: ignore[arg-type]
    return Registry(hub, router, HELLO, identity_of(WELCOME), WAIT_S, may_return=False)


def hear(registry: Registry, number: int, message: Any) -> None:
    registry.hub.arrivals.put((number, message))  # type: ignore[attr-defined]
    registry.hear(WAIT_S)


@pytest.mark.parametrize(
    "error",
    [OverflowError("inf"), TypeError("3"), RecursionError(), MemoryError(), WorkerError("gone")],
    ids=lambda error: type(error).__name__,
)
def test_an_instance_of_which_anything_is_raised_is_lost_alone(
    registry: Registry, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = registry._router.clients

    def update(self: EngineClient, status: StatusReport) -> None:
        if self is first:
            raise error
        self.num_steps += 1

    monkeypatch.setattr(EngineClient, "update", update)
    hear(registry, 0, SEEN)
    assert isinstance(first.broken, FastDecodeError) and second.broken is None
    hear(registry, 1, SEEN)
    assert second.num_steps == 1
    assert not registry.hub.connections[0].is_open  # type: ignore[attr-defined]


def test_what_cannot_be_sent_costs_that_instance_alone(registry: Registry) -> None:
    first, second = registry._router.clients
    registry._router.set_role("i0", InstanceRole.PREFILL)
    registry.hear(WAIT_S)
    second.cancel("a")
    assert isinstance(first.broken, FastDecodeError) and second.broken is None
    assert registry.hub.connections[1].sent == [Cancel(("a",))]  # type: ignore[attr-defined]


def test_a_router_that_hears_nothing_more_ends_all_requests(registry: Registry) -> None:
    inbox = Inbox()
    around = SimpleNamespace(
        engine=registry._router, num_r_workers=1, num_live_r_workers=1, has_hung_r_workers=False,
        close=registry.hub.close,
    )  # fmt: skip

    def make() -> Any:
        inbox.registry = registry
        return around

    service: EngineService = EngineService(make, inbox=inbox)
    service.open()
    reader = DeltaQueue()
    service.submit([Request("a", (5,), SamplingParams(), 3, seed=1)], reader)
    hub: Any = registry.hub
    hub.arrivals.put(ZeroDivisionError("no instance has said so"))
    (delta,) = reader.take(WAIT_S)
    assert "ZeroDivisionError: no instance has said so" in str(delta.error)
    service.close()


class Ranks(InprocHub[Any, Any]):
    """Connections to four ranks. A wait takes its whole time, in which the first may report."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.ends = [connect(self, "rank 0", InprocHub(), f"rank {i}")[1] for i in range(4)]
        self.chatty = False

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, Any]:
        assert timeout_s is not None, "it would wait for ever"
        if self.chatty:
            self.now_s += 0.5
            self.ends[0].send(StatusReport(7, state="ready", num_live_r_workers=2))
            return super().receive_any(0.0)
        try:
            return super().receive_any(0.0)
        except WorkerError as error:
            if error.code == TIMEOUT:
                self.now_s += timeout_s
            raise


@pytest.mark.parametrize("chatty", [False, True])
def test_who_never_says_what_it_is_is_given_up(chatty: bool) -> None:
    hub = Ranks()
    hub.ends[0].send(WELCOME)
    hub.ends[1].close()
    hub.ends[3].send(replace(WELCOME, model_hash="another"))
    hub.chatty = chatty
    welcomes, failed = greet(hub, HELLO, 100.0, {}, lambda: hub.now_s)
    assert welcomes == {0: WELCOME} and hub.connections[2].is_closed
    assert {i: error.code for i, error in failed.items()} == {
        1: CLOSED, 2: TIMEOUT, 3: "other_model"
    }  # fmt: skip
    assert "rank 2 lives, but hasn't loaded its model in 100 s" in failed[2].message
    assert 100.0 <= hub.now_s < 101.0


def test_nobody_is_waited_for_who_has_answered() -> None:
    hub = Ranks()
    for end in hub.ends:
        end.send(WELCOME)
    welcomes, failed = greet(hub, HELLO, 100.0, {}, lambda: hub.now_s)
    assert (welcomes, failed) == (dict.fromkeys(range(4), WELCOME), {})
    assert hub.now_s == 0.0


def test_only_time_in_which_the_router_listened_is_quiet(registry: Registry) -> None:
    now_s = [0.0]
    registry._clock, registry._looked_s = lambda: now_s[0], 0.0
    clients = registry._router.clients

    def quiet_after(seconds: float) -> list[float]:
        now_s[0] += seconds
        registry.hear(0.0)
        return [each.quiet_s for each in clients]

    assert quiet_after(0.75) == [0.75, 0.75]
    hear(registry, 1, Deltas(()))
    assert quiet_after(500.0) == [1.75, 1.0], "the router was stopped meanwhile"
    for _ in range(60):
        now_s[0] += 1.0
        hear(registry, 1, Deltas(()))
    assert clients[0].broken is not None and clients[0].broken.code == TIMEOUT
    assert clients[1].broken is None

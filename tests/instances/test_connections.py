"""The thread that hears instances: whatever is raised about one of them, that one
is lost; whatever else is raised is reported, and no request waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from messages_for_tests import INSTANCE_WELCOME
from values import replace

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.errors import FastDecodeError, WorkerError
from fastdecode.engine.instances.connections import InstanceConnections
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.instances import (
    Cancel,
    InstanceHello,
    InstanceWelcome,
    SetRole,
    StatusReport,
)
from fastdecode.wire.transport import CLOSED, TIMEOUT, timeout_error

WAIT_S = 60.0
SEEN = StatusReport(1, state="ready", num_live_r_workers=1)


class Line:
    """A connection to an instance that accepts every message but ``SetRole``."""

    heard_s = None
    is_open = True

    def __init__(self, number: int) -> None:
        self.peer = f"instance {number}"
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        if isinstance(message, SetRole):
            raise OverflowError("it doesn't fit")
        self.sent.append(message)

    def close(self) -> None:
        self.is_open = False


class Hub:
    def __init__(self) -> None:
        self.connections: Sequence[Any] = [Line(0), Line(1)]
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
    def give_up(self, number: int) -> None: ...
    def greet_all(self, hello: InstanceHello, timeout_s: float) -> Any:
        raise NotImplementedError


class Heard:
    def __init__(self) -> None:
        self.news: SimpleQueue[tuple[str, Any, Any]] = SimpleQueue()
        self.error: Exception | None = None

    def heard(self, number: int, message: Any) -> None:
        if number == 0 and self.error is not None:
            raise self.error
        self.news.put(("heard", number, message))

    def lost(self, number: int, error: FastDecodeError) -> None:
        self.news.put(("lost", number, error))

    def failed(self, error: FastDecodeError) -> None:
        self.news.put(("failed", None, error))

    def came_back(self, number: int, welcome: InstanceWelcome) -> bool:
        raise NotImplementedError


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def lines(heard: Heard) -> Any:
    lines = InstanceConnections(Hub(), InstanceHello(1, "x"), [], heard, WAIT_S, None)
    lines.start()
    yield lines
    lines.close()


@pytest.mark.parametrize(
    "error",
    [OverflowError("inf"), TypeError("3"), RecursionError(), MemoryError(), WorkerError("gone")],
    ids=lambda error: type(error).__name__,
)
def test_an_instance_of_which_anything_is_raised_is_lost_alone(
    lines: InstanceConnections, heard: Heard, error: Exception
) -> None:
    heard.error = error
    lines._hub.arrivals.put((0, SEEN))  # type: ignore[attr-defined]
    what, number, why = heard.news.get(timeout=WAIT_S)
    assert (what, number) == ("lost", 0) and isinstance(why, FastDecodeError)
    lines._hub.arrivals.put((1, SEEN))  # type: ignore[attr-defined]
    assert heard.news.get(timeout=WAIT_S)[:2] == ("heard", 1)
    assert not lines._hub.connections[0].is_open  # type: ignore[attr-defined]


def test_what_cannot_be_sent_costs_that_instance_alone(
    lines: InstanceConnections, heard: Heard
) -> None:
    lines.post(0, 0, SetRole(InstanceRole.BOTH))
    assert heard.news.get(timeout=WAIT_S)[:2] == ("lost", 0)
    lines.post(1, 0, Cancel(("a",)))
    lines._hub.arrivals.put((1, SEEN))  # type: ignore[attr-defined]
    assert heard.news.get(timeout=WAIT_S)[:2] == ("heard", 1)
    assert lines._hub.connections[1].sent == [Cancel(("a",))]


def test_a_thread_that_breaks_down_says_so(lines: InstanceConnections, heard: Heard) -> None:
    lines._hub.arrivals.put(ZeroDivisionError("nobody's fault"))  # type: ignore[attr-defined]
    what, _, why = heard.news.get(timeout=WAIT_S)
    assert what == "failed" and "ZeroDivisionError: nobody's fault" in str(why)
    lines.join(WAIT_S)
    assert threading.main_thread().is_alive() and not lines.is_alive()


pytest.importorskip("mpi4py", reason="needs mpi4py: pip install mpi4py")

HOW_IT_IS = StatusReport(7, state="ready", num_live_r_workers=2)
HELLO = InstanceHello(1, INSTANCE_WELCOME.model_hash)


class Ranks(InprocHub[Any, Any]):
    """Connections to four ranks. A wait without an answer takes its whole time, and the first
    rank may report its state meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.given_up: list[int] = []
        self.ends = [connect(self, "rank 0", InprocHub(), f"rank {i}")[1] for i in range(4)]
        self.chatty = False

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, Any]:
        assert timeout_s is not None, "it would wait for ever"
        if self.chatty:
            self.now_s += 0.5
            self.ends[0].send(HOW_IT_IS)
            return super().receive_any(0.0)
        try:
            return super().receive_any(0.0)
        except WorkerError as error:
            if error.code == TIMEOUT:
                self.now_s += timeout_s
            raise

    def give_up(self, number: int) -> None:
        self.given_up.append(number)

    def greet_all(self, hello: InstanceHello, timeout_s: float) -> Any:
        raise NotImplementedError

    def wake(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("chatty", [False, True])
def test_who_never_says_what_it_is_is_given_up(chatty: bool) -> None:
    from fastdecode.engine.instances.connections import greet_together

    hub = Ranks()
    hub.ends[0].send(INSTANCE_WELCOME)
    hub.ends[1].close()
    hub.ends[3].send(replace(INSTANCE_WELCOME, model_hash="another"))
    hub.chatty = chatty
    welcomes, failed = greet_together(hub, HELLO, 100.0, lambda: hub.now_s)
    assert welcomes == {0: INSTANCE_WELCOME} and hub.given_up == [2]
    assert {i: error.code for i, error in failed.items()} == {
        1: CLOSED, 2: TIMEOUT, 3: "other_model"
    }  # fmt: skip
    assert "rank 2 lives, but hasn't loaded its model in 100 s" in failed[2].message
    assert 100.0 <= hub.now_s < 101.0


def test_nobody_is_waited_for_who_has_answered() -> None:
    from fastdecode.engine.instances.connections import greet_together

    hub = Ranks()
    for end in hub.ends:
        end.send(INSTANCE_WELCOME)
    welcomes, failed = greet_together(hub, HELLO, 100.0, lambda: hub.now_s)
    assert (welcomes, failed) == (dict.fromkeys(range(4), INSTANCE_WELCOME), {})
    assert hub.now_s == 0.0 and not hub.given_up

"""The transport between threads: the suite, and what it does beside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from puppet import LocalPuppet
from transport_suite import MakeStar, TransportSuite, code_of

from fastdecode.core.errors import WorkerError
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.messages import FromRWorker, ToRWorker
from fastdecode.wire.transport import CLOSED, TIMEOUT, Hub, PeerLostError


class TestInproc(TransportSuite):
    @pytest.fixture
    def star(self) -> MakeStar:
        def make(num_peers: int) -> SimpleNamespace:
            hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
            names = [f"worker {i}" for i in range(num_peers)]
            ends = [
                connect(hub, "the S-worker", InprocHub[FromRWorker, ToRWorker](), name)[1]
                for name in names
            ]
            return SimpleNamespace(hub=hub, peers=[LocalPuppet(end) for end in ends], names=names)

        return make


def star(num_peers: int) -> tuple[Hub[str, int], list[InprocConnection[int, str]]]:
    hub: InprocHub[str, int] = InprocHub()
    peers = [
        connect(hub, "the S side", InprocHub[int, str](), f"worker {i}")[1]
        for i in range(num_peers)
    ]
    return hub, peers


def in_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_a_message_is_handed_over_as_it_is() -> None:
    one: InprocHub[list[int], list[int]] = InprocHub()
    here, there = connect(one, "here", InprocHub[list[int], list[int]](), "there")
    message = [1]
    here.send(message)
    assert there.receive(0.0) is message


def test_a_poll_leaves_a_call_to_look_up_to_the_next_wait_for_any() -> None:
    hub: InprocHub[str, int] = InprocHub()
    here, there = connect(hub, "the S side", InprocHub[int, str](), "the R side")
    hub.wake()
    assert here.poll() is None
    there.send(3)
    assert here.poll() == 3
    assert code_of(lambda: hub.receive_any(60.0)) == TIMEOUT  # woken, before its time
    there.send(4)
    assert hub.receive_any(60.0) == (0, 4)


def test_hub_receives_in_order_of_arrival() -> None:
    hub, (a, b, c) = star(3)
    c.send(30)
    a.send(10)
    c.send(31)
    b.send(20)
    assert [hub.receive_any(0.0) for _ in range(4)] == [(2, 30), (0, 10), (2, 31), (1, 20)]
    assert code_of(lambda: hub.receive_any(0.0), "worker 0", "worker 1", "worker 2") == TIMEOUT


def test_where_others_come_and_go_the_place_of_one_that_is_over_is_anothers() -> None:
    hub = InprocHub[str, int](keeps_places=False)

    def another(name: str) -> InprocConnection[int, str]:
        return connect(hub, "the S side", InprocHub[int, str](), name)[1]

    stays = another("stays")
    for i in range(5):
        guest = another(f"guest {i}")
        guest.send(i)
        guest.send(i)
        assert hub.receive_any(0.0) == (1, i)
        hub.connections[1].close()  # and what it has said besides counts no more
    assert [x.peer for x in hub.connections] == ["stays", "guest 4"]
    gone = another("gone")
    gone.close()
    with pytest.raises(PeerLostError) as lost:
        hub.receive_any(0.0)
    assert lost.value.index == 1
    assert another("next").send(7) is None and hub.receive_any(0.0) == (2, 7)
    hub.connections[1].close()  # only then is its end known to whoever serves it
    another("last").send(9)
    stays.send(3)
    assert [hub.receive_any(0.0) for _ in range(2)] == [(1, 9), (0, 3)]
    assert len(hub.connections) == 3


def test_closing_the_last_connection_wakes_the_hub() -> None:
    hub, _ = star(1)
    codes: list[str] = []
    waiting = in_thread(lambda: codes.append(code_of(lambda: hub.receive_any(None))))
    hub.connections[0].close()
    waiting.join(60.0)
    assert codes == [CLOSED]


def test_a_deadline_counts_from_the_call_whatever_comes_from_others() -> None:
    now = [100.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    hub: InprocHub[str, int] = InprocHub(clock)
    wanted, _ = connect(hub, "s", InprocHub[int, str](), "worker 0")
    _, other = connect(hub, "s", InprocHub[int, str](), "worker 1")
    for i in range(5):
        other.send(i)
    assert code_of(lambda: wanted.receive(3.5), "worker 0", "3.5 s") == TIMEOUT
    assert [hub.receive_any(0.0)[1] for _ in range(5)] == [0, 1, 2, 3, 4]


def test_many_threads_lose_nothing() -> None:
    hub, peers = star(4)

    def answer(peer: InprocConnection[int, str]) -> None:
        for _ in range(200):
            peer.send(int(peer.receive(60.0)))
        peer.close()

    threads = [in_thread(lambda peer=peer: answer(peer)) for peer in peers]  # type: ignore[misc]
    for i in range(200):
        for connection in hub.connections:
            connection.send(str(i))
    got: list[list[int]] = [[] for _ in peers]
    closed = 0
    while closed < len(peers):
        try:
            index, number = hub.receive_any(60.0)
        except WorkerError as error:
            if error.code != CLOSED:
                raise
            closed += 1
        else:
            got[index].append(number)
    assert got == [list(range(200))] * 4
    for thread in threads:
        thread.join(60.0)


def test_a_connection_to_a_hub_whose_thread_has_ended_is_closed() -> None:
    """Also one that is made later, as by an R-worker that fetches from another one."""
    hub: InprocHub[str, int] = InprocHub()
    before, _ = connect(InprocHub[int, str](), "here", hub, "there")
    hub.close()
    after, _ = connect(InprocHub[int, str](), "here", hub, "there")
    for side in (before, after):
        assert code_of(lambda side=side: side.receive(0.0)) == CLOSED  # type: ignore[misc]
        assert code_of(lambda side=side: side.send(1)) == CLOSED  # type: ignore[misc]

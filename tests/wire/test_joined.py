"""Several hubs as one: whose message it is, who is lost, and when to stop."""

from __future__ import annotations

from typing import Any

import pytest

from fastdecode.core.errors import WorkerError
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import Accepted, Open
from fastdecode.wire.transport import CLOSED, TIMEOUT, JoinedHub, PeerLostError, PolledHub


@pytest.fixture
def joined() -> tuple[JoinedHub[Any, Any], list[Any]]:
    """Two connections in the first hub, one in the second; and their other ends."""
    hubs: list[InprocHub[Any, Any]] = [InprocHub(), InprocHub()]
    ends = [connect(hubs[i], "us", InprocHub(), f"peer {n}")[1] for n, i in enumerate((0, 0, 1))]
    return JoinedHub(*hubs), ends


def test_a_message_is_of_the_connection_that_it_came_over(
    joined: tuple[JoinedHub[Any, Any], list[Any]],
) -> None:
    hub, ends = joined
    assert [connection.peer for connection in hub.connections] == ["peer 0", "peer 1", "peer 2"]
    for number in (2, 0, 1):
        ends[number].send(Accepted(number))
        assert hub.receive_any(1.0) == (number, Accepted(number))
    hub.connections[2].send(Open(1, 2))
    assert ends[2].poll() == Open(1, 2)


def test_no_hub_is_kept_waiting_by_another(joined: tuple[JoinedHub[Any, Any], list[Any]]) -> None:
    hub, ends = joined
    for number in (0, 0, 2, 2):
        ends[number].send(Accepted(number))
    assert [hub.receive_any(1.0)[0] for _ in range(4)] == [0, 2, 0, 2]


def test_who_is_lost_is_told_once_and_others_go_on(
    joined: tuple[JoinedHub[Any, Any], list[Any]],
) -> None:
    hub, ends = joined
    with pytest.raises(WorkerError, match="peer 0 or peer 1 or peer 2") as late:
        hub.receive_any(0.0)
    assert late.value.code == TIMEOUT
    ends[2].close()
    with pytest.raises(PeerLostError) as lost:
        hub.receive_any(1.0)
    assert lost.value.index == 2
    ends[0].send(Accepted(5))
    assert hub.receive_any(1.0) == (0, Accepted(5))
    for number in (0, 1):
        ends[number].close()
        with pytest.raises(PeerLostError):
            hub.receive_any(1.0)
    with pytest.raises(WorkerError) as over:
        hub.receive_any(None)
    assert over.value.code == CLOSED


def _here(hub: InprocHub[Any, Any], name: str) -> tuple[Any, Any]:
    """A connection to a peer here, and its other end."""
    first, there = connect(hub, "us", InprocHub(), name)
    first.is_busy = False  # type: ignore[attr-defined]
    return first, there


def test_who_moves_kv_here_is_looked_at_while_others_are_waited_for() -> None:
    """What it tells of is heard, though nobody else says anything."""

    class Moving(InprocHub[Any, Any]):
        def receive_any(self, timeout_s: float | None = None) -> tuple[int, Any]:
            waits.append(timeout_s)
            if len(waits) == 3:
                there.send(Accepted(7))
            return super().receive_any(0.0)

    waits: list[float | None] = []
    behind = Moving()
    connect(behind, "us", InprocHub(), "another")
    first, there = _here(InprocHub(), "the one that fetches")
    hub = JoinedHub(PolledHub([first]), behind)
    with pytest.raises(WorkerError, match="another"):
        hub.receive_any(60.0)
    assert len(waits) == 1, "nothing is on its way: there is one wait"
    poll = first.poll

    def begin() -> Any:
        first.is_busy = True  # it is looked at, finds what it was asked for, and begins
        return poll()

    first.poll = begin
    assert hub.receive_any(None) == (0, Accepted(7))
    assert len(waits) == 3 and all(wait is not None and wait < 0.1 for wait in waits[1:])


def test_who_works_in_this_thread_is_asked_first() -> None:
    """It is looked for, and never waited for."""
    at_once, behind = InprocHub[Any, Any](), InprocHub[Any, Any]()
    first, there = _here(at_once, "the inline one")
    _, other = connect(behind, "us", InprocHub(), "another")
    hub = JoinedHub(PolledHub([first]), behind)
    other.send(Accepted(2))
    there.send(Accepted(1))
    assert [hub.receive_any(1.0) for _ in range(2)] == [(0, Accepted(1)), (1, Accepted(2))]
    with pytest.raises(WorkerError, match="another"):
        hub.receive_any(0.0)
    there.close()
    with pytest.raises(PeerLostError) as lost:
        hub.receive_any(1.0)
    assert lost.value.index == 0
    other.send(Accepted(3))
    assert hub.receive_any(1.0) == (1, Accepted(3))
    other.close()
    with pytest.raises(PeerLostError) as lost:
        hub.receive_any(1.0)
    assert lost.value.index == 1

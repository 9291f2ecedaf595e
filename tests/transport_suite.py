"""What every transport must do, as tests to be inherited: ``class
TestX(TransportSuite)`` gives a ``star`` fixture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import pytest
from messages_for_tests import answer, attend, from_r_worker, packed_attend, same, to_r_worker

from fastdecode.core.errors import WorkerError
from fastdecode.wire.messages import Accepted, Attend, Close, FromRWorker, Open, ToRWorker
from fastdecode.wire.transport import CLOSED, TIMEOUT, Hub

WAIT_S = 60.0


class Peer(Protocol):
    """An R-worker's side, wherever it runs."""

    def send(self, message: FromRWorker) -> None: ...
    def receive(self, timeout_s: float | None = None) -> ToRWorker: ...
    def poll(self) -> ToRWorker | None: ...
    def close(self) -> None: ...
    def start(self, name: str, *args: Any) -> None: ...
    def result(self) -> Any: ...


class Star(Protocol):
    """An S-worker's hub with a few connections, and the R-workers at their
    ends. ``names`` are what the hub calls them."""

    hub: Hub[ToRWorker, FromRWorker]
    peers: list[Peer]
    names: list[str]


MakeStar = Callable[[int], Star]


def code_of(act: Callable[[], object], *names: str) -> str:
    with pytest.raises(WorkerError) as caught:
        act()
    for name in names:
        assert name in caught.value.message
    return caught.value.code


class TransportSuite:
    def test_every_message_arrives_as_it_was_sent(self, star: MakeStar) -> None:
        s = star(1)
        connection, peer = s.hub.connections[0], s.peers[0]
        for message in to_r_worker():
            connection.send(message)
            assert same(peer.receive(WAIT_S), message), message
        for answered in from_r_worker():
            peer.send(answered)
            assert same(connection.receive(WAIT_S), answered), answered

    def test_messages_of_all_sizes_keep_their_order(self, star: MakeStar) -> None:
        s = star(1)
        connection, peer = s.hub.connections[0], s.peers[0]
        sent: list[ToRWorker] = []
        for step in range(20):
            sent += [Open(step, 1), attend((1, 200, 5, 700)[step % 4], step=step)]
        peer.start("hold", len(sent))
        for message in sent:
            connection.send(message)
        assert connection.receive(WAIT_S) == Accepted(len(sent))
        assert all(same(x, y) for x, y in zip(peer.result(), sent, strict=True))

    def test_queries_keys_and_values_that_were_packed_arrive(self, star: MakeStar) -> None:
        """They may leave from where they lie."""
        s = star(1)
        connection, peer = s.hub.connections[0], s.peers[0]
        sent = [packed_attend(rows, step) for step, rows in enumerate((1, 3, 4000, 7, 5000))]
        peer.start("hold", len(sent))
        for message in sent:
            connection.send(message)
        assert connection.receive(WAIT_S) == Accepted(len(sent))
        assert all(same(x, y) for x, y in zip(peer.result(), sent, strict=True))

    def test_poll_never_waits(self, star: MakeStar) -> None:
        s = star(1)
        assert s.hub.connections[0].poll() is None
        s.peers[0].send(Accepted(1))
        received = None
        while received is None:
            received = s.hub.connections[0].poll()
        assert received == Accepted(1)
        assert s.hub.connections[0].poll() is None

    def test_a_deadline_names_the_peer_and_leaves_the_connection_usable(
        self, star: MakeStar
    ) -> None:
        s = star(2)
        assert code_of(lambda: s.hub.connections[1].receive(0.0), s.names[1]) == TIMEOUT
        assert code_of(lambda: s.hub.receive_any(0.01), *s.names) == TIMEOUT
        s.peers[1].send(Accepted(7))
        assert s.hub.connections[1].receive(WAIT_S) == Accepted(7)

    def test_the_hub_receives_from_whoever_answers(self, star: MakeStar) -> None:
        s = star(3)
        for peer in s.peers:
            peer.start("answer", 4)
        for step in range(4):
            for connection in s.hub.connections:
                connection.send(attend(3, step=step))
        got: list[list[int]] = [[], [], []]
        for _ in range(12):
            index, message = s.hub.receive_any(WAIT_S)
            assert same(message, answer(attend(3, step=message.step)))  # type: ignore[union-attr]
            got[index].append(message.step)  # type: ignore[union-attr]
        assert got == [[0, 1, 2, 3]] * 3
        assert [peer.result() for peer in s.peers] == [4, 4, 4]

    def test_asking_one_keeps_what_came_from_the_others(self, star: MakeStar) -> None:
        s = star(2)
        s.peers[0].send(Accepted(10))
        s.peers[1].send(Accepted(20))
        s.peers[0].send(Accepted(11))
        assert s.hub.connections[1].receive(WAIT_S) == Accepted(20)
        assert s.hub.connections[0].receive(WAIT_S) == Accepted(10)
        assert s.hub.receive_any(WAIT_S) == (0, Accepted(11))

    def test_what_was_sent_before_closing_is_received_first(self, star: MakeStar) -> None:
        s = star(1)
        connection, peer = s.hub.connections[0], s.peers[0]
        last = answer(attend(400))
        peer.send(Accepted(1))
        peer.send(last)
        peer.close()
        peer.close()
        assert connection.receive(WAIT_S) == Accepted(1)
        assert same(connection.receive(WAIT_S), last)
        for _ in range(2):
            assert code_of(lambda: connection.receive(WAIT_S), s.names[0]) == CLOSED
            assert code_of(connection.poll, s.names[0]) == CLOSED
            assert code_of(lambda: connection.send(Close(1)), s.names[0]) == CLOSED

    def test_the_s_worker_may_close_too(self, star: MakeStar) -> None:
        s = star(1)
        s.hub.connections[0].send(Open(1, 2))
        s.hub.connections[0].close()
        assert s.peers[0].receive(WAIT_S) == Open(1, 2)
        assert code_of(lambda: s.peers[0].receive(WAIT_S), "S-worker") == CLOSED

    def test_own_closing_ends_everything_at_once(self, star: MakeStar) -> None:
        s = star(1)
        connection = s.hub.connections[0]
        s.peers[0].send(Accepted(1))
        connection.close()
        connection.close()
        assert code_of(lambda: connection.receive(None), "closed on this side") == CLOSED
        assert code_of(connection.poll, "closed on this side") == CLOSED
        assert code_of(lambda: connection.send(Close(1)), "closed on this side") == CLOSED

    @pytest.mark.parametrize("who", ["peer", "another thread of this side"])
    def test_closing_wakes_the_one_who_waits(self, star: MakeStar, who: str) -> None:
        s = star(1)
        codes: list[str] = []
        waiting = threading.Thread(
            target=lambda: codes.append(code_of(lambda: s.hub.connections[0].receive(None))),
            daemon=True,
        )
        waiting.start()
        (s.peers[0] if who == "peer" else s.hub.connections[0]).close()
        waiting.join(WAIT_S)
        assert codes == [CLOSED]

    def test_the_hub_tells_each_closed_peer_once_and_serves_the_others(
        self, star: MakeStar
    ) -> None:
        s = star(2)
        s.peers[0].close()
        assert code_of(lambda: s.hub.receive_any(WAIT_S), s.names[0]) == CLOSED
        s.peers[1].send(Accepted(20))
        assert s.hub.receive_any(WAIT_S) == (1, Accepted(20))
        assert code_of(lambda: s.hub.receive_any(0.01), s.names[1]) == TIMEOUT
        s.peers[1].close()
        assert code_of(lambda: s.hub.receive_any(WAIT_S), s.names[1]) == CLOSED
        assert code_of(lambda: s.hub.receive_any(None), *s.names) == CLOSED

    def test_the_hub_forgets_a_connection_that_it_closed(self, star: MakeStar) -> None:
        s = star(2)
        s.peers[0].send(Accepted(10))
        s.hub.connections[0].close()
        s.peers[1].send(Accepted(20))
        assert s.hub.receive_any(WAIT_S) == (1, Accepted(20))
        assert code_of(lambda: s.hub.receive_any(0.01), s.names[1]) == TIMEOUT

    def test_received_arrays_hold_as_long_as_anybody_does(self, star: MakeStar) -> None:
        """Several answers of one connection are in use at once, as two lanes do it."""
        s = star(1)
        connection = s.hub.connections[0]
        s.peers[0].start("answer", 24)
        for step in range(24):
            connection.send(attend(2 if step % 3 else 300, step=step))
        received = [connection.receive(WAIT_S) for _ in range(24)]
        rows = [x.o[1:2] for x in received[:6]]  # type: ignore[union-attr]
        assert all(
            same(x, answer(attend(2 if i % 3 else 300, step=i))) for i, x in enumerate(received)
        )
        del received
        s.peers[0].result()
        s.peers[0].start("answer", 8)
        for step in range(8):
            connection.send(attend(300, step=step + 100))
            connection.receive(WAIT_S)
        for i, row in enumerate(rows):
            assert same(row, answer(attend(2 if i % 3 else 300, step=i)).o[1:2])

    def test_lent_arrays_may_be_overwritten_once_the_answer_is_here(self, star: MakeStar) -> None:
        s = star(1)
        s.peers[0].start("answer", 8)
        lent, results = attend(700), []
        for step in range(8):
            lent.q[:] = step
            s.hub.connections[0].send(Attend(step, 0, 0, lent.q, lent.k, lent.v))
            results.append(s.hub.connections[0].receive(WAIT_S))
        assert [set(result.o.ravel().tolist()) for result in results] == [  # type: ignore[union-attr]
            {step + 1} for step in range(8)
        ]

    def test_received_arrays_are_aligned_for_kernels(self, star: MakeStar) -> None:
        s = star(1)
        s.peers[0].start("answer", 2)
        for num_tokens in (3, 300):
            s.hub.connections[0].send(attend(num_tokens, dtype=np.float32))
            received = s.hub.connections[0].receive(WAIT_S)
            assert received.o.flags.aligned  # type: ignore[union-attr]

    def test_slices_travel(self, star: MakeStar) -> None:
        s = star(1)
        message = attend(300)
        q, k, v = message.q[100:250], message.k[::2], message.v[100:250]
        s.hub.connections[0].send(Attend(1, 0, 0, q, k, v))
        assert same(s.peers[0].receive(WAIT_S), Attend(1, 0, 0, q.copy(), k.copy(), v.copy()))

    def test_sending_never_waits_for_the_peer(self, star: MakeStar) -> None:
        s = star(1)
        sent = [attend(1000, step=step) for step in range(8)]  # 2 MB each
        for message in sent:
            s.hub.connections[0].send(message)
        s.peers[0].start("hold", 8)
        assert s.hub.connections[0].receive(WAIT_S) == Accepted(8)
        assert all(same(x, y) for x, y in zip(s.peers[0].result(), sent, strict=True))

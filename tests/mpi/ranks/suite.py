"""The transport suite over MPI: the hub is this rank's, the peers are the other ranks'."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from messages_for_tests import attend, same
from transport_suite import WAIT_S, MakeStar, TransportSuite, code_of

from fastdecode.wire.messages import PROTOCOL_VERSION, Accepted, Open
from fastdecode.wire.mpi.hub import FROM_R_WORKER, MpiHub


@pytest.fixture
def star(mpi: Any) -> Iterator[MakeStar]:
    made: list[SimpleNamespace] = []

    def make(num_peers: int) -> SimpleNamespace:
        if num_peers > len(mpi.puppets):
            pytest.skip(f"needs {num_peers} R-workers")
        line = next(mpi.lines)
        peers = mpi.puppets[:num_peers]
        for peer in peers:
            peer.call("open", line)
        names = [f"rank {rank}" for rank in range(1, 1 + num_peers)]
        hub: MpiHub[Any, Any] = MpiHub(mpi.job, FROM_R_WORKER)
        for rank, name in enumerate(names, 1):
            hub.connect(rank, f"R-worker {name}", line=line)
        made.append(SimpleNamespace(hub=hub, peers=peers, names=names))
        return made[-1]

    yield make
    for s in made:
        s.hub.close()
        for peer in s.peers:
            peer.close()


class TestMpi(TransportSuite):
    def test_a_large_message_leaves_while_the_sender_computes(
        self, star: MakeStar, mpi: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The sender makes no MPI call between sending and the receiver's word that all is there.
        A mistake in the background does not end what is done there."""
        s = star(1)
        failed = threading.Event()

        def advance() -> None:
            failed.set()
            raise TypeError("a mistake of ours")

        with monkeypatch.context() as patch:
            patch.setattr(mpi.job, "advance", advance)
            assert failed.wait(WAIT_S)
            failed.clear()
            assert failed.wait(WAIT_S), "the mistake has ended the pump"
        message = attend(4000)
        s.peers[0].start("hold_quietly", 1)
        s.hub.connections[0].send(message)
        assert same(s.peers[0].result()[0], message)

    def test_a_large_message_arrives_while_the_receiver_computes(
        self, star: MakeStar, mpi: Any
    ) -> None:
        """The receiver makes no MPI call after its answer to the message before."""
        s = star(1)
        s.peers[0].start("answer", 1)
        connection = s.hub.connections[0]
        connection.send(attend(1))
        connection.receive(WAIT_S)
        assert s.peers[0].result() == 1
        connection.send(attend(4000, step=1))
        end = time.monotonic() + WAIT_S
        while mpi.job.in_flight and time.monotonic() < end:
            assert connection.poll() is None
        assert not mpi.job.in_flight
        assert same(s.peers[0].receive(WAIT_S), attend(4000, step=1))

    def test_messages_for_the_other_side_are_refused(self, star: MakeStar) -> None:
        s = star(1)
        s.peers[0].send(Open(1, 1))
        assert (
            code_of(lambda: s.hub.connections[0].receive(WAIT_S), s.names[0], "Open")
            == "protocol_error"
        )
        # The other direction works still, so that the peer can be told.
        s.hub.connections[0].send(Open(2, 2))
        assert s.peers[0].receive(WAIT_S) == Open(2, 2)

    def test_damage_is_refused(self, star: MakeStar) -> None:
        s = star(1)
        s.peers[0].call("send_raw", b"FDN" + bytes([PROTOCOL_VERSION]) + b" garbage")
        assert (
            code_of(lambda: s.hub.receive_any(WAIT_S), s.names[0], "broke the protocol")
            == "protocol_error"
        )
        assert code_of(lambda: s.hub.receive_any(0.01), s.names[0]) == "connection_closed"

    def test_two_threads_may_use_two_hubs(self, star: MakeStar) -> None:
        first, second = star(1), star(1)
        assert first.peers == second.peers
        second.peers[0].start("answer", 30)
        thread = threading.Thread(
            target=lambda: [first.hub.connections[0].poll() for _ in range(3000)]
        )
        thread.start()
        for step in range(30):
            second.hub.connections[0].send(attend(100, step=step))
            assert np.all(
                second.hub.connections[0].receive(WAIT_S).o == attend(100, step=step).q + 1
            )  # type: ignore
        thread.join()
        assert second.peers[0].result() == 30
        second.peers[0].send(Accepted(3))
        assert second.hub.receive_any(WAIT_S) == (0, Accepted(3))

"""The ZeroMQ transport, its R-workers' sides in processes of their own: the
suite, access, deaths."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from messages_for_tests import attend, same, to_r_worker
from mpi_launch import Running, running
from puppet import Puppet, Puppets
from transport_suite import WAIT_S, MakeStar, TransportSuite, code_of

zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

from fastdecode.core.errors import ConfigError  # noqa: E402
from fastdecode.wire.codec import Codec  # noqa: E402
from fastdecode.wire.messages import Accepted, Open  # noqa: E402
from fastdecode.wire.transport import CLOSED, TIMEOUT  # noqa: E402
from fastdecode.wire.zmq.hub import ZmqHub, ZmqListener  # noqa: E402
from fastdecode.wire.zmq.keys import ClusterKey  # noqa: E402

HELLO = to_r_worker()[0]
ANY_PORT = "tcp://127.0.0.1:*"


class Stage:
    """Three puppets, and hubs that are closed at the end of a test."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.jobs: list[Running] = []
        self.puppets: list[Puppet] = []

    def start(self) -> None:
        scratch = self._stack.enter_context(running(["sleep", "0"]))
        path = scratch.directory / "puppets"
        puppets = Puppets(path, [0, 1, 2])
        self._stack.callback(puppets.close)
        script = str(Path(__file__).with_name("zmq_puppet.py"))
        for number in range(3):
            command = [sys.executable, script, str(path), str(number)]
            self.jobs.append(self._stack.enter_context(running(command)))
        self.puppets = puppets.wait()

    def stop(self) -> None:
        self._stack.close()
        self.__init__()  # type: ignore[misc]

    def restart_if_dead(self) -> None:
        if not all(len(job.processes()) == 1 for job in self.jobs) or not self.jobs:
            self.stop()
            self.start()


@pytest.fixture(scope="module")
def whole_stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.stop()


@pytest.fixture
def stage(whole_stage: Stage) -> Stage:
    whole_stage.restart_if_dead()
    return whole_stage


@pytest.fixture
def hub() -> Iterator[ZmqHub]:
    with contextlib.closing(ZmqHub()) as made:
        yield made


def connect(hub: ZmqHub, puppet: Puppet, silence_s: float = 5.0) -> tuple[Any, str]:
    """A connection over which Hello has been said."""
    address = puppet.call("open", ANY_PORT, None, silence_s)
    connection = hub.add(address)
    puppet.start("accept")
    connection.send(HELLO)
    assert same(puppet.result(), HELLO)
    return connection, address


class TestZmq(TransportSuite):
    @pytest.fixture
    def star(self, stage: Stage, hub: ZmqHub) -> MakeStar:
        def make(num_peers: int) -> SimpleNamespace:
            peers = stage.puppets[:num_peers]
            names = [connect(hub, peer)[1] for peer in peers]
            return SimpleNamespace(hub=hub, peers=peers, names=names)

        return make


def test_a_port_in_use_is_named(stage: Stage) -> None:
    address = stage.puppets[0].call("open", ANY_PORT, None, 5.0)
    with pytest.raises(ConfigError, match="in use"):
        ZmqListener(address, "second")


def greet(hub: ZmqHub, address: str) -> None:
    """A refused key may be known before Hello is sent, or only afterwards."""
    connection = hub.add(address)
    connection.send(HELLO)
    connection.receive(WAIT_S)


def test_members_of_the_cluster_talk_and_others_do_not(stage: Stage, tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        ClusterKey.create(tmp_path / name)
    ours, theirs = ClusterKey.read(tmp_path / "ours"), ClusterKey.read(tmp_path / "theirs")
    address = stage.puppets[0].call("open", ANY_PORT, str(tmp_path / "ours"), 5.0)
    stage.puppets[0].start("accept")
    for key in (theirs, None, ClusterKey(ours.public, theirs.secret)):
        with contextlib.closing(ZmqHub(key)) as hub:
            assert code_of(lambda hub=hub: greet(hub, address), "can't reach", "--key") == CLOSED  # type: ignore[misc]
    # Knowing the R-worker's public key isn't enough: the S-worker has to prove the secret, too.
    impostor_public, impostor_secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.curve_serverkey, dealer.curve_publickey = ours.public, impostor_public
        dealer.curve_secretkey, dealer.linger = impostor_secret, 0
        dealer.connect(address)
        dealer.send(Codec().encode(HELLO).head)
        assert not dealer.poll(500)
    member = ZmqHub(ours)
    connection = member.add(address)
    connection.send(HELLO)
    assert same(stage.puppets[0].result(), HELLO)
    stage.puppets[0].start("answer", 1)
    connection.send(attend(200))
    assert np.all(connection.receive(WAIT_S).o == attend(200).q + 1)
    member.close()


def test_what_breaks_the_protocol_ends_the_connection(stage: Stage, hub: ZmqHub) -> None:
    connection, _ = connect(hub, stage.puppets[0])
    stage.puppets[0].send(Open(1, 1))
    assert (
        code_of(lambda: connection.receive(WAIT_S), "broke the protocol", "Open")
        == "protocol_error"
    )
    # The other direction works still, so that the peer can be told.
    connection.send(Open(2, 2))
    assert stage.puppets[0].receive(WAIT_S) == Open(2, 2)


# Deaths.


def test_an_r_worker_that_was_killed_is_noticed_at_once(stage: Stage) -> None:
    """Heartbeats don't tell it within the time that the test waits."""
    with contextlib.closing(ZmqHub(silence_s=10 * WAIT_S)) as hub:
        connections = [connect(hub, puppet)[0] for puppet in stage.puppets]
        stage.puppets[1].send(Accepted(5))
        assert hub.receive_any(WAIT_S) == (1, Accepted(5))
        connections[1].send(attend(4000))
        stage.puppets[1].kill()
        assert code_of(lambda: hub.receive_any(WAIT_S), connections[1].peer, "is lost") == CLOSED
        assert code_of(lambda: connections[1].send(attend(1)), connections[1].peer) == CLOSED
        for worker in (0, 2):
            stage.puppets[worker].start("answer", 1)
            connections[worker].send(attend(2))
            assert hub.receive_any(WAIT_S)[0] == worker


def test_a_silent_r_worker_is_lost(stage: Stage) -> None:
    with contextlib.closing(ZmqHub(silence_s=0.4)) as hub:
        connection, _ = connect(hub, stage.puppets[0], silence_s=5.0)
        os.kill(stage.puppets[0].pid, signal.SIGSTOP)
        try:
            assert (
                code_of(lambda: connection.receive(WAIT_S), "is lost", "start it again") == CLOSED
            )
        finally:
            stage.puppets[0].kill()


def test_an_idle_s_worker_is_not_lost(stage: Stage, hub: ZmqHub) -> None:
    """Heartbeats need no Python: neither side calls anything while several
    times the silence goes by."""
    connection, _ = connect(hub, stage.puppets[0], silence_s=1.0)
    assert code_of(lambda: stage.puppets[0].receive(3.0), "S-worker") == TIMEOUT
    connection.send(Open(1, 1))
    assert stage.puppets[0].receive(WAIT_S) == Open(1, 1)


S_WORKER = """
import signal, sys
from fastdecode.wire.zmq.hub import ZmqHub
from messages_for_tests import to_r_worker
ZmqHub().add(sys.argv[1]).send(to_r_worker()[0])
signal.pause()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_r_worker_notices_that_its_s_worker_is_gone(how: int, hub: ZmqHub) -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    with (
        contextlib.closing(ZmqListener(ANY_PORT, "here", silence_s=0.5)) as listener,
        running([sys.executable, "-c", S_WORKER, listener.address], PYTHONPATH=paths) as job,
    ):
        index, hello = listener.receive_any(WAIT_S)
        connection = listener.connections[index]
        assert same(hello, HELLO)
        job.processes()[0].send_signal(how)
        assert code_of(lambda: connection.receive(WAIT_S), "is lost") == CLOSED
        connection.close()  # its place is free for the next
        hub.add(listener.address).send(HELLO)
        assert same(listener.receive_any(WAIT_S)[1], HELLO)


def test_an_r_worker_may_come_later_and_others_may_join(stage: Stage, hub: ZmqHub) -> None:
    with socket.socket() as kept:
        # Nobody else is given the port meanwhile, and who sets this option, too, may listen there.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{kept.getsockname()[1]}"
        connection = hub.add(address)
        connection.send(HELLO)
        assert code_of(lambda: hub.receive_any(0.2), address) == TIMEOUT
        stage.puppets[0].call("open", address, None, 5.0)
    stage.puppets[0].start("accept")
    assert same(stage.puppets[0].result(), HELLO)
    connect(hub, stage.puppets[1])
    stage.puppets[1].send(Accepted(1))
    assert hub.receive_any(WAIT_S) == (1, Accepted(1))

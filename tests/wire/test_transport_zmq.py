"""The ZeroMQ transport, its R-workers' sides in processes of their own: the
suite, access, strangers, deaths."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
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
from fastdecode.wire.messages import PROTOCOL_VERSION, Accepted, Failed, OpenSequence  # noqa: E402
from fastdecode.wire.transport import CLOSED, TIMEOUT  # noqa: E402
from fastdecode.wire.zmq.connection import ZmqConnection  # noqa: E402
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
    made = ZmqHub()
    yield made
    made.close()


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


def greet(connection: ZmqConnection) -> None:
    """A refused key may be known before Hello is sent, or only afterwards."""
    connection.send(HELLO)
    connection.receive(WAIT_S)


def test_members_of_the_cluster_talk_and_others_do_not(stage: Stage, tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        ClusterKey.create(tmp_path / name)
    ours, theirs = ClusterKey.read(tmp_path / "ours"), ClusterKey.read(tmp_path / "theirs")
    address = stage.puppets[0].call("open", ANY_PORT, str(tmp_path / "ours"), 5.0)
    stage.puppets[0].start("accept")
    for key in (theirs, None, ClusterKey(ours.public, theirs.secret)):
        stranger = ZmqHub(key)
        connection = stranger.add(address)
        assert code_of(lambda c=connection: greet(c), "is lost", "--key") == CLOSED  # type: ignore[misc]
        stranger.close()
    # Knowing the R-worker's public key isn't enough: the S-worker has to prove
    # that it has the secret too.
    impostor_public, impostor_secret = zmq.curve_keypair()
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.curve_serverkey, dealer.curve_publickey = ours.public, impostor_public
        dealer.curve_secretkey, dealer.linger = impostor_secret, 0
        dealer.connect(address)
        dealer.send(Codec().encode(HELLO).head)
        assert not dealer.poll(500)
    context.term()
    member = ZmqHub(ours)
    connection = member.add(address)
    connection.send(HELLO)
    assert same(stage.puppets[0].result(), HELLO)
    stage.puppets[0].start("answer", 1)
    connection.send(attend(200))
    assert np.all(connection.receive(WAIT_S).o == attend(200).q + 1)
    member.close()


# Strangers at the port.


@contextlib.contextmanager
def stranger(address: str, socket_type: int) -> Iterator[Any]:
    context = zmq.Context()
    with context.socket(socket_type) as made:
        made.linger = 1000
        made.connect(address)
        yield made
    context.term()


def test_garbage_is_dropped_and_the_connection_goes_on(stage: Stage, hub: ZmqHub) -> None:
    connection, address = connect(hub, stage.puppets[0])
    host, port = address.removeprefix("tcp://").split(":")
    rng = np.random.default_rng(0)
    for size in (1, 10, 64, 1000, 100_000):
        with socket.create_connection((host, int(port))) as raw, contextlib.suppress(OSError):
            raw.sendall(rng.bytes(size))
    head = Codec().encode(OpenSequence(1, 1)).head
    damaged = bytearray(head)
    damaged[-1] = 0xC1  # which msgpack never uses
    with stranger(address, zmq.DEALER) as dealer:
        for junk in (
            b"",
            b"\\0",
            b"x",
            b"FDN",
            rng.bytes(500),
            head,
            bytes(damaged),
            head + b"more",
            rng.bytes(1 << 20),
        ):
            dealer.send(junk)
        dealer.send_multipart([b"several", b"frames", *[b"x"] * 50])
    with stranger(address, zmq.REQ) as req:
        req.send(b"hello?")
    with stranger(address, zmq.PUB) as pub:
        pub.send(b"hello?")
    stage.puppets[0].start("answer", 20)
    for step in range(20):
        connection.send(attend(100, step=step))
        assert connection.receive(WAIT_S).step == step
    assert stage.puppets[0].result() == 20


def test_garbage_before_anybody_says_hello(stage: Stage, hub: ZmqHub) -> None:
    address = stage.puppets[0].call("open", ANY_PORT, None, 5.0)
    stage.puppets[0].start("accept")
    with stranger(address, zmq.DEALER) as dealer:
        for junk in (b"", b"x", b"FDWP" * 20, Codec().encode(OpenSequence(1, 1)).head):
            dealer.send(junk)
    connection = hub.add(address)
    connection.send(HELLO)
    assert same(stage.puppets[0].result(), HELLO)


def test_another_s_worker_is_told_that_this_one_is_busy(stage: Stage, hub: ZmqHub) -> None:
    connection, address = connect(hub, stage.puppets[0])
    second = ZmqHub()
    try:
        other = second.add(address)
        other.send(HELLO)
        stage.puppets[0].start("answer", 1)
        answered = other.receive(WAIT_S)
        assert (
            isinstance(answered, Failed)
            and answered.code == "busy"
            and "another S-worker" in answered.message
        )
        connection.send(attend(1))
        assert connection.receive(WAIT_S).step == 0
        # Once the first has closed, there is room.
        connection.close()
        assert code_of(lambda: stage.puppets[0].receive(WAIT_S), "S-worker") == CLOSED
        stage.puppets[0].close()
        stage.puppets[0].start("accept")
        third = second.add(address)
        third.send(HELLO)
        assert same(stage.puppets[0].result(), HELLO)
    finally:
        second.close()


def test_a_peer_of_another_version_is_told_both(stage: Stage, hub: ZmqHub) -> None:
    address = stage.puppets[0].call("open", ANY_PORT, None, 5.0)
    stage.puppets[0].start("accept")
    head = bytearray(Codec().encode(HELLO).head)
    head[3] = 77
    with stranger(address, zmq.DEALER) as dealer:
        dealer.send(bytes(head))
        assert dealer.poll(int(WAIT_S * 1000))
        answered = Codec().decode(np.frombuffer(dealer.recv(), np.uint8))
    assert isinstance(answered, Failed) and answered.code == "protocol_version"
    assert f"version 77, this side {PROTOCOL_VERSION}" in answered.message
    # And is still there for others.
    hub.add(address).send(HELLO)
    assert same(stage.puppets[0].result(), HELLO)


def test_what_breaks_the_protocol_ends_the_connection(stage: Stage, hub: ZmqHub) -> None:
    connection, _ = connect(hub, stage.puppets[0])
    stage.puppets[0].send(OpenSequence(1, 1))
    assert (
        code_of(lambda: connection.receive(WAIT_S), "broke the protocol", "OpenSequence")
        == "protocol_error"
    )
    # The other direction works still, so that the peer can be told.
    connection.send(OpenSequence(2, 2))
    assert stage.puppets[0].receive(WAIT_S) == OpenSequence(2, 2)


# Deaths.


def death_of(puppet: Puppet, signal_number: int) -> Callable[[], None]:
    return lambda: os.kill(puppet.pid, signal_number)


@pytest.fixture
def patient_hub() -> Iterator[ZmqHub]:
    """Whose heartbeats don't tell it that anybody is lost."""
    with contextlib.closing(ZmqHub(silence_s=10 * WAIT_S)) as made:
        yield made


def test_an_r_worker_that_was_killed_is_noticed_at_once(stage: Stage, patient_hub: ZmqHub) -> None:
    hub = patient_hub
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
    hub = ZmqHub(silence_s=0.4)
    try:
        connection, _ = connect(hub, stage.puppets[0], silence_s=5.0)
        os.kill(stage.puppets[0].pid, signal.SIGSTOP)
        assert code_of(lambda: connection.receive(WAIT_S), "is lost", "silent") == CLOSED
    finally:
        stage.puppets[0].kill()
        hub.close()


def test_an_idle_s_worker_is_not_lost(stage: Stage, hub: ZmqHub) -> None:
    """Heartbeats need no Python: neither side calls anything while several
    times the silence goes by."""
    connection, _ = connect(hub, stage.puppets[0], silence_s=1.0)
    assert code_of(lambda: stage.puppets[0].receive(3.0), "S-worker") == TIMEOUT
    connection.send(OpenSequence(1, 1))
    assert stage.puppets[0].receive(WAIT_S) == OpenSequence(1, 1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_r_worker_notices_that_its_s_worker_is_gone(stage: Stage, how: int) -> None:
    """The S-worker is a puppet's process this time: a hub over there, a listener here."""
    listener = ZmqListener(ANY_PORT, "here", silence_s=0.5)
    script = (
        "import signal, sys; from fastdecode.wire.zmq.hub import ZmqHub; from messages_for_tests "
        "import to_r_worker; "
    )
    script += "ZmqHub().add(sys.argv[1]).send(to_r_worker()[0]); signal.pause()"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    try:
        with running([sys.executable, "-c", script, listener.address], PYTHONPATH=paths) as job:
            index, hello = listener.receive_any(WAIT_S)
            connection = listener.connections[index]
            assert same(hello, HELLO)
            job.processes()[0].send_signal(how)
            assert code_of(lambda: connection.receive(WAIT_S), "is lost") == CLOSED
            connection.close()
            # It is free for the next.
            hub = ZmqHub()
            hub.add(listener.address).send(HELLO)
            assert same(listener.receive_any(WAIT_S)[1], HELLO)
            hub.close()
    finally:
        listener.close()


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

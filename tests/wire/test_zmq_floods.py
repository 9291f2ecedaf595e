"""A peer that floods an R-worker's port before it has proved the key: memory stays
bounded, and a member is served."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from messages_for_tests import same, to_r_worker

zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

from fastdecode.core.errors import ProtocolError  # noqa: E402
from fastdecode.wire.codec import Codec  # noqa: E402
from fastdecode.wire.messages import Accepted  # noqa: E402
from fastdecode.wire.zmq.access import ClusterKey, name_key  # noqa: E402
from fastdecode.wire.zmq.doors import (  # noqa: E402
    LEAST_AGE_S,
    MOST_SESSIONS,
    MOST_SESSIONS_OF_A_HOST,
    ProvingDoor,
)
from fastdecode.wire.zmq.hub import ZmqHub  # noqa: E402
from fastdecode.wire.zmq.listener import ZmqListener  # noqa: E402
from fastdecode.wire.zmq.proof import Challenge  # noqa: E402
from fastdecode.wire.zmq.strangers import MOST_ANSWERS  # noqa: E402

HELLO = to_r_worker()[0]
WAIT_S = 20.0
PART_BYTES = 1 << 20
NUM_PARTS = 300
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY" + b"\x0bSocket-Type\0\0\0\x06DEALER"


def a_key(directory: Path, security: str) -> ClusterKey:
    ClusterKey.create(directory / "key", security)
    return ClusterKey.read(directory / "key")


def check_it_serves(listener: ZmqListener, key: ClusterKey | None) -> None:
    with contextlib.closing(ZmqHub(key)) as hub:
        connection = hub.add(listener.address)
        connection.send(HELLO)
        assert hub.reach(WAIT_S) == {}
        index, hello = listener.receive_any(WAIT_S)
        assert same(hello, HELLO)
        listener.connections[index].send(Accepted(3))
        assert connection.receive(WAIT_S) == Accepted(3)


def sent_without_end(address: str) -> int:
    """Parts of one message that is never complete, until the other end hangs up."""
    host, port = address.removeprefix("tcp://").split(":")
    part = bytes([3]) + struct.pack(">Q", PART_BYTES) + bytes(PART_BYTES)
    num_sent = 0
    with (
        socket.create_connection((host, int(port)), timeout=WAIT_S) as raw,
        contextlib.suppress(OSError),
    ):
        raw.sendall(GREETING)
        raw.recv(1000)
        raw.sendall(bytes([4, len(READY)]) + READY)
        while num_sent < NUM_PARTS:
            raw.sendall(part)
            num_sent += 1
    return num_sent


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
def test_a_message_without_end_is_not_buffered(tmp_path: Path, security: str) -> None:
    key = a_key(tmp_path, security)
    process = psutil.Process()
    with contextlib.closing(ZmqListener("tcp://127.0.0.1:*", "r", key=key)) as listener:
        before = process.memory_info().rss
        assert sent_without_end(listener.address) < NUM_PARTS
        assert process.memory_info().rss - before < (NUM_PARTS * PART_BYTES) // 4
        check_it_serves(listener, key)


def test_parts_of_a_peer_that_recorded_the_password_are_not_kept(tmp_path: Path) -> None:
    key = a_key(tmp_path, "authenticate")
    context = zmq.Context()
    with (
        contextlib.closing(ZmqListener("tcp://127.0.0.1:*", "r", key=key)) as listener,
        context.socket(zmq.DEALER) as stranger,
    ):
        stranger.linger = 0
        name_key(stranger, key)
        stranger.connect(listener.address)
        for _ in range(20):
            stranger.send_multipart([b"x" * 100] * 5_000)
        assert listener.accept(0.2) is None
        check_it_serves(listener, key)
    context.term()


def test_a_peer_that_reads_no_answers_gets_few() -> None:
    """What waits for it would stay in memory."""
    context = zmq.Context()
    with contextlib.closing(ZmqListener("tcp://127.0.0.1:*", "r")) as listener:
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(listener.address)
            for _ in range(20 * MOST_ANSWERS):
                stranger.send(Codec().encode(HELLO, 5).head[:-1] + b"x")
            check_it_serves(listener, None)
            num_answers = 0
            while stranger.poll(100):
                stranger.recv()
                num_answers += 1
        assert MOST_ANSWERS <= num_answers <= 3 * MOST_ANSWERS  # of those of a second, or two
    context.term()


class Frame:
    """A challenge that came from a host."""

    def __init__(self, data: bytes, host: str) -> None:
        self.buffer, self._host = memoryview(data), host

    def get(self, name: str) -> str:
        assert name == "Peer-Address"
        return self._host


class Sent:
    """A socket that keeps what is sent, by identity."""

    def __init__(self) -> None:
        self.proofs: dict[bytes, bytes] = {}
        self._identity = b""

    def send(self, data: Any, *args: Any, **options: Any) -> None:
        if len(data) < 20:
            self._identity = bytes(data)
        else:
            self.proofs[self._identity] = bytes(data)


class Doorway:
    """A door at which members and strangers knock, without a network."""

    def __init__(self, key: ClusterKey) -> None:
        self.key = key.for_proofs
        self.now_s = 0.0
        self.socket: Any = Sent()
        self.door = ProvingDoor(self.socket, self.key, lambda _: None, lambda: self.now_s)

    def knock(self, identity: bytes, host: str) -> Challenge:
        challenge = Challenge(self.key)
        frame: Any = Frame(challenge.message, host)
        assert self.door.take(identity, [frame]) is None
        return challenge

    def is_admitted(self, identity: bytes, challenge: Challenge) -> bool:
        session = challenge.session(self.socket.proofs[identity])
        assert session is not None
        frames: Any = [Frame(session.tag(b"hello"), ""), Frame(b"hello", "")]
        try:
            return self.door.take(identity, frames) is frames[1]
        except ProtocolError:
            return False


@pytest.fixture
def doorway(tmp_path: Path) -> Doorway:
    return Doorway(a_key(tmp_path, "authenticate"))


def test_a_host_that_floods_displaces_its_own_sessions_alone(doorway: Doorway) -> None:
    member = doorway.knock(b"member", "10.0.0.1")
    for number in range(2 * MOST_SESSIONS):
        doorway.knock(b"s%d" % number, "10.0.0.2")
    assert doorway.door.num_sessions == MOST_SESSIONS_OF_A_HOST + 1
    assert doorway.is_admitted(b"member", member)


def test_young_sessions_stay_when_many_hosts_flood(doorway: Doorway) -> None:
    def flood(num_challenges: int) -> int:
        num_refused = 0
        for number in range(num_challenges):
            try:
                doorway.knock(b"s%d" % number, f"10.0.{number % 200}.2")
            except ProtocolError:
                num_refused += 1
        return num_refused

    member = doorway.knock(b"member", "10.0.0.1")
    assert flood(2 * MOST_SESSIONS) == MOST_SESSIONS + 1
    assert doorway.door.num_sessions == MOST_SESSIONS
    assert doorway.is_admitted(b"member", member)
    doorway.now_s = LEAST_AGE_S
    late = doorway.knock(b"late", "10.0.0.3")
    assert doorway.is_admitted(b"late", late) and doorway.door.num_sessions == MOST_SESSIONS


def test_a_refused_peer_is_not_answered_again(doorway: Doorway) -> None:
    junk: Any = [Frame(b"x", "10.0.0.2"), Frame(b"x", "10.0.0.2"), Frame(b"x", "10.0.0.2")]
    refused: Callable[[], Any] = lambda: doorway.door.take(b"s", junk)  # noqa: E731
    for _ in range(2):
        with pytest.raises(ProtocolError):
            refused()
    with pytest.raises(ProtocolError, match="was refused"):
        doorway.knock(b"s", "10.0.0.2")
    assert doorway.socket.proofs == {}

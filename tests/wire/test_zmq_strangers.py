"""What strangers send to an R-worker's port: it serves on, takes little memory, and says why it
refuses what speaks as we do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from messages_for_tests import attend, in_frames, same, to_r_worker
from transport_suite import WAIT_S, code_of

zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

from values import replace  # noqa: E402

from fastdecode.wire.codec import Codec  # noqa: E402
from fastdecode.wire.messages import (  # noqa: E402
    PROTOCOL_VERSION,
    Accepted,
    Failed,
    Inspect,
    Open,
)
from fastdecode.wire.traits import Role  # noqa: E402
from fastdecode.wire.transport import CLOSED, TIMEOUT, PeerLostError  # noqa: E402
from fastdecode.wire.zmq.hub import MAX_FRAME_BYTES, ZmqHub, ZmqListener  # noqa: E402
from fastdecode.wire.zmq.keys import ClusterKey  # noqa: E402

HELLO: Any = to_r_worker()[0]
SILENCE_S = 1.0
PART_BYTES = 1 << 20
NUM_PARTS = 300
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY" + b"\x0bSocket-Type\0\0\0\x06DEALER"


@pytest.fixture
def listener() -> Iterator[ZmqListener]:
    with contextlib.closing(ZmqListener("tcp://127.0.0.1:*", "r", silence_s=SILENCE_S)) as made:
        yield made


@pytest.fixture
def hub() -> Iterator[ZmqHub]:
    with contextlib.closing(ZmqHub()) as made:
        yield made


@contextlib.contextmanager
def stranger(address: str, kind: int = zmq.DEALER) -> Iterator[Any]:
    """A socket that is gone once all has left."""
    context = zmq.Context()
    with context.socket(kind) as made:
        made.sndhwm = 0
        made.connect(address)
        yield made
    context.term()


def raw_socket(address: str) -> socket.socket:
    host, port = address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def served(listener: ZmqListener, hub: ZmqHub) -> tuple[Any, int]:
    """An S-worker's connection over which Hello has been said, and its index at the R-worker."""
    connection = hub.add(listener.address)
    connection.send(HELLO)
    index, hello = listener.receive_any(WAIT_S)
    assert same(hello, HELLO)
    return connection, index


def check_it_serves(listener: ZmqListener, connection: Any, index: int) -> None:
    for step in range(5):
        connection.send(attend(100, step=step))
        got, message = listener.receive_any(WAIT_S)
        assert got == index and same(message, attend(100, step=step))
        listener.connections[index].send(Accepted(step))
        assert connection.receive(WAIT_S) == Accepted(step)


def test_garbage_is_dropped_before_and_after_the_hello(listener: ZmqListener, hub: ZmqHub) -> None:
    rng = np.random.default_rng(0)
    head = Codec().encode(Open(1, 1)).head
    junk = [b"", b"\0", b"x", b"FDN", rng.bytes(500), head, head[:-1] + b"\xc1", head + b"more"]

    def send_all() -> None:
        for size in (1, 10, 64, 1000, 100_000):
            with raw_socket(listener.address) as raw, contextlib.suppress(OSError):
                raw.sendall(rng.bytes(size))
        with stranger(listener.address) as dealer:
            for each in (*junk, rng.bytes(1 << 20)):
                dealer.send(each)
            dealer.send_multipart([b"several", b"frames", *[b"x"] * 50])
        with stranger(listener.address, zmq.REQ) as req:
            req.send(b"hello?")

    send_all()
    connection, index = served(listener, hub)
    send_all()
    check_it_serves(listener, connection, index)


def test_thousands_of_frames_nobody_reads_and_a_disconnect_do_no_harm(
    listener: ZmqListener, hub: ZmqHub
) -> None:
    """With a limit in libzmq, a connection that breaks with as many unread
    aborts the whole process."""
    connection, index = served(listener, hub)
    with stranger(listener.address) as dealer:
        for _ in range(2000):
            dealer.send(bytes(50_000))
    assert not threading.Event().wait(2 * SILENCE_S)  # heartbeats have come due meanwhile
    check_it_serves(listener, connection, index)


def test_a_frame_that_is_too_long_ends_the_strangers_connection_alone(
    listener: ZmqListener, hub: ZmqHub
) -> None:
    connection, index = served(listener, hub)
    with stranger(listener.address) as dealer:
        dealer.linger = 0
        dealer.send(bytes(2 * MAX_FRAME_BYTES))
        assert code_of(lambda: listener.receive_any(0.5)) == TIMEOUT
    check_it_serves(listener, connection, index)


def test_whoever_never_shakes_hands_is_hung_up_on(listener: ZmqListener, hub: ZmqHub) -> None:
    connection, index = served(listener, hub)
    with raw_socket(listener.address) as raw:
        while raw.recv(1000):
            pass
    check_it_serves(listener, connection, index)


def test_a_message_without_end_is_not_buffered_where_there_is_a_key(tmp_path: Path) -> None:
    ClusterKey.create(tmp_path / "key")
    key = ClusterKey.read(tmp_path / "key")
    process, num_sent = psutil.Process(), 0
    part = bytes([3]) + struct.pack(">Q", PART_BYTES) + bytes(PART_BYTES)
    with contextlib.closing(ZmqListener("tcp://127.0.0.1:*", "r", key=key)) as listener:
        before = process.memory_info().rss
        with raw_socket(listener.address) as raw, contextlib.suppress(OSError):
            raw.sendall(GREETING)
            raw.recv(1000)
            raw.sendall(bytes([4, len(READY)]) + READY)
            while num_sent < NUM_PARTS:
                raw.sendall(part)
                num_sent += 1
        assert num_sent < NUM_PARTS
        assert process.memory_info().rss - before < (NUM_PARTS * PART_BYTES) // 4
        with contextlib.closing(ZmqHub(key)) as hub:
            check_it_serves(listener, *served(listener, hub))


@pytest.mark.parametrize("damage", [lambda q, k, v: [q, k], lambda q, k, v: [q[:-1], k, v]])
def test_arrays_that_do_not_fit_end_the_connection(listener: ZmqListener, damage: Any) -> None:
    with stranger(listener.address) as peer:
        peer.send_multipart(in_frames(HELLO))
        index, _ = listener.receive_any(WAIT_S)
        head, *arrays = in_frames(attend(3000))
        peer.send_multipart([head, *damage(*arrays)])
        with pytest.raises(PeerLostError, match="broke the protocol: Attend") as caught:
            listener.receive_any(WAIT_S)
        assert (caught.value.index, caught.value.code) == (index, "protocol_error")
        for message in (HELLO, Open(1, 2)):  # over another connection
            peer.send_multipart(in_frames(message))
            assert same(listener.receive_any(WAIT_S)[1], message)


def refused(connection: Any, greeting: Any, listener: ZmqListener) -> str:
    connection.send(greeting)
    assert code_of(lambda: listener.receive_any(0.3)) == TIMEOUT
    answer = connection.receive(WAIT_S)
    assert isinstance(answer, Failed) and answer.code == "busy"
    return answer.message


def test_peers_are_accepted_by_role_so_many_of_each(hub: ZmqHub) -> None:
    most = {Role.S_WORKER: 2, Role.READER: 1}
    with contextlib.closing(ZmqListener("tcp://127.0.0.1:*", "r", most_peers=most)) as listener:
        connections = [hub.add(listener.address) for _ in range(6)]
        for connection, greeting in zip(connections[:3], (HELLO, HELLO, Inspect()), strict=True):
            connection.send(greeting)
            assert same(listener.receive_any(WAIT_S)[1], greeting)
        several = "it serves another S-worker (the S-worker at 127.0.0.1, the S-worker"
        assert several in refused(connections[3], HELLO, listener)
        reader = "it serves another reader (the doctor at 127.0.0.1)"
        assert refused(connections[4], Inspect(), listener) == reader
        neighbour = replace(HELLO, role=Role.NEIGHBOUR)
        assert refused(connections[5], neighbour, listener) == "it takes no neighbour"
        # Whose place is free again is another's.
        connections[1].close()
        with pytest.raises(PeerLostError) as caught:
            listener.receive_any(WAIT_S)
        assert (caught.value.index, caught.value.code) == (1, CLOSED)
        listener.connections[1].close()  # as whoever serves it does: its place is free from then on
        hub.add(listener.address).send(HELLO)
        assert listener.receive_any(WAIT_S)[0] == 1
        connections[0].send(Open(3, 4))
        assert listener.receive_any(WAIT_S) == (0, Open(3, 4))


@pytest.mark.parametrize(
    ("damage", "code", "match"),
    [
        (
            lambda head: head[:3] + bytes([77]) + head[4:],
            "protocol_version",
            f"version 77, this side {PROTOCOL_VERSION}",
        ),
        (
            lambda head: head.replace(b"S-worker", b"Z-worker"),
            "protocol_error",
            "Invalid enum value 'Z-worker'",
        ),
        (lambda head: head[:-1] + b"x", "protocol_error", "Expected `bool`"),
    ],
)
def test_a_greeting_that_is_refused_hears_why(
    damage: Callable[[bytes], bytes], code: str, match: str, listener: ZmqListener, hub: ZmqHub
) -> None:
    connection, index = served(listener, hub)
    with stranger(listener.address) as dealer:
        dealer.send(damage(Codec().encode(HELLO).head))
        assert code_of(lambda: listener.receive_any(0.5)) == TIMEOUT
        assert dealer.poll(int(WAIT_S * 1000))
        answer = Codec().decode(np.frombuffer(dealer.recv(), np.uint8))
    assert isinstance(answer, Failed) and answer.code == code and match in answer.message
    check_it_serves(listener, connection, index)


def test_a_peer_that_floods_holds_up_no_look(listener: ZmqListener, hub: ZmqHub) -> None:
    idle, flooding = hub.open(listener.address), hub.open(listener.address)
    for each in (idle, flooding):
        each.send(Inspect())
        listener.receive_any(WAIT_S)
    for _ in range(2000):
        flooding.send(Inspect())
    for _ in range(2000):
        listener.receive_any(WAIT_S)
        assert sum(len(each.inbox) for each in listener.connections) <= 1

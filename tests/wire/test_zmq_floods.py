"""A peer that floods an R-worker's port without the key: memory stays bounded, and a member is
served."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

import psutil
import pytest
from messages_for_tests import same, to_r_worker

zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

from fastdecode.wire.codec import Codec  # noqa: E402
from fastdecode.wire.messages import Accepted  # noqa: E402
from fastdecode.wire.zmq.hub import ZmqHub, ZmqListener  # noqa: E402
from fastdecode.wire.zmq.keys import ClusterKey  # noqa: E402

HELLO = to_r_worker()[0]
WAIT_S = 20.0
NUM_GREETINGS = 5000
PART_BYTES = 1 << 20
NUM_PARTS = 300
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY" + b"\x0bSocket-Type\0\0\0\x06DEALER"


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


def test_a_message_without_end_is_not_buffered(tmp_path: Path) -> None:
    ClusterKey.create(tmp_path / "key")
    key = ClusterKey.read(tmp_path / "key")
    process = psutil.Process()
    with contextlib.closing(ZmqListener("tcp://127.0.0.1:*", "r", key=key)) as listener:
        before = process.memory_info().rss
        assert sent_without_end(listener.address) < NUM_PARTS
        assert process.memory_info().rss - before < (NUM_PARTS * PART_BYTES) // 4
        check_it_serves(listener, key)


def test_a_peer_that_reads_no_answers_gets_few() -> None:
    """What waits for it would stay in memory."""
    context = zmq.Context()
    with contextlib.closing(ZmqListener("tcp://127.0.0.1:*", "r")) as listener:
        with context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(listener.address)
            for _ in range(NUM_GREETINGS):
                stranger.send(Codec().encode(HELLO).head[:-1] + b"x")
            check_it_serves(listener, None)
            num_answers = 0
            while stranger.poll(100):
                stranger.recv()
                num_answers += 1
        assert 1 <= num_answers < NUM_GREETINGS / 2
    context.term()

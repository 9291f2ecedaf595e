"""An R-worker's port that strangers flood: it goes on serving, and takes little
memory. Bounded, over loopback."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from messages_for_tests import attend, in_frames, same, to_r_worker
from transport_suite import WAIT_S, code_of

zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

from values import replace  # noqa: E402

from fastdecode.wire.blocks import ChunkForm, FetchChunk  # noqa: E402
from fastdecode.wire.codec import Codec  # noqa: E402
from fastdecode.wire.messages import (  # noqa: E402
    Accepted,
    Failed,
    Hello,
    Inspect,
    OpenSequence,
    StorePrompt,
)
from fastdecode.wire.traits import Role  # noqa: E402
from fastdecode.wire.transport import CLOSED, PeerLostError  # noqa: E402
from fastdecode.wire.zmq.connection import MAX_FRAME_BYTES  # noqa: E402
from fastdecode.wire.zmq.hub import ZmqHub, ZmqListener  # noqa: E402

HELLO: Any = to_r_worker()[0]
SILENCE_S = 1.5


@pytest.fixture
def listener(request: pytest.FixtureRequest) -> Iterator[ZmqListener]:
    silence_s = getattr(request, "param", WAIT_S)
    made = ZmqListener("tcp://127.0.0.1:*", "r", silence_s=silence_s)
    yield made
    made.close()


@pytest.fixture
def hub() -> Iterator[ZmqHub]:
    made = ZmqHub()
    yield made
    made.close()


@contextlib.contextmanager
def dealer(address: str, linger_ms: int = 0) -> Iterator[Any]:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as made:
        made.linger, made.sndhwm = linger_ms, 0
        made.connect(address)
        yield made
    context.term()


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


def flood(address: str, num_frames: int, frame_bytes: int, sent: Any) -> None:
    """A process that sends so much, says that it is on its way, and is gone without a word."""
    with dealer(address, linger_ms=-1) as stranger:
        for _ in range(num_frames):
            stranger.send(bytes(frame_bytes))
    sent.set()


def flooded(address: str, num_frames: int, frame_bytes: int, num_strangers: int = 1) -> None:
    """And wait until all of that has been sent."""
    spawn = multiprocessing.get_context("spawn")
    events = [spawn.Event() for _ in range(num_strangers)]
    processes = [
        spawn.Process(target=flood, args=(address, num_frames, frame_bytes, event))
        for event in events
    ]
    for process in processes:
        process.start()
    for event in events:
        assert event.wait(WAIT_S)
    for process in processes:
        process.join(WAIT_S)
        assert process.exitcode == 0


@pytest.mark.parametrize("listener", [SILENCE_S], indirect=True)
def test_thousands_of_frames_nobody_reads_and_a_disconnect_do_no_harm(
    listener: ZmqListener, hub: ZmqHub
) -> None:
    """With a limit in libzmq, a connection that breaks with as many unread
    aborts the whole process."""
    connection, index = served(listener, hub)
    flooded(listener.address, 2000, 50_000)
    assert not threading.Event().wait(2 * SILENCE_S)  # heartbeats have come due meanwhile
    check_it_serves(listener, connection, index)


def test_a_frame_that_is_too_long_ends_the_strangers_connection_alone(
    listener: ZmqListener, hub: ZmqHub
) -> None:
    connection, index = served(listener, hub)
    with dealer(listener.address) as stranger:
        stranger.send(bytes(2 * MAX_FRAME_BYTES))
        assert code_of(lambda: listener.receive_any(0.5)) == "worker_timeout"
    check_it_serves(listener, connection, index)


def test_whoever_never_shakes_hands_is_hung_up_on(listener: ZmqListener, hub: ZmqHub) -> None:
    connection, index = served(listener, hub)
    host, port = listener.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as raw:
        while raw.recv(1000):
            pass
    check_it_serves(listener, connection, index)


def test_long_messages_go_in_chunks_both_ways(listener: ZmqListener, hub: ZmqHub) -> None:
    connection, _ = served(listener, hub)
    long = attend(12_000)  # 24 MB
    assert Codec().encode(long).num_bytes > 4 * MAX_FRAME_BYTES
    for message in (long, OpenSequence(1, 2), long):
        connection.send(message)
    for message in (long, OpenSequence(1, 2), long):
        assert same(listener.receive_any(WAIT_S)[1], message)


@pytest.mark.parametrize("damage", [lambda q, k, v: [q, k], lambda q, k, v: [q[:-1], k, v]])
def test_arrays_that_do_not_fit_end_the_connection(listener: ZmqListener, damage: Any) -> None:
    with dealer(listener.address, linger_ms=1000) as peer:
        peer.send_multipart(in_frames(HELLO))
        index, _ = listener.receive_any(WAIT_S)
        head, *arrays = in_frames(attend(3000))
        peer.send_multipart([head, *damage(*arrays)])
        with pytest.raises(PeerLostError, match="broke the protocol: Attend") as caught:
            listener.receive_any(WAIT_S)
        assert (caught.value.index, caught.value.code) == (index, "protocol_error")


def test_peers_are_accepted_by_role_so_many_of_each(hub: ZmqHub) -> None:
    most = {Role.S_WORKER: 2, Role.READER: 1}
    listener = ZmqListener("tcp://127.0.0.1:*", "r", most_peers=most)
    try:
        neighbour = replace(HELLO, role=Role.NEIGHBOUR)
        connections = [hub.add(listener.address) for _ in range(6)]
        for connection, greeting in zip(connections[:3], (HELLO, HELLO, Inspect()), strict=True):
            connection.send(greeting)
            assert same(listener.receive_any(WAIT_S)[1], greeting)
        for connection, greeting, reason in (
            (
                connections[3],
                HELLO,
                "it serves another S-worker (the S-worker at 127.0.0.1, the S-worker",
            ),
            (connections[4], Inspect(), "it serves another reader (the reader at 127.0.0.1)"),
            (connections[5], neighbour, "it takes no neighbour"),
        ):
            connection.send(greeting)
            assert code_of(lambda: listener.receive_any(0.3)) == "worker_timeout"
            answer = connection.receive(WAIT_S)
            assert isinstance(answer, Failed) and answer.code == "busy" and reason in answer.message
        # Whose place is free again is another's.
        connections[1].close()
        with pytest.raises(PeerLostError) as caught:
            listener.receive_any(WAIT_S)
        assert (caught.value.index, caught.value.code) == (1, CLOSED)
        listener.connections[1].close()  # as whoever serves it does: its place is free from then on
        hub.add(listener.address).send(HELLO)
        assert listener.receive_any(WAIT_S)[0] == 1
        connections[0].send(OpenSequence(3, 4))
        assert listener.receive_any(WAIT_S) == (0, OpenSequence(3, 4))
    finally:
        listener.close()


@pytest.mark.parametrize("num_tokens", [1, MAX_FRAME_BYTES // 16])
def test_a_prompt_stage_begins_with_what_it_writes(num_tokens: int, hub: ZmqHub) -> None:
    """In one frame, or in several."""
    listener = ZmqListener("tcp://127.0.0.1:*", "r", most_peers={Role.FEEDER: 1})
    one, kv = np.ones(1, np.int32), np.zeros((num_tokens, 1, 4), np.float32)
    stored = StorePrompt(7, 1, 0, 0, np.array([5]), one - 1, one * num_tokens, kv, kv, 0)
    with contextlib.closing(listener):
        first, second = hub.add(listener.address), hub.add(listener.address)
        for _ in range(2):
            first.send(stored)
            index, got = listener.receive_any(WAIT_S)
            assert index == 0 and isinstance(got, StorePrompt) and got.k.shape == kv.shape
        numbers = np.array([5]), one - 1, one
        second.send(FetchChunk(ChunkForm.TOKENS, 0, 1, 0, 1, *numbers, 0, session=7))
        assert code_of(lambda: listener.receive_any(0.3)) == "worker_timeout"
        answer = second.receive(WAIT_S)
        assert isinstance(answer, Failed) and "serves another prompt stage" in answer.message


def test_a_role_that_does_not_exist_is_refused_by_name(listener: ZmqListener, hub: ZmqHub) -> None:
    connection, index = served(listener, hub)
    head = Codec().encode(HELLO).head.replace(b"S-worker", b"Z-worker")
    with dealer(listener.address) as stranger:
        stranger.send(head)
        assert code_of(lambda: listener.receive_any(0.5)) == "worker_timeout"
        assert stranger.poll(int(WAIT_S * 1000))
        answer = Codec().decode(np.frombuffer(stranger.recv(), np.uint8))
    assert isinstance(answer, Failed)
    assert "Invalid enum value 'Z-worker'" in answer.message
    check_it_serves(listener, connection, index)


def test_a_message_that_is_none_is_told_why(listener: ZmqListener) -> None:
    """A greeting that contradicts itself, of one who speaks as we do."""
    assert isinstance(HELLO, Hello)
    with dealer(listener.address) as stranger:
        stranger.send(Codec().encode(HELLO).head[:-1] + b"x")
        assert code_of(lambda: listener.receive_any(0.5)) == "worker_timeout"
        assert stranger.poll(int(WAIT_S * 1000))
        answer = Codec().decode(np.frombuffer(stranger.recv(), np.uint8))
    assert isinstance(answer, Failed) and "Expected `array`" in answer.message

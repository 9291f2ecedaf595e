"""What comes over a connection and can't even be refused, by a mistake of ours: that
connection is over, and the thread that reads the others goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from messages_for_tests import to_r_worker
from transport_suite import WAIT_S

zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")

from fastdecode.wire.codec import Codec  # noqa: E402
from fastdecode.wire.messages import Accepted, Hello  # noqa: E402
from fastdecode.wire.transport import PeerLostError  # noqa: E402
from fastdecode.wire.zmq.hub import ZmqHub, ZmqListener  # noqa: E402

HELLO: Any = to_r_worker()[0]
MARK = 4711


@pytest.fixture
def listener() -> Iterator[ZmqListener]:
    most = {HELLO.role: 2}
    made = ZmqListener("tcp://127.0.0.1:*", "r", silence_s=WAIT_S, most_peers=most)
    yield made
    made.close()


@pytest.fixture
def hub(listener: ZmqListener) -> Iterator[ZmqHub]:
    made = ZmqHub()
    for _ in range(2):
        made.add(listener.address)
    yield made
    made.close()


def break_reading(monkeypatch: pytest.MonkeyPatch, is_bad: Any) -> None:
    """Reading some messages raises what no reader expects."""
    decode = Codec.decode

    def read(codec: Codec, *args: Any, **options: Any) -> Any:
        found = decode(codec, *args, **options)
        if is_bad(found):
            raise OverflowError("cannot convert float infinity to integer")
        return found

    monkeypatch.setattr(Codec, "decode", read)


def test_an_answer_that_cannot_be_read_ends_its_connection_alone(
    listener: ZmqListener, hub: ZmqHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for connection in hub.connections:
        connection.send(HELLO)
        assert isinstance(listener.receive_any(WAIT_S)[1], Hello)
    break_reading(monkeypatch, lambda message: message == Accepted(MARK))
    first, second = listener.connections
    first.send(Accepted(MARK))
    with pytest.raises(PeerLostError, match="OverflowError: cannot convert") as lost:
        hub.receive_any(WAIT_S)
    second.send(Accepted(1))
    number, message = hub.receive_any(WAIT_S)
    assert message == Accepted(1) and number != lost.value.index


def test_what_a_peer_says_that_cannot_be_read_ends_its_connection_alone(
    listener: ZmqListener, hub: ZmqHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = hub.connections
    first.send(HELLO)
    assert isinstance(listener.receive_any(WAIT_S)[1], Hello)
    break_reading(monkeypatch, lambda message: message == to_r_worker()[1])
    first.send(to_r_worker()[1])
    with pytest.raises(PeerLostError, match="OverflowError: cannot convert"):
        listener.receive_any(WAIT_S)
    second.send(HELLO)
    assert isinstance(listener.receive_any(WAIT_S)[1], Hello)

"""Connections over real ZeroMQ sockets whose ends prove the cluster's key and
encrypt nothing (``LinkSecurity.AUTHENTICATE``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

zmq = pytest.importorskip("zmq")

from messages_for_tests import attend, same, to_r_worker  # noqa: E402
from values import replace  # noqa: E402

from fastdecode.core.errors import WorkerError  # noqa: E402
from fastdecode.wire.codec import Codec  # noqa: E402
from fastdecode.wire.messages import Accepted, Failed  # noqa: E402
from fastdecode.wire.transport import CLOSED, PeerLostError  # noqa: E402
from fastdecode.wire.zmq import proven_line  # noqa: E402
from fastdecode.wire.zmq.access import ClusterKey, name_key  # noqa: E402
from fastdecode.wire.zmq.admission import admit_only  # noqa: E402
from fastdecode.wire.zmq.hub import ZmqHub  # noqa: E402
from fastdecode.wire.zmq.line import MAX_FRAME_BYTES  # noqa: E402
from fastdecode.wire.zmq.listener import ZmqListener  # noqa: E402
from fastdecode.wire.zmq.proof import (  # noqa: E402
    Challenge,
    LinkSecurity,
    ProvenSession,
    answer_challenge,
)

HELLO = to_r_worker()[0]
WAIT_S = 20.0


def a_key(directory: Path, name: str, security: str = "authenticate") -> ClusterKey:
    path = directory / name
    if not path.exists():
        ClusterKey.create(path)
    return replace(ClusterKey.read(path), security=LinkSecurity(security))


@pytest.fixture
def key(tmp_path: Path) -> ClusterKey:
    return a_key(tmp_path, "ours")


@pytest.fixture
def listener(key: ClusterKey) -> Iterator[ZmqListener]:
    with contextlib.closing(ZmqListener("tcp://127.0.0.1:*", "r", key=key)) as made:
        yield made


@contextlib.contextmanager
def raw(kind: int, key: ClusterKey, address: str | None = None) -> Iterator[Any]:
    """A socket of a peer that writes frames by hand, and has recorded the password of the
    door; without an address it listens."""
    context = zmq.Context()
    with context.socket(kind) as made, contextlib.ExitStack() as stack:
        made.linger, made.rcvtimeo = 0, int(1000 * WAIT_S)
        if address is None:
            stack.callback(admit_only(context, made, key).stop)
            made.bind("tcp://127.0.0.1:*")
        else:
            name_key(made, key)
            made.connect(address)
        yield made
    context.term()


def served(listener: ZmqListener, hub: ZmqHub) -> tuple[Any, int]:
    connection = hub.add(listener.address)
    connection.send(HELLO)
    assert hub.reach(WAIT_S) == {} and connection.is_reached
    index, hello = listener.receive_any(WAIT_S)
    assert same(hello, HELLO)
    return connection, index


def a_session(key: ClusterKey, dealer: Any) -> tuple[bytes, ProvenSession]:
    """Begin by hand, as a member does; also what was sent for it."""
    challenge = Challenge(key.for_proofs)
    dealer.send(challenge.message)
    session = challenge.session(dealer.recv())
    assert session is not None
    return challenge.message, session


def test_members_talk_in_messages_of_any_length(listener: ZmqListener, key: ClusterKey) -> None:
    with contextlib.closing(ZmqHub(key)) as hub:
        connection, index = served(listener, hub)
        long = attend(MAX_FRAME_BYTES // 1000, step=7)
        assert Codec().encode(long).num_bytes > 2 * MAX_FRAME_BYTES
        for message in (attend(10, step=6), long, attend(11, step=8)):
            connection.send(message)
            assert same(listener.receive_any(WAIT_S)[1], message)
            listener.connections[index].send(Accepted(message.step))
            assert connection.receive(WAIT_S) == Accepted(message.step)


def test_what_travels_is_not_encrypted(key: ClusterKey) -> None:
    """It is named so; whoever wants that asks for ``encrypt``."""
    with raw(zmq.ROUTER, key) as router, contextlib.closing(ZmqHub(key)) as hub:
        connection = hub.add(router.getsockopt_string(zmq.LAST_ENDPOINT))
        identity, challenge = router.recv_multipart()
        answered = answer_challenge(key.for_proofs, challenge)
        assert answered is not None
        router.send_multipart([identity, answered[0]])
        connection.send(attend(10))
        with pytest.raises(WorkerError, match="sent nothing"):
            connection.receive(0.2)
        _, _, frame = router.recv_multipart()
        assert attend(10).k.tobytes() in frame


def test_a_peer_that_proves_nothing_hears_why(listener: ZmqListener, key: ClusterKey) -> None:
    with raw(zmq.DEALER, key, listener.address) as stranger:
        stranger.send(Codec().encode(HELLO, 5).head)
        told = Codec().decode(np.frombuffer(stranger.recv(), np.uint8))
        assert isinstance(told, Failed) and "same --key file" in told.message
        stranger.send(Challenge(key.for_proofs).message)
        assert not stranger.poll(200), "a refused peer gets no second answer"


@pytest.mark.parametrize("theirs", ["another key", "no key", "encrypts"])
def test_who_has_not_the_key_or_another_mode_is_refused(
    listener: ZmqListener, tmp_path: Path, theirs: str
) -> None:
    keys = {
        "another key": lambda: a_key(tmp_path, "theirs"),
        "no key": lambda: None,
        "encrypts": lambda: a_key(tmp_path, "ours", "encrypt"),
    }
    with contextlib.closing(ZmqHub(keys[theirs]())) as hub:
        hub.add(listener.address)
        reason = hub.reach(WAIT_S)[0]
        assert "--key" in reason.message and reason.code == CLOSED
    assert listener.accept(0) is None and listener.connections == ()


def test_a_listener_that_proves_nothing_is_given_up(
    key: ClusterKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proven_line, "HANDSHAKE_MS", 50)
    with raw(zmq.ROUTER, key) as router, contextlib.closing(ZmqHub(key)) as hub:
        connection = hub.add(router.getsockopt_string(zmq.LAST_ENDPOINT))
        connection.send(HELLO)  # and waits for the proof, so that nobody else reads it
        assert "didn't prove the key" in hub.reach(WAIT_S)[0].message
        assert len(router.recv_multipart()) == 2 and not router.poll(0), "a challenge alone"


def test_a_listener_without_a_key_is_given_up(key: ClusterKey) -> None:
    with contextlib.closing(ZmqListener("tcp://127.0.0.1:*", "r")) as plain:
        with contextlib.closing(ZmqHub(key)) as hub:
            hub.add(plain.address).send(HELLO)
            assert "--key" in hub.reach(WAIT_S)[0].message
        assert plain.accept(0) is None


def test_a_recorded_beginning_is_refused(listener: ZmqListener, key: ClusterKey) -> None:
    hello = Codec().encode(HELLO, 5).head
    with raw(zmq.DEALER, key, listener.address) as member:
        challenge, session = a_session(key, member)
        recorded = [session.tag(hello), hello]
        member.send_multipart(recorded)
        assert listener.accept(WAIT_S) is not None
        assert same(listener.receive_any(WAIT_S)[1], HELLO)  # the next is not the member's
    with raw(zmq.DEALER, key, listener.address) as replaying:
        replaying.send(challenge)
        replaying.recv()  # another number, and so other keys
        replaying.send_multipart(recorded)
        with contextlib.closing(ZmqHub(key)) as hub:
            served(listener, hub)  # behind what was replayed
    assert len(listener.connections) <= 2, "the member's, and this hub's"
    assert listener.accept(0) is not None and listener.accept(0) is None


@pytest.mark.parametrize("what", ["repeated", "skipped", "without a tag", "another head"])
def test_a_message_that_is_not_the_next_of_its_sender_ends_the_connection(
    listener: ZmqListener, key: ClusterKey, what: str
) -> None:
    def frame(step: int) -> bytes:
        encoded = Codec().encode(attend(3, step=step), 5)
        data = bytearray(encoded.num_bytes)
        encoded.write(memoryview(data))
        return bytes(data)

    hello = Codec().encode(HELLO, 5).head
    with raw(zmq.DEALER, key, listener.address) as member:
        _, session = a_session(key, member)
        member.send_multipart([session.tag(hello), hello])
        assert same(listener.receive_any(WAIT_S)[1], HELLO)
        first = [session.tag(frame(1)), frame(1)]
        member.send_multipart(first)
        assert same(listener.receive_any(WAIT_S)[1], attend(3, step=1))
        if what == "skipped":
            session.tag(frame(2))
        second = {
            "repeated": first,
            "without a tag": [frame(2)],
            "another head": [session.tag(frame(2)), frame(3)],
        }.get(what) or [session.tag(frame(2)), frame(2)]
        member.send_multipart(second)
        with pytest.raises(PeerLostError, match="refused"):
            listener.receive_any(WAIT_S)


def test_an_impostor_at_an_r_workers_address_is_refused(key: ClusterKey) -> None:
    """With a proof that it has recorded, and none of its own."""
    numbers = [Challenge(key.for_proofs) for _ in range(2)]
    recorded = answer_challenge(key.for_proofs, numbers[0].message)
    assert recorded is not None
    with raw(zmq.ROUTER, key) as router, contextlib.closing(ZmqHub(key)) as hub:
        connection = hub.add(router.getsockopt_string(zmq.LAST_ENDPOINT))
        connection.send(attend(10))
        identity, challenge = router.recv_multipart()
        router.send_multipart([identity, recorded[0]])
        assert "didn't prove the key" in hub.reach(WAIT_S)[0].message
        assert not router.poll(0), "what was to be sent has not left"
        assert answer_challenge(key.for_proofs, challenge) is not None


def test_an_answer_without_a_tag_ends_the_s_workers_connection(key: ClusterKey) -> None:
    with raw(zmq.ROUTER, key) as router, contextlib.closing(ZmqHub(key)) as hub:
        connection = hub.add(router.getsockopt_string(zmq.LAST_ENDPOINT))
        identity, challenge = router.recv_multipart()
        answered = answer_challenge(key.for_proofs, challenge)
        assert answered is not None
        router.send_multipart([identity, answered[0]])
        assert hub.reach(WAIT_S) == {}
        router.send_multipart([identity, Codec().encode(Accepted(1), 1).head])
        with pytest.raises(WorkerError, match="doesn't prove the key"):
            connection.receive(WAIT_S)


def two_ends(key: ClusterKey) -> tuple[ProvenSession, ProvenSession]:
    challenge = Challenge(key.for_proofs)
    answered = answer_challenge(key.for_proofs, challenge.message)
    assert answered is not None
    session = challenge.session(answered[0])
    assert session is not None
    return session, answered[1]


def test_what_a_tag_covers(key: ClusterKey) -> None:
    """A message's head and length, and not its arrays."""
    encoded = Codec().encode(attend(3, step=1), 5)
    data = np.zeros(encoded.num_bytes, np.uint8)
    encoded.write(data.data)

    def is_accepted(changed_at: int | None, cut: int = 0) -> bool:
        near, far = two_ends(key)
        tag, sent = near.tag(data), data[: len(data) - cut].copy()
        if changed_at is not None:
            sent[changed_at] ^= 1
        return far.accepts(tag, sent)

    head_bytes = len(encoded.head)
    assert is_accepted(None)
    assert not any(is_accepted(at) for at in range(head_bytes))
    assert not is_accepted(None, cut=1)
    assert is_accepted(len(data) - 1), "arrays are not protected, as docs/guides/cluster.md says"


def test_a_tag_covers_the_first_bytes_of_an_array_that_looks_like_a_head(key: ClusterKey) -> None:
    data = bytearray(Codec().encode(attend(3, step=1), 5).head)
    head_bytes_at = 3 + 1 + 4  # magic, version, epoch
    data[head_bytes_at : head_bytes_at + 4] = bytes(4)
    near, far = two_ends(key)
    tag = near.tag(data)
    data[40] ^= 1
    assert not far.accepts(tag, data)


def test_directions_and_connections_have_keys_of_their_own(key: ClusterKey) -> None:
    near, far = two_ends(key)
    other_near, _ = two_ends(key)
    data = b"\0"
    assert len({near.tag(data), far.tag(data), other_near.tag(data)}) == 3


def test_a_key_proves_nothing_for_another(tmp_path: Path, key: ClusterKey) -> None:
    challenge = Challenge(key.for_proofs)
    theirs = a_key(tmp_path, "theirs")
    assert theirs.secret != key.secret
    for proof in (
        answer_challenge(theirs.for_proofs, challenge.message)[0],  # type: ignore[index]
        b"",
        challenge.message,
    ):
        assert challenge.session(proof) is None
    assert answer_challenge(key.for_proofs, b"anything else") is None
    assert replace(key, secret=theirs.secret).for_proofs == theirs.for_proofs

"""Whose frames a listening socket takes in, and how it sends to peers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.codec import Codec, epoch_of
from fastdecode.wire.messages import Failed
from fastdecode.wire.zmq.line import MORE_FOLLOWS, RouterLine, Socket
from fastdecode.wire.zmq.proof import ProvenSession, answer_challenge

MOST_PARTS: Final = 3
"""That a listener keeps of a message beside its sender's identity: a tag, a frame, and
one more, which says that there are too many."""
MOST_SESSIONS: Final = 1024
"""Of peers without a connection: a peer that sends a challenge has one."""
MOST_SESSIONS_OF_A_HOST: Final = 256
LEAST_AGE_S: Final = 1.0
"""A session of another host is not forgotten before: its peer's greeting is on the way."""


class Door:
    """Takes in what comes: a peer that could connect may speak. So it is on loopback
    without a key, and where ZeroMQ itself has asked for the key."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    def take(self, identity: bytes, frames: Sequence[zmq.Frame]) -> zmq.Frame | None:
        """What a peer has sent, if it is one frame; None: the door has seen to it.

        Raises:
            ProtocolError: it has to be dropped; why.
        """
        if len(frames) != 1:
            raise ProtocolError(f"{len(frames)} frames where one belongs")
        return frames[0]

    def send(self, identity: bytes, data: Any, *, copy: bool) -> None:
        """Send a peer a frame. Raises zmq.ZMQError."""
        self._socket.send(identity, MORE_FOLLOWS)
        self._socket.send(data, zmq.NOBLOCK, copy=copy)


class ProvingDoor(Door):
    """Takes in what comes with a tag, from peers that have proved the key; see
    ``fastdecode.wire.zmq.proof``.

    Args:
        key: of the cluster, for proofs.
        open_line: of a peer that has a connection.
        clock: seconds.
    """

    def __init__(
        self,
        socket: Socket,
        key: bytes,
        open_line: Callable[[bytes], RouterLine | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(socket)
        self._key = key
        self._open_line = open_line
        self._clock = clock
        self._sessions: dict[bytes, ProvenSession] = {}  # by identity
        self._begun: dict[bytes, tuple[str, float]] = {}
        """Each session's host, and when it began; the oldest first."""
        self._refused_peers: dict[bytes, None] = {}
        """The last that were refused: they are not answered again."""

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def take(self, identity: bytes, frames: Sequence[zmq.Frame]) -> zmq.Frame | None:
        session = self._sessions.get(identity)
        if identity in self._refused_peers:
            raise ProtocolError("a peer that was refused sent more")
        if session is None and len(frames) == 1:
            self._answer(identity, frames[0])
            return None
        if session is None or len(frames) != 2:
            raise self._refused(identity, "what came without a tag")
        tag, frame = frames
        if not session.accepts(tag.buffer, frame.buffer):
            raise self._refused(
                identity, "a tag that isn't this message's: another key, or replayed"
            )
        return frame

    def send(self, identity: bytes, data: Any, *, copy: bool) -> None:
        session = self._sessions.get(identity)
        if session is None:
            super().send(identity, data, copy=copy)
            return
        self._socket.send(identity, MORE_FOLLOWS)
        self._socket.send(session.tag(data), MORE_FOLLOWS)
        self._socket.send(data, zmq.NOBLOCK, copy=copy)

    def _refused(self, identity: bytes, what: str) -> ProtocolError:
        """Nothing more is taken from this peer."""
        reason = f"refused {what}"
        line = self._open_line(identity)
        if line is not None:
            line.refuse(reason)
        self._forget(identity)
        self._refused_peers[identity] = None
        if len(self._refused_peers) > MOST_SESSIONS:
            del self._refused_peers[next(iter(self._refused_peers))]
        return ProtocolError(reason)

    def _answer(self, identity: bytes, frame: zmq.Frame) -> None:
        """Somebody begins. Raises ProtocolError: with no challenge."""
        answered = answer_challenge(self._key, frame.buffer)
        if answered is None:
            self._say_what_is_needed(identity, frame)
            raise self._refused(identity, "a message of a peer that hasn't proved the key")
        proof, session = answered
        host = str(frame.get("Peer-Address"))
        self._make_room(host)
        with contextlib.suppress(zmq.ZMQError):
            super().send(identity, proof, copy=True)
            self._sessions[identity] = session
            self._begun[identity] = host, self._clock()

    def _say_what_is_needed(self, identity: bytes, frame: zmq.Frame) -> None:
        epoch = epoch_of(frame.buffer)
        if epoch is not None:
            text = "it takes only peers that prove the key: give both sides the same --key file"
            failed = Failed("", "unauthenticated", text)
            with contextlib.suppress(zmq.ZMQError):
                super().send(identity, Codec().encode(failed, epoch).head, copy=True)

    def _make_room(self, host: str) -> None:
        """For one more session of a host. The oldest session without a connection makes
        room: this host's, if it has many.

        Raises:
            ProtocolError: too many peers have just begun.
        """
        idle = [peer for peer in self._begun if self._open_line(peer) is None]
        of_host = [peer for peer in idle if self._begun[peer][0] == host]
        if len(of_host) >= MOST_SESSIONS_OF_A_HOST:
            self._forget(of_host[0])
        elif len(idle) >= MOST_SESSIONS:
            if self._clock() - self._begun[idle[0]][1] < LEAST_AGE_S:
                raise ProtocolError(f"{len(idle)} peers began at once, and none has greeted yet")
            self._forget(idle[0])

    def _forget(self, identity: bytes) -> None:
        self._sessions.pop(identity, None)
        self._begun.pop(identity, None)

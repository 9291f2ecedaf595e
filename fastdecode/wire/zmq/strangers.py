"""What comes to an R-worker's socket from those that have no connection to it."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Final

import zmq

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.codec import Codec, Prefix, epoch_of
from fastdecode.wire.messages import Failed
from fastdecode.wire.zmq.doors import Door
from fastdecode.wire.zmq.line import Socket

logger = logging.getLogger(__name__)

MOST_ANSWERS: Final = 32
"""To one connection within a second: one that waits until another peer has left asks
again and again."""
_MOST_REMEMBERED: Final = 1024


class Strangers:
    """Answers those that speak as we do, and drops the rest.

    Args:
        name: the R-worker's.
        door: sends them answers.
    """

    def __init__(self, socket: Socket, name: str, door: Door) -> None:
        self._socket = socket
        self._door = door
        self._name = name
        self._codec = Codec()
        self._num_dropped = 0
        self._answers: dict[bytes, tuple[float, int]] = {}  # by identity: since when, how many

    def prefix_of(self, identity: bytes, frame: zmq.Frame) -> Prefix | None:
        """Return the prefix of a message, or None if another program sent these bytes."""
        try:
            return Prefix.of(frame.buffer) if len(frame.buffer) > 1 else None
        except ProtocolError as error:
            self.refuse(identity, frame, error)
            return None

    def refuse(self, identity: bytes, frame: zmq.Frame, error: ProtocolError) -> None:
        """Drop what one sent, and say why if it speaks as we do."""
        epoch = epoch_of(frame.buffer)
        if epoch is not None:
            self.answer(identity, error.code, error.message, epoch)
        self.drop(error.message)

    def answer(self, identity: bytes, code: str, message: str, epoch: int) -> None:
        """A few times a second: answers to a peer that doesn't read them stay in memory."""
        if not self._may_answer(identity):
            return
        head = self._codec.encode(Failed(self._name, code, message), epoch).head
        with contextlib.suppress(zmq.ZMQError):
            self._door.send(identity, head, copy=True)

    def _may_answer(self, identity: bytes) -> bool:
        now_s = time.monotonic()
        since_s, number = self._answers.pop(identity, (now_s, 0))
        if now_s - since_s >= 1.0:
            since_s, number = now_s, 0
        self._answers[identity] = since_s, number + 1
        if len(self._answers) > _MOST_REMEMBERED:
            del self._answers[next(iter(self._answers))]
        return number < MOST_ANSWERS

    def drop(self, reason: str) -> None:
        """Say so of the 1st, 2nd, 4th, 8th, …, so that no log is flooded."""
        self._num_dropped += 1
        if self._num_dropped & (self._num_dropped - 1) == 0:
            address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            logger.warning(
                "%s: dropped what a stranger sent (%d so far): %s",
                address,
                self._num_dropped,
                reason,
            )

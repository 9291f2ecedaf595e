"""The line of an end that connects and proves the key, where nothing is
encrypted; see ``fastdecode.wire.zmq.proof``."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import zmq

from fastdecode.wire.zmq.access import ClusterKey
from fastdecode.wire.zmq.line import HANDSHAKE_MS, MORE_FOLLOWS, DealerLine, LostError, Socket
from fastdecode.wire.zmq.proof import Challenge, ProvenSession

_MOST_PARTS = 2
_NO_PROOF = "it didn't prove the key: is --key the same file on both sides?"


class ProvenDealerLine(DealerLine):
    """What is sent before the other end has proved the key waits here, and leaves
    when somebody looks after the line, as a caller that awaits an answer does.

    Args:
        context, address, key, silence_s: see ``DealerLine``.
    """

    def __init__(
        self, context: zmq.Context[Socket], address: str, key: ClusterKey, silence_s: float
    ) -> None:
        super().__init__(context, address, key, silence_s)
        self._challenge = Challenge(key.for_proofs)
        self._session: ProvenSession | None = None
        self._unsent: deque[tuple[Any, bool]] = deque()
        self._socket.send(self._challenge.message, zmq.NOBLOCK)

    @property
    def is_reached(self) -> bool:
        return self._session is not None

    def check(self) -> None:
        super().check()
        self._await_proof()

    def send(self, data: Any, *, copy: bool) -> None:
        if self._session is None and not self._lost:
            self._unsent.append((data, copy))
        else:
            super().send(data, copy=copy)

    def receive(self) -> zmq.Frame | None:
        if self._session is None:
            self._await_proof()
        return None if self._session is None else super().receive()

    def _put(self, data: Any, *, copy: bool) -> None:
        assert self._session is not None
        self._socket.send(self._session.tag(data), MORE_FOLLOWS)
        self._socket.send(data, zmq.NOBLOCK, copy=copy)

    def _get(self) -> zmq.Frame:
        frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        while frames[-1].more:
            part = self._socket.recv(copy=False)
            if len(frames) > _MOST_PARTS:
                frames.pop()
            frames.append(part)
        if self._session is None:
            return frames[0]
        if len(frames) != 2 or not self._session.accepts(frames[0].buffer, frames[1].buffer):
            self._lost = (
                "a message came that doesn't prove the key: was the connection tampered with?"
            )
            raise LostError(self._lost)
        return frames[1]

    def _await_proof(self) -> None:
        """Take the proof if it is here, and send what waits for it. Raises
        LostError: it is none, or is overdue."""
        if self._session is not None:
            return
        proof = super().receive()
        if proof is not None:
            self._session = self._challenge.session(proof.buffer)
        if self._session is None and (proof is not None or self._is_overdue):
            self._lost = _NO_PROOF
            raise LostError(self._lost)
        while self._session is not None and self._unsent:
            data, copy = self._unsent.popleft()
            super().send(data, copy=copy)

    @property
    def _is_overdue(self) -> bool:
        connected_s = self._connected_s
        return connected_s is not None and time.monotonic() - connected_s > HANDSHAKE_MS / 1000


def connected_line(
    context: zmq.Context[Socket], address: str, key: ClusterKey | None, silence_s: float
) -> DealerLine:
    """A line to an address, as the key wants it; see ``DealerLine``."""
    if key is None or key.encrypts:
        return DealerLine(context, address, key, silence_s)
    return ProvenDealerLine(context, address, key, silence_s)

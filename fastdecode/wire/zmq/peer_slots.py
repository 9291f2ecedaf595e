"""Who is connected to a listening socket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from fastdecode.wire.traits import Role
from fastdecode.wire.zmq.connection import ReceiveT, SendT, ZmqConnection
from fastdecode.wire.zmq.line import RouterLine


@dataclass(frozen=True)
class ListenerPeer(Generic[SendT, ReceiveT]):
    """One that was accepted by its role."""

    identity: bytes
    line: RouterLine
    role: Role
    connection: ZmqConnection[SendT, ReceiveT]


class PeerSlots(Generic[SendT, ReceiveT]):
    """Peers by index. The place of one that is gone, and of whom that has been
    told, is another's then."""

    def __init__(self) -> None:
        self._peers: list[ListenerPeer[SendT, ReceiveT]] = []
        self._index_of: dict[bytes, int] = {}  # by identity
        self._new: list[int] = []  # that ``take_new`` hasn't given yet
        self._first = 0

    def __getitem__(self, index: int) -> ListenerPeer[SendT, ReceiveT]:
        return self._peers[index]

    @property
    def connections(self) -> tuple[ZmqConnection[SendT, ReceiveT], ...]:
        return tuple(peer.connection for peer in self._peers)

    def open_line(self, identity: bytes) -> RouterLine | None:
        """Of a peer whose connection is open; None: there is none of this identity."""
        index = self._index_of.get(identity)
        if index is None or not self._peers[index].connection.is_open:
            return None
        return self._peers[index].line

    def open_in(self, role: Role) -> list[ZmqConnection[SendT, ReceiveT]]:
        """The connections of peers of a role."""
        connections = (peer.connection for peer in self._peers if peer.role is role)
        return [connection for connection in connections if connection.is_open]

    def in_turn(self) -> Iterator[tuple[int, ListenerPeer[SendT, ReceiveT]]]:
        """All, beginning behind the one at which this was left last."""
        for i in range(len(self._peers)):
            index = (self._first + i) % len(self._peers)
            yield index, self._peers[index]

    def begin_behind(self, index: int) -> None:
        """See ``in_turn``."""
        self._first = index + 1

    def add(self, peer: ListenerPeer[SendT, ReceiveT]) -> None:
        """In the place of one that is over, if there is any."""
        over = [index for index, other in enumerate(self._peers) if other.connection.is_closed]
        index = over[0] if over else len(self._peers)
        if over:
            self._index_of.pop(self._peers[index].identity, None)
            self._new = [other for other in self._new if other != index]
            self._peers[index] = peer
        else:
            self._peers.append(peer)
        self._index_of[peer.identity] = index
        self._new.append(index)

    @property
    def has_new(self) -> bool:
        """Whether somebody has come that ``take_new`` hasn't given yet."""
        return bool(self._new)

    def take_new(self) -> ZmqConnection[SendT, ReceiveT]:
        """The first of them. Each is given once."""
        return self._peers[self._new.pop(0)].connection

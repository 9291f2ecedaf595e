"""Keeps one cache's replica up to date, behind the answers to its S-worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from fastdecode.core.clock import Clock
from fastdecode.core.errors import FastDecodeError, ProtocolError
from fastdecode.wire.blocks import NO_STEP, Replicated, StoreChunk, Unprotected
from fastdecode.wire.messages import FromRWorker, Welcome
from rworker.instructions import LinkReplica
from rworker.stream.changes import Change
from rworker.stream.chunk_endpoints import LocalCache
from rworker.stream.mirror import UNANSWERED, Mirror
from rworker.transfers.peer_link import PeerLink
from rworker.transfers.replica_file import ReplicaSink

logger = logging.getLogger(__name__)

LOOK_S: Final = 1e-3
"""Between two looks for another R-worker's answer, while nothing else happens."""
REST_S: Final = 0.25
"""And between two looks whether it is still there, while it owes none."""
_MOST_CHANGES: Final = 64


class ReplicaTransfer:
    """See the module, and ``Transfer``. A unit is some changes and at most one chunk.

    Args:
        order: what was asked for.
        source: reads the cache.
        sink: where the replica goes.
        clock: seconds.

    Raises:
        FastDecodeError: it can't be there.
    """

    def __init__(
        self, order: LinkReplica, source: LocalCache, sink: ReplicaSink, clock: Clock
    ) -> None:
        self.to: Final = order.to
        self._holder, self._number = order.holder, order.number
        self._order, self._source, self._sink, self._clock = order, source, sink, clock
        self._copies = [self._begin()]
        """The replica; and behind it the one that is to take its place."""
        self._most_bytes = sink.most_bytes

    def _begin(self) -> _Copy:
        link = PeerLink(self._sink.connect(), self._clock, self._order.timeout_s)
        return _Copy(self._order, self._source, link)

    @property
    def wait_s(self) -> float:
        """See ``Transfer``."""
        return min(copy.wait_s for copy in self._copies)

    @property
    def is_done(self) -> bool:
        """See ``Transfer``: the cache changes for as long as it is there."""
        return False

    def follow(self, change: Change) -> None:
        """The cache has accepted a change."""
        for copy in self._copies:
            copy.may_send = True
            copy.mirror.follow(change)

    def end_step(self, lane: int, step: int) -> None:
        """The cache has all of a lane's step in every layer."""
        for copy in self._copies:
            copy.may_send = True
            copy.mirror.end_step(lane, step)

    def advance(self) -> Iterator[Replicated]:
        """See ``Transfer``."""
        copy, *new = self._copies
        for lane, step in copy.advance():
            yield Replicated(self._holder, lane, step, self._number)
        try:
            held = self._renew(copy, new)
        except FastDecodeError as error:
            self._keep(copy, error)
            return
        for lane, step in held:
            yield Replicated(self._holder, lane, step, self._number)

    def _renew(self, copy: _Copy, new: list[_Copy]) -> list[tuple[int, int]]:
        """Begin the replica anew if it is due, and go on with that. What it has, once
        it has all: it takes the place of the one before."""
        if not new and copy.num_bytes > self._most_bytes:
            self._copies.append(self._begin())
        held = [each for each in new[0].advance() if each[1] != NO_STEP] if new else []
        if held:
            self._sink.settle()
            copy.close()
            self._copies, self._most_bytes = new, self._sink.most_bytes
        return held

    def _keep(self, copy: _Copy, error: FastDecodeError) -> None:
        """The new one has failed: the one before is as good as it was, and may be as long again."""
        logger.warning("the replica of holder %d grows: %s", self._holder, error)
        for each in self._copies[1:]:
            each.close()
        self._sink.abandon()
        self._copies, self._most_bytes = [copy], copy.num_bytes + self._sink.most_bytes

    def end(self, reason: str) -> Unprotected:
        """See ``Transfer``. Nobody goes on with what is there."""
        logger.warning("holder %d has no replica any more: %s", self._holder, reason)
        self._sink.discard()
        return Unprotected(self._holder, reason, self._number)

    def close(self) -> None:
        """See ``Transfer``. What is there stays."""
        for copy in self._copies:
            copy.close()

    def discard(self) -> None:
        """Nobody needs the replica any more."""
        self.close()
        self._sink.discard()


class _Copy:
    """A replica, and the link to it; ``source``: reads the cache.

    Raises:
        WorkerError: the neighbour is gone.
    """

    def __init__(self, order: LinkReplica, source: LocalCache, link: PeerLink) -> None:
        self.mirror: Final = Mirror(order.holder, order.books, source, order.link_bytes)
        self._link = link
        self._is_open = False  # the neighbour has welcomed us
        self.may_send = False
        """Whether there may be something to send."""
        self.num_bytes = 0
        """Of K and V that were sent."""
        link.ask(self.mirror.hello, self._welcome)

    @property
    def wait_s(self) -> float:
        """See ``Transfer``."""
        if self.may_send:
            return 0.0
        return LOOK_S if self._link.is_owed else REST_S

    def advance(self) -> Iterator[tuple[int, int]]:
        """Do a unit of work. Lanes, and the last step of each that has got there; a step
        ``NO_STEP``, once there is room."""
        was_open = self._is_open
        if self._link.listen():
            self.may_send = True
        if self._is_open and not was_open:
            yield 0, NO_STEP
        self._send()
        yield from self.mirror.take_held().items()

    def close(self) -> None:
        self._link.close()

    def _send(self) -> None:
        self.may_send = self._is_open
        for _ in range(_MOST_CHANGES):
            message = self.mirror.next() if self._is_open else None
            if message is None:
                self.may_send = False
                return
            if isinstance(message, UNANSWERED):
                self._link.send(message)
            else:
                self._link.ask(message, self.mirror.take)
            if isinstance(message, StoreChunk):
                self.num_bytes += len(message.data)
                return

    def _welcome(self, answer: FromRWorker) -> None:
        hello = self.mirror.hello
        hello.check(answer)
        assert isinstance(answer, Welcome)
        if answer.num_blocks != hello.max_blocks:
            raise ProtocolError(
                f"it has {answer.num_blocks} KV blocks for a replica of {hello.max_blocks}"
            )
        self._is_open = True

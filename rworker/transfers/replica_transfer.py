"""Keeps one cache's replica up to date, behind the answers to its S-worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.kv.chunks import StoreChunk
from fastdecode.wire.kv.replicating import NO_STEP, Replicated, Unprotected
from fastdecode.wire.messages import FromRWorker, Welcome
from rworker.instructions import LinkReplica
from rworker.stream.changes import Change
from rworker.stream.chunk_endpoints import LocalCache
from rworker.stream.mirror import UNANSWERED, Mirror
from rworker.transfers.peer_link import PeerLink

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
        link: to the neighbour; its own.

    Raises:
        WorkerError: the neighbour is gone.
    """

    def __init__(self, order: LinkReplica, source: LocalCache, link: PeerLink) -> None:
        self.to: Final = order.to
        self._holder, self._number = order.holder, order.number
        self._mirror = Mirror(order.holder, order.books, source, order.link_bytes)
        self._link = link
        self._is_open = False  # the neighbour has welcomed us
        self._may_send = False  # there may be something to send
        link.ask(self._mirror.hello, self._welcome)

    @property
    def wait_s(self) -> float:
        """See ``Transfer``."""
        if self._may_send:
            return 0.0
        return LOOK_S if self._link.is_owed else REST_S

    @property
    def is_done(self) -> bool:
        """See ``Transfer``: the cache changes for as long as it is there."""
        return False

    def follow(self, change: Change) -> None:
        """The cache has accepted a change."""
        self._may_send = True
        self._mirror.follow(change)

    def end_step(self, lane: int, step: int) -> None:
        """The cache has all of a lane's step in every layer."""
        self._may_send = True
        self._mirror.end_step(lane, step)

    def advance(self) -> Iterator[Replicated]:
        """See ``Transfer``."""
        was_open = self._is_open
        if self._link.listen():
            self._may_send = True
        if self._is_open and not was_open:
            yield Replicated(self._holder, 0, NO_STEP, self._number)
        self._send()
        for lane, step in self._mirror.take_held().items():
            yield Replicated(self._holder, lane, step, self._number)

    def end(self, reason: str) -> Unprotected:
        """See ``Transfer``."""
        logger.warning("holder %d has no replica any more: %s", self._holder, reason)
        return Unprotected(self._holder, reason, self._number)

    def close(self) -> None:
        """See ``Transfer``."""
        self._link.close()

    def _send(self) -> None:
        self._may_send = self._is_open
        for _ in range(_MOST_CHANGES):
            message = self._mirror.next() if self._is_open else None
            if message is None:
                self._may_send = False
                return
            if isinstance(message, UNANSWERED):
                self._link.send(message)
            else:
                self._link.ask(message, self._mirror.take)
            if isinstance(message, StoreChunk):
                return

    def _welcome(self, answer: FromRWorker) -> None:
        hello = self._mirror.hello
        hello.check(answer)
        assert isinstance(answer, Welcome)
        if answer.num_blocks != hello.max_blocks:
            raise ProtocolError(
                f"it has {answer.num_blocks} KV blocks for a replica of {hello.max_blocks}"
            )
        self._is_open = True

"""Keeps one cache's replica up to date, behind the answers to its S-worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from fastdecode.core.clock import Clock
from fastdecode.core.errors import FastDecodeError, ProtocolError
from fastdecode.wire.blocks import NO_STEP, KeptToRWorker, Replicated, StoreChunk
from fastdecode.wire.messages import FromRWorker, Welcome
from rworker.instructions import LinkReplica
from rworker.stream.memory import ChunkMemory
from rworker.stream.mirror import UNANSWERED, Mirror
from rworker.transfers.neighbours import PeerLink
from rworker.transfers.replica_file import ReplicaSink

logger = logging.getLogger(__name__)

LOOK_S: Final = 1e-3
"""Between two looks for another R-worker's answer, while nothing else happens."""
REST_S: Final = 0.25
"""And between two looks whether it is still there, while it owes none."""
_MOST_CHANGES: Final = 64


class ReplicaTransfer:
    """The transfer of one replica. A unit is some changes and at most one chunk.

    Args:
        memory: memory of the cache.
        sink: where the replica goes.

    Raises:
        FastDecodeError: If the replica can't be there.
    """

    def __init__(
        self, order: LinkReplica, memory: ChunkMemory, sink: ReplicaSink, clock: Clock
    ) -> None:
        self.to: Final = order.to
        self._holder, self._number = order.holder, order.number
        self._order, self._memory, self._sink, self._clock = order, memory, sink, clock
        self._copies = [self._begin()]
        """The replica, and behind it the one that will take its place."""
        self._most_bytes = sink.most_bytes

    def _begin(self) -> _Copy:
        link = PeerLink(self._sink.connect(), self._clock, self._order.timeout_s)
        return _Copy(self._order, self._memory, link)

    @property
    def wait_s(self) -> float:
        return min(copy.wait_s for copy in self._copies)

    @property
    def is_done(self) -> bool:
        """Always false: the cache may change until it is dropped."""
        return False

    def follow(self, change: KeptToRWorker) -> None:
        for copy in self._copies:
            copy.may_send = True
            copy.mirror.follow(change)

    def end_step(self, lane: int, step: int) -> None:
        for copy in self._copies:
            copy.may_send = True
            copy.mirror.end_step(lane, step)

    def advance(self) -> Iterator[Replicated]:
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
        """Advance the new replica, which is begun if it is due. Return the steps that it has once
        it has taken the place of the one before."""
        if not new and copy.num_bytes > self._most_bytes:
            self._copies.append(self._begin())
        held = [each for each in new[0].advance() if each[1] != NO_STEP] if new else []
        if held:
            self._sink.settle()
            copy.close()
            self._copies, self._most_bytes = new, self._sink.most_bytes
        return held

    def _keep(self, copy: _Copy, error: FastDecodeError) -> None:
        """Keep the previous replica, as the new one has failed. It may grow as much again."""
        logger.warning("the replica of R-worker %d's KV cache grows: %s", self._holder, error)
        for each in self._copies[1:]:
            each.close()
        self._sink.abandon()
        self._copies, self._most_bytes = [copy], copy.num_bytes + self._sink.most_bytes

    def end(self, reason: str) -> Replicated:
        """Discard the replica, which has failed."""
        logger.warning("R-worker %d's KV cache no longer has a replica: %s", self._holder, reason)
        self._sink.discard()
        return unprotected(self._order, reason)

    def close(self) -> None:
        """End the transfer. What is there stays."""
        for copy in self._copies:
            copy.close()

    def discard(self) -> None:
        """End the transfer, and discard the replica."""
        self.close()
        self._sink.discard()


def unprotected(order: LinkReplica, reason: str) -> Replicated:
    """Return the report that a replica is lost."""
    return Replicated(order.holder, 0, NO_STEP, order.number, reason)


class _Copy:
    """A replica, and the link to it. Raises WorkerError: If the neighbour is gone."""

    def __init__(self, order: LinkReplica, memory: ChunkMemory, link: PeerLink) -> None:
        self.mirror: Final = Mirror(order.holder, order.books, memory, order.link_bytes)
        self._link = link
        self._is_open = False  # the neighbour has welcomed us
        self.may_send = False
        """Whether there may be something to send."""
        self.num_bytes = 0
        """Bytes of K and V that were sent."""
        link.send(self.mirror.hello, self._welcome)

    @property
    def wait_s(self) -> float:
        if self.may_send:
            return 0.0
        return LOOK_S if self._link.num_owed else REST_S

    def advance(self) -> Iterator[tuple[int, int]]:
        """Do a unit of work. Return lanes with the last step of each that has arrived, and
        ``NO_STEP`` as a step once there is room."""
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
            is_answered = not isinstance(message, UNANSWERED)
            self._link.send(message, self.mirror.take if is_answered else None)
            if isinstance(message, StoreChunk):
                self.num_bytes += len(message.data)
                return

    def _welcome(self, answer: FromRWorker) -> None:
        hello = self.mirror.hello
        hello.check(answer)
        assert isinstance(answer, Welcome)
        if answer.num_blocks != hello.max_blocks:
            raise ProtocolError(
                f"R-worker {answer.worker} has {answer.num_blocks} KV blocks for a replica of "
                f"{hello.max_blocks}: give all R-workers the same --kv-memory-gb"
            )
        self._is_open = True

"""Transfers of an R-worker behind compute: replicas are kept up to date, prompts
are fetched."""

from __future__ import annotations

import time
from typing import Protocol

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId
from fastdecode.wire.kv.attending import FEEDING_LINE
from fastdecode.wire.kv.exporting import Pulled
from fastdecode.wire.kv.replicating import ReplicationNews
from rworker.instructions import Admit, BeginPull, EndPull, EndStep, Follow, LinkReplica
from rworker.pulling.pull import Placer
from rworker.pulling.pulls import Pulls
from rworker.stream.replica_links import ChunkReader, Neighbours, ReplicaLinks


class ChunkMemory(ChunkReader, Placer, Protocol):
    """What reads and writes K and V in a cache's memory."""


class Tell(Protocol):
    """Tells a peer."""

    def __call__(self, peer: int, news: ReplicationNews | Pulled) -> None: ...


class BackgroundTransfers:
    """Of one R-worker, whose loop asks for a **unit** of work when nothing else
    waits, or when one is late.

    Args:
        memory: of its caches.
        neighbours: how others are reached.
        tell: how peers are told what has come of it.
        clock: seconds.
    """

    def __init__(
        self, memory: ChunkMemory, neighbours: Neighbours, tell: Tell, clock: Clock = time.monotonic
    ) -> None:
        self._neighbours = neighbours
        self._links = ReplicaLinks(memory, neighbours, tell, clock)
        self._pulls = Pulls(memory, neighbours, tell, clock)
        self._admitted: set[str] = set()  # prompt stages
        self.is_used = False
        """Whether anything was ever asked of it."""

    @property
    def wait_s(self) -> float | None:
        """How long to wait for others' messages before ``work``; None: for as
        long as it takes."""
        if not self.is_used:
            return None
        waits_s = [each for each in (self._links.wait_s, self._pulls.wait_s) if each is not None]
        return min(waits_s, default=None)

    @property
    def is_late(self) -> bool:
        """Whether a unit is due, whatever else waits."""
        return self.is_used and (self._links.is_late or self._pulls.is_late)

    def obey(
        self, instruction: LinkReplica | Follow | EndStep | BeginPull | EndPull | Admit
    ) -> None:
        """Something of this begins, ends, or has to be known for it."""
        self.is_used = True
        if isinstance(instruction, Admit):
            for address in instruction.addresses:
                # Also when a cache is greeted again: two connections would share messages.
                if address not in self._admitted:
                    self._admitted.add(address)
                    self._neighbours.expect(address, FEEDING_LINE)
        elif isinstance(instruction, BeginPull):
            self._pulls.begin(instruction)
        elif isinstance(instruction, EndPull):
            self._pulls.end(instruction)
        else:
            self._links.obey(instruction)

    def attended(self) -> None:
        """A layer has been attended."""
        if self.is_used:
            self._pulls.turns.attended()

    def work(self) -> None:
        """A unit of each."""
        self._links.work()
        self._pulls.work()

    def drop(self, holder: HolderId) -> None:
        """The cache, or its link, is over."""
        self._links.drop(holder)
        self._pulls.drop(holder)

    def give_up(self, reason: str) -> None:
        """Nothing is transferred any more. Peers that wait get the reason."""
        self._links.give_up(reason)
        self._pulls.give_up(reason)
        self.close()

    def close(self) -> None:
        """All is over."""
        self._links.close()
        self._pulls.close()

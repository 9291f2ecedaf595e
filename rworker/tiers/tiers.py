"""The lower tiers of an R-worker's caches: opened, told what to move, and asked
what has moved."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from fastdecode.core.errors import FastDecodeError
from fastdecode.core.holders import HolderId
from fastdecode.wire.kv.kept import words_of
from fastdecode.wire.kv.tiers import MOST_MOVED, Stocked
from rworker.tiers.disk import Disk
from rworker.tiers.format import Entry, SlotShape
from rworker.tiers.health import Faults
from rworker.tiers.mover import CacheMemory, Mover
from rworker.tiers.opening import open_slots
from rworker.tiers.slots import SlotFile
from rworker.tiers.units import MoveJob

if TYPE_CHECKING:
    from rworker.instructions import DropStored, MoveBlocks, OpenTier

logger = logging.getLogger(__name__)

POLL_S: Final = 0.002
"""While something moves, whoever waits for messages looks so often whether it has."""


@dataclass(frozen=True)
class Done:
    """A job is over."""

    to: int
    """Who asked for it."""
    holder: HolderId
    number: int
    failed: set[int]
    """By their place in the job."""
    num_bytes: int
    """That were moved."""
    seconds: float
    faults: Faults = field(default_factory=Faults)
    """Of the holder's tier, since that was told last."""


@dataclass(frozen=True)
class Further:
    """A job that fetches has come further, and isn't over."""

    to: int
    """Who asked for it."""
    holder: HolderId
    number: int
    num_there: int
    """Layers that are there of all of its blocks."""
    num_layers: int
    """Of the cache."""
    seconds: float
    """Since it was begun."""


class LowerTier(Protocol):
    """Where the kept blocks of one cache go: a file (``Mover``), or memory that is not
    the cache's. One thread calls."""

    @property
    def num_layers(self) -> int:
        """Of the cache."""

    @property
    def stored_bytes(self) -> int:
        """Of a block, as it is stored."""

    @property
    def is_busy(self) -> bool:
        """Whether a job was not taken over yet."""

    def begin(self, job: MoveJob) -> None:
        """Move blocks."""

    def take_over(self) -> list[MoveJob]:
        """Jobs that are over; each is reported once."""

    def take_progress(self) -> list[tuple[MoveJob, int]]:
        """Of fetches that are not over, the ones that have come further, and how many
        leading layers are there."""

    def take_faults(self) -> Faults:
        """What has gone wrong since the last call."""

    def wait(self, timeout_s: float | None, *, for_progress: bool = False) -> None:
        """Until some job is over, or so long; or has come further."""

    def wait_for_layer(self, numbers: tuple[int, ...], layer: int) -> None:
        """Until a layer of these jobs' blocks is there, or has failed."""

    def drop(self, key: bytes) -> None:
        """A block is not kept any more."""

    def close(self) -> None:
        """Nothing is moved any more when this returns."""


class Tiers:
    """Of one R-worker. One thread calls.

    Args:
        disk: where kept blocks may go; None: nowhere.
        make_mover: of a file and a cache.
    """

    def __init__(
        self,
        disk: Disk | None = None,
        make_mover: Callable[[SlotFile, CacheMemory], Mover] = Mover,
    ) -> None:
        self._disk = disk
        self._make_mover = make_mover
        self._movers: dict[HolderId, LowerTier] = {}
        self._asked: dict[tuple[HolderId, int], int] = {}  # who asked for a job
        self._refused: list[Done] = []
        self.is_used = False
        """Whether anything was ever asked of it."""

    @property
    def is_busy(self) -> bool:
        """Whether somebody is to be told of a job."""
        return bool(self._asked or self._refused)

    @property
    def wait_s(self) -> float | None:
        """How long to wait for messages at a time; None: as long as it takes."""
        return POLL_S if self.is_busy else None

    def open(self, wanted: OpenTier, memory: CacheMemory) -> Iterator[Stocked]:
        """Open a holder's, and say what it has; no slots, if it can't be had:
        that is warned of.

        Args:
            memory: its cache.
        """
        self.is_used = True
        self.close(wanted.holder)
        if self._disk is None:
            yield from _pages(wanted.holder, 0, [])
            return
        try:
            shape = SlotShape(wanted.identity, memory.num_layers, memory.layer_bytes)
            slots = open_slots(self._disk.directory, shape, self._disk.num_bytes)
        except FastDecodeError as error:
            logger.warning("no KV blocks are kept on disk: %s", error.message)
            yield from _pages(wanted.holder, 0, [])
            return
        logger.info(
            "%s: room for %d KV blocks, %d there; %s", slots.path, slots.num_slots, len(slots),
            "direct" if slots.is_direct else "through the page cache",
        )  # fmt: skip
        yield from self.use(
            wanted.holder, self._make_mover(slots, memory), slots.num_slots, slots.entries
        )

    def use(
        self, holder: HolderId, tier: LowerTier, num_slots: int, entries: Sequence[Entry] = ()
    ) -> Iterator[Stocked]:
        """A holder's is open, with so many slots; what it has."""
        self._movers[holder] = tier
        return _pages(holder, num_slots, entries)

    def begin(self, wanted: MoveBlocks) -> None:
        """Blocks are to be moved; where there is no lower tier, that has failed."""
        self.is_used = True
        move, mover = wanted.move, self._movers.get(wanted.holder)
        if mover is None:
            failed = set(range(len(move.keys)))
            self._refused.append(Done(wanted.to, wanted.holder, move.number, failed, 0, 0.0))
            return
        self._asked[wanted.holder, move.number] = wanted.to
        mover.begin(MoveJob(move.number, move.is_fetch, move.keys, move.blocks, move.num_tokens))

    def drop(self, wanted: DropStored) -> None:
        """Blocks aren't kept down there any more, nor found after a restart."""
        mover = self._movers.get(wanted.holder)
        if mover is not None:
            for key in wanted.keys:
                mover.drop(key)

    def take_news(self) -> list[Done | Further]:
        """Jobs that are over, or have come further; each is told once."""
        news: list[Done | Further] = list(self._refused)
        self._refused = []
        for holder, mover in self._movers.items():
            if not mover.is_busy:
                continue
            for job, num_there in mover.take_progress():
                to, number = self._asked[holder, job.number], job.number
                news.append(Further(to, holder, number, num_there, mover.num_layers, job.seconds))
            for job in mover.take_over():
                num_bytes = (len(job.keys) - len(job.failed)) * mover.stored_bytes
                to = self._asked.pop((holder, job.number))
                done = (to, holder, job.number, job.failed, num_bytes, job.seconds)
                news.append(Done(*done, mover.take_faults()))
        return news

    def wait(self, timeout_s: float | None) -> None:
        """Until there is news, or so long."""
        if not self._refused:
            busy = [mover for mover in self._movers.values() if mover.is_busy]
            for mover in busy:
                mover.wait(timeout_s if len(busy) == 1 else POLL_S, for_progress=True)

    def wait_for_layer(self, holder: HolderId, numbers: tuple[int, ...], layer: int) -> None:
        """Until these jobs have fetched a layer; what hasn't come by then has
        failed."""
        mover = self._movers.get(holder)
        if mover is not None:
            mover.wait_for_layer(numbers, layer)

    def close(self, holder: HolderId) -> None:
        """A holder's cache is over: nothing is moved from or to it any more,
        when this returns."""
        self._refused = [done for done in self._refused if done.holder != holder]
        self._asked = {asked: to for asked, to in self._asked.items() if asked[0] != holder}
        mover = self._movers.pop(holder, None)
        if mover is not None:
            mover.close()

    def close_all(self) -> None:
        """All of them."""
        for holder in list(self._movers):
            self.close(holder)


def _pages(holder: HolderId, num_slots: int, entries: Sequence[Entry]) -> Iterator[Stocked]:
    """What there is, in messages of bounded size."""
    rest = iter(entries)
    page = list(islice(rest, MOST_MOVED))
    while True:
        following = list(islice(rest, MOST_MOVED))
        num_tokens = np.array([entry.num_tokens for entry in page], np.int32)
        keys = words_of([entry.key for entry in page])
        yield Stocked(holder, num_slots, keys, num_tokens, is_last=not following)
        if not following:
            return
        page = following

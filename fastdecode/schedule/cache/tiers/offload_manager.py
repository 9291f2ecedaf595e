"""All that is moved between the tiers of kept blocks: jobs, what they may do
next, and what they have done."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId
from fastdecode.schedule.cache.index import BlockIndex
from fastdecode.schedule.cache.kept import Use
from fastdecode.schedule.cache.orders import Orders
from fastdecode.schedule.cache.tiers.offload_jobs import OffloadJob, Rates, TierCounts, most_stored
from fastdecode.schedule.plan import DropCopies, Offload, Restore


class OffloadManager:
    """Of all holders. A block is moved by one job at a time, and of a holder
    one job at a time copies down.

    Args:
        indices: what each holder keeps.
        orders: what holders are to be told.
        block_size: tokens in a block.
        clock: by which blocks are idle.
    """

    def __init__(
        self, indices: list[BlockIndex], orders: Orders, block_size: int, clock: Clock
    ) -> None:
        self._indices = indices
        self._orders = orders
        self.now_s = clock
        """Seconds, on a clock that only goes on."""
        self._job_numbers = itertools.count()
        self.jobs: dict[int, OffloadJob] = {}
        """Under way, by number."""
        self.rates = Rates(block_size)
        """How long they take, and computing as much."""
        self.counts = TierCounts()
        """What they have moved."""

    @property
    def has_lower(self) -> bool:
        """Whether any holder has a lower tier."""
        return any(index.lower.num_slots for index in self._indices)

    def stocked(self, holder: HolderId, num_slots: int, blocks: Mapping[bytes, int]) -> None:
        """A holder has a lower tier, and blocks in it: key → tokens up to its end."""
        lower = self._indices[holder].lower
        self.counts.num_slots += num_slots - lower.num_slots
        lower.num_slots = num_slots
        lower.stocked(blocks, blocks.values(), Use(0, self.now_s()))
        self.counts.num_found += len(blocks)

    def fetch(self, holder: HolderId, keys: Seq[bytes], before: Seq[bytes | None]) -> None:
        """Of blocks that can be used, fetch what isn't there. There is room.

        Args:
            before: the key of the block before each.
        """
        number = next(self._job_numbers)
        missing = tuple(self._indices[holder].moving.begin_fetch(keys, before, number))
        if missing:
            self.jobs[number] = OffloadJob(number, holder, missing, is_fetch=True)
            self._orders.fetch(Restore(holder, number, missing))

    def copy_down(self, holder: HolderId, lacking: int, num_blocks: int) -> None:
        """Have the lower tier get what will be given up next.

        Args:
            lacking: so many more should be free, or be there, too.
            num_blocks: that the holder has.
        """
        if any(job.holder == holder and not job.is_fetch for job in self.jobs.values()):
            return
        index, now_s = self._indices[holder], self.now_s()
        lower = index.lower
        count = min(lacking, most_stored(num_blocks))
        is_full = len(lower) + count > lower.num_slots
        at_least = lower.least_value(now_s) if is_full else -math.inf
        blocks = index.idle.to_copy(count, now_s, at_least)
        gone = tuple(lower.make_room(len(blocks), now_s))
        if gone:
            index.moving.dropped(gone)
            self.counts.num_dropped += len(gone)
            self._orders.add(DropCopies(holder, gone))
        blocks = blocks[: lower.num_slots - len(lower)]
        if not blocks:
            return
        number = next(self._job_numbers)
        keys = tuple([block.key for block in blocks])
        index.moving.begin_store(blocks, number)
        self.jobs[number] = OffloadJob(number, holder, keys, is_fetch=False)
        num_tokens = tuple([block.num_tokens for block in blocks])
        self._orders.add(Offload(holder, number, keys, num_tokens))

    def moved(self, number: int, failed: Seq[bytes], num_bytes: int, seconds: float) -> None:
        """A job is over; what of it has failed."""
        job = self.jobs.pop(number)
        index, counts = self._indices[job.holder], self.counts
        bad = set(failed).intersection(job.keys)
        num_done = len(job.keys) - len(bad)
        counts.num_failed += len(bad)
        kept = (index.blocks.get(key) for key in job.keys)
        unwanted = {block.key for block in kept if block is not None and block.is_condemned}
        self.drop_copies(job.holder, bad | unwanted)
        index.moving.end(number, job.keys, bad, self.now_s())
        self._orders.forget(job.holder, index.moving.take_void(job.keys))
        if job.is_fetch:
            counts.num_fetched += num_done
            counts.fetched_bytes += num_bytes
            counts.fetch_s += seconds
            self.rates.fetched(job.holder, num_done, seconds)
        else:
            counts.num_stored += num_done
            counts.stored_bytes += num_bytes

    def drop_copies(self, holder: HolderId, keys: Iterable[bytes]) -> None:
        """The lower tier isn't to have these."""
        index, gone = self._indices[holder], tuple(sorted(keys))
        if gone:
            index.moving.dropped(gone)
            for key in gone:
                index.lower.drop(key)
            self._orders.add(DropCopies(holder, gone))

    def look_whether_fetching_pays(self) -> None:
        """By what it takes lately."""
        for holder, index in enumerate(self._indices):
            if index.lower.num_slots:
                index.lower.pays = self.rates.pays(HolderId(holder))

    def interrupt(self, holder: HolderId) -> None:
        """A holder's lower tier is gone, and what was on its way there, or from there."""
        index, now_s = self._indices[holder], self.now_s()
        jobs = [job for job in self.jobs.values() if job.holder == holder]
        self.lose(holder)
        index.moving.dropped(index.lower.lose())
        for job in jobs:
            index.moving.end(job.number, job.keys, set(job.keys), now_s)
            index.moving.take_void(job.keys)

    def lose(self, holder: HolderId) -> None:
        """A holder is gone, with its lower tier."""
        self.counts.num_slots -= self._indices[holder].lower.num_slots
        self.jobs = {number: job for number, job in self.jobs.items() if job.holder != holder}

    def check_invariants(self) -> None:
        """What moves is moved by a job of its own holder."""
        moving = {
            (job.holder, key, number) for number, job in self.jobs.items() for key in job.keys
        }
        found = {
            (holder, block.key, block.job)
            for holder, index in enumerate(self._indices)
            for block in index
            if block.job is not None
        }
        assert found <= moving, "a block is moved by no job"

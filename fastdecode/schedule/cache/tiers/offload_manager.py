"""All that is moved between the tiers of kept blocks: jobs, what they may do
next, and what they have done."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId
from fastdecode.schedule.cache.blocks import Index, Memory
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

    def __init__(self, indices: list[Index], orders: Orders, block_size: int, clock: Clock) -> None:
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
        return any(index.num_slots for index in self._indices)

    def stocked(self, holder: HolderId, num_slots: int, blocks: Mapping[bytes, int]) -> None:
        """A holder has a lower tier, and blocks in it: key → tokens up to its end."""
        index = self._indices[holder]
        self.counts.num_slots += num_slots - index.num_slots
        index.stock(num_slots, blocks, self.now_s())
        self.counts.num_found += len(blocks)

    def fetch(self, holder: HolderId, keys: Seq[bytes], before: Seq[bytes | None]) -> None:
        """Of blocks that can be used, fetch what isn't there. There is room.

        Args:
            before: the key of the block before each.
        """
        number = next(self._job_numbers)
        missing = tuple(self._indices[holder].begin_fetch(keys, before, number))
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
        number = next(self._job_numbers)
        count = min(lacking, most_stored(num_blocks))
        blocks, dropped = self._indices[holder].begin_store(count, number, self.now_s())
        if dropped:
            self.counts.num_dropped += len(dropped)
            self._orders.add(DropCopies(holder, tuple(dropped)))
        if not blocks:
            return
        keys = tuple([block.key for block in blocks])
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
        kept = (index.get(key) for key in job.keys)
        unwanted = {x.key for x in kept if x is not None and x.memory is Memory.VOID}
        self.drop_copies(job.holder, bad | unwanted)
        self._orders.forget(job.holder, index.end_job(number, job.keys, bad, self.now_s()))
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
            index.drop_below(gone)
            self._orders.add(DropCopies(holder, gone))

    def look_whether_fetching_pays(self) -> None:
        """By what it takes lately."""
        for holder, index in enumerate(self._indices):
            if index.num_slots:
                index.pays = self.rates.pays(HolderId(holder))

    def interrupt(self, holder: HolderId) -> None:
        """A holder's lower tier is gone, and what was on its way there, or from there."""
        index, now_s = self._indices[holder], self.now_s()
        jobs = [job for job in self.jobs.values() if job.holder == holder]
        self.lose(holder)
        index.lose_below()
        for job in jobs:
            index.end_job(job.number, job.keys, set(job.keys), now_s)

    def lose(self, holder: HolderId) -> None:
        """A holder is gone, with its lower tier."""
        self.counts.num_slots -= self._indices[holder].num_slots
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

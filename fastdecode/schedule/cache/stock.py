"""The cached blocks of all holders, the jobs that move them between a holder's memory and its
lower tier, and the messages that follow."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId, KVSource, Part, PartId
from fastdecode.schedule.cache.blocks import Block, Index, Memory, Window
from fastdecode.schedule.cache.fresh import FreshMemory
from fastdecode.schedule.cache.rates import Rates, TierCounts, most_stored
from fastdecode.schedule.cache.retention import Policy, Retention
from fastdecode.schedule.plan import Send
from fastdecode.wire.blocks import MOST_MOVED, Done, Fetch, Forget, Name, Retain, keys_of, words_of


@dataclass(frozen=True)
class Job:
    """Blocks of a holder that move between its tiers, or come from other engines."""

    holder: HolderId
    keys: tuple[bytes, ...]
    is_fetch: bool
    source: tuple[KVSource, ...] = ()
    """R-workers that it reads. Empty for the lower tier."""


class Stock:
    """The cached blocks of all holders. One job at a time moves a block, and one job of a holder
    at a time copies down.

    Args:
        num_holders: holders, each of which has an index of blocks.
        block_size: tokens in a block.
        policy: what idle blocks are worth. None for ``Retention``.
        clock: seconds; never goes back.
        only_ends: see ``Index``.
        window: tokens that the layer attends to that attends to most. None if it attends to all.
    """

    def __init__(
        self,
        num_holders: int,
        block_size: int,
        policy: Policy | None = None,
        clock: Clock = time.monotonic,
        *,
        only_ends: bool = False,
        window: int | None = None,
    ) -> None:
        assert window is None or not only_ends, "parts of sequences are kept as a whole"
        self.block_size: Final = block_size
        self.window: Final = Window(window, block_size)
        self.policy: Final = policy or Retention(block_size)
        self.now_s: Final = clock
        self._only_ends = only_ends
        self._indices = [self._empty() for _ in range(num_holders)]
        self._orders: list[Send] = []
        self._fetches: list[Send] = []
        self._tails: dict[PartId, bytes] = {}
        self._job_numbers = itertools.count()
        self.jobs: dict[int, Job] = {}
        """Jobs under way, by number."""
        self.rates = Rates(block_size)
        self.counts = TierCounts()
        self.fresh = FreshMemory(block_size)
        self.is_due = False
        """True if the next plan may copy more down: blocks were released, or copied."""
        self.peer_terms: tuple[float, float] = (60.0, 0.0)
        """Time-out in seconds, and bytes per second, of fetches from other engines (``Fetch``)."""

    @property
    def holders(self) -> list[HolderId]:
        return [HolderId(holder) for holder in range(len(self._indices))]

    def __getitem__(self, holder: HolderId) -> Index:
        """Return a holder's blocks, to be read. Changes that the holder is sent go through
        ``Stock``."""
        return self._indices[holder]

    def take_orders(self) -> list[Send]:
        """Return the messages that follow from all changes, but fetches."""
        orders, self._orders = self._orders, []
        return orders

    def take_fetches(self) -> list[Send]:
        """Return the orders to fetch. Whatever makes room for them is sent before."""
        fetches, self._fetches = self._fetches, []
        return fetches

    def keep(
        self, part: Part, first_block: int, keys: Seq[bytes], before: bytes | None
    ) -> list[bytes | None]:
        """Cache the blocks of a part that are full now, from ``first_block`` on.

        Args:
            before: key of the part's block before that one, if there is one.

        Returns:
            The key of each block. None for a block whose key another block has.
        """
        index = self._indices[part.holder]
        names = [None if key in index else key for key in keys]
        for place, (key, name) in enumerate(zip(keys, names, strict=True), first_block):
            if name is not None:
                index.name(name, before, part.first_token + (place + 1) * self.block_size)
            before = key
        first = first_block
        for is_new, run in itertools.groupby(names, lambda name: name is not None):
            some = list(run)
            if is_new:
                message = Name(part.part_id, first, words_of([x for x in some if x]))
                self._orders.append(Send(part.holder, message))
            first += len(some)
        return names

    def keep_tail(self, part: Part, key: bytes, before: bytes | None, num_tokens: int) -> None:
        """Cache the last block of a part that is closed now, though it is not full.

        Args:
            before: key of the part's block before it, if there is one.
            num_tokens: tokens up to its end.
        """
        if self.name_tail(part, key, before, num_tokens):
            index = self._indices[part.holder]
            index.want([key])
            index.release([key], self.now_s())

    def name_tail(self, part: Part, key: bytes, before: bytes | None, num_tokens: int) -> bool:
        """Name that block for a sequence that still uses it. Return False if another block has the
        key."""
        index = self._indices[part.holder]
        if key in index:
            return False
        index.name(key, before, num_tokens, is_tail=True)
        self._tails[part.part_id] = key
        return True

    def take_tail(self, part_id: PartId) -> bytes | None:
        """Return the key for the last block of a part that is closed now, if it is cached."""
        return self._tails.pop(part_id, None)

    def release(self, holder: HolderId, keys: Seq[bytes], *, for_good: bool) -> None:
        """End a sequence's use of blocks, which are in the order of its tokens.

        Args:
            for_good: no sequence may use them again.
        """
        index = self._indices[holder]
        if for_good:
            index.make_void(keys)
            self._drop_below(holder, filter(index.is_stored, keys))
        self.is_due = True
        self.forget(holder, index.release(keys, self.now_s()))

    def evict(self, holder: HolderId, count: int) -> None:
        """Evict up to ``count`` idle blocks of a holder."""
        self.forget(holder, self._indices[holder].evict(count, self.now_s()))

    def drop(self, holder: HolderId, keys: Seq[bytes]) -> None:
        """Drop blocks that only one chain has, from memory and from the lower tier."""
        self._drop(holder, self._indices[holder].drop(keys))

    def drop_own(self, holder: HolderId, keys: Seq[bytes]) -> None:
        """Drop blocks of a request that shares none: one that arrives when its job has ended."""
        index = self._indices[holder]
        self._drop(holder, index.drop_unused(filter(None, map(index.get, keys))))

    def drop_unseen(self, holder: HolderId, keys: Seq[bytes], num_past: int) -> None:
        """Drop a chain's blocks that no token behind ``num_past`` attends to."""
        self._drop(holder, self._indices[holder].drop_unseen(keys, num_past))

    def trim(self, num_cached_tokens: int, num_running: int) -> None:
        """Evict blocks that take memory that was never touched before (``FreshMemory``).

        Args:
            num_cached_tokens: tokens of running sequences.
            num_running: running sequences.
        """
        most = self.fresh.most_unhit(num_cached_tokens, num_running)
        if most is None:
            return
        excess = sum(index.idle.num_unhit for index in self._indices) - most
        while excess > 0:
            holder = max(self.holders, key=lambda h: self._indices[h].idle.num_unhit)
            count = min(excess, self._indices[holder].idle.num_unhit)
            gone = self._indices[holder].evict(count, self.now_s(), only_unhit=True)
            if not gone:
                return
            self.forget(holder, gone)
            self.fresh.evicted(gone)
            excess -= len(gone)

    def forget(self, holder: HolderId, keys: Seq[bytes]) -> None:
        """Let a holder forget blocks that its index has forgotten."""
        if keys:
            self._orders.append(Send(holder, Forget(words_of(keys))))

    # Lower tiers.

    @property
    def has_lower(self) -> bool:
        """True if any holder has a lower tier."""
        return any(index.num_slots for index in self._indices)

    @property
    def is_copying(self) -> bool:
        """True if blocks are copied down, or the next plan may begin to."""
        is_due = self.is_due or any(not job.is_fetch for job in self.jobs.values())
        return is_due and self.has_lower

    def stocked(self, holder: HolderId, num_slots: int, blocks: Mapping[bytes, int]) -> None:
        """Note a holder's lower tier, and what it has: key → tokens up to the block's end."""
        index = self._indices[holder]
        self.counts.num_slots += num_slots - index.num_slots
        index.stock(num_slots, blocks, self.now_s())
        self.counts.num_found += len(blocks)

    def fetch(
        self,
        holder: HolderId,
        keys: Seq[bytes],
        before: Seq[bytes | None],
        sources: Seq[KVSource] = (),
        first_token: int = 0,
        num_tokens: int = 0,
    ) -> None:
        """Fetch those blocks of a chain that are not in memory: what the lower tier has from
        there, the rest from ``sources``. There is room.

        Args:
            before: key of the block before each.
            first_token: first token of the chain.
            num_tokens: tokens up to the end of all that ``sources`` keep.
        """
        index, size = self._indices[holder], self.block_size
        ends = [min(first_token + (i + 1) * size, num_tokens) for i in range(len(keys))]
        parts = [tuple(x) for _, x in itertools.groupby(sources, lambda x: x.first_token)]
        jobs: dict[int, list[Block]] = {}
        for block in index.begin_fetch(keys, before, ends):
            place = -1
            if parts and not (index.pays and index.is_stored(block.key)):
                ahead = (i for i, part in enumerate(parts) if block.num_tokens <= part[0].end)
                place = next(ahead, -1)
            jobs.setdefault(place, []).append(block)
        for place, blocks in jobs.items():
            for at in range(0, len(blocks), MOST_MOVED):
                self._fetch(holder, blocks[at : at + MOST_MOVED], () if place < 0 else parts[place])

    def _fetch(self, holder: HolderId, blocks: Seq[Block], source: tuple[KVSource, ...]) -> None:
        number = next(self._job_numbers)
        keys = tuple([block.key for block in blocks])
        for block in blocks:
            block.job = number
        self.jobs[number] = Job(holder, keys, is_fetch=True, source=source)
        tail_tokens = blocks[-1].num_tokens % self.block_size
        message = Fetch(number, words_of(keys), source, tail_tokens, *self.peer_terms)
        self._fetches.append(Send(holder, message))

    def copy_down(self, holder: HolderId, lacking: int, num_blocks: int) -> None:
        """Copy blocks down that are evicted next.

        Args:
            lacking: blocks that should be free, or be copied, too.
            num_blocks: blocks of the holder.
        """
        if any(job.holder == holder and not job.is_fetch for job in self.jobs.values()):
            return
        number = next(self._job_numbers)
        count = min(lacking, most_stored(num_blocks))
        blocks, dropped = self._indices[holder].begin_store(count, number, self.now_s())
        self.counts.num_dropped += len(dropped)
        self._drop_below(holder, dropped)
        if blocks:
            keys = tuple([block.key for block in blocks])
            self.jobs[number] = Job(holder, keys, is_fetch=False)
            num_tokens = np.array([block.num_tokens for block in blocks], np.int32)
            self._orders.append(Send(holder, Retain(number, words_of(keys), num_tokens)))

    def end_job(self, done: Done) -> set[bytes]:
        """End a job. Return the keys of its blocks that were not moved."""
        number, job = done.job, self.jobs.pop(done.job)
        index, counts = self._indices[job.holder], self.counts
        counts.num_unread += done.num_unread
        counts.num_damaged += done.num_damaged
        counts.num_unwritten += done.num_unwritten
        counts.num_late += done.num_late
        bad = set(keys_of(done.missing)).intersection(job.keys)
        num_done = len(job.keys) - len(bad)
        counts.num_failed += 0 if job.source else len(bad)
        kept = (index.get(key) for key in job.keys)
        void = {x.key for x in kept if x is not None and x.memory is Memory.VOID}
        if not job.source:
            self._drop_below(job.holder, bad | void)
        self.forget(job.holder, index.end_job(number, job.keys, bad, self.now_s()))
        if job.is_fetch and not job.source:
            counts.num_fetched += num_done
            counts.fetched_bytes += done.num_bytes
            counts.fetch_s += done.seconds
            self.rates.fetched(job.holder, num_done, done.seconds)
        elif not job.source:
            counts.num_stored += num_done
            counts.stored_bytes += done.num_bytes
            self.is_due |= num_done > 0  # else it would try a full disk for ever
        return bad

    def look_whether_fetching_pays(self) -> None:
        """Update ``Index.pays`` from what fetching and computing took lately."""
        for holder, index in enumerate(self._indices):
            if index.num_slots:
                index.pays = self.rates.pays(HolderId(holder))

    # Lost holders.

    def named(self, holder: HolderId) -> tuple[bytes, ...]:
        """Return the keys that a holder is to keep that continues from a copy. It gets no message
        of earlier changes."""
        self._forget_orders(holder)
        return tuple([block.key for block in self._indices[holder]])

    def interrupt(self, holder: HolderId) -> None:
        """Lose a holder's lower tier, and what is moved."""
        index = self._indices[holder]
        jobs = {number: job for number, job in self.jobs.items() if job.holder == holder}
        self._forget_jobs(holder)
        index.lose_below()
        for number, job in jobs.items():
            index.end_job(number, job.keys, set(job.keys), self.now_s())

    def lose(self, holder: HolderId) -> None:
        """Lose all that a holder has."""
        self._forget_jobs(holder)
        self._indices[holder] = self._empty()
        self._forget_orders(holder)

    def check_invariants(self, users: Seq[Counter[bytes]]) -> None:
        """Recount. ``users``: how many running sequences use each block, for each holder."""
        jobs = self.jobs.items()
        moving = {(job.holder, key, number) for number, job in jobs for key in job.keys}
        for holder, (index, used) in enumerate(zip(self._indices, users, strict=True)):
            index.check_invariants(used)
            found = {(holder, block.key, block.job) for block in index if block.job is not None}
            assert found <= moving, "no job moves a block that is moved"

    def _empty(self) -> Index:
        return Index(self.policy, only_ends=self._only_ends, window=self.window)

    def _drop(self, holder: HolderId, gone: list[bytes]) -> None:
        self.forget(holder, gone)
        self._drop_below(holder, filter(self._indices[holder].is_stored, gone))

    def _drop_below(self, holder: HolderId, keys: Iterable[bytes]) -> None:
        """Drop blocks from the lower tier, whether or not it has them."""
        gone = sorted(keys)
        if gone:
            self._indices[holder].drop_below(gone)
            self._orders.append(Send(holder, Forget(words_of(gone), is_below=True)))

    def _forget_jobs(self, holder: HolderId) -> None:
        self.counts.num_slots -= self._indices[holder].num_slots
        self.jobs = {number: job for number, job in self.jobs.items() if job.holder != holder}

    def _forget_orders(self, holder: HolderId) -> None:
        self._orders = [order for order in self._orders if order.holder != holder]
        self._fetches = [fetch for fetch in self._fetches if fetch.holder != holder]

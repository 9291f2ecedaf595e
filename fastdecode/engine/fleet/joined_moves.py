"""What the members of a cache group report of transfers and tiers, as the group's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from fastdecode.core.holders import HolderId
from fastdecode.wire.kv.exporting import MoveNews, Pulled
from fastdecode.wire.kv.kept import keys_of, words_of
from fastdecode.wire.kv.tiers import Fetching, Moved, Stocked


class JoinedMoves:
    """Joins reports: a block, or a sequence, is there when every member has its part.

    Args:
        holder: the group.
        members: of it.
    """

    def __init__(self, holder: HolderId, members: Collection[HolderId]) -> None:
        self._holder = holder
        self._members = frozenset(members)
        self._moved: dict[int, dict[int, Moved]] = {}  # by job and member
        self._fetching: dict[int, dict[int, Fetching]] = {}
        self._pulled: dict[int, dict[int, Pulled]] = {}  # by sequence and member
        self._stocked: dict[int, dict[bytes, int]] = {}  # of each member
        self._num_slots: dict[int, int] = {}
        self._whole: set[int] = set()
        self.news: deque[MoveNews] = deque()
        """What all members have reported, and wasn't taken."""

    def take(self, worker: int, news: MoveNews) -> None:
        """A member reports."""
        group = self._members
        joined: MoveNews | None
        if isinstance(news, Moved):
            joined = self._take_moved(worker, news, group)
        elif isinstance(news, Fetching):
            joined = self._take_fetching(worker, news, group)
        elif isinstance(news, Pulled):
            joined = self._take_pulled(worker, news, group)
        else:
            joined = self._take_stocked(worker, news, group)
        if joined is not None:
            self.news.append(replace(joined, holder=self._holder))

    def extras(self, worker: int, stocked: Stocked) -> set[bytes]:
        """Blocks that a member has, and not all have."""
        return self._stocked[worker].keys() - set(keys_of(stocked.keys))

    def _take_fetching(
        self, worker: int, news: Fetching, group: Collection[int]
    ) -> Fetching | None:
        """The group is as far as its slowest member; one whose part is over reports
        nothing more."""
        told = self._fetching.setdefault(news.job, {})
        told[worker] = news
        over = self._moved.get(news.job, {})
        if not told.keys() | over.keys() >= set(group):
            return None
        under_way = (told[x] for x in told if x not in over)
        return min(under_way, key=lambda x: x.num_there, default=None)

    def _take_moved(self, worker: int, news: Moved, group: Collection[int]) -> Moved | None:
        told = self._moved.setdefault(news.job, {})
        told[worker] = news
        if not told.keys() >= set(group):
            return None
        del self._moved[news.job]
        self._fetching.pop(news.job, None)
        failed = {key for each in told.values() for key in keys_of(each.failed)}
        num_bytes = sum(each.num_bytes for each in told.values())
        seconds = max(each.seconds for each in told.values())
        faults = map(sum, zip(*(each.faults for each in told.values()), strict=True))
        return Moved(news.holder, news.job, words_of(sorted(failed)), num_bytes, seconds, *faults)

    def _take_pulled(self, worker: int, news: Pulled, group: Collection[int]) -> Pulled | None:
        """A sequence is here when all have their part of it."""
        told = self._pulled.setdefault(news.sequence_id, {})
        told[worker] = news
        if not told.keys() >= set(group):
            return None
        del self._pulled[news.sequence_id]
        num_bytes = sum(each.num_bytes for each in told.values())
        seconds = max(each.seconds for each in told.values())
        reason = next((each.reason for each in told.values() if each.reason), "")
        return Pulled(news.holder, news.sequence_id, num_bytes, seconds, reason)

    def _take_stocked(self, worker: int, news: Stocked, group: Collection[int]) -> Stocked | None:
        own = self._stocked.setdefault(worker, {})
        own.update(zip(keys_of(news.keys), news.num_tokens.tolist(), strict=True))
        self._num_slots[worker] = news.num_slots
        if news.is_last:
            self._whole.add(worker)
        if not self._whole >= set(group):
            return None
        stocks = [self._stocked[each] for each in group]
        keys = [key for key in stocks[0] if all(key in stock for stock in stocks)]
        num_tokens = np.array([stocks[0][key] for key in keys], np.int32)
        num_slots = min(self._num_slots[each] for each in group)
        return Stocked(news.holder, num_slots, words_of(keys), num_tokens, is_last=True)

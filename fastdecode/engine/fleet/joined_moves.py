"""What the members of a cache group report of transfers and tiers, as the group's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

import numpy as np
from msgspec.structs import replace

from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import Done, Inventory, MoveNews, Progress, Pulled, keys_of, words_of


class JoinedMoves:
    """Joins reports: a block, or a sequence, is there when every member has its part.

    Args:
        holder: the group.
        members: of it.
    """

    def __init__(self, holder: HolderId, members: Collection[HolderId]) -> None:
        self._holder = holder
        self._members = frozenset(members)
        self._moved: dict[int, dict[HolderId, Done]] = {}  # by job and member
        self._fetching: dict[int, dict[HolderId, Progress]] = {}
        self._pulled: dict[int, dict[HolderId, Pulled]] = {}  # by sequence and member
        self._stocked: dict[HolderId, dict[bytes, int]] = {}  # of each member
        self._num_slots: dict[HolderId, int] = {}
        self._whole: set[HolderId] = set()
        self._stores: set[int] = set()  # jobs
        self.news: deque[MoveNews] = deque()
        """What all members have reported, and wasn't taken."""

    def begin_store(self, job: int) -> None:
        """The members are asked to store blocks."""
        self._stores.add(job)

    def take(self, member: HolderId, news: MoveNews) -> dict[HolderId, set[bytes]]:
        """A member reports. Returns the blocks that members are to drop, since
        others lack them: disks would fill with what is of no use."""
        told = dict(self._moved.get(news.job, {})) if isinstance(news, Done) else {}
        joined: MoveNews | None
        if isinstance(news, Done):
            joined = self._take_moved(member, news)
        elif isinstance(news, Progress):
            joined = self._take_fetching(member, news)
        elif isinstance(news, Pulled):
            joined = self._take_pulled(member, news)
        else:
            joined = self._take_stocked(member, news)
        if joined is not None:
            self.news.append(replace(joined, holder=self._holder))
        if isinstance(joined, Done) and isinstance(news, Done):
            return self._failed_elsewhere(joined, {**told, member: news})
        return self._extras(joined) if isinstance(joined, Inventory) else {}

    def _failed_elsewhere(
        self, joined: Done, told: Mapping[HolderId, Done]
    ) -> dict[HolderId, set[bytes]]:
        """Of a store: what some member couldn't, by the others. Who asked for a fetch
        gives blocks up by itself."""
        if joined.job not in self._stores:
            return {}
        self._stores.remove(joined.job)
        failed = set(keys_of(joined.missing))
        return {member: failed - set(keys_of(news.missing)) for member, news in told.items()}

    def _extras(self, stocked: Inventory) -> dict[HolderId, set[bytes]]:
        """What members have, and not all have."""
        shared = set(keys_of(stocked.keys))
        return {member: set(own) - shared for member, own in self._stocked.items()}

    def _take_fetching(self, member: HolderId, news: Progress) -> Progress | None:
        """The group is as far as its slowest member; one whose part is over reports
        nothing more."""
        told = self._fetching.setdefault(news.job, {})
        told[member] = news
        over = self._moved.get(news.job, {})
        if not told.keys() | over.keys() >= self._members:
            return None
        under_way = (told[x] for x in told if x not in over)
        return min(under_way, key=lambda x: x.num_there, default=None)

    def _take_moved(self, member: HolderId, news: Done) -> Done | None:
        told = self._moved.setdefault(news.job, {})
        told[member] = news
        if not told.keys() >= self._members:
            return None
        del self._moved[news.job]
        self._fetching.pop(news.job, None)
        failed = {key for each in told.values() for key in keys_of(each.missing)}
        num_bytes = sum(each.num_bytes for each in told.values())
        seconds = max(each.seconds for each in told.values())
        faults = map(sum, zip(*(each.faults for each in told.values()), strict=True))
        reason = next((each.reason for each in told.values() if each.reason), "")
        at = news.holder, news.job, words_of(sorted(failed))
        done = Done(*at, num_bytes, seconds, reason=reason)
        names = "num_unread", "num_damaged", "num_unwritten", "num_late"
        return replace(done, **dict(zip(names, faults, strict=True)))

    def _take_pulled(self, member: HolderId, news: Pulled) -> Pulled | None:
        """A sequence is here when all have their part of it."""
        told = self._pulled.setdefault(news.sequence_id, {})
        told[member] = news
        if not told.keys() >= self._members:
            return None
        del self._pulled[news.sequence_id]
        num_bytes = sum(each.num_bytes for each in told.values())
        seconds = max(each.seconds for each in told.values())
        reason = next((each.reason for each in told.values() if each.reason), "")
        return Pulled(news.holder, news.sequence_id, num_bytes, seconds, reason)

    def _take_stocked(self, member: HolderId, news: Inventory) -> Inventory | None:
        own = self._stocked.setdefault(member, {})
        own.update(zip(keys_of(news.keys), news.num_tokens.tolist(), strict=True))
        self._num_slots[member] = news.num_slots
        if news.is_last:
            self._whole.add(member)
        if not self._whole >= self._members:
            return None
        stocks = [self._stocked[each] for each in self._members]
        keys = [key for key in stocks[0] if all(key in stock for stock in stocks)]
        num_tokens = np.array([stocks[0][key] for key in keys], np.int32)
        num_slots = min(self._num_slots[each] for each in self._members)
        return Inventory(news.holder, num_slots, words_of(keys), num_tokens, is_last=True)

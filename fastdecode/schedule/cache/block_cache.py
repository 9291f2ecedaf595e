"""The blocks that holders keep, and what holders are to be told about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Final

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId, Part, PartId
from fastdecode.schedule.cache.blocks import Index
from fastdecode.schedule.cache.fresh import FreshMemory
from fastdecode.schedule.cache.orders import Orders
from fastdecode.schedule.cache.retention import Policy
from fastdecode.schedule.cache.tiers.offload_manager import OffloadManager
from fastdecode.schedule.cache.window import Window, drop_unseen
from fastdecode.schedule.plan import Keep


class BlockCache:
    """Of all holders.

    Args:
        num_holders: that there are.
        block_size: tokens in a block.
        policy: says which kept blocks are given up first.
        clock: by which they are idle.
        only_ends: see ``Index``.
        window: tokens that the layer sees which sees most; None: all.
    """

    def __init__(
        self,
        num_holders: int,
        block_size: int,
        policy: Policy,
        clock: Clock,
        *,
        only_ends: bool = False,
        window: int | None = None,
    ) -> None:
        self._block_size = block_size
        self.window: Final = Window(window, block_size)
        """What is seen of a sequence."""
        self.policy: Final = policy
        """Says what is given up first."""
        self._clock = clock
        self._only_ends = only_ends
        self._indices = [self._empty() for _ in range(num_holders)]
        self.orders: Final = Orders()
        """What holders are to be told."""
        self.traffic: Final = OffloadManager(self._indices, self.orders, block_size, clock)
        """What is moved between tiers."""
        self._tails: dict[PartId, bytes] = {}
        self.fresh = FreshMemory(block_size)
        """What memory kept blocks may take."""

    @property
    def holders(self) -> list[HolderId]:
        return [HolderId(holder) for holder in range(len(self._indices))]

    def __getitem__(self, holder: HolderId) -> Index:
        """What the holder keeps: to be asked, and told who uses it."""
        return self._indices[holder]

    def keep(
        self, part: Part, first_block: int, keys: Seq[bytes], before: bytes | None
    ) -> list[bytes | None]:
        """A part has new blocks, from its ``first_block`` on.

        Args:
            before: the key of the part's block before that one, if there is one.

        Returns:
            By what key each is kept; None: it isn't, since another one has the
            key.
        """
        index = self._indices[part.holder]
        names = [None if key in index else key for key in keys]
        run: list[bytes] = []
        for place, (key, name) in enumerate(zip(keys, names, strict=True), first_block):
            if name is not None:
                index.name(name, before, part.first_token + (place + 1) * self._block_size)
                run.append(name)
            elif run:
                self.orders.add(Keep(part, place - len(run), tuple(run)))
                run = []
            before = key
        if run:
            self.orders.add(Keep(part, first_block + len(keys) - len(run), tuple(run)))
        return names

    def keep_tail(self, part: Part, key: bytes, before: bytes | None, num_tokens: int) -> None:
        """A part that is closed now leaves a block that isn't full; it is kept,
        unless another one has its key.

        Args:
            before: the key of the part's block before it, if there is one.
            num_tokens: up to its end.
        """
        index = self._indices[part.holder]
        if key not in index:
            index.name(key, before, num_tokens, is_tail=True)
            index.want([key])
            index.release([key], self._clock())
            self._tails[part.part_id] = key

    def take_tail(self, part_id: PartId) -> bytes | None:
        """The key by which the last block of a part that is closed now is kept,
        though it isn't full."""
        return self._tails.pop(part_id, None)

    def release(self, holder: HolderId, keys: Seq[bytes], *, for_good: bool) -> None:
        """A sequence that used these blocks, in the order of its tokens, runs no
        more. ``for_good``: nobody is to use them again."""
        index = self._indices[holder]
        if for_good:
            index.make_void(keys)
            self.traffic.drop_copies(holder, filter(index.is_stored, keys))
        self.orders.forget(holder, index.release(keys, self._clock()))

    def give_up(self, holder: HolderId, count: int) -> None:
        """Make room: so many idle blocks are kept no more."""
        self.orders.forget(holder, self._indices[holder].evict(count, self._clock()))

    def drop(self, holder: HolderId, keys: Seq[bytes]) -> None:
        """Of a chain that somebody has no use for any more, give up what nobody
        else has."""
        self._drop(holder, self._indices[holder].drop(keys))

    def drop_unseen(self, holder: HolderId, keys: Seq[bytes], num_past: int) -> None:
        """See ``cache.window``: also of copies in the lower tier."""
        self._drop(holder, drop_unseen(self._indices[holder], keys, num_past, self.window))

    def _drop(self, holder: HolderId, gone: list[bytes]) -> None:
        self.orders.forget(holder, gone)
        self.traffic.drop_copies(holder, filter(self._indices[holder].is_stored, gone))

    def _empty(self) -> Index:
        window = self.window.num_tokens
        return Index(self.policy, only_ends=self._only_ends, window=window)

    def trim(self, num_cached_tokens: int, num_running: int) -> None:
        """Give up what would take memory that was never touched before, when so
        many tokens of so many running sequences are cached."""
        most = self.fresh.most_unhit(num_cached_tokens, num_running)
        if most is None:
            return
        excess = sum(index.idle.num_unhit for index in self._indices) - most
        while excess > 0:
            holder = max(self.holders, key=lambda h: self._indices[h].idle.num_unhit)
            count = min(excess, self._indices[holder].idle.num_unhit)
            given_up = self._indices[holder].evict(count, self._clock(), only_unhit=True)
            if not given_up:
                return
            self.orders.forget(holder, given_up)
            self.fresh.gave_up(given_up)
            excess -= len(given_up)

    def named(self, holder: HolderId) -> tuple[bytes, ...]:
        """The keys of what a holder that goes on from a copy is to keep; it isn't to
        hear of what happened before."""
        self.orders.lose(holder)
        return tuple([block.key for block in self._indices[holder]])

    def release_lost(self, holder: HolderId, keys: Seq[bytes]) -> None:
        """A sequence uses these blocks, which its holder hasn't got, no more."""
        self._indices[holder].release(keys, self._clock())

    def lose_blocks(self, holder: HolderId, keys: Iterable[bytes]) -> None:
        """A holder hasn't got these kept blocks, which no sequence uses."""
        self._indices[holder].lose(keys)

    def lose(self, holder: HolderId) -> None:
        """A holder is gone, and all that it kept."""
        self.traffic.lose(holder)
        self._indices[holder] = self._empty()
        self.orders.lose(holder)

    def check_invariants(self, users: Seq[Counter[bytes]]) -> None:
        """Recount. ``users``: of each holder, how many running sequences use
        each block."""
        for index, used in zip(self._indices, users, strict=True):
            index.check_invariants(used)
        self.traffic.check_invariants()

"""What a holder's lower tier has, and what it gives up first."""

from __future__ import annotations

from collections.abc import Iterable

from fastdecode.schedule.cache.idle.blocks import IdleBlocks
from fastdecode.schedule.cache.kept import KeptBlock, Use
from fastdecode.schedule.cache.retention import Policy


class LowerTier:
    """Of one holder. What the cache above uses at the moment is never given up.

    Args:
        policy: says what goes first.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._blocks: dict[bytes, KeptBlock] = {}
        self._idle = IdleBlocks(policy)
        self.num_slots = 0
        """Blocks that it can have; 0: there is none."""
        self.pays = True
        """Whether fetching is sooner done than computing again."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def offers(self, key: bytes) -> bool:
        """Whether it has a block, and fetching that pays."""
        return self.pays and key in self._blocks

    def num_tokens(self, key: bytes) -> int:
        """Up to the end of a block that it has."""
        return self._blocks[key].num_tokens

    def stocked(self, keys: Iterable[bytes], num_tokens: Iterable[int], use: Use) -> None:
        """It has these from before."""
        for key, count in zip(keys, num_tokens, strict=True):
            if key not in self._blocks:
                self._add(KeptBlock(key, None, count, was_hit=True), use)

    def add(self, block: KeptBlock, use: Use | None) -> None:
        """It has a copy of a kept block. ``use``: since which nobody uses it;
        None: somebody does."""
        if block.key in self._blocks:
            return
        parent = None if block.parent is None else self._blocks.get(block.parent.key)
        copy = KeptBlock(block.key, parent, block.num_tokens, was_hit=True)
        copy.num_leases = block.num_leases
        self._add(copy, use)

    def _add(self, copy: KeptBlock, use: Use | None) -> None:
        self._blocks[copy.key] = copy
        if use is not None:
            self._idle.add(copy, Use(use.number, use.ended_s))

    def use(self, key: bytes) -> None:
        """The cache above has the block, too, and somebody uses it."""
        copy = self._blocks.get(key)
        if copy is not None and copy.idle_since is not None:
            self._idle.remove(copy)

    def rest(self, key: bytes, use: Use) -> None:
        """Nobody uses it since then."""
        copy = self._blocks.get(key)
        if copy is not None and copy.idle_since is None:
            self._idle.add(copy, Use(use.number, use.ended_s))

    def make_room(self, count: int, now_s: float) -> list[bytes]:
        """Give up as many as it takes for so many more to fit, as far as that
        can be done."""
        lacking = len(self._blocks) + count - self.num_slots
        if lacking <= 0:
            return []
        gone = [copy.key for copy in self._idle.give_up(lacking, now_s)]
        for key in gone:
            del self._blocks[key]
        return gone

    def drop(self, key: bytes) -> None:
        """It hasn't got it, after all."""
        copy = self._blocks.pop(key, None)
        if copy is not None and copy.idle_since is not None:
            self._idle.remove(copy)

    def lose(self) -> list[bytes]:
        """There is no lower tier any more. Returns what it had."""
        self.num_slots = 0
        gone = list(self._blocks)
        for key in gone:
            self.drop(key)
        return gone

    def least_value(self, now_s: float) -> float:
        """Of what it would give up first; infinite: there is nothing to be
        given up."""
        return self._idle.least_value(now_s)

    def check_invariants(self, in_use: set[bytes]) -> None:
        """Recount. ``in_use``: of the cache above."""
        assert len(self._blocks) <= self.num_slots
        self._idle.check_invariants(
            [copy for copy in self._blocks.values() if copy.idle_since is not None]
        )
        pinned = {key for key, copy in self._blocks.items() if copy.idle_since is None}
        assert pinned == in_use & set(self._blocks), "what is used may be given up, or is kept"

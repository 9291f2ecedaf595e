"""The kept blocks of one holder: which are in use, and which of the others are
given up.

A block is **idle** when no running sequence uses it; only idle ones are given
up. It was **hit** once a sequence has started with it that didn't compute it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Reversible
from itertools import takewhile
from typing import Final

from fastdecode.schedule.cache.idle.blocks import IdleBlocks
from fastdecode.schedule.cache.kept import KeptBlock, KeptBlocks
from fastdecode.schedule.cache.retention import Policy
from fastdecode.schedule.cache.tiers.lower import LowerTier
from fastdecode.schedule.cache.tiers.moving import MovingBlocks


class BlockIndex:
    """The kept blocks of one holder, by key.

    Args:
        policy: says what is given up first.
        only_ends, window: see ``IdleBlocks``.
    """

    def __init__(
        self, policy: Policy, *, only_ends: bool = False, window: int | None = None
    ) -> None:
        self.blocks: Final = KeptBlocks()
        """To be asked, and marked."""
        self.idle: Final = IdleBlocks(policy, only_ends=only_ends, window=window)
        """To be counted."""
        self.lower: Final = LowerTier(policy)
        """What the holder's lower tier has."""
        self.moving: Final = MovingBlocks(self.blocks, self.idle, self.lower)
        """What is on its way there, or from there."""

    def __len__(self) -> int:
        return len(self.blocks)

    def __contains__(self, key: bytes) -> bool:
        """Whether a block has this key, be it of use or not."""
        return key in self.blocks

    def __iter__(self) -> Iterator[KeptBlock]:
        return iter(self.blocks)

    def num_leading(self, keys: Iterable[bytes]) -> int:
        """How many of a chain's first blocks are there, and may be used; or can
        be fetched."""
        return sum(1 for _ in takewhile(self.is_usable, keys))

    def is_usable(self, key: bytes) -> bool:
        """Whether a block is there, and may be used; or can be fetched, and
        that pays."""
        block = self.blocks.get(key)
        if block is None:
            return self.lower.offers(key)
        return not block.is_condemned

    def add(self, key: bytes, before: bytes | None, num_tokens: int) -> None:
        """A running sequence has a new block.

        Args:
            before: the key of the block before it, if that is on this holder.
            num_tokens: up to its end.
        """
        block = self.blocks.add(key, before, num_tokens)
        block.num_users, block.is_copied = 1, key in self.lower
        self.lower.use(key)

    def use(self, keys: Iterable[bytes], *, as_hit: bool) -> None:
        """A sequence starts that uses these blocks. ``as_hit``: not as the fork
        of one that does."""
        for key in keys:
            block = self.blocks[key]
            if block.idle_since is not None:
                self.idle.remove(block)
            block.num_users += 1
            block.was_hit |= as_hit
            block.resting = None
            self.lower.use(key)

    def release(self, keys: Reversible[bytes], now_s: float) -> list[bytes]:
        """A sequence ends that used these blocks, in the order of its tokens.
        Returns those that are to be given up at once."""
        use, condemned = self.blocks.new_use(now_s), []
        for key in reversed(keys):
            block = self.blocks[key]
            block.num_users -= 1
            if block.num_users:
                continue
            self.lower.rest(key, use)
            if block.job is not None:
                block.resting = use
            elif block.is_condemned:
                self.idle.end_leases(block)
                self.blocks.forget(block)
                condemned.append(key)
            else:
                self.idle.add(block, use)
        return condemned

    def lease(self, key: bytes) -> None:
        """A conversation's turn has ended with this block: it shares it, and what
        is seen of those before it, until its next turn has ended."""
        self.idle.lease(self.blocks[key], 1)

    def end_turn(self, key: bytes) -> None:
        """A turn that had ended with this block, if it is there and one had, has
        been followed by another."""
        block = self.blocks.get(key)
        if block is not None and block.num_turns:
            self.idle.lease(block, -1)

    def give_up(self, count: int, now_s: float, *, only_unhit: bool = False) -> list[bytes]:
        """So many idle blocks; or of those that were never hit. See
        ``IdleBlocks.give_up``."""
        blocks = self.idle.give_up(count, now_s, only_unhit=only_unhit)
        for block in blocks:
            self.blocks.forget(block)
        return [block.key for block in blocks]

    def drop(self, keys: Reversible[bytes]) -> list[bytes]:
        """Of a chain's blocks give up those that are idle, shared by no
        conversation, and have no other behind them. Returns them."""
        gone: list[bytes] = []
        for key in reversed(keys):
            block = self.blocks.get(key)
            if block is None:
                continue
            if block.idle_since is None or block.num_leases or block.num_idle_behind:
                break
            self.idle.remove(block)
            self.blocks.forget(block)
            gone.append(key)
        return gone

    def lose(self, keys: Iterable[bytes]) -> None:
        """These blocks, which nobody uses, aren't there any more; some may have been
        given up meanwhile."""
        for block in [self.blocks[key] for key in keys if key in self.blocks]:
            self.idle.remove(block)
            self.idle.end_leases(block)
            self.blocks.forget(block)

    def check_invariants(self, used: Counter[bytes]) -> None:
        """Recount. ``used``: how many running sequences use each block."""
        users = {block.key: block.num_users for block in self if block.num_users}
        assert users == dict(used), "users are miscounted"
        self.blocks.check_invariants()
        self._check_leases()
        self.lower.check_invariants(set(users))
        idle = [block for block in self if not block.num_users and block.job is None]
        self.idle.check_invariants(idle)
        assert not any(block.is_condemned for block in idle), "it was to be given up"

    def _check_leases(self) -> None:
        leases: Counter[int] = Counter()
        for block in self:
            for each in self.idle.leases.shared_with(block) if block.num_turns else ():
                leases[id(each)] += block.num_turns
        assert self.idle.leases.num_turns == sum(block.num_turns for block in self)
        assert all(block.num_leases == leases[id(block)] for block in self), (
            "conversations that share a block are miscounted"
        )

"""The kept blocks of one holder: which are in use, and which of the others are
given up.

A block is **idle** when no running sequence uses it; only idle ones are given
up. It was **hit** once a sequence has started with it that didn't compute it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Reversible

from fastdecode.schedule.cache.idle import IdleBlocks
from fastdecode.schedule.cache.kept import KeptBlock, Use
from fastdecode.schedule.cache.retention import Policy


class BlockIndex:
    """The kept blocks of one holder, by key.

    Args:
        policy: says what is given up first.
    """

    def __init__(self, policy: Policy) -> None:
        self._blocks: dict[bytes, KeptBlock] = {}
        self.idle = IdleBlocks(policy)
        """To be counted."""
        self._num_uses = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        """Whether a block has this key, be it of use or not."""
        return key in self._blocks

    def __iter__(self) -> Iterator[KeptBlock]:
        return iter(self._blocks.values())

    def num_leading(self, keys: Iterable[bytes]) -> int:
        """How many of a chain's first blocks are there, and may be used."""
        count = 0
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.is_condemned:
                break
            count += 1
        return count

    def num_idle_of(self, keys: Iterable[bytes]) -> int:
        """How many of these blocks, all of which are there, are idle."""
        return sum(self._blocks[key].num_users == 0 for key in keys)

    def add(self, key: bytes, before: bytes | None, num_tokens: int) -> None:
        """A running sequence has a new block.

        Args:
            before: the key of the block before it, if that is on this holder.
            num_tokens: up to its end.
        """
        assert key not in self._blocks
        parent = None if before is None else self._blocks.get(before)
        self._blocks[key] = KeptBlock(key, parent, num_tokens, num_users=1)

    def use(self, keys: Iterable[bytes], *, as_hit: bool) -> None:
        """A sequence starts that uses these blocks. ``as_hit``: not as the fork
        of one that does."""
        for key in keys:
            block = self._blocks[key]
            if block.num_users == 0:
                self.idle.remove(block)
            block.num_users += 1
            block.was_hit |= as_hit

    def release(self, keys: Reversible[bytes], now_s: float) -> list[bytes]:
        """A sequence ends that used these blocks, in the order of its tokens.
        Returns those that are to be given up at once."""
        self._num_uses += 1
        use, condemned = Use(self._num_uses, now_s), []
        for key in reversed(keys):
            block = self._blocks[key]
            block.num_users -= 1
            if block.num_users:
                continue
            if block.is_condemned:
                self.end_turn(key)
                del self._blocks[key]
                condemned.append(key)
                continue
            self.idle.add(block, use)
        return condemned

    def lease(self, key: bytes) -> None:
        """A conversation's turn has ended with this block: it shares it, and all
        before it, until its next turn has ended."""
        self.idle.lease(self._blocks[key], 1)

    def end_turn(self, key: bytes) -> None:
        """A turn that had ended with this block, if it is there and one had, has
        been followed by another."""
        block = self._blocks.get(key)
        if block is not None and block.num_turns:
            self.idle.lease(block, -1)

    def want(self, keys: Iterable[bytes]) -> None:
        """These blocks, which are in use, are worth memory as if they were hit."""
        for key in keys:
            self._blocks[key].was_hit = True

    def condemn(self, keys: Iterable[bytes]) -> None:
        """Nobody is to start with these blocks, which are in use."""
        for key in keys:
            self._blocks[key].is_condemned = True

    def give_up(self, count: int, now_s: float, *, only_unhit: bool = False) -> list[bytes]:
        """So many idle blocks; or of those that were never hit. See
        ``IdleBlocks.give_up``."""
        keys = [block.key for block in self.idle.give_up(count, now_s, only_unhit=only_unhit)]
        for key in keys:
            del self._blocks[key]
        return keys

    def check_invariants(self, used: Counter[bytes]) -> None:
        """Recount. ``used``: how many running sequences use each block."""
        users = {key: block.num_users for key, block in self._blocks.items() if block.num_users}
        assert users == dict(used), "users are miscounted"
        idle = [block for block in self._blocks.values() if not block.num_users]
        self.idle.check_invariants(idle)
        assert not any(block.is_condemned for block in idle), "it was to be given up"
        assert all(block.num_leases >= block.num_turns >= 0 for block in self._blocks.values())

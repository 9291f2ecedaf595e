"""The kept blocks of one holder: which are in use, and in what order the others
are given up.

A block is **idle** when no running sequence uses it; only idle ones are given
up. It was **hit** once a sequence has started with it that didn't compute it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Reversible

from fastdecode.schedule.cache.idle import IdleBlocks, KeptBlock


class BlockIndex:
    """The kept blocks of one holder, by key."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, KeptBlock] = {}
        self._idle = IdleBlocks()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        """Whether a block has this key, be it of use or not."""
        return key in self._blocks

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_unhit(self) -> int:
        """Idle ones that were never hit."""
        return self._idle.num_unhit

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

    def add(self, key: bytes) -> None:
        """A running sequence has a new block."""
        assert key not in self._blocks
        self._blocks[key] = KeptBlock(num_users=1)

    def use(self, keys: Iterable[bytes], *, as_hit: bool) -> None:
        """A sequence starts that uses these blocks. ``as_hit``: not as the fork
        of one that does."""
        for key in keys:
            block = self._blocks[key]
            if block.num_users == 0:
                self._idle.remove(key, block)
            block.num_users += 1
            block.was_hit |= as_hit

    def release(self, keys: Reversible[bytes]) -> list[bytes]:
        """A sequence ends that used these blocks, in the order of its tokens:
        of those that get idle, the later ones are given up first. Returns those
        that are to be given up at once."""
        condemned = []
        for key in reversed(keys):
            block = self._blocks[key]
            block.num_users -= 1
            if block.num_users:
                continue
            if block.is_condemned:
                del self._blocks[key]
                condemned.append(key)
                continue
            self._idle.add(key, block)
        return condemned

    def want(self, keys: Iterable[bytes]) -> None:
        """These blocks, which are in use, are worth memory as if they were hit."""
        for key in keys:
            self._blocks[key].was_hit = True

    def condemn(self, keys: Iterable[bytes]) -> None:
        """Nobody is to start with these blocks, which are in use."""
        for key in keys:
            self._blocks[key].is_condemned = True

    def give_up(self, count: int, *, only_unhit: bool = False) -> list[bytes]:
        """So many idle blocks; or of those that were never hit."""
        idle = self._idle
        keys = idle.give_up_unhit(count) if only_unhit else idle.give_up(count)
        for key in keys:
            del self._blocks[key]
        return keys

    def check_invariants(self, used: Counter[bytes]) -> None:
        """Recount. ``used``: how many running sequences use each block."""
        users = {key: block.num_users for key, block in self._blocks.items() if block.num_users}
        assert users == dict(used), "users are miscounted"
        idle = {key for key, block in self._blocks.items() if not block.num_users}
        self._idle.check_invariants(idle)
        assert not any(self._blocks[key].is_condemned for key in idle), "it was to be given up"

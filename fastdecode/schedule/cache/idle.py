"""The kept blocks that no running sequence uses, in the order in which they are
given up."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class KeptBlock:
    num_users: int
    """Running sequences that use it."""
    was_hit: bool = False
    is_condemned: bool = False
    """Nobody may start with it any more; it is given up when it gets idle."""
    idle_since: int = 0
    """On a clock that counts how often blocks got idle."""


class IdleBlocks:
    """Of one holder, by key: those idle for longest are given up first."""

    def __init__(self) -> None:
        # Apart, since those that were never hit are given up first where it is
        # memory that is saved.
        self._hit: OrderedDict[bytes, KeptBlock] = OrderedDict()
        self._unhit: OrderedDict[bytes, KeptBlock] = OrderedDict()
        self._clock = 0

    def __len__(self) -> int:
        return len(self._hit) + len(self._unhit)

    @property
    def num_unhit(self) -> int:
        """Those that were never hit."""
        return len(self._unhit)

    def add(self, key: bytes, block: KeptBlock) -> None:
        """A block gets idle."""
        self._clock += 1
        block.idle_since = self._clock
        self._like(block)[key] = block

    def remove(self, key: bytes, block: KeptBlock) -> None:
        """A block is used again."""
        del self._like(block)[key]

    def give_up(self, count: int) -> list[bytes]:
        """So many of them."""
        return [self._older().popitem(last=False)[0] for _ in range(count)]

    def give_up_unhit(self, count: int) -> list[bytes]:
        """So many of those that were never hit."""
        return [self._unhit.popitem(last=False)[0] for _ in range(count)]

    def _older(self) -> OrderedDict[bytes, KeptBlock]:
        """Where the one is that is idle for longest."""
        if not self._hit or not self._unhit:
            return self._hit or self._unhit
        hit, unhit = next(iter(self._hit.values())), next(iter(self._unhit.values()))
        return self._hit if hit.idle_since < unhit.idle_since else self._unhit

    def _like(self, block: KeptBlock) -> OrderedDict[bytes, KeptBlock]:
        return self._hit if block.was_hit else self._unhit

    def check_invariants(self, idle: set[bytes]) -> None:
        """Recount. ``idle``: those that are."""
        assert idle == set(self._hit) | set(self._unhit) and not set(self._hit) & set(self._unhit)
        assert all(block.was_hit for block in self._hit.values())
        assert not any(block.was_hit for block in self._unhit.values())

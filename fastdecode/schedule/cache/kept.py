"""Kept blocks, and since when each is idle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from weakref import WeakValueDictionary


@dataclass(eq=False, slots=True)
class Use:
    """A sequence that has ended, and what is idle since then."""

    number: int
    """Uses of a holder's blocks are numbered as they end."""
    ended_s: float
    num_idle: int = 0
    """Blocks that nobody has used since."""


class _Named:
    """May be referred to weakly."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False, slots=True)
class KeptBlock(_Named):
    """One of a holder's.

    Behind a block are those that begin with all of its tokens. A block without
    an idle one behind it is an **end**.
    """

    key: bytes
    parent: KeptBlock | None
    """The block before it. It may have been given up meanwhile; if it is kept
    again it is this very object."""
    num_tokens: int
    """Up to its end, of whatever sequence has it."""
    num_users: int = 0
    """Running sequences that use it."""
    was_hit: bool = False
    is_condemned: bool = False
    """Nobody may start with it any more; it is given up when it gets idle."""
    num_turns: int = 0
    """Conversations whose last turn ended here."""
    num_leases: int = 0
    """The same of this block and all behind it: conversations that share it."""
    idle_since: Use | None = None
    """None: it isn't idle."""
    num_idle_behind: int = 0
    """Idle blocks whose parent it is."""
    followed_by: bytes | None = None
    """The key of a full block that was kept behind it last."""
    has_branches: bool = False
    """Different ones were."""
    job: int | None = None
    """That moves it between tiers: it is neither given up nor idle meanwhile."""
    is_coming: bool = False
    """It is being fetched: whoever uses it has to wait."""
    is_copied: bool = False
    """The lower tier has it, too."""
    resting: Use | None = None
    """While it is moved and nobody uses it: since when."""
    row: int = -1
    """Among idle blocks; -1: it is none."""


class KeptBlocks:
    """A holder's, by key.

    A block that is given up while others behind it refer to it isn't gone: kept
    again it is this very object, so that who shares it is known.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, KeptBlock] = {}
        # Given up, with blocks behind them that refer to them.
        self._gone: WeakValueDictionary[bytes, KeptBlock] = WeakValueDictionary()
        self._num_uses = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[KeptBlock]:
        return iter(self._blocks.values())

    def __getitem__(self, key: bytes) -> KeptBlock:
        return self._blocks[key]

    def get(self, key: bytes) -> KeptBlock | None:
        """None: it isn't kept."""
        return self._blocks.get(key)

    def add(self, key: bytes, before: bytes | None, num_tokens: int) -> KeptBlock:
        """A block that isn't kept is kept from now on.

        Args:
            before: the key of the block before it, if that is on this holder.
            num_tokens: up to its end.
        """
        assert key not in self._blocks
        block = self._gone.pop(key, None)
        if block is None:
            block = KeptBlock(key, self._find(before), num_tokens)
        self._blocks[key] = block
        return block

    def forget(self, block: KeptBlock) -> None:
        """It is kept no more."""
        block.was_hit = block.is_condemned = False
        del self._blocks[block.key]
        self._gone[block.key] = block

    def follow(self, before: bytes | None, key: bytes) -> None:
        """A full block is kept behind another, which may be there."""
        block = self._find(before)
        if block is not None:
            block.has_branches |= block.followed_by not in (None, key)
            block.followed_by = key

    def want(self, keys: Iterable[bytes]) -> None:
        """These blocks, which are in use, are worth memory as if they were hit."""
        for key in keys:
            self._blocks[key].was_hit = True

    def condemn(self, keys: Iterable[bytes]) -> None:
        """Nobody is to start with these blocks, which are in use."""
        for key in keys:
            self._blocks[key].is_condemned = True

    def new_use(self, now_s: float) -> Use:
        """Of some of them, which ends now."""
        self._num_uses += 1
        return Use(self._num_uses, now_s)

    def check_invariants(self) -> None:
        """Blocks that share what is before them share one object."""
        for key, block in self._blocks.items():
            assert block.num_leases >= block.num_turns >= 0 and block.key == key
            before = block.parent
            if before is not None:
                assert before is self._find(before.key), "it is there twice"

    def _find(self, key: bytes | None) -> KeptBlock | None:
        """A block that is there, or has others behind it."""
        if key is None:
            return None
        return self._blocks.get(key) or self._gone.get(key)

"""The cached blocks of one holder: where their K and V are, and which sequences use them.

A block is one object per holder and key. ``Memory`` says what the holder's cache has of it,
``Below`` whether the holder's lower tier has a copy:

=========  =================================================================================
memory     changes
=========  =================================================================================
ABSENT     named → READY; fetch ordered → ARRIVING
ARRIVING   fetch done → READY; failed, or unwanted → VOID
READY      evicted or lost → ABSENT; doubted, or unwanted while it is in use → VOID
VOID       no user and no job → ABSENT
=========  =================================================================================

=========  =================================================================================
below      changes
=========  =================================================================================
NONE       copy ordered → STORING; found in the tier → STORED
STORING    copy done → STORED; failed, or the block is VOID → NONE
STORED     dropped, unreadable, or the tier is lost → NONE
=========  =================================================================================

An **idle** block is READY, and neither a sequence nor a job uses it. Only idle blocks are
evicted, from memory. The lower tier evicts what no sequence uses. **Behind** a block are those
that begin with all of its tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Reversible
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice, takewhile
from typing import Final

from fastdecode.core.spec import first_seen
from fastdecode.schedule.cache.eviction import ANY, STORED, UNHIT, Evictable
from fastdecode.schedule.cache.retention import Policy


class Memory(IntEnum):
    """What a holder's cache has of a block."""

    ABSENT = 0
    ARRIVING = 1
    READY = 2
    VOID = 3
    """No sequence may start with it."""


class Below(IntEnum):
    """What a holder's lower tier has of a block."""

    NONE = 0
    STORING = 1
    STORED = 2


@dataclass(eq=False, slots=True)
class Block:
    """One block of a holder, from its first use until neither the holder nor a block behind it
    needs it. If it returns to memory meanwhile, it is this object again."""

    key: bytes
    parent: Block | None
    num_tokens: int
    """Tokens up to its end, of any sequence that has it."""
    memory: Memory = Memory.ABSENT
    below: Below = Below.NONE
    job: int | None = None
    """The job that moves it between tiers."""
    num_users: int = 0
    """Running sequences that use it."""
    was_hit: bool = False
    """A sequence has started with it that did not compute it."""
    num_turns: int = 0
    """Conversations whose last turn ended here."""
    num_leases: int = 0
    """Conversations whose next turn attends to it."""
    last_use: int = 0
    """Number of its last use. Uses of a holder's blocks are numbered as they end."""
    ended_s: float = 0.0
    """When that use ended."""
    num_behind: int = 0
    """Blocks whose parent it is."""
    followed_by: bytes | None = None
    """Key of the full block that was named behind it last."""
    has_branches: bool = False
    """Different ones were."""

    @property
    def is_idle(self) -> bool:
        return self.memory is Memory.READY and not self.num_users and self.job is None

    @property
    def is_over(self) -> bool:
        """True if it is to be forgotten at once."""
        return self.memory is Memory.VOID and not self.num_users and self.job is None


@dataclass(frozen=True)
class Window:
    """What a sequence sees of its past. Blocks of which no layer sees a token are **unseen**.

    Args:
        num_tokens: most tokens that any layer attends to. None if a layer attends to all.
        block_size: tokens in a block.
    """

    num_tokens: int | None = None
    block_size: int = 1

    def num_unseen(self, num_past: int) -> int:
        """Count the unseen blocks of a sequence that continues behind ``num_past`` tokens."""
        return first_seen(num_past, self.num_tokens) // self.block_size

    def unseen_tokens(self, num_past: int) -> int:
        return self.num_unseen(num_past) * self.block_size


_SEES_ALL: Final = Window()


class Index:
    """The blocks of one holder, by key.

    Args:
        policy: what idle blocks are worth.
        only_ends: idle blocks that have others behind them are not evicted.
        window: what sequences see of their past.
    """

    def __init__(
        self, policy: Policy, *, only_ends: bool = False, window: Window = _SEES_ALL
    ) -> None:
        self._window = window
        self._blocks: dict[bytes, Block] = {}
        self._num_uses = 0
        self.num_users = 0
        """Users of all blocks, summed."""
        self._num_there = 0
        self.idle = Evictable(policy, only_ends=only_ends)
        self._resting = Evictable(policy)  # what the lower tier may evict
        self.num_turns = 0
        """Conversations whose last turn ended with one of the blocks."""
        self.num_slots = 0
        """Blocks that the lower tier can have. 0 if there is no tier."""
        self.num_stored = 0
        """Blocks that it has."""
        self.pays = True
        """True if fetching a block takes less time than computing it."""

    def __len__(self) -> int:
        """Return the number of blocks in memory, those that are arriving included."""
        return self._num_there

    def __contains__(self, key: bytes) -> bool:
        """Return True if memory has a block with this key, or a job fetches it."""
        return self.get(key) is not None

    def __iter__(self) -> Iterator[Block]:
        return (block for block in self._blocks.values() if block.memory)

    def __getitem__(self, key: bytes) -> Block:
        return self._blocks[key]

    def get(self, key: bytes) -> Block | None:
        """Return the block with this key if it is in memory, or arriving."""
        block = self._blocks.get(key)
        return block if block is not None and block.memory else None

    def is_usable(self, key: bytes) -> bool:
        """Return True if a sequence can start with the block, or with it once it is fetched."""
        block = self._blocks.get(key)
        if block is None or block.memory is Memory.VOID:
            return False
        return bool(block.memory) or (block.below is Below.STORED and self.pays)

    def may_start_with(self, key: bytes) -> bool:
        """Return True unless memory has a block with this key that no sequence may start with."""
        block = self._blocks.get(key)
        return block is None or block.memory is not Memory.VOID

    def num_leading(self, keys: Iterable[bytes]) -> int:
        """Count how many of a chain's first blocks a sequence can start with."""
        return sum(1 for _ in takewhile(self.is_usable, keys))

    def name(
        self, key: bytes, before: bytes | None, num_tokens: int, *, is_tail: bool = False
    ) -> None:
        """Add a block that a running sequence has computed, and uses.

        Args:
            before: key of the block before it, if that is on this holder.
            num_tokens: tokens up to its end.
            is_tail: the block is not full.
        """
        block = self._add(key, before, num_tokens)
        assert not block.memory
        if block.parent is not None and not is_tail:
            block.parent.has_branches |= block.parent.followed_by not in (None, key)
            block.parent.followed_by = key
        block.memory, block.num_users = Memory.READY, 1
        self.num_users += 1
        self._num_there += 1
        self._update(block)

    def use(self, keys: Iterable[bytes], *, as_hit: bool) -> None:
        """Count a sequence that starts with these blocks. ``as_hit``: not a fork."""
        for key in keys:
            block = self._blocks[key]
            block.num_users += 1
            self.num_users += 1
            block.was_hit |= as_hit
            self._update(block)

    def release(self, keys: Reversible[bytes], now_s: float) -> list[bytes]:
        """End a sequence's use of blocks, which are in the order of its tokens. Return the keys
        of those that are forgotten at once."""
        self._num_uses += 1
        over: list[Block] = []
        for key in reversed(keys):
            block = self._blocks[key]
            block.num_users -= 1
            self.num_users -= 1
            if not block.num_users:
                block.last_use, block.ended_s = self._num_uses, now_s
                over += [block] if block.is_over else []
            self._update(block)
        return self.forget(over)

    def want(self, keys: Iterable[bytes]) -> None:
        """Make blocks in use worth memory as if they had been hit."""
        for key in keys:
            self._blocks[key].was_hit = True

    def make_void(self, keys: Iterable[bytes]) -> None:
        """Let no sequence start with blocks that are in use, or moved."""
        for key in keys:
            block = self._blocks[key]
            block.memory = Memory.VOID
            if block.num_turns:
                self._lease(block, -block.num_turns)

    def forget(self, blocks: Iterable[Block]) -> list[bytes]:
        """Remove blocks from memory. Return their keys."""
        gone = []
        for block in blocks:
            block.memory, block.was_hit = Memory.ABSENT, False
            self._num_there -= 1
            self._update(block)
            gone.append(block.key)
        return gone

    def evict(self, count: int, now_s: float, *, only_unhit: bool = False) -> list[bytes]:
        """Evict up to ``count`` idle blocks, or of those that were never hit. Blocks that the
        lower tier has, too, come first. Return their keys."""
        gone: list[bytes] = []
        for kind in (UNHIT,) if only_unhit else (STORED, ANY):
            if kind != STORED or self.idle.num_stored:
                found = self.idle.in_order(count - len(gone), now_s, kind)
                for block in islice(found, count - len(gone)):
                    gone += self.forget([block])
        return gone

    def drop(self, keys: Reversible[bytes]) -> list[bytes]:
        """Forget a chain's blocks from its end, as far as they are idle, and neither shared by
        conversations nor followed by idle blocks. Return their keys."""
        gone: list[bytes] = []
        for key in reversed(keys):
            block = self.get(key)
            if block is None:
                continue
            if not block.is_idle or block.num_leases or self.idle.has_behind(block):
                break
            gone += self.forget([block])
        return gone

    def drop_unseen(self, keys: Reversible[bytes], num_past: int) -> list[bytes]:
        """Drop the blocks of an ended sequence that no sequence sees which continues behind its
        ``num_past`` tokens.

        Blocks stay that are in use, or shared by conversations. Where prompts parted they will
        again: what is seen from there stays, too.

        Args:
            keys: cached blocks of the sequence, in the order of its tokens.

        Returns:
            Keys of the dropped blocks. A block that is moved is dropped when its job ends.
        """
        end = self._window.unseen_tokens(num_past)
        gone: list[Block] = []
        seen_from = end  # from where prompts parted from the sequence
        for key in reversed(keys) if end else ():
            block = self.get(key)
            if block is None or block.num_tokens > end or block.num_users or block.num_leases:
                continue
            if block.has_branches:
                seen_from = min(seen_from, self._window.unseen_tokens(block.num_tokens))
            if not block.has_branches and block.num_tokens <= seen_from:
                gone.append(block)
        return self.drop_unused(gone)

    def drop_unused(self, blocks: Iterable[Block]) -> list[bytes]:
        """Drop those blocks that no sequence uses, shared or not. Return their keys. A block that
        is moved is dropped when its job ends."""
        unused = [block for block in blocks if not block.num_users]
        self.make_void(block.key for block in unused if block.job is not None)
        return self.forget(block for block in unused if block.job is None)

    def lose(self, keys: Iterable[bytes]) -> None:
        """Remove blocks that the holder lacks, and no sequence uses. Some may have left."""
        self.forget([block for key in keys if (block := self.get(key)) is not None])

    # Conversations.

    def lease(self, key: bytes) -> None:
        """Count a conversation whose turn has ended with this block."""
        self._lease(self._blocks[key], 1)

    def end_turn(self, key: bytes) -> None:
        """End one lease of a conversation's earlier turn, if that ended with this block."""
        block = self._blocks.get(key)
        if block is not None and block.num_turns:
            self._lease(block, -1)

    def _lease(self, block: Block, count: int) -> None:
        block.num_turns += count
        self.num_turns += count
        for each in self._shared_with(block):
            each.num_leases += count
            self._update(each)

    def _shared_with(self, block: Block) -> list[Block]:
        """Return a block, and those before it that tokens behind it attend to."""
        seen_from = first_seen(block.num_tokens, self._window.num_tokens)
        shared, before = [block], block.parent
        while before is not None and before.num_tokens > seen_from:
            shared.append(before)
            before = before.parent
        return shared

    # The lower tier.

    def is_stored(self, key: bytes) -> bool:
        """Return True if the lower tier has a copy of the block."""
        block = self._blocks.get(key)
        return block is not None and block.below is Below.STORED

    def jobs_of(self, keys: Iterable[bytes]) -> set[int]:
        """Return the jobs that fetch any of these blocks."""
        blocks = [self._blocks[key] for key in keys]
        return {x.job for x in blocks if x.memory is Memory.ARRIVING and x.job is not None}

    def stock(self, num_slots: int, blocks: Mapping[bytes, int], now_s: float) -> None:
        """Note what the lower tier has: key → tokens up to the block's end."""
        self.num_slots = num_slots
        for key, num_tokens in blocks.items():
            block = self._add(key, None, num_tokens)
            if not block.below:
                block.below = Below.STORED
                self.num_stored += 1
                block.ended_s = block.ended_s if block.memory else now_s
                self._update(block)

    def begin_fetch(
        self, keys: Iterable[bytes], before: Iterable[bytes | None], ends: Iterable[int]
    ) -> list[Block]:
        """Let those of a chain's blocks arrive that are not in memory. Return them: the caller
        says which job fetches each.

        Args:
            before: key of the block before each.
            ends: tokens up to each block's end, of blocks that are not known.
        """
        missing = []
        for key, parent, num_tokens in zip(keys, before, ends, strict=False):
            if key not in self:
                block = self._add(key, parent, num_tokens)
                block.memory, block.was_hit = Memory.ARRIVING, True
                self._num_there += 1
                self._update(block)
                missing.append(block)
        return missing

    def begin_store(self, count: int, job: int, now_s: float) -> tuple[list[Block], list[bytes]]:
        """Copy up to ``count`` idle blocks down that are evicted next. A full tier drops blocks for
        those that are worth more.

        Returns:
            The blocks to copy, and the keys of those that the tier drops.
        """
        is_full = self.num_stored + count > self.num_slots
        more_than = self._resting.least_value(now_s) if is_full else -math.inf
        blocks = self.idle.to_copy(count, now_s, more_than)
        num_over = max(0, self.num_stored + len(blocks) - self.num_slots)
        dropped = []
        for block in islice(self._resting.in_order(num_over, now_s), num_over):
            self.drop_below([block.key])
            dropped.append(block.key)
        blocks = blocks[: self.num_slots - self.num_stored]
        for block in blocks:
            block.below, block.job = Below.STORING, job
            self._update(block)
        return blocks, dropped

    def drop_below(self, keys: Iterable[bytes]) -> None:
        """Remove blocks from the lower tier, as far as it has them."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None and block.below is Below.STORED:
                block.below = Below.NONE
                self.num_stored -= 1
                self._update(block)

    def lose_below(self) -> None:
        """Remove the lower tier, and all that it has."""
        self.drop_below(list(self._blocks))
        self.num_slots = 0

    def end_job(
        self, job: int, keys: Iterable[bytes], failed: set[bytes], now_s: float
    ) -> list[bytes]:
        """End a job. Return the keys of blocks that are forgotten for it."""
        self._num_uses += 1
        over: list[Block] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.job != job:
                continue
            block.job = None
            if block.below is Below.STORING:
                is_stored = key not in failed and block.memory is not Memory.VOID
                block.below = Below.STORED if is_stored else Below.NONE
                self.num_stored += is_stored
            elif key in failed:
                block.memory = Memory.VOID
            elif block.memory is Memory.ARRIVING:
                block.memory = Memory.READY
                if not block.num_users:
                    block.last_use, block.ended_s = self._num_uses, now_s
            over += [block] if block.is_over else []
            self._update(block)
        return self.forget(over)

    def check_invariants(self, used: Counter[bytes]) -> None:
        """Recount. ``used``: how many running sequences use each block."""
        every = self._blocks.values()
        assert {x.key: x.num_users for x in every if x.num_users} == dict(used), "miscounted users"
        assert self.num_users == used.total()
        assert self._num_there == sum(1 for _ in self)
        assert self.num_stored == sum(x.below is Below.STORED for x in every) <= self.num_slots
        assert not any(x.is_over for x in every), "a block was to be forgotten"
        behind = Counter(x.parent for x in every if x.parent is not None)
        leases: Counter[Block] = Counter()
        for block in every:
            assert block.memory or block.below or block.num_behind, "a block is left over"
            assert block.num_behind == behind[block] and block.num_leases >= block.num_turns >= 0
            assert block.parent is None or self._blocks[block.parent.key] is block.parent
            for each in self._shared_with(block) if block.num_turns else ():
                leases[each] += block.num_turns
        assert self.num_turns == sum(x.num_turns for x in every)
        assert all(x.num_leases == leases[x] for x in every), "leases are miscounted"
        self.idle.check_invariants(x for x in every if x.is_idle)
        self._resting.check_invariants(x for x in every if _may_rest(x))

    def _add(self, key: bytes, before: bytes | None, num_tokens: int) -> Block:
        """Return the block with this key, a new one if there is none."""
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = Block(key, None, num_tokens)
        if block.parent is None and before is not None and not block.num_leases:
            self._resting.put(block, 0)  # its parent changes
            block.parent = self._blocks.get(before)
            if block.parent is not None:
                block.parent.num_behind += 1
        return block

    def _update(self, block: Block) -> None:
        """See to what follows from a change of a block."""
        kinds = 0
        if block.is_idle:
            kinds = ANY | (not block.was_hit) * UNHIT | (block.below is Below.STORED) * STORED
        self.idle.put(block, kinds)
        self._resting.put(block, _may_rest(block) * ANY)
        if block.memory or block.below:
            return
        if block.num_turns:
            self._lease(block, -block.num_turns)
        while block.key in self._blocks and not (block.memory or block.below or block.num_behind):
            del self._blocks[block.key]
            if block.parent is None:
                break
            block = block.parent
            block.num_behind -= 1


def _may_rest(block: Block) -> bool:
    """Return True if the lower tier may evict a block."""
    return block.below is Below.STORED and not block.num_users and block.job is None

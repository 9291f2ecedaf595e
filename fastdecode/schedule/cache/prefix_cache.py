"""Full KV blocks are kept when their sequences end, and sequences that begin
with the same tokens start with them.

Which holder keeps what is known here, on the S-worker, to the block, since
starts count on it: holders learn by messages (``Stock``) and
decide nothing. What running sequences use is never given up. Of the rest a
policy says what goes first.

What is kept behind a missing block stays of use: a sequence starts with both,
and runs the tokens of its **gap** first, together with those that are new.
Sequences that are split have none: of their blocks only ends are given up.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Final

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId, Residence, SequenceId
from fastdecode.core.sequence import Sequence, shifted
from fastdecode.schedule.cache.chains import Chains
from fastdecode.schedule.cache.parts import KeptPart, Sharing
from fastdecode.schedule.cache.retention import Policy, Retention
from fastdecode.schedule.cache.reuse import Reuse, reuses
from fastdecode.schedule.cache.stock import Stock
from fastdecode.schedule.cache.turn_blocks import TurnBlocks


class PrefixCache:
    """See the module.

    Args:
        num_holders: that there are.
        block_size: tokens in a block.
        keeps_blocks: blocks outlive their sequences.
        policy: says what is given up first; None: what is worth least (see
            ``Retention``).
        clock: by which blocks are idle.
        only_ends: what is behind a missing block is of no use.
        window: tokens that the layer sees which sees most; None: all.
    """

    def __init__(
        self,
        num_holders: int,
        block_size: int,
        keeps_blocks: bool = False,
        policy: Policy | None = None,
        clock: Clock = time.monotonic,
        *,
        only_ends: bool = False,
        window: int | None = None,
    ) -> None:
        assert window is None or not only_ends, "parts of sequences are kept as a whole"
        self.block_size = block_size
        self.chains = Chains(block_size, are_on=keeps_blocks)
        policy = policy or Retention(block_size)
        self.stock = Stock(
            num_holders, block_size, policy, clock, only_ends=only_ends, window=window
        )
        """What is kept where."""
        self.turns = TurnBlocks(self.chains, self.stock, block_size)
        """What turns of conversations keep."""
        self._sharing: dict[SequenceId, Sharing] = {}
        # Of the blocks in the tables of running sequences, summed over these,
        # those that are kept.
        self._num_shared = [0] * num_holders
        # Blocks that running sequences compute before they draw, and how many compute each.
        self._coming: Counter[bytes] = Counter()
        self.computing: Final[set[SequenceId]] = set()
        """Sequences that have not computed all of theirs yet."""

    def num_beside(self, holder: HolderId) -> int:
        """Kept blocks, less those that running sequences have reserved room
        for; negative where several use one."""
        return len(self.stock[holder]) - self._num_shared[holder]

    def make_room(self, holder: HolderId, num_unreserved: int) -> None:
        """Keep no more than so many blocks allow that aren't reserved."""
        lacking = self.num_beside(holder) - num_unreserved
        if lacking > 0:
            self.stock.give_up(holder, lacking)

    def reuses(self, sequence: Sequence, sizes: Seq[int]) -> list[Reuse]:
        """What the sequence could start with, most tokens first.

        Args:
            sizes: tokens to reserve for each of its parts.
        """
        if not self.chains.is_shared(sequence):
            return []
        stock, size, num_tokens = self.stock, self.block_size, len(sequence.token_ids)
        keys = self.chains.keys(sequence)
        found = reuses(stock, keys, sizes, num_tokens - 1, size)
        for end in self.turns.ends_of(sequence):
            keys = self.chains.with_tail(sequence, end)
            found += reuses(stock, keys, sizes, end, size, with_tail=True)
        return sorted(found, key=lambda reuse: -reuse.num_tokens)

    def keys(self, sequence: Sequence) -> list[bytes]:
        """Of the full blocks with which a sequence could start; none, if it
        shares none."""
        if not self.chains.is_shared(sequence):
            return []
        return self.chains.keys(sequence)[: (len(sequence.token_ids) - 1) // self.block_size]

    def is_coming(self, sequence: Sequence, found: Seq[Reuse]) -> bool:
        """Whether a running sequence is computing the first block that this one
        lacks, or the first one behind all that it has.

        Args:
            found: what it could start with now.
        """
        if not self._coming or not self.chains.is_shared(sequence):
            return False
        keys = self.chains.keys(sequence)
        missing = [0]
        if found:
            gap, num_there = found[0].gap, found[0].num_blocks
            missing = [gap.start // self.block_size, num_there] if gap else [num_there]
        return any(place < len(keys) and keys[place] in self._coming for place in missing)

    def begin(self, sequence: Sequence, residence: Residence, reuse: Reuse | None) -> None:
        """The sequence starts, with kept blocks or none."""
        if not self.chains.is_shared(sequence):
            return
        sharing = self._sharing[sequence.sequence_id] = Sharing.of(residence)
        keys = self.chains.keys(sequence)
        missing = keys if reuse is None else self._start_with(sharing, reuse, keys)
        for part in sharing.parts:
            self._num_shared[part.holder] += part.num_shared
        if missing:
            sharing.coming.update(missing)
            self._coming.update(sharing.coming)
            self.computing.add(sequence.sequence_id)
        num_hit = 0 if reuse is None else reuse.num_tokens
        self.stock.fresh.started(missing, len(sequence.token_ids), num_hit)

    def _start_with(self, sharing: Sharing, reuse: Reuse, keys: list[bytes]) -> list[bytes]:
        """A sequence starts with kept blocks. Returns which of its full ones,
        by their ``keys``, it lacks."""
        size, first = self.block_size, reuse.first_token // self.block_size
        gap = range(reuse.gap.start // size, reuse.gap.stop // size)
        own_gap = shifted(gap, -first)
        has_copy = reuse.num_tokens % size != 0
        last = sharing.parts[len(reuse.keys) - 1]
        for part, used in zip(sharing.parts, reuse.keys, strict=False):
            before = [keys[first - 1] if first else None, *used[:-1]]
            if gap:
                before[own_gap.start] = keys[gap.stop - 1]
            self.stock.fetch(part.holder, used, before)
            self.stock[part.holder].use(used, as_hit=True)
            part.start_with(used, own_gap, has_copy=has_copy and part is last)
        last.is_turns_tail = reuse.has_tail
        return keys[gap.start : gap.stop] + keys[reuse.num_blocks :]

    def awaited(self, sequence: Sequence) -> frozenset[int]:
        """Jobs that fetch blocks with which a sequence starts."""
        sharing = self._sharing.get(sequence.sequence_id)
        jobs: set[int] = set()
        for part in [] if sharing is None else sharing.parts:
            jobs |= self.stock[part.holder].jobs_of(part.keys)
        return frozenset(jobs)

    def begin_fork(
        self, sequence: Sequence, residence: Residence, parent: Sequence, num_tokens: int
    ) -> None:
        """The sequence starts with so many tokens of a running one."""
        if not self.chains.is_shared(sequence):
            return
        sharing = self._sharing[sequence.sequence_id] = Sharing.of(residence)
        theirs = self._sharing.get(parent.sequence_id)
        for place, part in enumerate(sharing.parts):
            num_full = part.num_full(num_tokens, self.block_size)
            names = theirs.parts[place].names[:num_full] if theirs is not None and num_full else []
            part.names = names + [None] * (num_full - len(names))
            self.stock[part.holder].use(part.keys, as_hit=False)
            self._num_shared[part.holder] += part.num_shared

    def keep(self, sequence: Sequence) -> None:
        """Keep the full blocks of a running sequence, which isn't stepping."""
        sharing = self._sharing.get(sequence.sequence_id)
        if sharing is None or sequence.is_spoilt:
            return
        for part in sharing.parts:
            num_full = part.num_full(sequence.num_cached, self.block_size)
            while not part.is_lost and (blocks := part.next_blocks(num_full)):
                at = part.part.first_token // self.block_size
                chain = self.chains.keys(sequence, at + blocks.stop)
                keys = chain[at + blocks.start :]
                before = chain[at + blocks.start - 1] if blocks.start else None
                names = self.stock.keep(part.part, blocks.start, keys, before)
                part.names += names
                self._num_shared[part.holder] += sum(name is not None for name in names)
                self._arrived(sequence.sequence_id, sharing, keys)

    def _arrived(self, sequence_id: SequenceId, sharing: Sharing, keys: Seq[bytes]) -> None:
        """Note that a sequence has computed blocks, or will not."""
        for key in sharing.coming.intersection(keys):
            sharing.coming.remove(key)
            self._coming[key] -= 1
            if not self._coming[key]:
                del self._coming[key]
        if not sharing.coming:
            self.computing.discard(sequence_id)

    def answered(self, sequence: Sequence) -> None:
        """A running sequence has come to its end."""
        sharing = self._sharing.get(sequence.sequence_id)
        if sharing is not None and sequence.request.cache.turn is not None:
            sharing.is_answered = not sequence.is_spoilt

    def end(self, sequence: Sequence) -> None:
        """The sequence runs no more. If it came to logits that aren't finite,
        what it used is used no more."""
        sharing = self._sharing.pop(sequence.sequence_id, None)
        if sharing is None:
            return
        self._arrived(sequence.sequence_id, sharing, [*sharing.coming])
        if sharing.is_answered:
            self.turns.end(sequence, sharing)
        for part in sharing.parts:
            self._num_shared[part.holder] -= part.num_shared
            self.stock.release(part.holder, part.keys, for_good=sequence.is_spoilt)
            self.stock.drop_unseen(part.holder, part.keys, sequence.num_cached)

    def is_awaited(self, holder: HolderId) -> bool:
        """Whether a holder keeps what some conversation goes on with."""
        return self.stock[holder].num_turns > 0

    def has_gap(self, sequence: Sequence) -> bool:
        """Whether a sequence has kept blocks behind tokens that it hasn't run yet."""
        sharing = self._sharing.get(sequence.sequence_id)
        return sharing is not None and any(part.behind for part in sharing.parts)

    def lose_parts(self, sequence: Sequence, holder: HolderId) -> None:
        """A holder has no part of a running sequence any more."""
        sharing = self._sharing.get(sequence.sequence_id)
        for part in [] if sharing is None else sharing.parts:
            part.is_lost |= part.holder == holder

    def lose_blocks(self, holder: HolderId, keys: Iterable[bytes]) -> None:
        """A holder goes on without some of the blocks that it kept."""
        lost = set(keys)
        for sharing in self._sharing.values() if lost else ():
            for part in sharing.parts:
                if part.holder == holder and not lost.isdisjoint(part.keys):
                    self._use_less(part, lost)
        self.stock[holder].lose(lost)

    def _use_less(self, part: KeptPart, lost: set[bytes]) -> None:
        """A part of a running sequence uses these kept blocks no more."""
        self._num_shared[part.holder] -= part.num_shared
        gone = [key for key in part.keys if key in lost]
        self.stock[part.holder].release(gone, self.stock.now_s())
        part.names = [None if name in lost else name for name in part.names]
        while part.names and part.names[-1] is None:
            part.names.pop()  # it may be kept when the sequence has run it again
        part.tail = None if part.tail in lost else part.tail
        self._num_shared[part.holder] += part.num_shared

    def rewind(self, sequence: Sequence) -> None:
        """A running sequence has fewer tokens cached than it had: it doesn't use the
        kept blocks of the others any more."""
        sharing = self._sharing.get(sequence.sequence_id)
        for part in [] if sharing is None else sharing.parts:
            num_full = part.num_full(sequence.num_cached, self.block_size)
            gone = [name for name in part.names[num_full:] if name is not None]
            del part.names[num_full:]
            self._num_shared[part.holder] -= len(gone)
            self.stock.release(part.holder, gone, for_good=False)

    def lose(self, holder: HolderId) -> None:
        """A holder is gone, and all that it kept."""
        self.stock.lose(holder)
        self._num_shared[holder] = 0
        for sharing in self._sharing.values():
            for part in sharing.parts:
                if part.holder == holder:
                    part.names, part.behind, part.tail, part.is_lost = [], [], None, True

    def check_invariants(self, running: Iterable[SequenceId]) -> None:
        """Recount. ``running``: those that are."""
        assert set(self._sharing) <= set(running), "what doesn't run uses blocks"
        num_shared = [0] * len(self._num_shared)
        users: list[Counter[bytes]] = [Counter() for _ in num_shared]
        for sharing in self._sharing.values():
            for part in sharing.parts:
                num_shared[part.holder] += part.num_shared
                users[part.holder].update(part.keys)
        assert num_shared == self._num_shared, "blocks are miscounted"
        every = self._sharing.values()
        coming = Counter(key for sharing in every for key in sharing.coming)
        assert coming == self._coming, "blocks that come are miscounted"
        assert self.computing == {i for i, sharing in self._sharing.items() if sharing.coming}
        self.stock.check_invariants(users)

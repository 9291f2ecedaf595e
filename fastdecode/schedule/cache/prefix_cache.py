"""Full KV blocks are kept when their sequences end, and sequences that begin
with the same tokens start with them.

Which holder keeps what is known here, on the S-worker, to the block, since
starts count on it: holders are told by ``Keep`` and ``Forget`` (``Stock``) and
decide nothing. What running sequences use is never given up. Of the rest a
policy says what goes first, and of one sequence's blocks that is the last one,
since a later block is of no use without the earlier ones.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from fastdecode.core.clock import Clock
from fastdecode.core.holders import HolderId, Residence, SequenceId
from fastdecode.core.sequence import Sequence
from fastdecode.schedule.cache.chains import Chains
from fastdecode.schedule.cache.coming import Coming
from fastdecode.schedule.cache.parts import Sharing
from fastdecode.schedule.cache.retention import Policy, Retention
from fastdecode.schedule.cache.reuse import Reuse, reuses
from fastdecode.schedule.cache.stock import Stock


class PrefixCache:
    """See the module.

    Args:
        num_holders: that there are.
        block_size: tokens in a block.
        identity: what K and V depend on beside tokens; None: nothing is kept.
        policy: says what is given up first; None: what is worth least (see
            ``Retention``).
        clock: by which blocks are idle.
    """

    def __init__(
        self,
        num_holders: int,
        block_size: int,
        identity: str | None = None,
        policy: Policy | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._block_size = block_size
        self._chains = Chains(identity, block_size)
        self.stock = Stock(num_holders, block_size, policy or Retention(block_size), clock)
        """What is kept where."""
        self._sharing: dict[SequenceId, Sharing] = {}
        # Of the blocks in the tables of running sequences, summed over these,
        # those that are kept.
        self._num_shared = [0] * num_holders
        self.coming = Coming()
        """What is being computed."""

    @property
    def is_on(self) -> bool:
        return self._chains.are_on

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
        if not self._chains.is_shared(sequence):
            return []
        stock, size, num_tokens = self.stock, self._block_size, len(sequence.token_ids)
        found = reuses(stock, self._chains.keys(sequence), sizes, num_tokens - 1, size)
        turn = sequence.request.cache.turn or 0
        if turn % size and turn < num_tokens:
            keys = self._chains.with_tail(sequence, turn)
            found += reuses(stock, keys, sizes, turn, size, with_tail=True)
        return sorted(found, key=lambda reuse: -reuse.num_tokens)

    def is_coming(self, sequence: Sequence, found: Seq[Reuse]) -> bool:
        """Whether a running sequence is computing the first block that this one
        lacks.

        Args:
            found: what it could start with now.
        """
        if not self.coming or not self._chains.is_shared(sequence):
            return False
        keys = self._chains.keys(sequence)
        num_there = found[0].num_blocks if found else 0
        return num_there < len(keys) and keys[num_there] in self.coming

    def begin(self, sequence: Sequence, residence: Residence, reuse: Reuse | None) -> None:
        """The sequence starts, with kept blocks or none."""
        if not self._chains.is_shared(sequence):
            return
        sharing = self._sharing[sequence.sequence_id] = Sharing.of(residence)
        num_there = 0
        if reuse is not None:
            num_there = reuse.num_blocks
            for part, used in zip(sharing.parts, reuse.keys, strict=False):
                self.stock[part.holder].use(used, as_hit=True)
                part.names.extend(used)
            if reuse.num_tokens % self._block_size:
                last = sharing.parts[len(reuse.keys) - 1]
                last.tail = last.names.pop()
                last.is_turns_tail = reuse.has_tail
        for part in sharing.parts:
            self._num_shared[part.holder] += part.num_shared
        missing = self._chains.keys(sequence)[num_there:]
        self.coming.expect(sequence.sequence_id, sharing, missing)
        num_hit = 0 if reuse is None else reuse.num_tokens
        self.stock.fresh.started(missing, len(sequence.token_ids), num_hit)

    def begin_fork(
        self, sequence: Sequence, residence: Residence, parent: Sequence, num_tokens: int
    ) -> None:
        """The sequence starts with so many tokens of a running one."""
        if not self._chains.is_shared(sequence):
            return
        sharing = self._sharing[sequence.sequence_id] = Sharing.of(residence)
        theirs = self._sharing.get(parent.sequence_id)
        for place, part in enumerate(sharing.parts):
            num_full = part.num_full(num_tokens, self._block_size)
            names = theirs.parts[place].names[:num_full] if theirs is not None and num_full else []
            part.names = names + [None] * (num_full - len(names))
            self.stock[part.holder].use(part.keys, as_hit=False)
            self._num_shared[part.holder] += part.num_shared

    def keep(self, sequence: Sequence) -> None:
        """Keep the full blocks of a running sequence, which isn't stepping."""
        sharing = self._sharing.get(sequence.sequence_id)
        if sharing is None or sequence.is_checked:
            return
        for part in sharing.parts:
            first = len(part.names)
            num_full = part.num_full(sequence.num_cached, self._block_size)
            if num_full > first and not part.is_lost:
                at = part.part.first_token // self._block_size
                chain = self._chains.keys(sequence, at + num_full)
                keys, before = chain[at + first :], chain[at + first - 1] if first else None
                names = self.stock.keep(part.part, first, keys, before)
                part.names += names
                self._num_shared[part.holder] += sum(name is not None for name in names)
                self.coming.arrived(sequence.sequence_id, sharing, keys)

    def answered(self, sequence: Sequence) -> None:
        """A running sequence has come to its end. A turn of a conversation
        keeps what isn't full of its last block, too; what the turn before had
        kept of its own is of no use any more."""
        sharing = self._sharing.get(sequence.sequence_id)
        if sharing is not None and sequence.request.cache.turn is not None:
            sharing.is_answered = not sequence.is_checked

    def end(self, sequence: Sequence) -> None:
        """The sequence runs no more. If it came to logits that aren't finite,
        what it used is used no more."""
        sharing = self._sharing.pop(sequence.sequence_id, None)
        if sharing is None:
            return
        self.coming.arrived(sequence.sequence_id, sharing, list(sharing.coming))
        if sharing.is_answered:
            self._keep_tail(sequence, sharing)
        for part in sharing.parts:
            self._num_shared[part.holder] -= part.num_shared
            self.stock.release(part.holder, part.keys, for_good=sequence.is_checked)

    def _keep_tail(self, sequence: Sequence, sharing: Sharing) -> None:
        """What a turn has come to is kept, to the last token."""
        size, turn = self._block_size, sequence.request.cache.turn
        for part in sharing.parts:
            index = self.stock[part.holder]
            index.want(part.keys)
            if part.is_turns_tail and part.tail is not None:
                index.condemn([part.tail])
            elif turn and turn % size == 0:
                index.end_turn(self._chains.keys(sequence, turn // size)[-1])
        last, num_tokens = sharing.parts[-1], sequence.num_cached
        if num_tokens <= last.part.first_token or last.is_lost:
            return
        keys = self._chains.with_tail(sequence, num_tokens)
        own = keys[last.part.first_token // size :]
        if num_tokens % size:
            self.stock.keep_tail(last.part, own[-1], own[-2] if len(own) > 1 else None, num_tokens)
        else:
            del own[-1]  # no tokens, no block
        if own[-1] in self.stock[last.holder]:
            self.stock[last.holder].lease(own[-1])

    def is_over(self, sequence: Sequence) -> None:
        """The sequence doesn't run, and won't start again."""
        self._chains.is_over(sequence)

    def lose(self, holder: HolderId) -> None:
        """A holder is gone, and all that it kept."""
        self.stock.lose(holder)
        self._num_shared[holder] = 0
        for sharing in self._sharing.values():
            for part in sharing.parts:
                if part.holder == holder:
                    part.names, part.tail, part.is_lost = [], None, True

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
        self.coming.check_invariants(self._sharing.items())
        self.stock.check_invariants(users)

"""What running sequences and conversations hold of the cached blocks, and what sequences could
start with.

Which holder has which block is decided here, on the S-worker: holders learn it by messages
(``Stock``). Blocks that running sequences use are never evicted. Blocks behind a missing one stay
useful: a sequence starts with both, and runs the tokens of its **gap** first, together with those
that are new. Split sequences have no gaps: of their blocks only ends are evicted.

A sequence that is handed over **offers** its blocks: it uses them, by their keys, until its end.

A conversation's turn that is answered leaves all of its blocks, also its **tail**, the last one,
which is not full. It has a lease on them until the next turn is answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Final

from fastdecode.core.holders import HolderId, Part, PartId, Residence, SequenceId, num_offered
from fastdecode.core.resuming import HeldSequence
from fastdecode.core.sequence import Sequence, shifted
from fastdecode.schedule.cache.chains import Chains
from fastdecode.schedule.cache.reuse import Reuse, offered, reuses
from fastdecode.schedule.cache.stock import Stock


@dataclass(eq=False)
class _HeldPart:
    """What one part of a running sequence holds."""

    part: Part
    end: int | None
    """The first token of the next part. None for the last part."""
    names: list[bytes | None] = field(default_factory=list)
    """Keys of its first full blocks. None for a block whose key another block has."""
    behind: list[bytes] = field(default_factory=list)
    """Keys of the blocks behind its gap. Empty once that is filled."""
    first_behind: int = 0
    """Place of the first of those."""
    tail: bytes | None = None
    """Key of the block that is copied when the sequence's first token runs."""
    beside: list[bytes] = field(default_factory=list)
    """Keys of blocks that it offers, and of which it has its own copy."""
    is_turns_tail: bool = False
    """True if that block is the tail of the turn before this one."""
    passing: bytes | None = None
    """Key of the tail with which the sequence is handed over. No other starts with it."""
    is_lost: bool = False
    """True if its holder is lost."""

    @property
    def holder(self) -> HolderId:
        return self.part.holder

    @property
    def keys(self) -> list[bytes]:
        """Keys of all blocks that it uses, in the order of its tokens."""
        keys = [name for name in self.names if name is not None] + self.behind + self.beside
        return keys if self.tail is None else [*keys, self.tail]

    @property
    def num_copied(self) -> int:
        """Count the blocks that it uses, and of which it has, or will have, its own copy."""
        return len(self.beside) + (self.tail is not None)

    def next_blocks(self, num_full: int) -> range:
        """Return the blocks among the first ``num_full`` that have no name yet, those before a gap
        first."""
        first = len(self.names)
        if self.behind and num_full > self.first_behind:
            if first < self.first_behind:
                return range(first, self.first_behind)
            self.names += self.behind
            first, self.behind = len(self.names), []
        return range(first, max(first, num_full))

    def num_full(self, num_cached: int, block_size: int) -> int:
        """Count its full blocks when ``num_cached`` tokens of the sequence are cached."""
        end = num_cached if self.end is None else min(num_cached, self.end)
        return max(0, end - self.part.first_token) // block_size


class Holdings:
    """See the module.

    Args:
        stock: the cached blocks of all holders.
        keeps_blocks: blocks outlive their sequences.
        hands_over: sequences may go to other engines, or come from there.
    """

    def __init__(
        self, stock: Stock, *, keeps_blocks: bool = False, hands_over: bool = False
    ) -> None:
        self.stock: Final = stock
        self.block_size: Final = stock.block_size
        self.chains: Final = Chains(
            stock.block_size, are_on=keeps_blocks or hands_over, are_shared=keeps_blocks
        )
        self._held: dict[SequenceId, list[_HeldPart]] = {}
        self._answered: set[SequenceId] = set()  # turns of conversations that were answered
        self._num_copied = Counter[HolderId]()  # of running sequences' parts
        self._ends: dict[bytes | None, set[int]] = {}
        """Tails in which chains of resumed sessions end: key of the block before → tokens."""
        self.computing: Final[dict[SequenceId, set[bytes]]] = {}
        """Keys of the blocks that running sequences compute before they draw."""

    def num_beside(self, holder: HolderId) -> int:
        """Count cached blocks, less those for which running sequences have reserved room. Negative
        where several sequences use a block."""
        index = self.stock[holder]
        return len(index) - index.num_users + self._num_copied[holder]

    def make_room(self, holder: HolderId, num_unreserved: int) -> None:
        """Evict blocks until the others fit into ``num_unreserved``."""
        lacking = self.num_beside(holder) - num_unreserved
        if lacking > 0:
            self.stock.evict(holder, lacking)

    def reuses(self, sequence: Sequence, sizes: Seq[int]) -> list[Reuse]:
        """Return what the sequence could start with, most tokens first.

        Args:
            sizes: tokens to reserve for each of its parts.
        """
        if not self.chains.is_shared(sequence):
            return []
        num_tokens, size = len(sequence.token_ids), self.block_size
        keys = self.chains.keys(sequence)
        found = reuses(self.stock, keys, sizes, num_tokens - 1)
        ends = {sequence.request.cache.turn or 0}
        if self._ends:
            ends.update(*(self._ends.get(key, ()) for key in (None, *keys)))
        for end in ends:
            if end % size and end < num_tokens:
                keys = self.chains.with_tail(sequence, end)
                found += reuses(self.stock, keys, sizes, end, with_tail=True)
        return sorted(found, key=lambda reuse: -reuse.num_tokens)

    def is_coming(self, sequence: Sequence, found: Seq[Reuse]) -> bool:
        """Return True if a running sequence computes the first block that this one lacks, or the
        first one behind all that it has.

        Args:
            found: what it could start with now.
        """
        if not self.computing or not self.chains.is_shared(sequence):
            return False
        keys = self.chains.keys(sequence)
        missing = [0]
        if found:
            gap, num_there = found[0].gap, found[0].num_blocks
            missing = [gap.start // self.block_size, num_there] if gap else [num_there]
        wanted = [keys[place] for place in missing if place < len(keys)]
        return any(not coming.isdisjoint(wanted) for coming in self.computing.values())

    def begin(self, sequence: Sequence, residence: Residence, reuse: Reuse | None) -> None:
        """Start a sequence, with cached blocks or none."""
        if not self.chains.is_named(sequence):
            return
        parts = self._held[sequence.sequence_id] = _held(residence)
        missing = self.chains.keys(sequence)
        if reuse is not None:
            missing = self._start_with(parts, reuse, missing)
            last = parts[len(reuse.keys) - 1]
            if num_offered(reuse.sources) % self.block_size:
                last.passing = last.tail
        if missing and self.chains.is_shared(sequence):
            self.computing[sequence.sequence_id] = set(missing)
        num_hit = 0 if reuse is None else reuse.num_tokens
        self.stock.fresh.started(missing, len(sequence.token_ids), num_hit)

    def _start_with(self, parts: list[_HeldPart], reuse: Reuse, keys: list[bytes]) -> list[bytes]:
        """Return the keys of the sequence's full blocks that it lacks. ``keys``: keys of all."""
        size, first = self.block_size, reuse.first_token // self.block_size
        gap = range(reuse.gap.start // size, reuse.gap.stop // size)
        own_gap = shifted(gap, -first)
        for part, used in zip(parts, reuse.keys, strict=False):
            before = [keys[first - 1] if first else None, *used[:-1]]
            if gap:
                before[own_gap.start] = keys[gap.stop - 1]
            at = part.part.first_token, num_offered(reuse.sources)
            self.stock.fetch(part.holder, used, before, reuse.sources, *at)
            self.stock[part.holder].use(used, as_hit=True)
            split = own_gap.start if gap else len(used)
            part.names, part.behind = list(used[:split]), list(used[split:])
            part.first_behind = own_gap.stop
        last = parts[len(reuse.keys) - 1]
        if reuse.num_tokens % size:  # its last block is copied
            last.tail = last.behind.pop() if last.behind else last.names.pop()
            self._num_copied[last.holder] += 1
        last.is_turns_tail = reuse.has_tail
        return keys[gap.start : gap.stop] + keys[reuse.num_blocks :]

    def awaited(self, sequence: Sequence) -> frozenset[int]:
        """Return the jobs that fetch blocks with which a sequence starts."""
        parts = self._held.get(sequence.sequence_id, ())
        return frozenset(job for x in parts for job in self.stock[x.holder].jobs_of(x.keys))

    def begin_fork(
        self, sequence: Sequence, residence: Residence, parent: Sequence, num_tokens: int
    ) -> None:
        """Start a sequence with the first ``num_tokens`` tokens of a running one."""
        if not self.chains.is_named(sequence):
            return
        parts = self._held[sequence.sequence_id] = _held(residence)
        theirs = self._held.get(parent.sequence_id)
        for place, part in enumerate(parts):
            num_full = part.num_full(num_tokens, self.block_size)
            names = theirs[place].names[:num_full] if theirs is not None and num_full else []
            if self.chains.is_shared(sequence):  # else it names its blocks when it is handed over
                names += [None] * (num_full - len(names))
            part.names = names
            self.stock[part.holder].use(part.keys, as_hit=False)

    def keep(self, sequence: Sequence) -> None:
        """Cache the full blocks of a running sequence that is not stepping, for others."""
        if self.chains.is_shared(sequence):
            self._name(sequence)

    def _name(self, sequence: Sequence) -> None:
        for part in () if sequence.is_spoilt else self._held.get(sequence.sequence_id, ()):
            num_full = part.num_full(sequence.num_cached, self.block_size)
            while not part.is_lost and (blocks := part.next_blocks(num_full)):
                at = part.part.first_token // self.block_size
                chain = self.chains.keys(sequence, at + blocks.stop)
                keys = chain[at + blocks.start :]
                before = chain[at + blocks.start - 1] if blocks.start else None
                part.names += self.stock.keep(part.part, blocks.start, keys, before)
                if (coming := self.computing.get(sequence.sequence_id)) is not None:
                    coming.difference_update(keys)
                    if not coming:
                        del self.computing[sequence.sequence_id]

    def offered(self, sequence: Sequence, holders: Seq[HolderId], sizes: Seq[int]) -> Reuse:
        """Return the start of a sequence whose first tokens other engines keep.

        Args:
            holders: where its parts are to be.
            sizes: tokens to reserve for each part.
        """
        num_tokens, end = self.num_offered(sequence), num_offered(sequence.sources)
        if num_tokens % self.block_size:
            keys = self.chains.with_tail(sequence, end)[: -(-end // self.block_size)]
        else:
            keys = self.chains.keys(sequence, num_tokens // self.block_size)
        return offered(
            self.stock, keys, holders, sizes, num_tokens, self.block_size, sequence.sources
        )

    def num_offered(self, sequence: Sequence) -> int:
        """Count the tokens of other engines with which a sequence could start: whole blocks, unless
        its prompt is held for it, or they are the turn before. One token has to run."""
        most = min(num_offered(sequence.sources), len(sequence.token_ids) - 1)
        is_held = all(source.is_held for source in sequence.sources)
        has_tail = is_held or most == sequence.request.cache.turn
        return most if has_tail else most - most % self.block_size

    def offer(self, sequence: Sequence) -> int:
        """Name all blocks of a running sequence whose parts are closed now, so that other engines
        can read them. It uses them until its end.

        Returns:
            The number of its first tokens in these.
        """
        self._name(sequence)
        size, num_tokens = self.block_size, sequence.num_cached
        keys = self.chains.with_tail(sequence, num_tokens)
        for part in self._held[sequence.sequence_id]:
            first = part.part.first_token // size
            own = keys[first : first + part.num_full(num_tokens, size)]
            for place, key in enumerate(own):  # another block had the name, and is gone
                if part.names[place] is None and key not in self.stock[part.holder]:
                    before = own[place - 1] if place else None
                    part.names[place : place + 1] = self.stock.keep(part.part, place, [key], before)
            if part.end is None and num_tokens % size:
                own, before = keys[first:], keys[-2] if len(keys) - 1 > first else None
                is_new = self.stock.name_tail(part.part, own[-1], before, num_tokens)
                part.names.append(own[-1] if is_new else None)
                part.passing = own[-1]
            part.beside = [x for x, name in zip(own, part.names, strict=True) if name is None]
            self._num_copied[part.holder] += len(part.beside)
            self.stock[part.holder].use(part.beside, as_hit=False)
            for place, key in enumerate(own):
                if not self.stock[part.holder].may_start_with(key):
                    return (first + place) * size
        return num_tokens

    def kept(self, sequence: Sequence) -> tuple[Part, ...]:
        """Return the parts of a running sequence, with the tokens that they leave to others."""
        residence = sequence.residence
        if residence is None or sequence.is_spoilt or not self.chains.is_shared(sequence):
            return ()
        end = sequence.num_cached
        if sequence.sequence_id not in self._answered:
            end -= end % self.block_size
        counts = [(part, min(end, part.end) - part.first_token) for part in residence.parts]
        return tuple([replace(part, num_tokens=count) for part, count in counts if count > 0])

    def answered(self, sequence: Sequence) -> None:
        """Note that a running sequence has reached its end."""
        is_turn = sequence.request.cache.turn is not None and self.chains.is_shared(sequence)
        if is_turn and not sequence.is_spoilt:
            self._answered |= self._held.keys() & {sequence.sequence_id}

    def end(self, sequence: Sequence) -> None:
        """End a sequence's use of blocks. If its logits were not finite, no other uses them."""
        parts = self._held.pop(sequence.sequence_id, ())
        self.computing.pop(sequence.sequence_id, None)
        if sequence.sequence_id in self._answered:
            self._answered.remove(sequence.sequence_id)
            self._end_turn(sequence, parts)
        for part in parts:
            self._num_copied[part.holder] -= part.num_copied
            self.stock.release(part.holder, part.keys, for_good=sequence.is_spoilt)
            self.stock.drop_unseen(part.holder, part.keys, sequence.num_cached)
            if not self.chains.is_shared(sequence):
                self.stock.drop_own(part.holder, part.keys)
            if part.passing is not None:
                self.stock.drop(part.holder, [part.passing])

    def _end_turn(self, sequence: Sequence, parts: Seq[_HeldPart]) -> None:
        """Cache an answered turn to its last token, and end the lease of the turn before."""
        size, turn, num_tokens = self.block_size, sequence.request.cache.turn, sequence.num_cached
        for part in parts:
            index = self.stock[part.holder]
            index.want(part.keys)
            if part.is_turns_tail and part.tail is not None:
                index.make_void([part.tail])
            elif turn and turn % size == 0:
                index.end_turn(self.chains.keys(sequence, turn // size)[-1])
        last = parts[-1]
        if num_tokens <= last.part.first_token or last.is_lost:
            return
        own = self.chains.with_tail(sequence, num_tokens)[last.part.first_token // size :]
        if num_tokens % size:
            before = own[-2] if len(own) > 1 else None
            self.stock.keep_tail(last.part, own[-1], before, num_tokens)
        else:
            del own[-1]  # no tokens, no block
        if own[-1] in (index := self.stock[last.holder]):
            index.lease(own[-1])

    def end_conversation(self, token_ids: Seq[int], salt: str) -> None:
        """End a conversation, whose last token was never run, and drop the idle blocks that no
        other has."""
        keys = self.chains.of_tokens(token_ids[:-1], salt)
        for holder in self.stock.holders if keys else ():
            self.stock[holder].end_turn(keys[-1])
            self.stock.drop(holder, keys)

    def keep_held(self, held: HeldSequence, counts: Mapping[Part, int]) -> dict[PartId, bytes]:
        """Cache the blocks of a sequence whose S-worker was lost. The caller closes its parts then.

        Args:
            counts: cached tokens of each of its parts, in order.

        Returns:
            Keys of the tails that are cached, by the part that ends there.
        """
        tails: dict[PartId, bytes] = {}
        stock, size = self.stock, self.block_size
        end = held.parts[0].first_token if held.parts else 0  # no layer sees tokens before
        for part, count in counts.items():
            if part.first_token != end:
                continue  # no sequence can start with it
            end += count
            keys = self.chains.of_tokens(held.token_ids[:end], held.salt)
            first, num_full = part.first_token // size, end // size
            names = [x for x in stock.keep(part, 0, keys[first:num_full], None) if x is not None]
            stock[part.holder].want(names)
            stock.release(part.holder, names, for_good=False)
            # A sibling copies the last block when it appends its first own token.
            is_shared = held.num_siblings > 1 and end <= held.num_prompt_tokens
            if end % size and not is_shared:
                before = keys[num_full - 1] if num_full else None
                stock.keep_tail(part, keys[-1], before if num_full > first else None, end)
                self._ends.setdefault(before, set()).add(end)
                if (tail := stock.take_tail(part.part_id)) is not None:
                    tails[part.part_id] = tail
        return tails

    def is_awaited(self, holder: HolderId) -> bool:
        """Return True if a holder has what some conversation continues with."""
        return self.stock[holder].num_turns > 0

    # Lost holders.

    def has_gap(self, sequence: Sequence) -> bool:
        """Return True if a sequence has cached blocks behind tokens that it has not run yet."""
        return any(part.behind for part in self._held.get(sequence.sequence_id, ()))

    def lose_parts(self, sequence: Sequence, holder: HolderId) -> None:
        """Note that a holder has lost its parts of a running sequence."""
        for part in self._held.get(sequence.sequence_id, ()):
            part.is_lost |= part.holder == holder

    def lose_blocks(self, holder: HolderId, keys: Iterable[bytes]) -> None:
        """Continue a holder without some of the blocks that it had."""
        lost = set(keys)
        for part in self._parts_on(holder) if lost else ():
            if lost.isdisjoint(keys := part.keys):
                continue
            self.stock[holder].release([x for x in keys if x in lost], self.stock.now_s())
            part.names = [None if name in lost else name for name in part.names]
            while part.names and part.names[-1] is None:
                part.names.pop()  # it may be cached when the sequence has run it again
            if part.tail in lost:
                self._num_copied[holder] -= 1
                part.tail = None
        self.stock[holder].lose(lost)

    def rewind(self, sequence: Sequence) -> None:
        """End a running sequence's use of blocks that it lacks since fewer of its tokens are
        cached."""
        for part in self._held.get(sequence.sequence_id, ()):
            num_full = part.num_full(sequence.num_cached, self.block_size)
            gone = [name for name in part.names[num_full:] if name is not None]
            del part.names[num_full:]
            self.stock.release(part.holder, gone, for_good=False)

    def lose(self, holder: HolderId) -> None:
        """Lose a holder, and all that it had."""
        self.stock.lose(holder)
        del self._num_copied[holder]
        for part in self._parts_on(holder):
            part.names, part.behind, part.beside = [], [], []
            part.tail, part.is_lost = None, True

    def check_invariants(self, running: Iterable[SequenceId]) -> None:
        """Recount. ``running``: the running sequences."""
        assert set(self._held) <= set(running), "what doesn't run uses blocks"
        users: list[Counter[bytes]] = [Counter() for _ in self.stock.holders]
        for holder, used in zip(self.stock.holders, users, strict=True):
            for part in self._parts_on(holder):
                used.update(part.keys)
            num_copied = sum(part.num_copied for part in self._parts_on(holder))
            assert num_copied == self._num_copied[holder], "copied blocks are miscounted"
        assert self._answered | self.computing.keys() <= self._held.keys()
        assert all(self.computing.values())
        self.stock.check_invariants(users)

    def _parts_on(self, holder: HolderId) -> Iterator[_HeldPart]:
        return (x for parts in self._held.values() for x in parts if x.holder == holder)


def _held(residence: Residence) -> list[_HeldPart]:
    """Return what a sequence holds that uses no cached blocks yet."""
    ends = [*[part.first_token for part in residence.parts[1:]], None]
    return [_HeldPart(part, end) for part, end in zip(residence.parts, ends, strict=True)]

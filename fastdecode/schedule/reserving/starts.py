"""How a waiting sequence would start: as what fork, in which chunks, on which
holders, with what load.

A sequence that may need several parts starts when all of them have room for all
that it may ever need, whatever is forecast. Where the parts are says how long
chunks may be, and the number of chunks how much load is when: so places, chunks
and load of a split sequence are settled in two rounds.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from fastdecode.core.holders import HolderId, PartId, Residence, new_residence
from fastdecode.core.sequence import NOTHING, Sequence
from fastdecode.schedule.admission.load_control import MicroBatch
from fastdecode.schedule.cache.reuse import Reuse
from fastdecode.schedule.lengths import LengthPredictor
from fastdecode.schedule.plan import Start
from fastdecode.schedule.reserving.holder_choice import HolderChoice
from fastdecode.schedule.reserving.ledger import BlockLedger
from fastdecode.schedule.running import Lane, RunningSequence, cached_at_end

_TOKENS_A_TOKEN = 4
"""To spare a holder's neighbour so many cached tokens more than others have is
worth running one token of a prompt again."""


@dataclass(frozen=True)
class Wish:
    """A sequence that is to start in a step of a lane."""

    sequence: Sequence
    sizes: tuple[int, ...]
    """Tokens to reserve for each part."""
    may_grow_to: tuple[int, ...]
    """Tokens that each may have in the end."""
    ahead: int
    """Steps until then; 0 is the one that is being planned."""
    parent: RunningSequence | None = None
    reuse: Reuse | None = None
    """The kept blocks that it starts with, if it is no fork."""
    num_shared: int = 0
    """Tokens that it needn't run, since its parent has them, or they are kept."""
    first_token: int = 0
    """Those before it are in none of its parts: no layer sees them any more."""

    def without(self, num_unseen: int) -> Wish:
        """Of a whole sequence: so many tokens are in no part of it."""
        if not num_unseen:
            return self
        (size,), (most,) = self.sizes, self.may_grow_to
        sizes, may_grow_to = (size - num_unseen,), (most - num_unseen,)
        return replace(self, sizes=sizes, may_grow_to=may_grow_to, first_token=num_unseen)

    @property
    def is_split(self) -> bool:
        return len(self.sizes) > 1

    @property
    def fixed(self) -> tuple[HolderId, ...]:
        """Where its first parts have to be."""
        if self.reuse is not None:
            return self.reuse.holders
        if self.parent is None:
            return ()
        return self.parent.holders[: -(-self.num_shared // self.sizes[0])]

    @property
    def credit(self) -> Mapping[HolderId, int]:
        """Blocks that need no room."""
        return {} if self.reuse is None else self.reuse.credit


@dataclass(frozen=True)
class Candidate:
    """A wish, and how it can be met at once."""

    wish: Wish
    chunks: tuple[int, ...]
    """In which the prompt would run; none where a single token is left of it."""
    holders: tuple[HolderId, ...]
    """Of each part."""
    projected: MicroBatch


class Starts:
    """Finds candidates, and starts them.

    Args:
        ledger: counts what is reserved.
        lengths: forecasts what is to be reserved, and the load.
        places: says which holders are for which lane; None: all are for all.
        first_part_id: of the parts of sequences, which are numbered from there.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        lengths: LengthPredictor,
        places: HolderChoice | None = None,
        first_part_id: int = 0,
    ) -> None:
        self._ledger = ledger
        self._places = places
        self._lengths = lengths
        self._part_ids = map(PartId, itertools.count(first_part_id))

    def candidate(
        self,
        lane: Lane,
        sequence: Sequence,
        sibling: RunningSequence | None,
        *,
        ahead: int,
        recompute: bool,
    ) -> Candidate | None:
        """How the sequence could start now, as a fork if that can be; None if
        it has to wait.

        Args:
            sibling: a running sequence of the same request.
            recompute: it has run before, and reserves all that it may ever
                need.
        """
        num_shared = sequence.num_prompt_tokens - 1
        if sibling is not None and num_shared and not self._keeps_more(sequence, num_shared):
            parent = sibling.sequence
            if not sibling.is_open or parent.num_cached < num_shared or parent.behind_gap:
                return None
            if self._ledger.cache.awaited(parent):
                return None  # it may turn out that it hasn't got them
            first = sibling.residence.parts[0].first_token
            if first <= self._ledger.cache.stock.window.unseen_tokens(num_shared):
                wish = self._wish(sequence, ahead, recompute, sibling, num_shared)
                if (fork := self._meet(lane, wish.without(first))) is not None:
                    return fork
        wish = self._wish(sequence, ahead, recompute)
        if sequence.sources:
            return self._with_offered(lane, wish)
        return self._with_kept(lane, wish)

    def _with_offered(self, lane: Lane, wish: Wish) -> Candidate | None:
        """Return how the wish can be met with blocks that other engines keep. None: it has to wait
        for room."""
        cache, size = self._ledger.cache, self._ledger.shape.block_size
        num_offered = cache.num_offered(wish.sequence)
        if not all(source.is_held for source in wish.sequence.sources):
            found = cache.reuses(wish.sequence, wish.sizes)
            if not num_offered or (found and found[0].num_tokens + size > num_offered):
                return self._with_kept(lane, wish)
        # A last block that is not full is copied, and takes room twice.
        *sizes, last = wish.sizes
        more = size if num_offered % size else 0
        roomy = replace(wish, sizes=(*sizes, last + more), num_shared=num_offered)
        candidate = self._meet(lane, roomy)
        if candidate is None:
            is_stuck = not lane.running if wish.is_split else self._never_fits(roomy)
            return self._meet(lane, wish) if more and is_stuck else None
        reuse = cache.offered(wish.sequence, candidate.holders, wish.sizes)
        if reuse.num_tokens < num_offered:
            return self._with_kept(lane, wish)
        return replace(candidate, wish=replace(wish, num_shared=num_offered, reuse=reuse))

    def _never_fits(self, wish: Wish) -> bool:
        """Return True if no holder has room for the wish's last part, even an empty one."""
        capacity, needed = self._ledger.capacity, self._ledger.shape.blocks_for(wish.sizes[-1])
        return all(capacity.blocks(holder) < needed for holder in self._ledger.holders.open)

    def _keeps_more(self, sequence: Sequence, num_shared: int) -> bool:
        """Whether more of a sequence that has drawn is kept than a fork shares."""
        cache = self._ledger.cache
        if not cache.chains.are_on or not sequence.num_generated:
            return False
        sizes = self._ledger.shape.sizes(sequence.max_cached_tokens)
        return any(reuse.num_tokens > num_shared for reuse in cache.reuses(sequence, sizes))

    def _with_kept(self, lane: Lane, wish: Wish) -> Candidate | None:
        """How the wish can be met with as many kept blocks as possible. None:
        it can't, or some that it lacks are being computed just now."""
        cache = self._ledger.cache
        if cache.chains.are_on:
            found = cache.reuses(wish.sequence, wish.sizes)
            if cache.is_coming(wish.sequence, found):
                return None
            for reuse in self._worth_it(lane, found):
                if reuse.first_token and wish.sequence.request.hands_over:
                    continue  # whoever it is handed over to fetches all of it
                started = replace(wish, reuse=reuse, num_shared=reuse.num_tokens)
                if cache.is_coming(wish.sequence, (reuse,)):
                    return None
                candidate = self._meet(lane, started.without(reuse.first_token))
                if candidate is not None:
                    return candidate
            if found and cache.is_coming(wish.sequence, ()):
                return None  # it would begin where others are just computing what it needs
        return self._meet(lane, wish)

    def _worth_it(self, lane: Lane, found: Seq[Reuse]) -> list[Reuse]:
        """Of whole sequences' reuses the ones on no holder much busier than others,
        in the order in which they are to be tried: most tokens first, and
        of as many tokens the least busy holder."""
        busy = [self._busier(lane, reuse.holders[0]) for reuse in found]
        return [
            reuse
            for reuse, more in sorted(zip(found, busy, strict=True), key=_worth)
            if len(reuse.holders) > 1 or more <= reuse.num_tokens * _TOKENS_A_TOKEN
        ]

    def _busier(self, lane: Lane, holder: HolderId) -> int:
        """Cached tokens that a holder has of a lane beyond the least busy one that its
        sequences could be on."""
        others: Seq[HolderId] = self._ledger.holders.open
        if self._places is not None:
            others = self._places.alike(holder, others)
        least = min((lane.reserved_tokens[other] for other in others), default=0)
        return lane.reserved_tokens[holder] - least

    def start(self, lane: Lane, candidate: Candidate) -> Start:
        """Book and reserve all that the candidate needs. It runs in the lane from now on."""
        wish, holders = candidate.wish, candidate.holders
        parts = holders if wish.is_split else None
        lane.budget.book(candidate.chunks, wish.num_shared, parts=parts, ahead=wish.ahead)
        residence = new_residence(holders, wish.sizes, self._part_ids, wish.first_token)
        self._begin(wish, residence)
        self._ledger.reserve(residence)
        if self._places is not None:
            self._places.started(wish.sequence, residence)
        projected, chunks = candidate.projected, deque(candidate.chunks)
        until = min(projected.target_length, residence.num_tokens)
        kept = () if wish.reuse is None else wish.reuse.keys
        awaits = self._ledger.cache.awaited(wish.sequence) if kept else frozenset[int]()
        run = RunningSequence(wish.sequence, projected, chunks, lane.step + wish.ahead, until)
        run.is_fetching = bool(awaits)
        lane.enter(run, residence)
        parent = None if wish.parent is None else wish.parent.sequence
        gap = NOTHING if wish.reuse is None else wish.reuse.gap
        first = chunks[0] if chunks else 1
        is_handed = wish.reuse is not None and bool(wish.reuse.sources)
        shared = (wish.num_shared, kept, gap, awaits)
        return Start(wish.sequence, residence, parent, *shared, first, is_handed)

    def _begin(self, wish: Wish, residence: Residence) -> None:
        """Tell the cache what the sequence starts with."""
        cache, sequence = self._ledger.cache, wish.sequence
        if wish.parent is None:
            cache.begin(sequence, residence, wish.reuse)
        else:
            cache.begin_fork(sequence, residence, wish.parent.sequence, wish.num_shared)

    def _wish(
        self,
        sequence: Sequence,
        ahead: int,
        recompute: bool,
        parent: RunningSequence | None = None,
        num_shared: int = 0,
    ) -> Wish:
        most = sequence.max_cached_tokens
        may_grow_to = self._ledger.shape.sizes(most)
        reserve = most
        if len(may_grow_to) == 1 and not recompute:
            reserve = cached_at_end(sequence, self._lengths.safe(sequence))
        sizes = self._ledger.shape.sizes(reserve)
        return Wish(sequence, sizes, may_grow_to, ahead, parent, num_shared=num_shared)

    def _meet(self, lane: Lane, wish: Wish) -> Candidate | None:
        """Chunks, load and places, as far as blocks, prefill budget and policy
        allow it; else None."""
        candidate = self._settle(lane, wish, () if wish.is_split else None, wish.fixed)
        if candidate is None or not wish.is_split:
            return candidate
        return self._settle(lane, wish, candidate.holders, candidate.holders)

    def _settle(
        self, lane: Lane, wish: Wish, parts: tuple[HolderId, ...] | None, fixed: Seq[HolderId]
    ) -> Candidate | None:
        """One round. ``parts``: see ``PrefillBudget.chunks``; ``fixed``: where
        the first parts have to be."""
        chunks = self._chunks(lane, wish, parts)
        if chunks is None:
            return None
        projected = self._projected(lane, wish, len(chunks))
        holders = self._place(lane, wish, projected, fixed)
        return None if holders is None else Candidate(wish, chunks, holders, projected)

    def _chunks(
        self, lane: Lane, wish: Wish, parts: tuple[HolderId, ...] | None
    ) -> tuple[int, ...] | None:
        num_tokens = len(wish.sequence.token_ids) - wish.num_shared
        if num_tokens == 1:
            return ()
        chunks = lane.budget.chunks(num_tokens, wish.num_shared, parts=parts, ahead=wish.ahead)
        return chunks or None

    def _projected(self, lane: Lane, wish: Wish, num_chunks: int) -> MicroBatch:
        # Holders have all of its tokens after the last prefill step, and one
        # more after each that follows.
        expected = cached_at_end(wish.sequence, self._lengths.expected(wish.sequence))
        first_length = len(wish.sequence.token_ids) - max(0, num_chunks - 1)
        return MicroBatch(1, expected, lane.step + wish.ahead, first_length)

    def _place(
        self, lane: Lane, wish: Wish, projected: MicroBatch, fixed: Seq[HolderId]
    ) -> tuple[HolderId, ...] | None:
        """A holder for each part, the first ones where they have to be; None: not in this step."""
        shares = _shares(wish, projected)
        # Before parts go where they exceed a limit alone, all holders are
        # looked at for room within their limits.
        for alone in (False, True) if wish.is_split else (True,):
            placed: list[HolderId] = []
            while len(placed) < len(shares):
                holder = self._choose(lane, wish, shares, placed, fixed, alone)
                if holder is None:
                    break
                placed.append(holder)
            else:
                return tuple(placed)
        return None

    def _choose(
        self,
        lane: Lane,
        wish: Wish,
        shares: Seq[MicroBatch],
        placed: Seq[HolderId],
        fixed: Seq[HolderId],
        alone: bool,
    ) -> HolderId | None:
        """A holder for the part that comes after those that are ``placed``;
        ``shares``: the load of each part."""
        part = len(placed)
        tiers: Seq[list[HolderId]]
        tiers = self._ledger.candidates(placed, wish.sizes, wish.may_grow_to, wish.credit)
        if self._places is not None:
            tiers = self._places.among(lane.index, wish.sequence, tiers)
        if part < len(fixed):
            tiers = [[fixed[part]]] if any(fixed[part] in tier for tier in tiers) else []
        earlier = tuple(zip(placed, shares, strict=False))
        for tier in tiers:
            tier.sort(
                key=lambda holder: (
                    lane.reserved_tokens[holder] / self._ledger.capacity.tokens(holder)
                )
            )
            chosen = lane.admission.choose(shares[part], tier, earlier, alone=alone)
            if chosen is not None:
                return HolderId(chosen)
        return None


def _worth(option: tuple[Reuse, int]) -> tuple[int, int]:
    reuse, busy = option
    return -reuse.num_tokens, busy


def _shares(wish: Wish, projected: MicroBatch) -> list[MicroBatch]:
    """What each part is of a sequence's load."""
    if not wish.is_split:
        return [projected]
    firsts = itertools.accumulate(wish.sizes, initial=0)
    return [
        projected.part(first, num_tokens)
        for first, num_tokens in zip(firsts, wish.sizes, strict=False)
    ]

"""How a waiting sequence would start: as which fork, in which chunks, on which holders.

A sequence that may need several parts starts when all of them have room for all that it may ever
need, whatever is forecast. Chunks depend on where the parts are, and the load on the number of
chunks: places, chunks and load of a split sequence are settled in two rounds.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

from fastdecode.core.holders import HolderId, PartId, Residence, new_residence
from fastdecode.core.sequence import NOTHING, Sequence
from fastdecode.schedule.admission.load_control import MicroBatch
from fastdecode.schedule.cache.reuse import Reuse
from fastdecode.schedule.lengths import LengthPredictor
from fastdecode.schedule.plan import Lane, RunningSequence, Start, cached_at_end
from fastdecode.schedule.reserving.ledger import BlockLedger

_TOKENS_A_TOKEN = 4
"""Cached tokens by which a holder may be busier than others for each token of a prompt that it
spares."""


class HolderChoice(Protocol):
    """Chooses where a sequence that starts may go."""

    def among(
        self, lane: int, sequence: Sequence, tiers: Seq[Seq[HolderId]]
    ) -> Seq[list[HolderId]]:
        """Return those of the holders with room where a sequence may start in this lane."""

    def alike(self, holder: HolderId, present: Seq[HolderId]) -> Seq[HolderId]:
        """Return the holders on which a lane's sequences could be in place of this one."""

    def started(self, sequence: Sequence, residence: Residence) -> None:
        """Note where a sequence starts."""


class OwnHolders:
    """Each lane has its own holder, with the lane's number."""

    def of_lane(self, lane: int, capacity: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that each holder has room for, of this lane's sequences."""
        return tuple(tokens if holder == lane else 0 for holder, tokens in enumerate(capacity))

    def among(
        self, lane: int, sequence: Sequence, tiers: Seq[Seq[HolderId]]
    ) -> list[list[HolderId]]:
        return [[holder for holder in tier if holder == lane] for tier in tiers]

    def alike(self, holder: HolderId, present: Seq[HolderId]) -> Seq[HolderId]:
        return [holder]

    def started(self, sequence: Sequence, residence: Residence) -> None:
        pass


@dataclass(frozen=True)
class Wish:
    """A sequence that is to start in a step of a lane."""

    sequence: Sequence
    sizes: tuple[int, ...]
    """Tokens to reserve for each part."""
    may_grow_to: tuple[int, ...]
    """Tokens that each may have in the end."""
    ahead: int
    """Steps until then. 0 for the one that is planned."""
    parent: RunningSequence | None = None
    reuse: Reuse | None = None
    """The cached blocks that it starts with, if it is not a fork."""
    num_shared: int = 0
    """Tokens that its parent has, or cached blocks."""
    first_token: int = 0
    """First token of its first part. No layer sees those before."""

    def without(self, num_unseen: int) -> Wish:
        """Return it without the first tokens of a whole sequence."""
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
        """Holders of its first parts, where these are settled."""
        if self.reuse is not None:
            return self.reuse.holders
        if self.parent is None:
            return ()
        return self.parent.holders[: -(-self.num_shared // self.sizes[0])]

    @property
    def credit(self) -> Mapping[HolderId, int]:
        return {} if self.reuse is None else self.reuse.credit


@dataclass(frozen=True)
class Candidate:
    """A wish, and how it can be met at once."""

    wish: Wish
    chunks: tuple[int, ...]
    """Chunks of the prompt. Empty if a single token is left of it."""
    holders: tuple[HolderId, ...]
    """Holder of each part."""
    projected: MicroBatch


class Starts:
    """Finds candidates, and starts them.

    Args:
        ledger: counts what is reserved.
        lengths: forecasts what is to be reserved, and the load.
        places: chooses holders for each lane. None if each lane may use all.
        first_part_id: number of the first part.
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
        """Return how a sequence could start now, as a fork if possible. None if it has to wait.

        Args:
            sibling: a running sequence of the same request.
            recompute: it has run before, and reserves all that it may ever need.
        """
        num_shared = sequence.num_prompt_tokens - 1
        if sibling is not None and num_shared and not self._keeps_more(sequence, num_shared):
            parent = sibling.sequence
            if not sibling.is_open or parent.num_cached < num_shared or parent.behind_gap:
                return None
            if self._ledger.cache.awaited(parent):
                return None  # it may never get them
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
        """Return how the wish can be met with blocks that other engines keep. None if it has to
        wait for room."""
        cache, size = self._ledger.cache, self._ledger.shape.block_size
        num_offered = cache.num_offered(wish.sequence)
        is_held = all(source.is_held for source in wish.sequence.sources)
        found = [] if is_held else cache.reuses(wish.sequence, wish.sizes)
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
        """Return True if more of a sequence that has drawn is cached than a fork shares."""
        cache = self._ledger.cache
        if not cache.chains.are_on or not sequence.num_generated:
            return False
        sizes = self._ledger.shape.sizes(sequence.max_cached_tokens)
        return any(reuse.num_tokens > num_shared for reuse in cache.reuses(sequence, sizes))

    def _with_kept(self, lane: Lane, wish: Wish) -> Candidate | None:
        """Meet a wish with as many cached blocks as possible. None if it has to wait, perhaps for
        blocks that a running sequence computes."""
        cache = self._ledger.cache
        if cache.chains.are_on:
            found = cache.reuses(wish.sequence, wish.sizes)
            if cache.is_coming(wish.sequence, found):
                return None
            for reuse in self._worth_it(lane, found):
                if reuse.first_token and wish.sequence.request.hands_over:
                    continue  # the engine that continues it fetches all of it
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
        """Return the reuses on holders that are not much busier than others, most tokens first,
        those of equally many tokens by how busy the holder is."""
        options = [(reuse, self._busier(lane, reuse.holders[0])) for reuse in found]
        options.sort(key=lambda option: (-option[0].num_tokens, option[1]))
        return [
            reuse
            for reuse, busier in options
            if len(reuse.holders) > 1 or busier <= reuse.num_tokens * _TOKENS_A_TOKEN
        ]

    def _busier(self, lane: Lane, holder: HolderId) -> int:
        """Return the tokens of a lane that a holder has beyond the least busy one that could have
        them."""
        others: Seq[HolderId] = self._ledger.holders.open
        if self._places is not None:
            others = self._places.alike(holder, others)
        least = min((lane.reserved_tokens[other] for other in others), default=0)
        return lane.reserved_tokens[holder] - least

    def start(self, lane: Lane, candidate: Candidate) -> Start:
        """Book and reserve what a candidate needs. It then runs in the lane."""
        wish, holders = candidate.wish, candidate.holders
        parts = holders if wish.is_split else None
        lane.budget.book(candidate.chunks, wish.num_shared, parts=parts, ahead=wish.ahead)
        residence = new_residence(holders, wish.sizes, self._part_ids, wish.first_token)
        cache = self._ledger.cache
        if wish.parent is None:
            cache.begin(wish.sequence, residence, wish.reuse)
        else:
            cache.begin_fork(wish.sequence, residence, wish.parent.sequence, wish.num_shared)
        self._ledger.reserve(residence)
        if self._places is not None:
            self._places.started(wish.sequence, residence)
        projected, chunks = candidate.projected, deque(candidate.chunks)
        until = min(projected.target_length, residence.num_tokens)
        kept = () if wish.reuse is None else wish.reuse.keys
        awaits = cache.awaited(wish.sequence) if kept else frozenset[int]()
        run = RunningSequence(wish.sequence, projected, chunks, lane.step + wish.ahead, until)
        run.is_fetching = bool(awaits)
        lane.enter(run, residence)
        parent = None if wish.parent is None else wish.parent.sequence
        gap = NOTHING if wish.reuse is None else wish.reuse.gap
        first = chunks[0] if chunks else 1
        is_handed = wish.reuse is not None and bool(wish.reuse.sources)
        shared = (wish.num_shared, kept, gap, awaits)
        return Start(wish.sequence, residence, parent, *shared, first, is_handed)

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
        """Settle chunks, load and places. None if blocks, prefill budget or policy forbid it."""
        candidate = self._settle(lane, wish, () if wish.is_split else None, wish.fixed)
        if candidate is None or not wish.is_split:
            return candidate
        return self._settle(lane, wish, candidate.holders, candidate.holders)

    def _settle(
        self, lane: Lane, wish: Wish, parts: tuple[HolderId, ...] | None, fixed: Seq[HolderId]
    ) -> Candidate | None:
        """Settle one round.

        Args:
            parts: see ``PrefillBudget.chunks``.
            fixed: holders of the first parts, where these are settled.
        """
        chunks: tuple[int, ...] = ()
        num_tokens = len(wish.sequence.token_ids) - wish.num_shared
        if num_tokens > 1:
            chunks = lane.budget.chunks(num_tokens, wish.num_shared, parts=parts, ahead=wish.ahead)
            if not chunks:
                return None
        # Holders have all of its tokens after the last prefill step, and one more after each
        # that follows.
        expected = cached_at_end(wish.sequence, self._lengths.expected(wish.sequence))
        first_length = len(wish.sequence.token_ids) - max(0, len(chunks) - 1)
        projected = MicroBatch(1, expected, lane.step + wish.ahead, first_length)
        holders = self._place(lane, wish, projected, fixed)
        return None if holders is None else Candidate(wish, chunks, holders, projected)

    def _place(
        self, lane: Lane, wish: Wish, projected: MicroBatch, fixed: Seq[HolderId]
    ) -> tuple[HolderId, ...] | None:
        """Return a holder for each part. None if they have no room in this step."""
        shares = [projected]
        if wish.is_split:
            firsts = itertools.accumulate(wish.sizes, initial=0)
            shares = [projected.part(*x) for x in zip(firsts, wish.sizes, strict=False)]
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
        """Return a holder for the part behind those that are ``placed``.

        Args:
            shares: load of each part.
        """
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

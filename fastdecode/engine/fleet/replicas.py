"""Replicas as the engine sees them: who keeps whose, which of them can be gone on with, and how a
neighbour takes a lost R-worker's place.

R-workers form a ring (``fastdecode.schedule.ring``). Each keeps a replica of the one before it,
which sends it the tokens itself: the S-worker never does. When one is lost, its neighbour has its
cache, and acts for it from then on. Neither that cache nor the one before it has a second copy
from then on, until the ring is closed again: when nothing is left of what was taken over.

A holder may be a group of several members (``fastdecode.engine.fleet.groups``). Members of the
same layers are a ring.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Final

import numpy as np

from fastdecode.core.clock import Clock
from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.failovers import Failovers
from fastdecode.engine.fleet.greeting import check_disks, offer_for_replicas
from fastdecode.engine.fleet.groups import GroupPool, HolderPool
from fastdecode.engine.fleet.replacements import HubReplacements, Replacements
from fastdecode.engine.fleet.resharing import GROUP, Resharing, offer_room
from fastdecode.engine.fleet.ring import LinkOptions
from fastdecode.schedule.life import events
from fastdecode.wire.blocks import MISSING, TakenOver, TakeOver, words_of
from fastdecode.wire.messages import MAX_ID, Hello, Welcome
from fastdecode.wire.transport import TIMEOUT
from fastdecode.wire.waiting import look_until_found

logger = logging.getLogger(__name__)


@dataclass
class _Takeover:
    """Members of a holder that other R-workers serve; all its members are asked what they have."""

    members: list[HolderId]
    parts: Sequence[int]  # of sequences, in the order in which they were named
    keys: Sequence[bytes]  # of kept blocks that were named first
    asked: Mapping[int, int] = field(default_factory=dict)
    """Tokens, by part."""
    asked_keys: Sequence[bytes] = ()  # of kept blocks that were named last


class Replicas:
    """As the engine uses them, of holders that are groups of members; see ``HolderPool``. A plain
    R-worker is a group of one.

    To the engine a group is interrupted when members are lost that neighbours take over: steps in
    flight end, all members are asked what they have of each sequence, and the sequences go on with
    the tokens that all have. A member that has more, of steps that didn't count, is asked to
    forget it. Where that can't be, all is recomputed on other holders.

    Args:
        rings: of members, with the options of their links. Every member of a group that keeps
            other layers is in a ring of its own.
    """

    def __init__(
        self,
        fleet: HolderPool,
        rings: Sequence[tuple[Sequence[HolderId], LinkOptions]],
        clock: Clock = time.monotonic,
    ) -> None:
        self._fleet = fleet
        (circle, options), *others = rings
        first = Failovers(fleet.members, options, clock, circle)
        own = [Failovers(fleet.members, each, clock, one, first.figures) for one, each in others]
        self.rings: Final = [first, *own]
        self._ring_of = {member: ring for ring in self.rings for member in ring.circle}
        self.figures: Final = first.figures
        """What happened to replicas so far; links are counted of the first ring."""
        self._session = options.session
        self._begin_s = options.begin_s
        self._places: HubReplacements | None = None
        self._takeovers: dict[HolderId, _Takeover] = {}  # under way

    def begin(self) -> None:
        """Have every member that is present keep its neighbour up to date; and wait for the
        replicas, if so asked (``LinkOptions.begin_s``).

        Raises:
            WorkerError: an R-worker that is to keep one does not answer.
        """
        for ring in self.rings:
            ring.begin()
        if self._begin_s and not look_until_found(lambda: self._has_begun or None, self._begin_s):
            raise WorkerError(
                f"no replica of the device's KV cache was there within {self._begin_s:g} s",
                code=TIMEOUT,
            )

    @property
    def _has_begun(self) -> bool:
        self._fleet.look()
        self.take_news(0)
        return not any(ring.is_beginning for ring in self.rings)

    @property
    def adopted(self) -> set[HolderId]:
        """Holders of which neighbours have taken a member over. None, where there are
        no others to start on."""
        adopted = self._adopted
        return adopted if self._has_others(adopted) else set()

    @property
    def _adopted(self) -> set[HolderId]:
        return {self._fleet.owner(member) for ring in self.rings for member in ring.adopted}

    def _has_others(self, adopted: set[HolderId]) -> bool:
        if not adopted:
            return True
        lost = self._fleet.lost
        return any(one not in lost and one not in adopted for one in self._fleet.holders)

    def hand_over_to(self, replacements: Replacements | None) -> None:
        """From now on, what neighbours took over is given to replacements, if any come."""
        self._places = replacements if isinstance(replacements, HubReplacements) else None
        self.rings[0].replacements = self._places

    def take_news(self, last_step: int) -> None:
        """Take in what members have reported of their replicas. ``last_step``: that has begun."""
        self._fleet.members.hear_reports()
        heard = self._fleet.members.take_replications()
        for ring in self.rings:
            ring.take_news(last_step, [x for x in heard if x.holder in ring.circle])

    def leaving(self, is_used: Callable[[HolderId], bool]) -> list[HolderId]:
        """Holders of which a member is to leave the neighbour that took it over, since
        its replacement has caught up. ``is_used``: whether any sequence is on a holder."""
        if self._places is None or not self.adopted:
            return []
        ring, owner = self.rings[0], self._fleet.owner
        waiting = self._places.look(list(ring.adopted))
        leaving = ring.leaving(waiting, lambda member: is_used(owner(member)))
        return list(dict.fromkeys(map(owner, leaving)))

    def is_leaving(self, holder: HolderId) -> bool:
        """Whether a member of a holder is on its way back to its own place."""
        return any(self._ring_of[x].is_leaving(x) for x in self._fleet.shards_of(holder))

    def lose(self, holder: HolderId, *, is_used: bool) -> bool:
        """A holder is lost since members are; sequences are on it, or not (``is_used``).
        Whether neighbours can take these over."""
        self._takeovers.pop(holder, None)
        kept = self._lose_members(holder, is_used=is_used)
        if is_used and kept and all(kept):
            return True
        self.emptied(holder)
        return False

    def _lose_members(self, holder: HolderId, *, is_used: bool) -> list[bool]:
        """Whether others can take over the members that were lost since."""
        lost = self._fleet.take_lost_members(holder)
        return [self._ring_of[member].lose(member, is_used=is_used) for member in lost]

    def reopened(self) -> list[HolderId]:
        """Holders of which neighbours have taken a member over, that sequences may start
        on, where there are no others."""
        adopted = self._adopted
        return [] if self._has_others(adopted) else sorted(adopted)

    def take_over(self, order: events.TakeOver) -> bool:
        """Have neighbours, or replacements, serve the members that a holder lost, and
        ask all its members what they have. Whether they are present."""
        holder = order.holder
        moved = self._moving(holder)
        if moved is None or not all(self._ring_of[x].go_on(x) for x in moved):
            self.emptied(holder)
            return False
        self._fleet.go_on(holder)
        parts = [part.part_id for part in order.parts]
        self._takeovers[holder] = _Takeover(moved, parts, order.keys)
        self._ask(holder, dict(zip(parts, order.num_tokens, strict=True)), order.keys)
        return True

    def _moving(self, holder: HolderId) -> list[HolderId] | None:
        """The members that others are to serve; None: no R-worker can."""
        members = list(self._fleet.shards_of(holder))
        if len(members) > 1:  # some may have been lost while steps in flight ended
            if not all(self._lose_members(holder, is_used=True)):
                return None
            return [x for x in members if self._ring_of[x].is_moving(x)]
        return members

    def _ask(self, holder: HolderId, num_tokens: Mapping[int, int], keys: Sequence[bytes]) -> None:
        """All members, what they have of each part, and which kept blocks."""
        ids, counts = np.array(list(num_tokens), np.int64), list(num_tokens.values())
        self._takeovers[holder].asked = num_tokens
        self._takeovers[holder].asked_keys = keys
        order = TakeOver(self._session, ids, np.array(counts, np.int32), keys=words_of(keys))
        self._fleet.send(holder, order)

    def taken_over(self, holder: HolderId, answer: TakenOver) -> events.TakenOver | None:
        """All members of a holder have answered. None: some have to forget tokens that
        others lack, and answer once more."""
        takeover = self._takeovers[holder]
        counts = dict(zip(takeover.asked, answer.num_tokens.tolist(), strict=True))
        there = {part: count for part, count in counts.items() if count != MISSING}
        kept = list(compress(takeover.asked_keys, answer.is_kept.tolist()))
        is_less = there != takeover.asked or len(kept) < len(takeover.asked_keys)
        if is_less and len(self._fleet.shards_of(holder)) > 1:
            self._ask(holder, there, kept)
            return None
        del self._takeovers[holder]
        for member in takeover.members:
            self._ring_of[member].went_on(member, is_empty=not there and not kept)
        found = tuple(map(there.get, takeover.parts))
        lost = tuple(set(takeover.keys).difference(kept))
        return events.TakenOver(holder, found, lost, is_home=holder not in self._adopted)

    def emptied(self, holder: HolderId) -> None:
        """Nothing is left of what was taken over, or nobody can take it over."""
        for member in self._fleet.shards_of(holder):
            self._ring_of[member].give_up(member)
        self._fleet.give_up(holder)

    def is_in_ring(self, holder: HolderId) -> bool:
        """Whether a member of a lost holder is there, and has part in a ring still: it would
        forget the replica that it keeps when it is greeted again."""
        lost = self._fleet.members.is_lost
        members = self._fleet.shards_of(holder)
        return any(not lost(x) and self._ring_of[x].is_member(x) for x in members)

    def mend(self, vacant: Collection[HolderId] = (), *, may_return: bool = False) -> None:
        """Close the rings again over the members that are present, once no neighbour has
        anything of a lost one.

        Args:
            vacant: lost holders that nothing uses.
            may_return: these are greeted again once their lost members have replacements:
                the other members leave the rings before.
        """
        leaving: list[HolderId] = []
        for holder in vacant:
            members = self._fleet.shards_of(holder)
            if len(members) > 1:  # some may have been lost since
                self._lose_members(holder, is_used=False)
            leaving += members if may_return else ()
        for ring in self.rings:
            ring.mend(leaving)


class HeadReplicas(Replicas):
    """Of the one group whose members share out the heads. When no neighbour can take a
    member over, or nothing is left of what one took over, all replicas end, and the
    remaining members share the heads anew (``Resharing``)."""

    @property
    def adopted(self) -> set[HolderId]:
        return self._adopted

    def hand_over_to(self, replacements: Replacements | None) -> None:
        assert isinstance(replacements, Resharing)
        super().hand_over_to(replacements.keep_replicas(lambda: self.has_ended))

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left of replicas, once the group is given up."""
        self._fleet.look()  # no step awaits an answer to what was asked before
        self.take_news(0)
        return self.rings[0].end_all()

    def reopened(self) -> list[HolderId]:
        """See ``Replicas``. The heads are shared anew instead."""
        return []

    def emptied(self, holder: HolderId) -> None:
        self.rings[0].end_all()
        self._fleet.give_up(holder)

    def mend(self, vacant: Collection[HolderId] = (), *, may_return: bool = False) -> None:
        """See ``Replicas``. The members of a lost group are no ring."""
        if GROUP not in self._fleet.lost:
            super().mend()


def new_session() -> int:
    """Secret of a run."""
    return 1 + secrets.randbelow(MAX_ID)


def replicate(
    fleet: HolderPool,
    hello: Hello,
    welcomes: Mapping[HolderId, Welcome],
    options: LinkOptions,
    clock: Clock = time.monotonic,
    circle: Sequence[HolderId] | None = None,
) -> tuple[dict[HolderId, Welcome], Replicas]:
    """Have every R-worker that is there offer half of its KV blocks: in the other half
    it keeps a replica of its neighbour's, once the replicas begin. Where R-workers without
    holders keep the replicas, holders offer what these R-workers have room for.

    Args:
        circle: the holders that have replicas; None: all. Others offer all that they have.

    Raises:
        ConfigError: there is to be a single one, or one hasn't the memory, or the disk.
        WorkerError: of a group that shares heads, none is left; or see ``offer_as_kept``.
    """
    circle = fleet.members.holders if circle is None else circle
    if isinstance(fleet, GroupPool):
        if options.are_in_files:
            check_disks(fleet, {x: each for x, each in welcomes.items() if x == GROUP})
        else:
            welcomes = offer_room(fleet, hello, welcomes)
        return dict(welcomes), HeadReplicas(fleet, [(circle, options)], clock)
    copied = {holder: welcome for holder, welcome in welcomes.items() if holder in circle}
    again = {**welcomes, **offer_for_replicas(fleet, hello, copied, options.keepers)}
    return again, Replicas(fleet, [(circle, options)], clock)

"""Replicas as the engine sees them: which R-worker keeps which, which of them are usable, and how
a neighbour takes a lost R-worker's place.

R-workers form a ring (``fastdecode.schedule.ring``). Each keeps a replica of the one before it,
which sends it the tokens itself: the S-worker never does. When one is lost, its neighbour has its
cache, and serves it. Neither that cache nor the one before it has a second copy until the ring is
closed again, which happens once nothing is left of what was taken over.

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
from fastdecode.engine.fleet.failovers import Failovers, ReplicaFigures
from fastdecode.engine.fleet.greeting import check_disks, offer_for_replicas
from fastdecode.engine.fleet.groups import GroupPool, HolderPool
from fastdecode.engine.fleet.replacements import HubReplacements, Replacements
from fastdecode.engine.fleet.resharing import GROUP, Resharing, offer_room
from fastdecode.engine.fleet.ring import DISK, LinkFigures, LinkOptions, ReplicaState
from fastdecode.schedule.life import events
from fastdecode.wire.blocks import MISSING, TakenOver, TakeOver, words_of
from fastdecode.wire.messages import MAX_ID, Hello, Welcome
from fastdecode.wire.transport import TIMEOUT
from fastdecode.wire.waiting import look_until_found

logger = logging.getLogger(__name__)


@dataclass
class _Takeover:
    """A takeover of a holder, all of whose members are asked what they have."""

    members: list[HolderId]  # those that other R-workers serve
    parts: Sequence[int]  # of sequences, in the order in which they were named
    keys: Sequence[bytes]  # of the kept blocks in the first question
    asked: Mapping[int, int] = field(default_factory=dict)
    """Tokens in the latest question, by part."""
    asked_keys: Sequence[bytes] = ()  # of the kept blocks in the latest question


class Replicas:
    """Replicas of holders that are groups of members (``HolderPool``). A plain R-worker is a group
    of one.

    To the engine a group is interrupted when members are lost that neighbours take over: steps in
    flight end, all members are asked what they have of each sequence, and the sequences continue
    with the tokens that all have. A member that has more, of steps that didn't count, is asked to
    forget it. Where that is impossible, all is recomputed on other holders.

    Args:
        rings: Members, with the options of their links. Members of a group that keep different
            layers are in different rings.
    """

    def __init__(
        self,
        fleet: HolderPool,
        rings: Sequence[tuple[Sequence[HolderId], LinkOptions]],
        clock: Clock = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self.figures: Final = ReplicaFigures()
        """Counts of what happened to replicas. Links are those of the first ring."""
        links = [self.figures, *(LinkFigures() for _ in rings[1:])]
        self.rings: Final = [
            Failovers(fleet.members, options, clock, circle, self.figures, own)
            for (circle, options), own in zip(rings, links, strict=True)
        ]
        self._ring_of = {member: ring for ring in self.rings for member in ring.circle}
        self._options = rings[0][1]
        self._places: HubReplacements | None = None
        self._takeovers: dict[HolderId, _Takeover] = {}  # under way

    def begin(self) -> None:
        """Begin a replica of every member that is present, and wait for the replicas if the
        options ask for that (``LinkOptions.begin_s``).

        Raises:
            WorkerError: If an R-worker that is to keep one does not answer.
        """
        for each in self.rings:
            each.ring.close(each.present)
        begin_s = self._options.begin_s
        if begin_s and not look_until_found(lambda: self._have_begun or None, begin_s):
            raise WorkerError(
                f"no replica of the device's KV cache was ready within {begin_s:g} s",
                code=TIMEOUT,
            )

    @property
    def _have_begun(self) -> bool:
        self._fleet.look()
        self.take_news(0)
        return not any(ReplicaState.NEW in each.ring.states.values() for each in self.rings)

    @property
    def adopted(self) -> set[HolderId]:
        """Holders of which neighbours have taken a member over. Empty if no other holder is
        left for sequences to start on."""
        adopted = self._adopted
        return adopted if self._has_others(adopted) else set()

    @property
    def _adopted(self) -> set[HolderId]:
        return {self._fleet.owner(member) for ring in self.rings for member in ring.adopted}

    def _has_others(self, adopted: set[HolderId]) -> bool:
        lost = self._fleet.lost if adopted else {}
        return any(one not in lost and one not in adopted for one in self._fleet.holders)

    def hand_over_to(self, replacements: Replacements | None) -> None:
        """Give replacements, if any may come, what neighbours took over."""
        if isinstance(replacements, HubReplacements):
            self._places = self.rings[0].replacements = replacements

    def take_news(self, last_step: int) -> None:
        """Take in what members have reported of their replicas. ``last_step``: the last one that
        has begun."""
        self._fleet.members.hear_reports()
        for news in self._fleet.members.take_replications():
            if (of := self._ring_of.get(HolderId(news.holder))) is not None:
                of.ring.take(news, last_step)
        for each in self.rings:
            each.ring.count()

    def leaving(self, is_used: Callable[[HolderId], bool]) -> list[HolderId]:
        """Return holders of which a member is to leave the neighbour that took it over, since
        its replacement has caught up. ``is_used``: Tells whether any sequence is on a holder."""
        if self._places is None or not self.adopted:
            return []
        ring, owner = self.rings[0], self._fleet.owner
        waiting = self._places.look(list(ring.adopted))
        leaving = ring.leaving(waiting, lambda member: is_used(owner(member)))
        return list(dict.fromkeys(map(owner, leaving)))

    def is_leaving(self, holder: HolderId) -> bool:
        """Return True if a member of a holder is on its way back to its own place."""
        return any(x in self._ring_of[x].handovers for x in self._fleet.shards_of(holder))

    def lose(self, holder: HolderId, *, is_used: bool) -> bool:
        """Record the loss of a holder, by that of members. Return True if neighbours can take
        these over. ``is_used``: True if sequences are on it."""
        self._takeovers.pop(holder, None)
        kept = self._lose_members(holder, is_used=is_used)
        if is_used and kept and all(kept):
            return True
        self.emptied(holder)
        return False

    def _lose_members(self, holder: HolderId, *, is_used: bool) -> list[bool]:
        """Return whether others can take over each member that was lost since the last call."""
        lost = self._fleet.take_lost_members(holder)
        return [self._ring_of[member].lose(member, is_used=is_used) for member in lost]

    def reopened(self) -> list[HolderId]:
        """Return the holders of which neighbours have taken a member over, if no other holder is
        left for sequences to start on."""
        adopted = self._adopted
        return [] if self._has_others(adopted) else sorted(adopted)

    def take_over(self, order: events.TakeOver) -> bool:
        """Let neighbours, or replacements, serve the members that a holder lost, and ask all its
        members what they have. Return False if an R-worker is missing for one."""
        holder = order.holder
        moved, may_move = list(self._fleet.shards_of(holder)), True
        if len(moved) > 1:  # some may have been lost while steps in flight ended
            may_move = all(self._lose_members(holder, is_used=True))
            moved = [x for x in moved if self._ring_of[x].is_moving(x)]
        if not may_move or not all(self._ring_of[x].take_over(x) for x in moved):
            self.emptied(holder)
            return False
        self._fleet.resume(holder)
        parts = [part.part_id for part in order.parts]
        self._takeovers[holder] = _Takeover(moved, parts, order.keys)
        self._ask(holder, dict(zip(parts, order.num_tokens, strict=True)), order.keys)
        return True

    def _ask(self, holder: HolderId, num_tokens: Mapping[int, int], keys: Sequence[bytes]) -> None:
        """Ask all members what they have of each part, and which kept blocks."""
        takeover, is_in_file = self._takeovers[holder], DISK in self._options.keepers.values()
        takeover.asked, takeover.asked_keys = num_tokens, keys
        ids = np.array([*num_tokens], np.int64)
        counts, words = np.array([*num_tokens.values()], np.int32), words_of(keys)
        order = TakeOver(self._options.session, ids, counts, keys=words, is_in_file=is_in_file)
        self._fleet.send(holder, order)

    def taken_over(self, holder: HolderId, answer: TakenOver) -> events.TakenOver | None:
        """Take in the answer of all members of a holder. Return None if some have to forget
        tokens that others lack: they are asked once more."""
        takeover = self._takeovers[holder]
        counts = dict(zip(takeover.asked, answer.num_tokens.tolist(), strict=True))
        present = {part: count for part, count in counts.items() if count != MISSING}
        kept = list(compress(takeover.asked_keys, answer.is_kept.tolist()))
        is_less = present != takeover.asked or len(kept) < len(takeover.asked_keys)
        if is_less and len(self._fleet.shards_of(holder)) > 1:
            self._ask(holder, present, kept)
            return None
        del self._takeovers[holder]
        for member in takeover.members:
            self._ring_of[member].taken_over(member, is_empty=not present and not kept)
        found = tuple(map(present.get, takeover.parts))
        lost = tuple(set(takeover.keys).difference(kept))
        return events.TakenOver(holder, found, lost, is_home=holder not in self._adopted)

    def emptied(self, holder: HolderId) -> None:
        """Abandon a holder: nothing is left of what was taken over, or no R-worker can do it."""
        for member in self._fleet.shards_of(holder):
            self._ring_of[member].give_up(member)
        self._fleet.give_up(holder)

    def is_in_ring(self, holder: HolderId) -> bool:
        """Return True if a member of a lost holder is connected, and still in a ring: a second
        greeting would make it forget the replica that it keeps."""
        lost = self._fleet.members.is_lost
        members = self._fleet.shards_of(holder)
        return any(not lost(x) and self._ring_of[x].ring.has(x) for x in members)

    def mend(self, vacant: Collection[HolderId] = (), *, may_return: bool = False) -> None:
        """Close the rings again over the members that are present, once no neighbour has
        anything of a lost one.

        Args:
            vacant: Lost holders that nothing uses.
            may_return: True if these are greeted again later: their members leave the rings before.
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
    """Replicas of the one group whose members share out the heads. When no neighbour can take a
    member over, or nothing is left of what one took over, all replicas end, and the remaining
    members share the heads again (``Resharing``)."""

    def _has_others(self, adopted: set[HolderId]) -> bool:
        return True  # or the heads are shared again

    def hand_over_to(self, replacements: Replacements | None) -> None:
        assert isinstance(replacements, Resharing)
        super().hand_over_to(replacements.keep_replicas(lambda: self.has_ended))

    @property
    def has_ended(self) -> bool:
        """True if nothing is left of replicas, once the group is given up."""
        self._fleet.look()  # no step awaits an answer to what was asked before
        self.take_news(0)
        return self.rings[0].end_all()

    def emptied(self, holder: HolderId) -> None:
        self.rings[0].end_all()
        self._fleet.give_up(holder)

    def mend(self, vacant: Collection[HolderId] = (), *, may_return: bool = False) -> None:
        """Close the ring, unless the group is lost: its members form none."""
        if GROUP not in self._fleet.lost:
            super().mend()


def new_session() -> int:
    """Return a secret for a run."""
    return 1 + secrets.randbelow(MAX_ID)


def replicate(
    fleet: HolderPool,
    hello: Hello,
    welcomes: Mapping[HolderId, Welcome],
    options: LinkOptions,
    clock: Clock = time.monotonic,
    circle: Sequence[HolderId] | None = None,
) -> tuple[dict[HolderId, Welcome], Replicas]:
    """Ask every R-worker that is present to offer what leaves room for the replicas.

    Args:
        circle: The holders that have replicas. None for all. Others offer all that they have.

    Raises:
        ConfigError: If there is a single R-worker, or one lacks the memory or the disk.
        WorkerError: If no member of a group that shares heads is left, or a keeper is lost.
    """
    circle = fleet.members.holders if circle is None else circle
    if isinstance(fleet, GroupPool):
        if DISK in options.keepers.values():
            check_disks(fleet, {x: each for x, each in welcomes.items() if x == GROUP})
        else:
            welcomes = offer_room(fleet, hello, welcomes)
        return dict(welcomes), HeadReplicas(fleet, [(circle, options)], clock)
    copied = {holder: welcome for holder, welcome in welcomes.items() if holder in circle}
    again = {**welcomes, **offer_for_replicas(fleet, hello, copied, options.keepers)}
    return again, Replicas(fleet, [(circle, options)], clock)

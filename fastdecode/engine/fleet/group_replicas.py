"""Replicas of cache groups: each member keeps its neighbour's shard a second time.

Members of the same layers are a ring (``fastdecode.engine.fleet.replicas``). When
one is lost, its neighbour takes over, and has two shards to serve. To the engine
the group is interrupted: steps in flight end, all members are asked what they have
of each sequence, and the sequences go on with the tokens that all have. A member
that has more, of steps that didn't count, is asked to forget it.

Where that can't be, all is recomputed, as without replicas: on other groups, or
where the members share out the heads, once the remaining ones share them anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from fastdecode.core.clock import Clock
from fastdecode.core.errors import WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.greeting import greet
from fastdecode.engine.fleet.groups import GroupPool
from fastdecode.engine.fleet.replacements import HubReplacements, Replacements
from fastdecode.engine.fleet.replicas import Failovers
from fastdecode.engine.fleet.resharing import GROUP, Resharing, most_blocks
from fastdecode.engine.fleet.ring import LinkOptions
from fastdecode.schedule.life import events
from fastdecode.schedule.ring import neighbour
from fastdecode.wire.kv.taking_over import MISSING, TakenOver, TakeOver
from fastdecode.wire.messages import Hello, Welcome


def replicate_heads(
    fleet: GroupPool,
    hello: Hello,
    welcomes: Mapping[HolderId, Welcome],
    options: LinkOptions,
    clock: Clock = time.monotonic,
) -> tuple[dict[HolderId, Welcome], GroupReplicas]:
    """As ``fastdecode.engine.fleet.replicas.replicate``, of a group. If one is
    lost meanwhile, the others share its heads.

    Raises:
        ConfigError: there is to be a single one, or one hasn't the memory.
        WorkerError: none is left.
    """
    neighbour(HolderId(0), len(fleet.members))  # or there is none
    again: dict[HolderId, Welcome] = {}
    while not again:
        if welcomes:
            again = greet(fleet, hello, {GROUP: most_blocks(fleet.groups[GROUP], hello)})
        if not again:
            _begin_again(fleet)
            welcomes = greet(fleet, hello)
    replicas = GroupReplicas(fleet, [(fleet.members.holders, options)], clock)
    replicas.begin()
    return again, replicas


def _begin_again(fleet: GroupPool) -> None:
    """The members that are left are a group.

    Raises:
        WorkerError: none is.
    """
    fleet.take_losses()
    fleet.take_lost_members(GROUP)
    if len(fleet.gone) == len(fleet.members):
        raise next(iter(fleet.gone.values()))
    fleet.revive(GROUP)


class GroupReplicas:
    """See the module. The engine uses it as it does ``Replicas``.

    Args:
        fleet: the groups.
        rings: of members, with the options of their links. Every member of a group
            that keeps other layers is in a ring of its own.
        clock: seconds.
    """

    def __init__(
        self,
        fleet: GroupPool,
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
        """See ``Replicas``; links are counted of the first ring."""
        self._session = options.session
        self._places: HubReplacements[Any] | None = None
        self._leaving: list[HolderId] = []  # members on their way to their own places
        self._moved: dict[HolderId, list[HolderId]] = {}  # taken over, once they have answered
        self._asked: dict[HolderId, TakeOver] = {}
        self._parts: dict[HolderId, list[int]] = {}  # in the order in which they were named
        self._reopened: set[HolderId] = set()
        self._is_over = False  # the heads are to be shared anew

    def begin(self) -> None:
        """Have every member that is there keep its neighbour up to date."""
        for ring in self.rings:
            ring.begin([x for x in ring.circle if x not in self._fleet.members.lost])

    @property
    def adopted(self) -> set[HolderId]:
        """See ``Replicas``: groups of which neighbours have taken a member over. None,
        where there are no others to start on, and the heads can't be shared anew."""
        adopted = self._adopted
        if self._is_over or not (self._fleet.shares_heads or self._has_others(adopted)):
            return set()
        return adopted

    @property
    def _adopted(self) -> set[HolderId]:
        members = set().union(*(ring.adopted for ring in self.rings))
        if not members:
            return set()
        return {x.holder for x in self._fleet.groups if not members.isdisjoint(x.shards)}

    def _has_others(self, adopted: set[HolderId]) -> bool:
        lost = self._fleet.lost
        return any(one not in lost and one not in adopted for one in self._fleet.holders)

    def hand_over_to(self, replacements: Replacements | None) -> None:
        """See ``Replicas``."""
        if isinstance(replacements, Resharing):
            self._places = replacements.keep_replicas(lambda: self.has_ended)
            self.rings[0].hand_over_to(self._places)

    def take_news(self, last_step: int) -> None:
        """See ``Replicas``."""
        heard = self._fleet.members.events.take_replicas()
        for ring in self.rings:
            ring.take_news(last_step, [x for x in heard if x.holder in ring.circle])

    def leaving(
        self, found: Mapping[int, Welcome], is_used: Callable[[HolderId], bool]
    ) -> list[HolderId]:
        """See ``Replicas``. ``found``: who waits in the group's place, which is nobody."""
        if self._places is None or not self.adopted:
            return []
        ring = self.rings[0]
        waiting = self._places.look(list(ring.adopted))
        leaving = ring.leaving(waiting, lambda member: is_used(GROUP))
        self._leaving += leaving
        return [GROUP] if leaving else []

    def is_leaving(self, holder: HolderId) -> bool:
        """See ``Replicas``."""
        return any(map(self.rings[0].is_leaving, self.rings[0].adopted))

    def lose(self, holder: HolderId, *, is_used: bool) -> bool:
        """See ``Replicas``. A group is lost since members are."""
        self._asked.pop(holder, None)
        self._reopened.discard(holder)
        kept = self._lose_members(holder, is_used=is_used)
        if is_used and not self._is_over and kept and all(kept):
            return True
        self._give_up(holder)
        return False

    def _lose_members(self, holder: HolderId, *, is_used: bool) -> list[bool]:
        """Whether others can take over the members that were lost since."""
        lost = self._fleet.take_lost_members(holder)
        return [self._ring_of[member].lose(member, is_used=is_used) for member in lost]

    def reopened(self) -> list[HolderId]:
        """See ``Replicas``: groups of which neighbours have taken a member over, where
        there are no others. Each is reported once."""
        if self._fleet.shares_heads or not (adopted := self._adopted):
            return []
        if self._has_others(adopted):
            return []
        found = adopted - self._reopened - self._asked.keys()
        self._reopened |= found
        return sorted(found)

    def take_over(self, order: events.TakeOver) -> bool:
        """See ``Replicas``."""
        holder, group = order.holder, self._fleet.groups[order.holder]
        kept = self._lose_members(holder, is_used=True)  # some while steps in flight ended
        moved = [x for x in group.shards if x in self._ring_of[x].failing or x in self._leaving]
        self._leaving = [member for member in self._leaving if member not in moved]
        if not all(kept) or not all(self._ring_of[x].go_on(x) for x in moved):
            self._give_up(holder)
            return False
        self._moved[holder] = moved
        group.begin(group.shards)
        self._fleet.revive(holder)
        self._parts[holder] = [part.part_id for part in order.parts]
        self._ask(holder, dict(zip(self._parts[holder], order.num_tokens, strict=True)))
        return True

    def _ask(self, holder: HolderId, num_tokens: Mapping[int, int]) -> None:
        """All members, what they have of each part."""
        ids, counts = np.array(list(num_tokens), np.int64), list(num_tokens.values())
        self._asked[holder] = TakeOver(self._session, ids, np.array(counts, np.int32))
        self._fleet.send(holder, self._asked[holder])

    def taken_over(self, holder: HolderId, answer: TakenOver) -> events.TakenOver | None:
        """See ``Replicas``. None: members have been told to forget what others
        haven't, and are to answer once more."""
        asked = self._asked[holder]
        ids, wanted = asked.sequence_ids.tolist(), asked.num_tokens.tolist()
        counts = dict(zip(ids, answer.num_tokens.tolist(), strict=True))
        there = {part: count for part, count in counts.items() if count != MISSING}
        if list(there.values()) != wanted:
            self._ask(holder, there)
            return None
        del self._asked[holder]
        for member in self._moved.pop(holder):
            self._ring_of[member].went_on(member)
        found = tuple(map(there.get, self._parts.pop(holder)))
        return events.TakenOver(holder, found, is_home=holder not in self._adopted)

    def emptied(self, holder: HolderId) -> None:
        """See ``Replicas``. The members that are left share the heads anew, if there
        are heads to share."""
        self._give_up(holder)

    @property
    def has_ended(self) -> bool:
        """Whether the heads are to be shared anew, and nothing is left of replicas."""
        if not self._is_over:
            return False
        self._fleet.look()  # nobody awaits an answer to what was asked before
        self.take_news(0)
        return self.rings[0].end_all()

    def joined(self) -> None:
        """See ``Replicas``. The heads are shared anew."""
        self._is_over = False
        self._fleet.take_lost_members(GROUP)  # they are no members any more
        self.rings[0].joined()

    def mend(self) -> None:
        """See ``Replicas``."""
        if not self._is_over:
            for ring in self.rings:
                ring.mend()

    def _give_up(self, holder: HolderId) -> None:
        """Nobody takes over from members any more."""
        group = self._fleet.groups[holder]
        error = group.broken or WorkerError(f"{group.peer} is incomplete")
        if self._fleet.shares_heads:
            self._is_over = True
            self._leaving.clear()
            self.rings[0].end_all()
        else:
            for member in group.shards:
                self._ring_of[member].give_up(member)
        self._fleet.give_up(holder, error)

"""Replicas in a group that shares out the heads: each member keeps its neighbour's
heads of every sequence a second time.

The members are a ring of their own (``fastdecode.engine.fleet.replicas``). When
one is lost, its neighbour takes over, and has two shards to serve. To the engine
the group is interrupted: steps in flight end, all members are asked what they have
of each sequence, and the sequences go on with the tokens that all have. A member
that has more, of steps that didn't count, is asked to forget it.

Where that can't be, the members that are left share the heads anew, and all is
recomputed, as without replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
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
    replicas = GroupReplicas(fleet, options, clock)
    replicas.members.begin(list(fleet.groups[GROUP].shards))
    return again, replicas


def _begin_again(fleet: GroupPool) -> None:
    """The members that are left are a group.

    Raises:
        WorkerError: none is.
    """
    fleet.take_losses()
    fleet.take_lost_members()
    if len(fleet.gone) == len(fleet.members):
        raise next(iter(fleet.gone.values()))
    fleet.revive(GROUP)


class GroupReplicas:
    """See the module. The engine uses it as it does ``Replicas``.

    Args:
        fleet: the group.
        options: of the links.
        clock: seconds.
    """

    def __init__(
        self, fleet: GroupPool, options: LinkOptions, clock: Clock = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._group = fleet.groups[GROUP]
        self._session = options.session
        self.members: Final = Failovers(fleet.members, options, clock)
        """Of its members."""
        self.figures: Final = self.members.figures
        """See ``Replicas``."""
        self._places: HubReplacements[Any] | None = None
        self._leaving: list[HolderId] = []  # members on their way to their own places
        self._moved: list[HolderId] = []  # those that others go on for, once they have answered
        self._asked: TakeOver | None = None
        self._parts: list[int] = []  # in the order in which they were named
        self._is_over = False  # the heads are to be shared anew

    @property
    def adopted(self) -> set[HolderId]:
        """See ``Replicas``: the group, while a neighbour goes on for a member."""
        return {GROUP} if self.members.adopted and not self._is_over else set()

    def hand_over_to(self, replacements: Replacements | None) -> None:
        """See ``Replicas``."""
        if isinstance(replacements, Resharing):
            self._places = replacements.keep_replicas(lambda: self.has_ended)
            self.members.hand_over_to(self._places)

    def take_news(self, last_step: int) -> None:
        """See ``Replicas``."""
        self.members.take_news(last_step)

    def leaving(
        self, found: Mapping[int, Welcome], is_used: Callable[[HolderId], bool]
    ) -> list[HolderId]:
        """See ``Replicas``. ``found``: who waits in the group's place, which is nobody."""
        if self._places is None or not self.adopted:
            return []
        waiting = self._places.look(list(self.members.adopted))
        leaving = self.members.leaving(waiting, lambda member: is_used(GROUP))
        self._leaving += leaving
        return [GROUP] if leaving else []

    def is_leaving(self, holder: HolderId) -> bool:
        """See ``Replicas``."""
        return any(map(self.members.is_leaving, self.members.adopted))

    def lose(self, holder: HolderId, *, is_used: bool) -> bool:
        """See ``Replicas``. The group is lost since a member is."""
        self._asked = None
        if self._lose_members(is_used=is_used) and is_used and not self._is_over:
            return True
        self._give_up()
        return False

    def _lose_members(self, *, is_used: bool) -> bool:
        """Whether others can go on for all members that were lost since."""
        lost = self._fleet.take_lost_members()
        kept = [self.members.lose(member, is_used=is_used) for member in lost]
        return all(kept)

    def reopened(self) -> list[HolderId]:
        """See ``Replicas``."""
        return []

    def take_over(self, order: events.TakeOver) -> bool:
        """See ``Replicas``."""
        is_kept = self._lose_members(is_used=True)  # some while steps in flight ended
        self._moved = list(dict.fromkeys([*self.members.failing, *self._leaving]))
        self._leaving.clear()
        if not is_kept or not all(self.members.go_on(member) for member in self._moved):
            self._give_up()
            return False
        self._group.begin(self._group.shards)
        self._fleet.revive(GROUP)
        self._parts = [part.part_id for part in order.parts]
        self._ask(dict(zip(self._parts, order.num_tokens, strict=True)))
        return True

    def _ask(self, num_tokens: Mapping[int, int]) -> None:
        """All members, what they have of each part."""
        ids, counts = np.array(list(num_tokens), np.int64), list(num_tokens.values())
        self._asked = TakeOver(self._session, ids, np.array(counts, np.int32))
        self._fleet.send(GROUP, self._asked)

    def taken_over(self, holder: HolderId, answer: TakenOver) -> events.TakenOver | None:
        """See ``Replicas``. None: members have been told to forget what others
        haven't, and are to answer once more."""
        assert self._asked is not None
        ids, wanted = self._asked.sequence_ids.tolist(), self._asked.num_tokens.tolist()
        counts = dict(zip(ids, answer.num_tokens.tolist(), strict=True))
        there = {part: count for part, count in counts.items() if count != MISSING}
        if list(there.values()) != wanted:
            self._ask(there)
            return None
        self._asked = None
        for member in self._moved:
            self.members.went_on(member)
        found = tuple(map(there.get, self._parts))
        return events.TakenOver(GROUP, found, is_home=not self.members.adopted)

    def emptied(self, holder: HolderId) -> None:
        """See ``Replicas``. The members that are left share the heads anew."""
        self._give_up()

    @property
    def has_ended(self) -> bool:
        """Whether the heads are to be shared anew, and nothing is left of replicas."""
        if not self._is_over:
            return False
        self._fleet.look()  # nobody awaits an answer to what was asked before
        self.members.take_news(0)
        return self.members.end_all()

    def joined(self) -> None:
        """See ``Replicas``. The heads are shared anew."""
        self._is_over = False
        self._fleet.take_lost_members()  # they are no members any more
        self.members.joined()

    def mend(self) -> None:
        """See ``Replicas``."""
        if not self._is_over:
            self.members.mend()

    def _give_up(self) -> None:
        """Nobody goes on for members any more."""
        self._is_over = True
        self._leaving.clear()
        self.members.end_all()
        error = self._group.broken or WorkerError(f"{self._group.peer} is incomplete")
        self._fleet.give_up(GROUP, error)

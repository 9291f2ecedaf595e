"""A group whose members share out the KV heads (``--r-partition heads``). When it loses a member,
the remaining members share the heads again."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import HeadShare, Shard
from fastdecode.engine.fleet.greeting import greet
from fastdecode.engine.fleet.groups import CacheGroup, GroupPool
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.fleet.replacements import HubReplacements, Replacements
from fastdecode.schedule.ring import neighbour, num_shared
from fastdecode.wire.messages import Hello, Welcome

logger = logging.getLogger(__name__)

GROUP: Final = HolderId(0)
"""The one group of an engine that shares out the heads."""


def in_heads(members: WorkerPool) -> GroupPool:
    """Return one group whose members share out the KV heads: each keeps some heads of every
    sequence, and has the same share of every step's work, up to whole heads. The group's capacity
    is that of its smallest member. A device beside R-workers is a group of its own."""
    beside = [x for x in members.placement if x not in members.r_workers]
    return GroupPool(members, [{}, *({x: Shard()} for x in beside)], share_out_heads)


def share_out_heads(members: WorkerPool, hello: Hello) -> dict[HolderId, Shard]:
    """Return the heads of each member that is not lost."""
    lost = members.lost
    present = [x for x in members.r_workers if x not in lost]
    if not present:
        return {}
    shares = share_heads(hello.attention[0].num_q_heads, hello.kv.num_kv_heads, len(present))
    return {member: Shard(share) for member, share in zip(present, shares, strict=True)}


def share_heads(num_q_heads: int, num_kv_heads: int, num_workers: int) -> list[HeadShare]:
    """Return shares as even as whole KV heads allow. Raises ConfigError: If there are fewer KV
    heads than R-workers."""
    if num_workers > num_kv_heads:
        raise ConfigError(
            f"{num_workers} R-workers can't share {num_kv_heads} KV heads: start {num_kv_heads} at "
            "most, or choose ",
            Given("r_partition", "sequences"),
        )
    group = num_q_heads // num_kv_heads
    bounds = [num_kv_heads * i // num_workers for i in range(num_workers + 1)]
    return [
        HeadShare(slice(a, b), slice(a * group, b * group)) for a, b in itertools.pairwise(bounds)
    ]


def offer_room(
    fleet: GroupPool, hello: Hello, welcomes: Mapping[HolderId, Welcome]
) -> dict[HolderId, Welcome]:
    """Ask each member to offer room for its own shard and its neighbour's replica. If one is lost
    meanwhile, the others share its heads. If all are resumed, they have offered that before, and
    are not asked.

    Raises:
        ConfigError: If there is a single member, or one lacks the memory.
        WorkerError: If none is left.
    """
    neighbour(HolderId(0), len(fleet.members.r_workers))  # or there is none
    if hello.resumes:
        if GROUP in welcomes and welcomes[GROUP].is_resumed:
            return dict(welcomes)
        hello = replace(hello, resumes=False)
        welcomes = greet_members(fleet, hello)
    again: dict[HolderId, Welcome] = {}
    while GROUP not in again:
        if GROUP in welcomes:
            again = greet(fleet, hello, {GROUP: most_blocks(fleet.groups[GROUP], hello)})
        if GROUP not in again:
            _begin_again(fleet)
            welcomes = greet_members(fleet, hello)
    return again


def greet_members(fleet: GroupPool, hello: Hello) -> dict[HolderId, Welcome]:
    """Greet the members. If one is lost meanwhile, the others share its heads. Raises WorkerError:
    If none is left."""
    while GROUP not in (welcomes := greet(fleet, hello)):
        _begin_again(fleet)
    return welcomes


def _begin_again(fleet: GroupPool) -> None:
    """Make a group of the members that are left. Raises WorkerError: If none is."""
    fleet.take_losses()
    if all(map(fleet.members.is_lost, fleet.members.r_workers)):
        raise next(iter(fleet.gone.values()))
    fleet.revive(GROUP)


def most_blocks(group: CacheGroup, hello: Hello) -> int:
    """Return the most blocks that each member of a group may offer, which has just been greeted, so
    that it has room for its neighbour's replica. 0, for all blocks, if there is a single member.
    Raises ConfigError: If there isn't the memory."""
    if len(group.shards) < 2:
        return 0
    blocks = [welcome.num_blocks for welcome in group.welcomes.values()]
    return num_shared(blocks, [hello.part(x).kv.block_bytes for x in group.shards.values()])


class Resharing:
    """Greets the remaining members of a lost group with other heads (``Replacements``). ``places``:
    R-workers that may replace a member, or None."""

    def __init__(
        self,
        fleet: GroupPool,
        hello: Hello,
        deadlines: Deadlines,
        places: Replacements | None = None,
    ) -> None:
        assert places is None or isinstance(places, HubReplacements)
        self._fleet = fleet
        self._members = fleet.members
        self._group = fleet.groups[GROUP]
        self._hello = hello
        self._deadlines = deadlines
        self._places: HubReplacements | None = places
        self._have_ended: Callable[[], bool] | None = None
        self._usual: Deadlines | None = None
        """The members' deadlines outside a greeting. None if no greeting is under way."""
        self._most_blocks = 0  # in the latest greeting
        self._welcome: Welcome | None = None
        self._too_few = 0
        """A number of members that lacks the memory to share all heads. 0 before a failure."""

    @property
    def timeout_s(self) -> float:
        if self._num_left and self._num_left != self._too_few:
            return math.inf
        return 0.0 if self._places is None else self._places.timeout_s

    @property
    def _num_left(self) -> int:
        return sum(not self._members.is_lost(x) for x in self._members.r_workers)

    def limit(self, num_blocks: Mapping[int, int]) -> None:
        """Do nothing: what a group may offer depends on the members that are left."""

    def keep_replicas(self, have_ended: Callable[[], bool]) -> HubReplacements | None:
        """Let members that share the heads again keep replicas, too. Return what replaces members.
        ``have_ended``: Returns True once no neighbour can take over."""
        self._have_ended = have_ended
        self._limit()
        return self._places

    def look(self, lost: Iterable[int]) -> dict[int, Welcome]:
        """Return the group's welcome once all members have answered. They may compile kernels."""
        if GROUP not in lost or not self._may_begin():
            return {}
        while self._welcome is None and self._num_left:
            if self._usual is None or self._group.broken is not None:
                if self._usual is not None and not self._let_in():
                    break
                self._greet(0)
            self._fleet.take_in()
            if self._group.broken is None:
                self._hear()
                break
        return {} if self._welcome is None else {GROUP: self._welcome}

    def admit(self, worker: int) -> None:
        self._end_greeting()
        self._welcome = None
        self._limit()
        logger.warning("%s: the KV heads are shared again", self._fleet.peer(GROUP))

    def _limit(self) -> None:
        """Limit the replacement of a member to its heads, and to as much room."""
        if self._places is not None and self._group.welcomes:
            least = min(welcome.num_blocks for welcome in self._group.welcomes.values())
            shards = self._group.shards
            self._places.limit(dict.fromkeys(shards, least), shards)

    def _may_begin(self) -> bool:
        """Return True if nothing is left of replicas, or in the way of new ones."""
        if self._usual is not None or self._welcome is not None:
            return True
        has_ended = self._have_ended is None or self._have_ended()
        return has_ended and self._let_in() and self._num_left != self._too_few

    def _let_in(self) -> bool:
        """Make members of replacements that wait. Return False if some that were greeted haven't
        answered, or a later stage has none for a lost member."""
        self._fleet.take_in()  # later stages report their replacements
        if self._places is not None:
            self._limit()
            gone = map(HolderId, self._members.gone)
            found = self._places.look([x for x in gone if self._members.is_here(x)])
            if self._places.is_owed:
                return False
            for place in found:
                self._places.admit(place)
                self._members.revive(HolderId(place))
        return self._members.revive_elsewhere(self._group.shards)

    def _greet(self, most: int) -> None:
        """Greet all members. ``most``: Blocks that each may offer. 0 for all that it has."""
        if self._usual is None:
            self._usual = self._members.pending.deadlines
            self._members.pending.deadlines = self._deadlines.while_greeting()
            self._fleet.is_greeting = True
        self._most_blocks = most
        self._fleet.send(GROUP, replace(self._hello, max_blocks=most))

    def _end_greeting(self) -> None:
        if self._usual is not None:
            self._members.pending.deadlines = self._usual
            self._fleet.is_greeting = False
            self._usual = None

    def _hear(self) -> None:
        """Take in the members' joined answer, once all have given it."""
        answer = self._group.welcome
        if answer is None or self._have_ended is None or self._most_blocks:
            self._welcome = answer
            return
        try:  # each member is to have room for its neighbour's replica, too
            most = most_blocks(self._group, self._hello)
        except ConfigError as error:
            logger.error("the heads can't be shared again: %s", error)
            self._too_few = self._num_left
            self._end_greeting()
        else:
            if most:
                self._greet(most)
            else:
                self._welcome = answer

"""Cache groups: holders that several R-workers keep together.

A ``CacheGroup`` is a holder of several **members**, each with a ``Shard`` of the cache: some
layers, or some heads. Every member is a holder of a ``WorkerPool``, which sends, receives, and
notices losses. A group cuts a message into the members' parts (``message.part``), and joins their
answers (``message.join``). Where one refuses, the others undo what they accepted. A group is lost
when one of its members is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
from msgspec.structs import replace

from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import Shard
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.wire.blocks import (
    Done,
    Forget,
    Inventory,
    MoveNews,
    Progress,
    Retain,
    UseTier,
    keys_of,
    words_of,
)
from fastdecode.wire.messages import (
    Accepted,
    Answer,
    Attend,
    AttendResult,
    BeginStep,
    Hello,
    Refused,
    ToRWorker,
    Welcome,
)

Shards = Mapping[HolderId, Shard]
"""What each member keeps, in the order of heads."""


class JoinedMoves:
    """Joins members' reports of transfers and tiers: every member has its part of a block."""

    def __init__(self, holder: HolderId, members: Collection[HolderId]) -> None:
        self._holder = holder
        self._members = frozenset(members)
        self._moved: dict[int, dict[HolderId, Done]] = {}  # by job and member
        self._fetching: dict[int, dict[HolderId, Progress]] = {}
        self._stocked: dict[HolderId, dict[bytes, int]] = {}  # of each member
        self._num_slots: dict[HolderId, int] = {}  # of members that have reported all
        self.stores: set[int] = set()  # jobs
        self.news: deque[MoveNews] = deque()  # joined reports that were not taken yet

    def take(self, member: HolderId, news: MoveNews) -> dict[HolderId, set[bytes]]:
        """Take in a member's report. Return the blocks that members are to drop, since others
        lack them: otherwise disks would fill with useless blocks."""
        match news:
            case Done():
                return self._take_moved(member, news)
            case Inventory():
                return self._take_stocked(member, news)
            case Progress():
                self._take_fetching(member, news)
        return {}

    def _take_fetching(self, member: HolderId, news: Progress) -> None:
        """The group is as far as its slowest member. A member that is done reports nothing
        more."""
        by_member = self._fetching.setdefault(news.job, {})
        by_member[member] = news
        over = self._moved.get(news.job, {})
        under_way = [by_member[x] for x in by_member if x not in over]
        if under_way and by_member.keys() | over.keys() >= self._members:
            slowest = min(under_way, key=lambda x: x.num_there)
            self.news.append(replace(slowest, holder=self._holder))

    def _take_moved(self, member: HolderId, news: Done) -> dict[HolderId, set[bytes]]:
        by_member = self._moved.setdefault(news.job, {})
        by_member[member] = news
        if not by_member.keys() >= self._members:
            return {}
        del self._moved[news.job]
        self._fetching.pop(news.job, None)
        own_failed = {x: set(keys_of(each.missing)) for x, each in by_member.items()}
        failed = set[bytes]().union(*own_failed.values())
        joined = replace(news, holder=self._holder, missing=words_of(sorted(failed)))
        for name in ("num_bytes", "num_unread", "num_damaged", "num_unwritten", "num_late"):
            joined = replace(joined, **{name: sum(getattr(x, name) for x in by_member.values())})
        reason = next((each.reason for each in by_member.values() if each.reason), "")
        seconds = max(each.seconds for each in by_member.values())
        self.news.append(replace(joined, seconds=seconds, reason=reason))
        # The engine gives up the blocks of a failed fetch by itself.
        is_store = news.job in self.stores
        self.stores.discard(news.job)
        return {x: failed - own for x, own in own_failed.items()} if is_store else {}

    def _take_stocked(self, member: HolderId, news: Inventory) -> dict[HolderId, set[bytes]]:
        own = self._stocked.setdefault(member, {})
        own.update(zip(keys_of(news.keys), news.num_tokens.tolist(), strict=True))
        if news.is_last or member in self._num_slots:
            self._num_slots[member] = news.num_slots
        if not self._num_slots.keys() >= self._members:
            return {}
        first, *others = (self._stocked[each] for each in self._members)
        shared = [key for key in first if all(key in stock for stock in others)]
        num_tokens = np.array([first[key] for key in shared], np.int32)
        num_slots = min(self._num_slots.values())
        self.news.append(
            Inventory(self._holder, num_slots, words_of(shared), num_tokens, is_last=True)
        )
        return {x: set(stock).difference(shared) for x, stock in self._stocked.items()}


class _Asked:
    """A message to some members, and the answers so far."""

    __slots__ = ("answers", "due", "message")

    def __init__(self, message: ToRWorker, due: Sequence[HolderId]) -> None:
        self.message = message
        self.due = due
        self.answers: dict[HolderId, Answer] = {}


class CacheGroup:
    """One holder of several members. What each keeps may be known later (``begin``)."""

    def __init__(self, holder: HolderId, pool: WorkerPool, shards: Shards) -> None:
        self.holder: Final = holder
        self._pool = pool
        self._asked: dict[HolderId, deque[_Asked | None]] = {}
        """Questions to each member, in order. None for one that is forgotten."""
        self._want_lse: dict[int, bool] = {}  # of each lane's step
        self.welcomes: dict[HolderId, Welcome] = {}
        """What each member answered to the last greeting."""
        self.welcome: Welcome | None = None
        """The group's answer to it. None until all have answered."""
        self.greets_all = False
        """True if a greeting goes to members in every stage, and not in the first alone. Each
        stage does the first greeting by itself."""
        self.loss: WorkerError | None = None
        """Why it is lost, until it is revived. None if it isn't, or that loss was not taken yet
        (``WorkerPool.take_losses``)."""
        self.begin(shards)

    def begin(self, shards: Shards) -> None:
        """Set the members. What was asked before is forgotten."""
        pool = self._pool
        self.shards = dict(shards)
        self.lost_members: list[HolderId] = []
        """Members whose losses were taken by the pool, and not yet by replicas."""
        self.moves = JoinedMoves(self.holder, self.shards)
        """What members report of tiers and transfers."""
        self._asked = {
            member: deque([None] * pool.pending.num_about(pool.placement[member], member))
            for member in shards
        }
        self._members = tuple(shards)
        self._here = tuple(member for member in shards if pool.is_here(member))

    @property
    def peer(self) -> str:
        members = self._here if len(self._here) == 1 < len(self._members) else self.shards
        peers = dict.fromkeys(map(self._pool.peer, members or self._pool.placement))
        return next(iter(peers)) if len(members) == 1 else f"the group of {', '.join(peers)}"

    @property
    def broken(self) -> WorkerError | None:
        """Why a member is lost whose shard no other has. None if no shard is missing."""
        gone, placement = self._pool.gone, self._pool.placement
        if not gone:
            return None
        if not self.shards and all(map(self._pool.is_lost, self._pool.r_workers)):
            return next(iter(gone.values()))
        return next((gone[placement[x]] for x in self.shards if placement[x] in gone), None)

    def send(self, message: ToRWorker) -> None:
        """Send its part to each member that the message concerns, or nothing if one of these is
        lost."""
        pool = self._pool
        everywhere = message.in_every_stage or (isinstance(message, Hello) and self.greets_all)
        due = self._members if everywhere else self._here
        if pool.gone and any(map(pool.is_lost, due)):
            return
        if isinstance(message, Hello):
            self.welcome = None
        elif isinstance(message, BeginStep):
            self._want_lse[message.lane] = message.want_lse
        elif isinstance(message, Retain):
            self.moves.stores.add(message.job)
        if message.answers:
            asked = _Asked(message, due)
            for member in due:
                self._asked[member].append(asked)
        for member in due:
            pool.send(member, message.part(self.shards[member]))

    def take(self, member: HolderId, answer: Answer) -> Answer | None:
        """Take in a member's answer. Return the group's answer, once all have answered."""
        waiting = self._asked.get(member)
        asked = waiting.popleft() if waiting else None
        if asked is None or not self._is_due(member, asked.message, answer):
            return None
        asked.answers[member] = answer
        return self._joined(asked) if len(asked.answers) == len(asked.due) else None

    def take_moved(self, member: HolderId, news: MoveNews) -> None:
        """Take in a member's report on a transfer, unless that is forgotten."""
        waiting = self._asked.get(member)
        if waiting is None or any(x is None or isinstance(x.message, Hello) for x in waiting):
            return
        if isinstance(news, Progress) and len(self._here) < len(self._members):
            return  # other stages don't report it: no sequence begins before all is there
        for each, keys in self.moves.take(member, news).items():
            if keys:
                self._pool.send(each, Forget(words_of(sorted(keys)), is_below=True))

    def _is_due(self, member: HolderId, asked: ToRWorker, answer: Answer) -> bool:
        """Return True if the arrays of an answer are the ones that were asked for. Once they are
        joined, it is unknown which member sent wrong ones."""
        heads = self.shards[member].heads
        if heads is None or not isinstance(asked, Attend):
            return True
        assert isinstance(answer, AttendResult), "other kinds were refused"
        shape = (len(asked.q), heads.num_q_heads, asked.q.shape[2])
        try:
            answer.check_arrays(shape, asked.q.dtype, want_lse=self._want_lse[asked.lane])
        except ProtocolError as lie:
            peer = self._pool.peer(member)
            self._pool.lose(member, ProtocolError(f"{peer} {lie.message}"))
            return False
        return True

    def _joined(self, asked: _Asked) -> Answer:
        answers = {member: asked.answers[member] for member in asked.due}
        joined: Answer = asked.message.join(list(answers.values()))
        if isinstance(joined, Refused) and (undo := asked.message.undo()) is not None:
            for member, answer in answers.items():
                if isinstance(answer, Accepted):
                    self._pool.send(member, undo)
        elif isinstance(joined, Welcome):
            self.welcomes = {x: each for x, each in answers.items() if isinstance(each, Welcome)}
            self.welcome = joined
        return joined


class GroupPool:
    """Cache groups as the engine sees them; see ``WorkerPool``.

    Args:
        members: Every member as a holder. The pool counts and times what they owe.
        share_out: Makes the shards of the first group, when it is greeted. None to keep them.
    """

    def __init__(
        self,
        members: WorkerPool,
        shards: Sequence[Shards],
        share_out: Callable[[WorkerPool, Hello], Shards] | None = None,
    ) -> None:
        self.members: Final = members
        self.pending, self.gone = members.pending, members.gone
        self.groups: Final = [CacheGroup(HolderId(i), members, x) for i, x in enumerate(shards)]
        self._owners = {member: group for group in self.groups for member in group.shards}
        self._share_out = share_out
        self.is_greeting = False
        """True while members of a lost group are greeted again. A hybrid device still answers."""
        self.tier: UseTier | None = None
        """Opens the lower tiers of groups. None if they have none."""
        self._kept: deque[tuple[HolderId, Answer]] = deque()  # answers that ``take_in`` took

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def holders(self) -> list[HolderId]:
        return [group.holder for group in self.groups]

    @property
    def lost(self) -> dict[HolderId, WorkerError]:
        found = {group.holder: group.loss or group.broken for group in self.groups}
        return {holder: error for holder, error in found.items() if error is not None}

    @property
    def is_owed(self) -> bool:
        may_wait = len(self.groups) > 1 or not self.is_greeting
        return bool(self._kept) or (may_wait and self.members.is_owed)

    @property
    def is_owed_at_once(self) -> bool:
        return bool(self._kept) or self.members.is_owed_at_once

    def peer(self, holder: HolderId) -> str:
        return self.groups[holder].peer

    def open_tier(self, holder: HolderId) -> None:
        if self.tier is not None:
            is_one_of_several = len(self.groups) > 1
            self.send(holder, self.tier.of_column(holder) if is_one_of_several else self.tier)

    @property
    def has_moves(self) -> bool:
        return bool(self.moves)

    @property
    def moves(self) -> list[MoveNews]:
        for news in self.members.take_moves():
            member = HolderId(news.holder)
            group = self._group_of(member)
            if group is not None and group.loss is None:
                group.take_moved(member, news)
        return [news for group in self.groups for news in group.moves.news]

    def take_moves(self) -> list[MoveNews]:
        taken = self.moves
        for group in self.groups:
            group.moves.news.clear()
        return taken

    def take_losses(self) -> list[tuple[HolderId, WorkerError]]:
        """Return the groups that have lost a member, and why. Each is reported once, until it is
        revived."""
        losses = []
        for member, error in self.members.take_losses():
            group = self._group_of(member)
            if group is not None:
                group.lost_members.append(member)
                if self.give_up(group.holder, error):
                    losses.append((group.holder, error))
        return losses

    def shards_of(self, holder: HolderId) -> Mapping[HolderId, Shard]:
        return self.groups[holder].shards

    def owner(self, member: HolderId) -> HolderId:
        return self._owners.get(member, self.groups[0]).holder

    def take_lost_members(self, holder: HolderId) -> list[HolderId]:
        group = self.groups[holder]
        lost, group.lost_members = group.lost_members, []
        return lost

    def resume(self, holder: HolderId) -> None:
        group = self.groups[holder]
        group.begin(group.shards)
        group.loss = None

    def send(self, holder: HolderId, message: ToRWorker) -> None:
        """Send to all members. A lost group is sent nothing but a greeting."""
        group = self.groups[holder]
        if isinstance(message, Hello):
            self._begin(group, message)
        elif group.loss is not None:
            return
        group.send(message)

    def receive(self, *, most_s: float = math.inf) -> tuple[HolderId, Answer] | None:
        return self._kept.popleft() if self._kept else self._receive(most_s)

    def take_in(self) -> None:
        """Take in what has arrived, outside ``receive``. An answer of another group, such as a
        device beside R-workers, is kept for ``receive``; a ``Welcome`` is in its group."""
        if not self.members.is_owed:
            self.look()
        elif (received := self._receive(0.0)) is not None:
            self._keep(received)

    def _keep(self, received: tuple[HolderId, Answer]) -> None:
        if not isinstance(received[1], Welcome):
            self._kept.append(received)

    def _receive(self, most_s: float) -> tuple[HolderId, Answer] | None:
        num_gone = len(self.gone)
        while (received := self.members.receive(most_s=most_s)) is not None:
            if (joined := self._take(*received)) is not None:
                return joined
            if len(self.gone) > num_gone or not self.is_owed:
                return None
        return None

    def look(self) -> None:
        for received in self.members.look():
            if (joined := self._take(*received)) is not None:
                self._keep(joined)

    def lose(self, holder: HolderId, error: FastDecodeError) -> None:
        """Give up a member of a group, unless one is lost already."""
        group = self.groups[holder]
        if group.broken is None and group.shards:
            self.members.lose(next(iter(group.shards)), error)

    def give_up(self, holder: HolderId, error: WorkerError | None = None) -> bool:
        """Treat a group as lost until it is revived. Return False if it was lost before.
        ``error``: Why. None if that is the loss of a member."""
        group = self.groups[holder]
        if group.loss is not None:
            return False
        group.loss = error or group.broken or WorkerError(f"{group.peer} is incomplete")
        group.moves.news.clear()
        return True

    def revive(self, holder: HolderId) -> None:
        """Use a group again, with other members or with members at other R-workers."""
        self.groups[holder].loss = None
        self.open_tier(holder)

    def _begin(self, group: CacheGroup, hello: Hello) -> None:
        share_out = self._share_out if group is self.groups[0] else None
        group.begin(group.shards if share_out is None else share_out(self.members, hello))

    def _group_of(self, member: HolderId) -> CacheGroup | None:
        """Return the group of a member. None if other members have its shard now."""
        group = self._owners.get(member, self.groups[0])
        return group if member in group.shards else None

    def _take(self, member: HolderId, answer: Answer) -> tuple[HolderId, Answer] | None:
        group = self._group_of(member)
        joined = None if group is None else group.take(member, answer)
        if group is None or joined is None or group.loss is not None:
            return None
        return group.holder, joined


HolderPool: TypeAlias = WorkerPool | GroupPool
"""The holders of an engine. One R-worker keeps each, or several do together."""

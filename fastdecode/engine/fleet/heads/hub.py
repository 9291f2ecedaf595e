"""R-workers that share out the KV heads: each keeps some heads of every
sequence (``--r-partition heads``).

However long or short the sequences are, every R-worker then has the same share
of every step's work, up to whole heads. The engine sees one holder, the group.
``HeadsHub`` is the one peer that keeps it: it cuts q, k and v by heads on the
way out, and puts o together on the way back; all else is said to everybody, and
answered once all have. Its capacity is that of the smallest.

Its **members** are a fleet of their own: a holder there is a share of the heads.
Who loses an R-worker loses a part of every sequence, and the group is broken.
Those that are left share the heads anew (``resharing``), and the engine
recomputes everything, as it does after any loss. Or, with replicas, a neighbour
goes on for the lost one (``replicas``).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ConfigError, Given, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import HeadShare
from fastdecode.engine.fleet.deadlines import Deadlines
from fastdecode.engine.fleet.heads.answers import GroupAnswers, check_arrays
from fastdecode.engine.fleet.heads.tiers import GroupTiers
from fastdecode.engine.fleet.pool import RHub, WorkerPool
from fastdecode.wire.kv.exporting import MoveNews
from fastdecode.wire.messages import (
    Accepted,
    Answer,
    Attend,
    AttendResult,
    BeginStep,
    FromRWorker,
    Hello,
    Refused,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.transport import TIMEOUT, timeout_error

GROUP: Final = HolderId(0)
"""The one holder that the engine sees."""


def share_heads(num_q_heads: int, num_kv_heads: int, num_workers: int) -> list[HeadShare]:
    """As even as whole KV heads allow.

    Raises:
        ConfigError: there are fewer KV heads than R-workers.
    """
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


class HeadsConnection:
    """The one R-worker that the engine sees; see ``fastdecode.wire.transport.Connection``."""

    def __init__(self, hub: HeadsHub, close: Callable[[], None]) -> None:
        self._hub = hub
        self.close = close

    @property
    def peer(self) -> str:
        return self._hub.peer

    @property
    def heard_s(self) -> float | None:
        return self._hub.heard_s

    def send(self, message: ToRWorker) -> None:
        self._hub.send(message)

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        return self._hub.receive_any(timeout_s)[1]

    def poll(self) -> FromRWorker | None:
        return self._hub.poll()


class HeadsHub:
    """See the module, and ``fastdecode.wire.transport.Hub``.

    Args:
        parts: to the R-workers.
        absent: those that aren't there to begin with, and why.
        clock: seconds, for deadlines.
    """

    def __init__(
        self,
        parts: RHub,
        absent: Mapping[int, WorkerError] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        # Whoever waits for the group gives it up when that takes too long.
        self.members: Final = WorkerPool(parts, math.inf, clock=clock, absent=absent)
        """A holder is a share of the heads there."""

        def close() -> None:
            for connection in parts.connections:
                connection.close()

        self.connections = (HeadsConnection(self, close),)
        self.shares: dict[HolderId, HeadShare] = {}
        """The heads of each member that the group is made of."""
        self.welcomes: dict[HolderId, Welcome] = {}
        """What each has answered to the last greeting."""
        self._answers = GroupAnswers()
        self._tiers = GroupTiers()
        self._want_lse: dict[int, bool] = {}  # of each lane's step
        self._clock = clock

    @property
    def peer(self) -> str:
        peers = map(self.members.peer, self.shares or self.members.placement)
        return f"the group of {', '.join(dict.fromkeys(peers))}"

    @property
    def heard_s(self) -> float | None:
        """When the one that has been silent for longest was heard."""
        heard_s = (_heard_s(self.members, member) for member in self.shares)
        return min((s for s in heard_s if s is not None), default=None)

    @property
    def broken(self) -> WorkerError | None:
        """Why one of the group is lost that nobody goes on for; None: it is whole."""
        lost = self.members.lost if self.members.gone else {}
        return next((lost[member] for member in self.shares if member in lost), None)

    def begin(self, shares: Mapping[HolderId, HeadShare]) -> None:
        """From now on these are the group. What they were asked before is forgotten."""
        members = self.members
        self.shares = dict(shares)
        self._tiers = GroupTiers()
        self._answers.begin({x: members.pending.num_about(members.placement[x], x) for x in shares})

    def send(self, message: ToRWorker) -> None:
        if isinstance(message, Hello):
            self.begin(_shared_out(self.members, message))
        self._check_whole()
        if isinstance(message, BeginStep):
            self._want_lse[message.lane] = message.want_lse
        self._answers.ask(message)
        for member, share in self.shares.items():
            self.members.send(member, message.part(share))
        self._check_whole()

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, FromRWorker]:
        until_s = math.inf if timeout_s is None else self._clock() + timeout_s
        left_s = math.inf
        while True:
            answer = self._next()
            if answer is not None:
                return GROUP, answer
            if left_s <= 0:
                raise timeout_error(self.peer, timeout_s or 0.0)
            left_s = until_s - self._clock()
            self._take_in(max(0.0, left_s))

    def poll(self) -> FromRWorker | None:
        self._check_whole()
        if self.members.is_owed:
            self._take_in(0.0)
        else:
            self.members.look()
        return self._next()

    def give_up_the_slowest(self) -> None:
        """Somebody has kept us waiting for too long: whoever has answered
        least, or was heard least lately, is lost."""
        if self.broken is None and self.shares:
            behind = self._answers.behind
            if len(behind) == len(self.shares):
                behind = [min(behind, key=lambda member: _heard_s(self.members, member) or 0.0)]
            for member in behind:
                self._give_up(member, "keeps the others waiting", TIMEOUT)

    def give_up_heads(self, heads: NDArray[np.bool_], reason: str) -> None:
        """Those that answered for any of these query heads [Hq] are lost."""
        for member, share in self.shares.items():
            if heads[share.q].any():
                self._give_up(member, reason, ProtocolError.default_code)

    def give_up_overdue(self, deadlines: Deadlines, since_s: float) -> None:
        """Whoever should have answered by now, or given a sign of life, is lost."""
        now = deadlines.clock()
        for member in self._answers.silent:
            end_s, reason = deadlines.end(since_s, _heard_s(self.members, member))
            if end_s <= now:
                self._give_up(member, reason, TIMEOUT)

    def _give_up(self, member: HolderId, reason: str, code: str) -> None:
        text = f"{self.members.peer(member)} {reason}"
        self.members.lose(member, WorkerError(text, code=code))

    def _take_in(self, most_s: float) -> None:
        """What comes next, if it comes within so many seconds."""
        received = self.members.receive(most_s=most_s)
        if received is not None:
            self._answers.take(*received)
        for news in self.members.events.take_tiers():
            if not self._answers.is_stale(HolderId(news.holder)):
                self._tiers.take(news.holder, news, self.shares)

    def _next(self) -> Answer | MoveNews | None:
        """The answer to what was asked first, once everybody has given it; or
        what all have said unasked."""
        self._check_whole()
        if self._tiers.news:
            return replace(self._tiers.news.popleft(), holder=GROUP)
        answered = self._answers.next()
        if answered is None:
            return None
        asked, answers = answered
        if isinstance(asked, Attend):  # once they are joined, nobody knows any more who has lied
            want_lse = self._want_lse[asked.lane]
            for member, lie in _lies(asked, answers, self.shares, want_lse=want_lse):
                self._give_up(member, lie.message, lie.code)
            self._check_whole()
        if isinstance(asked, Hello):
            self.welcomes = {x: each for x, each in answers.items() if isinstance(each, Welcome)}
        return _joined(self.members, asked, answers)

    def _check_whole(self) -> None:
        """Raises WorkerError: the group is broken."""
        error = self.broken
        if error is not None:
            raise WorkerError(error.message, code=error.code)


def _lies(
    asked: Attend,
    answers: Mapping[HolderId, Answer],
    shares: Mapping[HolderId, HeadShare],
    *,
    want_lse: bool,
) -> Iterator[tuple[HolderId, ProtocolError]]:
    """Who has answered with other arrays than were asked for, and which."""
    num_rows, _, head_dim = asked.q.shape
    for member, answer in answers.items():
        shape = (num_rows, shares[member].num_q_heads, head_dim)
        try:
            assert isinstance(answer, AttendResult), "other kinds were refused"
            check_arrays(answer, shape, asked.q.dtype, want_lse=want_lse)
        except ProtocolError as lie:
            yield member, lie


def _heard_s(members: WorkerPool, member: HolderId) -> float | None:
    """When the R-worker that keeps a share was heard."""
    return members.pending.heard_s(members.placement[member])


def _shared_out(members: WorkerPool, hello: Hello) -> dict[HolderId, HeadShare]:
    """The heads, among those that are there.

    Raises:
        WorkerError: nobody is.
    """
    present = [member for member in members.placement if member not in members.lost]
    if not present:
        raise next(iter(members.lost.values()))
    shares = share_heads(hello.attention[0].num_q_heads, hello.kv.num_kv_heads, len(present))
    return dict(zip(present, shares, strict=True))


def _joined(members: WorkerPool, asked: ToRWorker, answers: Mapping[HolderId, Answer]) -> Answer:
    """Everybody's answer as one."""
    joined: Answer = asked.join(list(answers.values()))
    undo = asked.undo()
    if isinstance(joined, Refused) and undo is not None:
        for member, answer in answers.items():
            if isinstance(answer, Accepted):
                members.send(member, undo)
    return joined

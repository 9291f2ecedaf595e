"""The replicas of one ring of R-workers: which R-worker keeps which, and how far each is.

The members change (``close``): without a lost R-worker, and with a replacement. A member that gets
another neighbour begins a new link; the others keep theirs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.wire.blocks import (
    NO_STEP,
    ON_DISK,
    DropCache,
    Dropped,
    Replicate,
    ReplicationNews,
)
from fastdecode.wire.transport import TIMEOUT

logger = logging.getLogger(__name__)


MOST_LAG: Final = 1000  # steps; a replica that is further behind counts as that far


class ReplicaState(Enum):
    """State of a holder's replica."""

    NEW = "new"  # begun, but its keeper has reported nothing yet
    KEPT = "kept"
    CAUGHT_UP = "caught up"  # it has had all that was cached at the end of some step
    ENDED = "ended"  # missing, or no longer kept up to date


USABLE: Final = (ReplicaState.KEPT, ReplicaState.CAUGHT_UP)
"""States of a replica whose keeper could take over."""


DISK: Final = HolderId(-1)
"""A keeper that stands for a file, which any R-worker can restore the replica from."""


@dataclass(frozen=True)
class LinkOptions:
    """Options that all replication links share."""

    addresses: Sequence[str] | Mapping[HolderId, str]
    """Names under which R-workers reach each other, by their holders."""
    num_bytes: int  # most bytes in flight without an answer, per link
    timeout_s: float  # how long a neighbour may take to make room
    session: int  # secret of this run, in which holders were greeted
    keepers: Mapping[HolderId, HolderId] = field(default_factory=dict)
    """The R-worker without a holder that keeps each holder's replica, or ``DISK``. If empty, the
    holders' own R-workers keep the replicas, in a ring."""
    begin_s: float = 0.0
    """How long the start waits for all replicas. At 0 they are made while sequences run."""


@dataclass
class LinkFigures:
    """Counts of what happened to the replicas of a ring."""

    num_rings: int = 0
    """Times that the ring was closed again after a loss, or over a replacement."""
    unprotected_s: float = 0.0  # time in which some R-worker had no replica
    lags: Counter[int] = field(default_factory=Counter)
    """How often each lag was reported: steps begun since the one that a neighbour has, at most
    ``MOST_LAG``."""


class Ring:
    """A ring of holders, each an R-worker. The next of each keeps its replica."""

    def __init__(
        self, fleet: WorkerPool, options: LinkOptions, clock: Clock, figures: LinkFigures
    ) -> None:
        self._fleet = fleet
        # The ring looks at other times than the pool.
        self._deadlines = replace(fleet.pending.deadlines)
        self.options: Final = options
        self._clock = clock
        self.figures = figures
        # The keeper of each holder's replica. A holder may be its own: its replacement keeps a
        # copy while a neighbour serves it.
        self._keepers: dict[HolderId, HolderId] = {}
        self.states: dict[HolderId, ReplicaState] = {}
        """State of each holder's replica, if it is to have one, or had until it was lost."""
        self._unprotected_since_s: float | None = None
        # When each replica that ends was to be dropped, by holder and keeper.
        self._dropping: dict[tuple[HolderId, HolderId], float] = {}
        self._links: Counter[HolderId] = Counter()
        """Number of each holder's last link, which all reports on it carry. 0 before the first."""

    def count(self) -> None:
        """Count the time in which some R-worker has no replica, up to now."""
        now = self._clock()
        if self._unprotected_since_s is not None:
            self.figures.unprotected_s += now - self._unprotected_since_s
        is_bare = any(state not in USABLE for state in self.states.values())
        self._unprotected_since_s = now if is_bare else None

    def make_way(self, members: Sequence[HolderId]) -> bool:
        """Drop every replica that a ring of ``members`` does not use. Return True once all drops
        are confirmed; until then, call again."""
        wanted = self._pairs(members)
        for holder, keeper in list(self._keepers.items()):
            if wanted.get(holder) != keeper:
                self._end(holder)
                self.forget(holder)
        # Keepers that hang are lost here: they owe no answer, so the pool would not notice them
        # while no step is in flight.
        deadlines, heard_s, gone = self._deadlines, self._fleet.pending.heard_s, self._fleet.gone
        now = deadlines.begin_look()
        for (_, keeper), since_s in list(self._dropping.items()):
            end_s, reason = deadlines.end(since_s, heard_s(keeper))
            if end_s <= now and keeper not in gone:
                error = WorkerError(f"{self._fleet.peer(keeper)} {reason}", code=TIMEOUT)
                self._fleet.lose(keeper, error)
        deadlines.end_look()
        self._dropping = {x: since_s for x, since_s in self._dropping.items() if x[1] not in gone}
        return not self._dropping

    def is_closed_over(self, members: Sequence[HolderId]) -> bool:
        """Return True if these are the ring, or a loss is still to be reported (``lose``)."""
        gone = self._fleet.gone
        if gone and any(gone.keys() & pair for pair in self._keepers.items()):
            return True
        return self._keepers == self._pairs(members) and self.states.keys() == set(members)

    def close(self, members: Sequence[HolderId]) -> None:
        before, self._keepers = self._keepers, self._pairs(members)
        if not self._keepers:
            logger.warning("no replicas: all R-workers but one are lost")
        self.states = dict.fromkeys(members, ReplicaState.ENDED) | {
            holder: self.states.get(holder, ReplicaState.KEPT) for holder in self._keepers
        }
        for holder, keeper in self._keepers.items():
            if before.get(holder) != keeper:
                self._begin(holder, keeper)
        self.count()

    def _pairs(self, members: Sequence[HolderId]) -> dict[HolderId, HolderId]:
        """Return the keeper of each replica. A single member of a ring has none."""
        keepers, gone = self.options.keepers, self._fleet.gone
        if keepers:
            return {one: keepers[one] for one in members if keepers[one] not in gone}
        if len(members) < 2:
            return {}
        return dict(zip(members, [*members[1:], members[0]], strict=True))

    def has(self, holder: HolderId) -> bool:
        """Return True if a holder has a replica, or keeps another's."""
        return any(holder in pair for pair in self._keepers.items())

    def keeper_of(self, holder: HolderId) -> HolderId | None:
        """Return the R-worker that keeps a holder's replica, or restores it. None if it is
        lost, or there is no replica."""
        gone, placement = self._fleet.gone, self._fleet.placement
        if not self._is_in_file(holder):
            keeper = self._keepers.get(holder)
            return None if keeper in gone else keeper
        circle = [*self.options.keepers]
        at = circle.index(holder)
        others = (one for one in circle[at + 1 :] + circle[:at] if placement[one] == one)
        return next((x for x in (HolderId(placement[holder]), *others) if x not in gone), None)

    def keep_again(self, holder: HolderId) -> None:
        """Let the R-worker that restored a holder from a file keep its replica there."""
        if self._is_in_file(holder):
            self._begin(holder, DISK)

    def _is_in_file(self, holder: HolderId) -> bool:
        return self._keepers.get(holder) == DISK

    def lose(self, holder: HolderId) -> None:
        """Record the loss of a holder: its replica ends, and the one that it kept is lost."""
        self._dropping = {x: since_s for x, since_s in self._dropping.items() if x[1] != holder}
        self._set(holder, ReplicaState.ENDED)
        for one, keeper in list(self._keepers.items()):
            if keeper == holder != one:
                self._end(one)
                del self._keepers[one]

    def forget(self, holder: HolderId) -> None:
        """Drop a holder's replica, also where a neighbour took it over."""
        keeper, is_own = self.keeper_of(holder), self._is_in_file(holder)
        self._keepers.pop(holder, None)
        if keeper is not None and not (is_own and keeper == holder):
            self._drop(holder, keeper)

    def copy(self, holder: HolderId) -> None:
        """Copy a cache that a neighbour serves to the replacement of its holder."""
        self._keepers[holder] = holder
        self._begin(holder, holder)

    def stop_copying(self, holder: HolderId, source: HolderId) -> None:
        """Stop the copy to ``holder``; ``source`` keeps serving it."""
        self._keepers[holder] = source
        self._end(holder)

    def moved(self, holder: HolderId, source: HolderId) -> None:
        """Note that the replacement serves the copy: the neighbour (``source``) drops its own."""
        del self._keepers[holder]
        self._set(holder, ReplicaState.ENDED)
        self._drop(holder, source)

    def take(self, news: ReplicationNews, last_step: int) -> None:
        """Take in a report of an R-worker. ``last_step``: the last one that has begun."""
        holder = HolderId(news.holder)
        if isinstance(news, Dropped):
            self._dropping.pop((HolderId(news.cache), holder), None)
            return
        number = self._links[holder]
        if news.link > number:
            text = f"{self._fleet.peer(holder)} reports on a link that it never had: {news}"
            self._fleet.lose(holder, ProtocolError(text))
        elif news.link < number or holder not in self._keepers:
            pass  # of a link that is over
        elif not news.reason:
            has_caught_up = news.step != NO_STEP
            if self.states.get(holder) in (ReplicaState.NEW, ReplicaState.KEPT):
                self._set(holder, ReplicaState.CAUGHT_UP if has_caught_up else ReplicaState.KEPT)
            if has_caught_up:
                self.figures.lags[min(max(0, last_step - news.step), MOST_LAG)] += 1
        else:
            name = self._fleet.peer(holder)
            logger.warning("%s no longer has a replica: %s", name, news.reason)
            self._set(holder, ReplicaState.ENDED)

    def _set(self, holder: HolderId, state: ReplicaState) -> None:
        self.states[holder] = state
        self.count()

    def _begin(self, holder: HolderId, keeper: HolderId) -> None:
        """Begin a link of the holder's to a new keeper, without a report yet."""
        self._set(holder, ReplicaState.NEW)
        self._tell(holder, ON_DISK if keeper == DISK else self.options.addresses[keeper])

    def _tell(self, holder: HolderId, keeper: str) -> None:
        """Ask a holder to replicate to the R-worker at ``keeper`` over a new link. Empty to stop
        replicating."""
        self._links[holder] += 1
        options, number = self.options, self._links[holder]
        order = Replicate(keeper, options.num_bytes, number, options.timeout_s)
        self._fleet.send(holder, order)

    def _drop(self, holder: HolderId, keeper: HolderId) -> None:
        if keeper not in self._fleet.gone:
            self._dropping[holder, keeper] = self._deadlines.clock()
            link = self._links[holder] if DISK in self.options.keepers.values() else 0
            self._fleet.send(keeper, DropCache(self.options.session, holder, keeper, link))

    def _end(self, holder: HolderId) -> None:
        """Stop keeping a holder's replica up to date."""
        self._set(holder, ReplicaState.ENDED)
        if holder not in self._fleet.lost:
            self._tell(holder, "")

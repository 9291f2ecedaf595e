"""The ring of R-workers as the engine sees it: who keeps whose replica, and how
far each is.

The members change (``close``): without one that is lost, and with one that has
come. Who has another neighbour than before begins a new link; the others go on
with theirs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.schedule.ring import RecoveryPlan, plan_recovery
from fastdecode.wire.kv.replicating import NO_STEP, Dropped, Replicate, Replicated, ReplicationNews
from fastdecode.wire.kv.taking_over import DropCache
from fastdecode.wire.messages import MAX_ID, MAX_LANES

logger = logging.getLogger(__name__)

MOST_LAG: Final = 1000
"""Steps; a replica that is further behind counts as that far."""


@dataclass(frozen=True)
class LinkOptions:
    """Of all links."""

    addresses: Sequence[str]
    """What R-workers call each other, by holder."""
    num_bytes: int
    """That a link may have under way unanswered."""
    timeout_s: float
    """How long a neighbour may take to make room."""
    session: int
    """Secret of this run, in which holders were greeted."""


class Ring:
    """Of a fleet's holders, each an R-worker. The next of each keeps its replica.

    Args:
        fleet: the holders.
        options: of all links.
        clock: seconds.
    """

    def __init__(self, fleet: Fleet, options: LinkOptions, clock: Clock) -> None:
        self._fleet = fleet
        self._options = options
        self._clock = clock
        self.members: tuple[HolderId, ...] = ()
        self._keepers: dict[HolderId, HolderId] = {}  # who keeps each one's replica
        self._dropping: set[tuple[HolderId, HolderId]] = set()  # replicas that end, and keepers
        self._numbers: Counter[HolderId] = Counter()  # of the last link of each
        self._starting: set[HolderId] = set()  # those of whose replica nobody has heard yet
        self._without: set[HolderId] = set()  # those that have none, or not any more
        self._held: dict[HolderId, dict[int, int]] = {}  # what each one's neighbour has: lane, step
        self._unprotected_since_s: float | None = None
        self.unprotected_s = 0.0
        """In which some R-worker had no replica, up to the last ``count``."""
        self.lags: Counter[int] = Counter()
        """Steps that had begun since the one that a neighbour has, at most
        ``MOST_LAG``: how often it was said."""

    def make_way(self, members: Sequence[HolderId]) -> bool:
        """End what would be in the way of a ring of these. Whether all of that
        is over; if not, ask again."""
        wanted = _pairs(members)
        for holder, keeper in list(self._keepers.items()):
            if wanted.get(holder) != keeper:
                self._end(holder)
                self.forget(holder)
        gone = self._fleet.gone
        self._dropping = {pair for pair in self._dropping if pair[1] not in gone}
        return not self._dropping

    def close(self, members: Sequence[HolderId]) -> None:
        """From now on these are the ring."""
        self.members = tuple(members)
        before, self._keepers = self._keepers, _pairs(members)
        if not self._keepers:
            logger.warning("no replicas: all R-workers but one are lost")
        self._starting &= self._keepers.keys()
        self._without &= self._keepers.keys()
        self._without |= set(members) - self._keepers.keys()
        for holder in self._keepers:
            self._link(holder, before)
        self.count()

    def beside(self, holder: HolderId, step: int) -> HolderId:
        """Who keeps a member's replica (1), or whose is kept there (-1)."""
        return self.members[(self.members.index(holder) + step) % len(self.members)]

    def plan(self, holder: HolderId) -> RecoveryPlan | None:
        """What becomes of the members that are lost, by their places in the
        ring, with the point from which this one goes on; None: its neighbour
        can't go on for it."""
        if holder not in self.members or len(self.members) < 2:
            return None
        bare = self._without | self._starting
        lost, acked = self._fleet.lost, self._held.get(holder, {})
        lanes = [acked.get(lane, -1) for lane in range(1 + max(acked, default=0))]
        failed = [HolderId(place) for place, one in enumerate(self.members) if one in lost]
        without = [HolderId(place) for place, one in enumerate(self.members) if one in bare]
        plan = plan_recovery(len(self.members), failed, lanes, without)
        return plan if HolderId(self.members.index(holder)) in plan.adopted else None

    def lose(self, holder: HolderId) -> None:
        """A holder is lost: its replica is the last of it, and the one that it
        kept is gone."""
        self._dropping = {pair for pair in self._dropping if pair[1] != holder}
        if holder in self.members:
            before = self.beside(holder, -1)
            self._without |= {holder, before}
            self._starting -= {holder, before}
            if self._keepers.get(before) == holder:
                self._end(before)
                del self._keepers[before]
        self.count()

    def forget(self, holder: HolderId) -> None:
        """Nobody goes on with a replica, or not any more; also where it was
        taken over."""
        keeper = self._keepers.pop(holder, None)
        if keeper is not None and keeper not in self._fleet.gone:
            self._dropping.add((holder, keeper))
            self._fleet.send(keeper, DropCache(self._options.session, holder, keeper))

    def take(self, news: ReplicationNews, last_step: int) -> None:
        """What an R-worker has said. ``last_step``: that has begun."""
        holder = HolderId(news.holder)
        if isinstance(news, Dropped):
            self._dropping.discard((HolderId(news.cache), holder))
            return
        number = self._numbers[holder]
        if news.link > number or (isinstance(news, Replicated) and not _may_be(news)):
            text = f"{self._fleet.peer(holder)} speaks of what can't be: {news}"
            self._fleet.lose(holder, ProtocolError(text))
        elif news.link < number or holder not in self._keepers:
            pass  # of a link that is over
        elif isinstance(news, Replicated):
            self._starting.discard(holder)
            self._held.setdefault(holder, {})[news.lane] = news.step
            if news.step != NO_STEP:
                self.lags[min(max(0, last_step - news.step), MOST_LAG)] += 1
        else:
            name = self._fleet.peer(holder)
            logger.warning("%s has no replica any more: %s", name, news.reason)
            self._starting.discard(holder)
            self._without.add(holder)
        self.count()

    def count(self) -> None:
        """Count the time in which some R-worker has no replica, up to now."""
        now = self._clock()
        if self._unprotected_since_s is not None:
            self.unprotected_s += now - self._unprotected_since_s
        self._unprotected_since_s = now if self._without | self._starting else None

    def _link(self, holder: HolderId, before: dict[HolderId, HolderId]) -> None:
        """Have a member's replica kept, where that wasn't so ``before``; and
        have it expect whoever's it keeps, where that is another."""
        keeper, guest = self._keepers[holder], self.beside(holder, -1)
        is_new = before.get(holder) != keeper
        if is_new:
            self._starting.add(holder)
            self._without.discard(holder)
            self._held.pop(holder, None)
        if is_new or before.get(guest) != holder:
            names = self._options.addresses
            expected = names[guest] if before.get(guest) != holder else ""
            self._tell(holder, names[keeper], expected, is_new=is_new)

    def _tell(self, holder: HolderId, keeper: str, guest: str, *, is_new: bool = True) -> None:
        self._numbers[holder] += is_new
        options = self._options
        where = (keeper, guest, options.num_bytes)
        self._fleet.send(holder, Replicate(*where, self._numbers[holder], options.timeout_s))

    def _end(self, holder: HolderId) -> None:
        """Its replica isn't kept up to date any more."""
        self._without.add(holder)
        self._starting.discard(holder)
        if holder not in self._fleet.lost:
            self._tell(holder, "", "")


def _pairs(members: Sequence[HolderId]) -> dict[HolderId, HolderId]:
    """Who keeps whose replica; of a single one nobody does."""
    if len(members) < 2:
        return {}
    return dict(zip(members, [*members[1:], members[0]], strict=True))


def _may_be(news: Replicated) -> bool:
    return 0 <= news.lane < MAX_LANES and NO_STEP <= news.step <= MAX_ID

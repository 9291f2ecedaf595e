"""Transfers of an R-worker behind compute: replicas are kept up to date, cached blocks go to a
lower tier, come back, or come from other R-workers.

The loop asks for a **unit** of work when no message waits: some changes and one chunk of each
replica, and of each fetch from a peer as many chunks as take a millisecond or two. Under constant
load a unit is done all the same after ``_MOST_STEPS`` steps (replicas) and ``LATE_S`` (fetches).

While this R-worker attends, fetches without a pace of their own take ``SHARE`` of its time, one
chunk a unit: a chunk also costs time at its source, and in the threads that carry it.

Lower tiers copy by themselves, and a unit only reports what has come. A failure ends the transfers
that need what failed. The peer that asked for one gets the reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Protocol, TypeAlias, TypeVar

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ConfigError, FastDecodeError
from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import ON_DISK, Done, Fetch, Progress, Replicated
from rworker.instructions import DropStored, EndStep, Follow, LinkReplica, MoveBlocks
from rworker.stream.memory import ChunkMemory
from rworker.tiers.tier import Tier
from rworker.tiers.tiers import POLL_S, Tiers
from rworker.transfers.neighbours import Neighbours, NoNeighbours, PeerLink
from rworker.transfers.peer_fetch import PeerFetch
from rworker.transfers.replica_file import ReplicaFiles, ReplicaSink
from rworker.transfers.replica_transfer import LOOK_S, ReplicaTransfer, unprotected
from rworker.transfers.throttle import Throttle

logger = logging.getLogger(__name__)

_MOST_STEPS: Final = 2
_MOST_ANSWERS: Final = 2
"""Answers of a link that a unit takes in. Each may be a chunk."""

TransferNews: TypeAlias = Replicated | Progress | Done
Tell: TypeAlias = Callable[[int, TransferNews], None]
"""Sends a peer, by its number, a report."""
_Key = TypeVar("_Key")


class TransferMemory(ChunkMemory, Protocol):
    """Memory of an R-worker's caches, and their lower tiers."""

    @property
    def tiers(self) -> Tiers: ...


class Transfer(Protocol):
    """K and V on their way, behind compute."""

    @property
    def to(self) -> int:
        """The peer that asked for it."""

    def advance(self) -> Iterable[TransferNews]:
        """Do a unit of work. Return reports for the peer that asked.

        Raises:
            FastDecodeError: If it can't continue.
        """

    @property
    def is_done(self) -> bool:
        """True if all has come."""

    def end(self, reason: str) -> TransferNews:
        """Return the last report. ``reason``: why the transfer has failed, if it has."""

    def close(self) -> None:
        """Stop reading and writing."""


_One = TypeVar("_One", bound=Transfer)


class BackgroundTransfers:
    """The transfers of one R-worker.

    Args:
        memory: memory of its caches.
        neighbours: how others are reached.
        tell: how peers get reports.
        files: files of replicas. None if there are none.
    """

    def __init__(
        self,
        memory: TransferMemory,
        neighbours: Neighbours,
        tell: Tell,
        clock: Clock = time.monotonic,
        files: ReplicaFiles | None = None,
    ) -> None:
        self._memory = memory
        self._neighbours = neighbours
        self._tell = tell
        self._clock = clock
        self.files: Final = files
        self._replicas: dict[HolderId, ReplicaTransfer] = {}
        self._numbers: dict[HolderId, int] = {}  # of the last replica of each, which may be over
        self._num_ended = 0  # steps, since replicas had a unit
        self._fetches: dict[tuple[HolderId, int], PeerFetch] = {}
        self._links: dict[str, PeerLink] = {}  # that fetches share
        self._moves: dict[tuple[HolderId, int], tuple[MoveBlocks, Tier]] = {}
        self._throttle = Throttle(clock)
        self.is_used = False
        """True if anything was ever asked of it."""

    @property
    def wait_s(self) -> float | None:
        """Time to wait for messages before ``work``. None if there is nothing to do."""
        waits_s = [replica.wait_s for replica in self._replicas.values()]
        if self._moves:
            waits_s.append(POLL_S)
        if self._is_fetching:
            waits_s.append(max(LOOK_S, self._throttle.rest_s))
        return min(waits_s, default=None)

    @property
    def is_moving(self) -> bool:
        """True if cached blocks are being moved."""
        return bool(self._moves)

    @property
    def is_late(self) -> bool:
        """True if a unit is due, whatever else waits."""
        if self._num_ended >= _MOST_STEPS:
            return True
        return self._is_fetching and self._throttle.is_late

    @property
    def gives_way(self) -> bool:
        """True if fetches from peers leave the time to attention: something is attended, and one of
        them has no pace."""
        if not self._throttle.is_attending:
            return False
        return any(not one.bytes_per_s for one in self._fetches.values())

    def obey(self, instruction: LinkReplica | Follow | EndStep | MoveBlocks | DropStored) -> None:
        """Begin or end a transfer, or let it know of a change."""
        self.is_used = True
        match instruction:
            case LinkReplica():
                self._replicate(instruction)
            case Follow(holder, change):
                if holder in self._replicas:
                    self._replicas[holder].follow(change)
            case EndStep(holder, lane, step):
                if holder in self._replicas:
                    self._replicas[holder].end_step(lane, step)
                    self._num_ended += 1
            case MoveBlocks(message=Fetch(source=(_, *_)) as message):
                self._fetch(instruction, message)
            case MoveBlocks(to, holder, move=job):
                if (tier := self._memory.tiers.of(holder)) is None:
                    self._tell(to, instruction.end(reason="there is no lower tier"))
                    return
                self._moves[holder, job.number] = instruction, tier
                tier.begin(job)
            case DropStored(holder, keys):
                if (tier := self._memory.tiers.of(holder)) is not None:
                    tier.drop(keys)

    def attended(self) -> None:
        """Note that a layer was attended."""
        if self.is_used:
            self._throttle.attended()

    def report_moves(self) -> None:
        """Report how far cached blocks have come that move between a cache and its tier."""
        for key, (order, tier) in list(self._moves.items()):
            job, num_before = order.move, order.move.num_told
            num_there = tier.progress(job)
            if num_there == tier.num_layers:
                del self._moves[key]
                num_bytes = (len(job.keys) - len(job.failed)) * tier.stored_bytes
                self._tell(order.to, order.end(num_bytes, job.seconds, tier.take_faults()))
            elif job.num_told > num_before:
                self._tell(order.to, Progress(*key, num_there, tier.num_layers, job.seconds))

    def work(self) -> None:
        """Do a unit of each transfer."""
        self.report_moves()
        self._num_ended = 0
        self._advance_all(self._replicas)
        if not self._is_fetching:
            return
        began_s = self._clock()
        gives_way = self.gives_way
        if gives_way and self._throttle.rest_s > 0:
            return
        for address in list(self._links):
            self._listen(address, 1 if gives_way else _MOST_ANSWERS)
        self._advance_all(self._fetches)
        self._throttle.worked(began_s, gives_way=gives_way)

    def drop(self, holder: HolderId) -> None:
        """End all transfers of a cache, without a report."""
        self._numbers.pop(holder, None)
        _close(self._replicas, [holder])
        _close(self._fetches, [key for key in self._fetches if key[0] == holder])
        self._moves = {key: move for key, move in self._moves.items() if key[0] != holder}
        self._memory.tiers.close(holder)

    def give_up(self, reason: str) -> None:
        """End all transfers but those of lower tiers. Peers that wait get the reason."""
        for holder in list(self._replicas):
            self._end(self._replicas, holder, reason)
        for key in list(self._fetches):
            self._end(self._fetches, key, reason)
        self._neighbours = NoNeighbours()
        self._close_links()

    def close(self) -> None:
        """End all transfers, without a report."""
        _close(self._replicas, list(self._replicas))
        _close(self._fetches, list(self._fetches))
        self._moves.clear()
        self._close_links()
        self._memory.tiers.close_all()

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    @property
    def _is_fetching(self) -> bool:
        return bool(self._fetches) or any(link.num_owed for link in self._links.values())

    def _replicate(self, order: LinkReplica) -> None:
        holder = order.holder
        is_new = self._numbers.get(holder) != order.number
        if is_new:
            if holder in self._replicas:
                self._replicas.pop(holder).discard()
            self._numbers[holder] = order.number
        try:
            if order.keeper and is_new:
                sink = self._sink(order)
                self._replicas[holder] = ReplicaTransfer(order, self._memory, sink, self._clock)
        except FastDecodeError as error:
            self._tell(order.to, unprotected(order, error.message))

    def _sink(self, order: LinkReplica) -> ReplicaSink:
        if order.keeper != ON_DISK:
            return ReplicaSink(partial(self._neighbours.open, order.keeper))
        if self.files is None:
            raise ConfigError("it has no disk for replicas: give it --cache-disk")
        return self.files.sink(order)

    def _fetch(self, order: MoveBlocks, message: Fetch) -> None:
        for address, link in list(self._links.items()):
            if not link.num_owed:
                self._listen(address, _MOST_ANSWERS)  # nothing else finds that it is gone
        one = PeerFetch(order, message, self._memory, self._throttle, self._clock)
        key = order.holder, order.move.number
        self._fetches[key] = one
        self._end_if_failed(self._fetches, key, lambda: one.begin(self._link_to))

    def _link_to(self, address: str) -> PeerLink:
        """Return the link to a source. Raises FastDecodeError: If it can't be had."""
        if address not in self._links:
            self._links[address] = PeerLink(self._neighbours.open(address), self._clock)
        return self._links[address]

    def _listen(self, address: str, most: int) -> None:
        """Take in answers of a shared link. If it fails, so do fetches that need it."""
        link = self._links[address]
        reason = _failure_of(lambda: link.listen(most))
        if reason is not None:
            self._links.pop(address).close()
            for key in [key for key, one in self._fetches.items() if one.uses(address)]:
                self._end(self._fetches, key, reason)

    def _advance_all(self, transfers: dict[_Key, _One]) -> None:
        for key, transfer in list(transfers.items()):
            self._end_if_failed(transfers, key, partial(self._advance, transfer))
            if transfer.is_done:
                self._end(transfers, key)

    def _advance(self, transfer: Transfer) -> None:
        for news in transfer.advance():
            self._tell(transfer.to, news)

    def _end_if_failed(
        self, transfers: dict[_Key, _One], key: _Key, act: Callable[[], None]
    ) -> None:
        reason = _failure_of(act)
        if reason is not None:
            self._end(transfers, key, reason)

    def _end(self, transfers: dict[_Key, _One], key: _Key, reason: str = "") -> None:
        """End a transfer, unless it has ended. The peer that asked for it gets a report."""
        transfer = transfers.pop(key, None)
        if transfer is not None:
            transfer.close()
            self._tell(transfer.to, transfer.end(reason))


def _close(transfers: dict[_Key, _One], keys: Iterable[_Key]) -> None:
    """End these transfers, as far as they haven't ended, without a report."""
    for key in keys:
        transfer = transfers.pop(key, None)
        if transfer is not None:
            transfer.close()


def _failure_of(act: Callable[[], object]) -> str | None:
    """Call ``act``. Return why it has failed, if it has."""
    try:
        act()
    except FastDecodeError as error:
        return error.message
    except Exception as error:
        logger.exception("a transfer fails")
        return f"{type(error).__name__}: {error}"
    return None

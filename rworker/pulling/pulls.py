"""What an R-worker fetches from others, behind compute.

The loop asks for a **unit** of work when nothing else waits: at most so many
chunks as take a millisecond or two. Where something always waits, a unit is done
every ``LATE_S`` (``rworker.pulling.throttle``) all the same, or nothing would ever arrive.

Where this R-worker attends, what is fetched without a pace of its own takes a
part of its time, ``SHARE``, and no more: a chunk costs about as much at the
other end, and in the threads that carry it, and whoever attends meanwhile has
that many fewer cores and bytes a second. As soon as nothing is attended, all of
the time is for fetching.

What breaks ends the pulls that need it, and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from fastdecode.core.clock import Clock
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.holders import HolderId
from fastdecode.wire.kv.exporting import Pulled
from rworker.instructions import BeginPull, EndPull
from rworker.pulling.pull import OnePull, Place, Placer
from rworker.pulling.throttle import Throttle
from rworker.pulling.transfer_link import TransferLink
from rworker.stream.replica_links import LOOK_S, Neighbours

logger = logging.getLogger(__name__)

_MOST_ANSWERS: Final = 2
"""That a unit takes in of a way."""

Tell = Callable[[int, Pulled], None]
"""Tells a peer."""


class Pulls:
    """Of one R-worker.

    Args:
        placer: of its caches.
        neighbours: how others are reached.
        tell: how peers are told what has come.
        clock: seconds.
    """

    def __init__(
        self, placer: Placer, neighbours: Neighbours, tell: Tell, clock: Clock = time.monotonic
    ) -> None:
        self._placer = placer
        self._neighbours = neighbours
        self._tell = tell
        self._clock = clock
        self._ways: dict[Place, TransferLink] = {}
        self._pulls: dict[tuple[HolderId, int], OnePull] = {}
        self.turns: Final = Throttle(clock)

    @property
    def _is_idle(self) -> bool:
        return not self._pulls and not any(way.is_owed for way in self._ways.values())

    @property
    def wait_s(self) -> float | None:
        """How long to wait for others' messages before ``work``; None: for as
        long as it takes."""
        return None if self._is_idle else max(LOOK_S, self.turns.rest_s)

    @property
    def is_late(self) -> bool:
        """Whether a unit is due, whatever else waits."""
        return not self._is_idle and self.turns.is_late

    def begin(self, order: BeginPull) -> None:
        """Something is to be fetched."""
        self._drop_lost_ways()
        message = order.message
        ways: dict[Place, TransferLink] = {}
        pull = OnePull(order, self._placer, ways, self._clock)
        self._pulls[order.holder, message.sequence_id] = pull
        try:
            for source in message.sources:
                place = source.address, source.line
                ways[place] = self._way(place)
                ways[place].timeout_s = max(ways[place].timeout_s, message.timeout_s)
            pull.begin()
        except FastDecodeError as error:
            self._end(pull, error.message)
        except Exception as error:
            self._end(pull, _unexpected(error))

    def end(self, order: EndPull) -> None:
        """A sequence is closed: nothing more is wanted for it."""
        pull = self._pulls.get((order.holder, order.sequence))
        if pull is not None:
            self._end(pull, "the sequence was closed")

    def drop(self, holder: HolderId) -> None:
        """A cache is over, or another's: nobody is told."""
        for key in [key for key in self._pulls if key[0] == holder]:
            self._pulls.pop(key).is_over = True

    def work(self) -> None:
        """A unit of each way and each pull, unless the next one is for later."""
        began_s = self._clock()
        gives_way = self.gives_way
        if gives_way and self.turns.rest_s > 0:
            return
        most = 1 if gives_way else _MOST_ANSWERS
        for place, way in list(self._ways.items()):
            self._listen(place, way, most)
        for pull in list(self._pulls.values()):
            self._advance(pull)
        self.turns.worked(began_s, gives_way=gives_way)

    @property
    def gives_way(self) -> bool:
        """Whether something is attended, and somebody set no pace."""
        pulls = self._pulls.values()
        return self.turns.is_attending and any(not x.order.message.bytes_per_s for x in pulls)

    def give_up(self, reason: str) -> None:
        """Nothing more is fetched. Peers that wait get the reason."""
        for pull in list(self._pulls.values()):
            self._end(pull, reason)

    def close(self) -> None:
        """Nothing more is fetched."""
        self._pulls.clear()
        for way in self._ways.values():
            way.close()
        self._ways.clear()

    def _way(self, place: Place) -> TransferLink:
        """To where a source is. Raises FastDecodeError: it can't be had."""
        if place not in self._ways:
            self._ways[place] = TransferLink(self._neighbours.connect(*place), self._clock)
        return self._ways[place]

    def _drop_lost_ways(self) -> None:
        """Close idle ways whose other end has gone: nothing reads them otherwise."""
        for place, way in list(self._ways.items()):
            if not way.is_owed:
                self._listen(place, way, _MOST_ANSWERS)

    def _listen(self, place: Place, way: TransferLink, most: int) -> None:
        try:
            for _ in range(most):
                if not way.take_next():
                    break
            way.check_patience()
        except FastDecodeError as error:
            self._lose(place, error.message)
        except Exception as error:
            logger.exception("a way to %s is given up", way.peer)
            self._lose(place, f"{type(error).__name__}: {error}")

    def _advance(self, pull: OnePull) -> None:
        if pull.failed is not None:
            self._end(pull, pull.failed)
            return
        try:
            while self.turns.may_ask and (num_bytes := pull.advance()):
                self.turns.asked(num_bytes, pull.order.message.bytes_per_s)
        except FastDecodeError as error:
            self._end(pull, error.message)
            return
        except Exception as error:
            self._end(pull, _unexpected(error))
            return
        if pull.is_done:
            self._end(pull)

    def _lose(self, place: Place, reason: str) -> None:
        """Another R-worker is gone, or refuses: so are pulls that need it."""
        self._ways.pop(place).close()
        for pull in [pull for pull in self._pulls.values() if pull.uses(place)]:
            self._end(pull, reason)

    def _end(self, pull: OnePull, reason: str = "") -> None:
        order = pull.order
        pull.is_over = True
        del self._pulls[order.holder, order.message.sequence_id]
        if reason:
            logger.info("sequence %d isn't fetched: %s", order.message.sequence_id, reason)
        self._tell(order.to, pull.told(self._clock(), reason))


def _unexpected(error: Exception) -> str:
    """Why a pull ends, where what another instance said of its sources can't even
    be refused."""
    logger.error("a prompt can't be fetched", exc_info=error)
    return f"{type(error).__name__}: {error}"

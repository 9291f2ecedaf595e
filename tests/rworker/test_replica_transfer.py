"""A link that gets into trouble: its cache has no replica any more, and nothing else happens."""

from __future__ import annotations

import numpy as np
import pytest
from chunk_memory import hello_for
from values import replace

from fastdecode.core.dtype import DType
from fastdecode.core.errors import FastDecodeError, ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import KVSpec
from fastdecode.wire.blocks import NO_STEP, Replicated
from fastdecode.wire.codec import Array
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.messages import Accepted, FromRWorker, Hello, Open, ToRWorker, Welcome
from rworker.cache_state import CacheState
from rworker.instructions import EndStep, Follow, LinkReplica, PlaceChunk, ReadChunk
from rworker.transfers.background_transfers import BackgroundTransfers, TransferNews
from rworker.transfers.neighbours import REACH_S, NeighbourConnection
from rworker.transfers.replica_transfer import LOOK_S, REST_S

KV = KVSpec(2, 2, 8, DType.INT8, 4)
NUM_BLOCKS = 14
HOLDER, S_WORKER = HolderId(0), 3
LINK, TIMEOUT_S = 4, 60.0


class Trouble:
    """Reads and writes nothing."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def read(self, read: ReadChunk) -> Array:
        raise self._error

    def place(self, place: PlaceChunk) -> None:
        raise self._error


class Pair:
    """An R-worker's links, and the neighbour, in whose hand it is what it says."""

    def __init__(self, error: Exception) -> None:
        self.books = CacheState(replace(hello_for(KV), session=5), NUM_BLOCKS)
        self.told: list[tuple[int, TransferNews]] = []
        self.now_s = 0.0
        self.is_reached = True
        self.links = BackgroundTransfers(
            Trouble(error), self, lambda to, news: self.told.append((to, news)), lambda: self.now_s
        )
        self.neighbour: InprocConnection[FromRWorker, ToRWorker] | None = None
        assert self.links.wait_s is None
        self.link(LINK)

    def link(self, number: int) -> None:
        link = LinkReplica(S_WORKER, HOLDER, self.books, "r1", 1 << 20, number, TIMEOUT_S)
        self.links.obey(link)

    def open(self, address: str) -> NeighbourConnection:
        assert address == "r1"
        here, self.neighbour = connect(InprocHub(), "the owner", InprocHub(), "R-worker r1")
        here.is_reached = self.is_reached
        return here

    def welcome(self, num_blocks: int = NUM_BLOCKS) -> None:
        assert self.neighbour is not None
        assert isinstance(self.neighbour.receive(1.0), Hello)
        self.neighbour.send(Welcome("r1", num_blocks, KV.block_size, 1))
        self.links.work()

    def decode(self) -> None:
        """A sequence is opened, and a step of it ends."""
        change = Open(1, 8)
        assert self.books.reserve(change) == Accepted(1)
        self.links.obey(Follow(HOLDER, change))
        self.books.store.append(np.array([1]), np.array([3]))
        self.links.obey(EndStep(HOLDER, 0, 0))


@pytest.mark.parametrize("error", [MemoryError("no more memory"), ProtocolError("no")])
def test_what_cannot_be_read_costs_the_replica_alone(error: Exception) -> None:
    pair = Pair(error)
    assert (pair.links.wait_s, pair.told) == (LOOK_S, []), "it waits to be welcomed"
    pair.welcome()
    assert pair.told == [(S_WORKER, Replicated(HOLDER, 0, NO_STEP, LINK))]
    pair.decode()
    assert (pair.links.wait_s, len(pair.told)) == (0, 1)
    pair.links.work()
    reason = error.message if isinstance(error, FastDecodeError) else f"MemoryError: {error}"
    assert pair.told[1:] == [(S_WORKER, Replicated(HOLDER, 0, NO_STEP, LINK, reason))]
    pair.links.obey(EndStep(HOLDER, 0, 1))
    pair.links.work()
    assert (pair.links.wait_s, len(pair.told)) == (None, 2)


def test_a_neighbour_with_too_little_room_keeps_nothing() -> None:
    pair = Pair(ProtocolError("no"))
    pair.welcome(num_blocks=NUM_BLOCKS - 1)
    ((to, news),) = pair.told
    assert to == S_WORKER and isinstance(news, Replicated)
    assert news.reason.startswith("R-worker r1 has 13 KV blocks for a replica of 14: give all ")


def test_a_link_at_rest_looks_now_and_then_whether_the_neighbour_is_there() -> None:
    pair = Pair(ProtocolError("no"))
    pair.welcome()
    assert pair.links.wait_s == REST_S
    assert pair.neighbour is not None
    pair.neighbour.close()
    pair.links.work()
    assert isinstance(news := pair.told[-1][1], Replicated) and news.reason


@pytest.mark.parametrize(
    ("is_reached", "after_s", "reason"),
    [(False, REACH_S, "can't be reached"), (True, TIMEOUT_S, "has answered nothing")],
)
def test_a_neighbour_that_says_nothing_is_told_by_name(
    is_reached: bool, after_s: float, reason: str
) -> None:
    pair = Pair(ProtocolError("no"))
    pair.is_reached = is_reached
    pair.link(LINK + 1)
    pair.now_s = after_s
    pair.links.work()
    assert not pair.told
    pair.now_s += 0.1
    pair.links.work()
    ((to, news),) = pair.told
    assert to == S_WORKER and isinstance(news, Replicated) and news.link == LINK + 1
    assert news.reason.startswith("R-worker r1 ") and reason in news.reason


def test_a_neighbour_that_stops_answering_keeps_no_replica() -> None:
    pair = Pair(ProtocolError("no"))
    pair.welcome()
    change = Open(1, 8)
    assert pair.books.reserve(change) == Accepted(1)
    pair.links.obey(Follow(HOLDER, change))
    for wait_s, num_told in ((0.0, 1), (TIMEOUT_S, 1), (0.1, 2)):
        pair.now_s += wait_s
        pair.links.work()
        assert len(pair.told) == num_told
    news = pair.told[-1][1]
    assert isinstance(news, Replicated) and "has answered nothing" in news.reason


def test_a_link_of_the_same_number_goes_on_or_stays_over() -> None:
    pair = Pair(ProtocolError("no"))
    pair.welcome()
    first = pair.neighbour
    pair.link(LINK)
    assert pair.neighbour is first
    assert first is not None
    first.close()
    pair.links.work()
    pair.link(LINK)
    assert pair.links.wait_s is None and len(pair.told) == 2
    pair.link(LINK + 1)
    assert pair.neighbour is not first
    pair.welcome()
    assert pair.told[2:] == [(S_WORKER, Replicated(HOLDER, 0, NO_STEP, LINK + 1))]

"""A cache goes on without the peer that used it: replicas, and an S-worker's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from state_machine import HELLO, KV_BYTES, Worker, attend, chunk, step_of
from values import replace

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import DropCache, Dropped, Replicate, TakenOver, TakeOver, Truncate
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import Accepted, Close, Failed, Open, Refused, Shutdown, Welcome
from fastdecode.wire.traits import Role
from rworker.attention import AttentionExecutor
from rworker.instructions import Drop, HangUp, RemoveReplica, Send, Stop, Unlink
from rworker.worker import RWorker, serve_next

S_WORKER, NEIGHBOUR, STRANGER = range(3)
SESSION = 77
OWN = replace(HELLO, holder=1, session=SESSION, max_blocks=12)
REPLICA = replace(HELLO, holder=0, session=SESSION, max_blocks=12, role=Role.NEIGHBOUR)


class Peers(Worker):
    """A worker with an S-worker that has its own cache, and a neighbour that keeps a replica."""

    def __init__(self) -> None:
        super().__init__(KV_BYTES)
        assert isinstance(self.from_peer(S_WORKER, OWN), Welcome)
        assert isinstance(self.from_peer(NEIGHBOUR, REPLICA), Welcome)

    def from_peer(self, peer: int, message: Any) -> Any:
        (send,) = [x for x in self.say(peer, message) if isinstance(x, Send)]
        assert send.to == peer
        return send.message


def take(*wanted: tuple[int, int], session: int = SESSION, holder: int = 0) -> TakeOver:
    ids, most = (np.array(x) for x in zip(*wanted, strict=True))
    return TakeOver(session, ids.astype(np.int64), most.astype(np.int32), holder)


@pytest.fixture
def peers() -> Peers:
    peers = Peers()
    for sequence in (1, 2, 3):
        assert peers.from_peer(NEIGHBOUR, Open(sequence, 10)) == Accepted(sequence)
    return peers


def counts(answer: Any) -> list[int]:
    assert isinstance(answer, TakenOver)
    return answer.num_tokens.tolist()


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_replica_is_taken_over_at_what_is_in_every_layer(peers: Peers, is_lost: bool) -> None:
    peers.say(NEIGHBOUR, chunk((1, 0, 5), (2, 0, 3)))
    peers.say(NEIGHBOUR, chunk((1, 5, 1), (2, 3, 1)))
    if is_lost:
        assert peers.lose(NEIGHBOUR) == ()
    told = peers.say(S_WORKER, take((1, 9), (2, 3), (7, 5)))
    assert counts(told[0].message) == [6, 3, -1]
    assert told[1:] == (() if is_lost else (Unlink(HolderId(0)), HangUp(NEIGHBOUR)))
    # Sequence 3 wasn't named. The others go on, with queries, beside the own cache.
    peers.step_from(S_WORKER, step_of((1, 6, 1), (2, 3, 1), step=9, holder=0))
    assert peers.from_peer(S_WORKER, Open(3, 10, holder=0)) == Accepted(3)
    assert peers.from_peer(S_WORKER, Open(3, 10, holder=1)) == Accepted(3)


def test_whoever_had_it_changes_nothing_any_more(peers: Peers) -> None:
    peers.say(NEIGHBOUR, chunk((1, 0, 5)))
    peers.say(S_WORKER, take((1, 5)))
    for message in (chunk((1, 5, 1)), Close(1), Open(4, 4)):
        failed = peers.from_peer(NEIGHBOUR, message)
        assert isinstance(failed, Failed) and "Hello" in failed.message
    busy = peers.from_peer(NEIGHBOUR, REPLICA)
    assert isinstance(busy, Failed) and busy.code == "busy"
    assert counts(peers.from_peer(S_WORKER, take((1, 9)))) == [5]


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_replica_that_came_too_late_takes_no_memory(peers: Peers, is_lost: bool) -> None:
    """Its neighbour was given up, and opened it after it was dropped."""
    peers.say(S_WORKER, DropCache(SESSION, 0, holder=1))
    assert isinstance(peers.from_peer(NEIGHBOUR, REPLICA), Welcome)
    if is_lost:
        peers.lose(NEIGHBOUR)
    whole = replace(OWN, max_blocks=0)
    told = peers.say(S_WORKER, whole)
    assert Drop(HolderId(0)) in told and (HangUp(NEIGHBOUR) in told) == (not is_lost)
    (cache,) = peers.state._caches
    assert cache.holder == 1
    assert KV_BYTES - cache.num_bytes < cache.num_bytes // cache.books.store.num_blocks


@pytest.mark.parametrize("session", [0, 5])
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_stranger_takes_nothing(peers: Peers, session: int, is_lost: bool) -> None:
    peers.say(NEIGHBOUR, chunk((1, 0, 5)))
    if is_lost:
        peers.lose(NEIGHBOUR)
    other = replace(OWN, holder=2, session=session, max_blocks=1)
    assert isinstance(peers.from_peer(STRANGER, other), Welcome)
    for holder in (0, 1):
        send, hang_up = peers.say(STRANGER, take((1, 5), session=session, holder=holder))
        assert isinstance(send.message, Failed) and hang_up == HangUp(STRANGER)
        assert "no cache of this session" in send.message.message
    busy = peers.from_peer(STRANGER, replace(other, holder=0))
    assert isinstance(busy, Failed) and busy.code == "busy"
    assert counts(peers.from_peer(S_WORKER, take((1, 9)))) == [5]


class _Full(AttentionExecutor):
    """Has no memory."""

    def place(self, place: Any) -> None:
        raise MemoryError("no more memory")


def test_a_replica_that_lacks_what_its_books_say_is_not_taken_over(peers: Peers) -> None:
    executor, hub = _Full(num_threads=1), InprocHub[Any, Any]()
    executor.drop = lambda drop: None  # type: ignore[method-assign]
    ends = [connect(InprocHub(), "a peer", hub, "R-worker r7")[0] for _ in range(3)]
    ends[NEIGHBOUR].send(chunk((1, 0, 5)))
    assert serve_next(hub, RWorker(hub, peers.state, executor), None)
    assert isinstance(ends[NEIGHBOUR].poll(), Failed) and not hub.connections[NEIGHBOUR].is_open
    failed = peers.from_peer(S_WORKER, take((1, 5)))
    assert isinstance(failed, Failed) and "no cache of this session" in failed.message


def test_a_neighbour_takes_nothing_over(peers: Peers) -> None:
    failed = peers.from_peer(NEIGHBOUR, take((1, 5)))
    assert isinstance(failed, Failed) and "a neighbour may not" in failed.message


def test_a_replica_goes_with_the_last_s_worker_of_its_session(peers: Peers) -> None:
    assert peers.lose(NEIGHBOUR) == ()
    drops = peers.lose(S_WORKER)
    assert sorted(x.holder for x in drops if isinstance(x, Drop)) == [0, 1]
    assert isinstance(drops[-1], Stop)


def test_without_a_session_a_replica_goes_with_its_neighbour() -> None:
    peers = Peers()
    assert isinstance(
        peers.from_peer(STRANGER, replace(REPLICA, holder=5, session=0, max_blocks=1)), Welcome
    )
    assert peers.lose(STRANGER) == (Drop(5),)  # type: ignore[arg-type]


def test_a_replica_that_nobody_feeds_is_begun_anew(peers: Peers) -> None:
    peers.say(NEIGHBOUR, chunk((1, 0, 5)))
    peers.lose(NEIGHBOUR)
    assert isinstance(peers.from_peer(STRANGER, REPLICA), Welcome)
    assert peers.from_peer(STRANGER, Open(1, 5)) == Accepted(1)


def test_an_s_worker_rolls_its_own_cache_back(peers: Peers) -> None:
    for sequence in (1, 2):
        peers.from_peer(S_WORKER, Open(sequence, 10))
    peers.step_from(S_WORKER, step_of((1, 0, 4)))
    peers.say(S_WORKER, step_of((1, 4, 1), (2, 0, 2), step=1))
    assert counts(peers.from_peer(S_WORKER, take((1, 4), (2, 9), holder=1))) == [4, 0]
    again = step_of((1, 4, 1), (2, 0, 2), step=2)
    peers.say(S_WORKER, again)
    assert len(peers.say(S_WORKER, attend(again, 0))) == 1


def test_a_cache_with_a_replica_is_not_rolled_back_behind_its_back() -> None:
    """Tokens of a step that isn't over were never told; others are forgotten there, too."""
    peers = Peers()
    for sequence, num_tokens in ((1, 5), (2, 4), (3, 3)):
        peers.say(S_WORKER, Open(sequence, 10))
        peers.step_from(S_WORKER, step_of((sequence, 0, num_tokens)))
    peers.say(S_WORKER, Replicate("r2", 1 << 20, 1, 60.0))
    under_way = step_of((1, 5, 1), (2, 4, 1), step=1)
    peers.say(S_WORKER, under_way)
    told, *followed = peers.say(S_WORKER, take((1, 5), (2, 2), holder=1))
    assert counts(told.message) == [5, 2]
    assert [(one.holder, one.change) for one in followed] == [(1, Close(3)), (1, Truncate(2, 2))]


def test_a_sequence_that_can_not_be_rolled_back_is_closed(peers: Peers) -> None:
    """The fork keeps the blocks that it leaves."""
    for sequence in (2, 3):
        peers.say(NEIGHBOUR, Close(sequence))
    assert peers.from_peer(NEIGHBOUR, Open(4, 36)) == Accepted(4)
    peers.say(NEIGHBOUR, chunk((4, 0, 16)))
    assert peers.from_peer(NEIGHBOUR, Open(5, 16, 16, parent_id=4)) == Accepted(5)
    peers.lose(NEIGHBOUR)
    assert counts(peers.from_peer(S_WORKER, take((4, 3), (5, 16), (1, 3)))) == [-1, 16, 0]
    assert peers.from_peer(S_WORKER, Open(4, 16, holder=0)) == Accepted(4)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (take((1, 5), (1, 5)), "named once"),
        (take((1, -5)), "at least 0"),
        (take((1, 5), holder=9), "no cache of this session"),
    ],
)
def test_what_makes_no_sense_changes_nothing(peers: Peers, message: Any, reason: str) -> None:
    peers.say(NEIGHBOUR, chunk((1, 0, 5)))
    failed = peers.from_peer(S_WORKER, message)
    assert isinstance(failed, Failed) and reason in failed.message
    assert peers.from_peer(NEIGHBOUR, Open(9, 4)) == Accepted(9), "it has its cache still"


def test_a_session_does_not_change(peers: Peers) -> None:
    failed = peers.from_peer(S_WORKER, replace(OWN, session=3))
    assert isinstance(failed, Failed) and "another session" in failed.message


# Truncation.


def test_truncation_that_would_break_a_promise_is_refused() -> None:
    worker = Worker(4 * 3 * 2 * 16 * 4 * 2 * 4 * 100)
    worker.tell(replace(HELLO, max_blocks=4))
    worker.answer(Open(1, 12))
    worker.run_step(step_of((1, 0, 12)))
    worker.answer(Open(2, 16, 12, parent_id=1))
    refused = worker.answer(Truncate(1, 4))
    assert isinstance(refused, Refused) and "others share blocks" in refused.message
    worker.tell(Close(2))
    assert worker.answer(Truncate(1, 4)) == Accepted(1)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Truncate(1, 6), "has 5 tokens cached"),
        (Truncate(1, -1), "num_tokens"),
        (Truncate(9, 1), "not open"),
        (Truncate(2, 0), "open step"),
    ],
)
def test_truncations_that_make_no_sense(worker: Worker, message: Any, reason: str) -> None:
    for sequence in (1, 2):
        worker.answer(Open(sequence, 10))
    worker.run_step(step_of((1, 0, 5)))
    worker.tell(step_of((2, 0, 1), step=1))
    worker.fails(message, reason)


def test_the_last_to_leave_ends_it(peers: Peers) -> None:
    assert peers.say(S_WORKER, Shutdown()) == (Stop(),)


def test_what_nobody_could_answer_is_noticed() -> None:
    """And of R-workers that share out heads, the one that has least counts."""
    asked = take((1, 5), (2, 9))

    def told(*numbers: int) -> TakenOver:
        return TakenOver(np.array(numbers, np.int32))

    asked.check(told(5, -1))
    for wrong in (told(5), told(6, 0), told(0, -2)):
        with pytest.raises(ProtocolError, match=r"answered TakeOver|num_tokens has 1"):
            asked.check(wrong)
    assert asked.join([told(5, 7), told(4, 9), told(5, -1)]).num_tokens.tolist() == [4, -1]


def test_a_replica_is_dropped_with_whoever_kept_it_up_to_date(peers: Peers) -> None:
    gone = peers.say(S_WORKER, DropCache(SESSION, 0, 1))
    assert gone == (Drop(HolderId(0)), HangUp(NEIGHBOUR), Send(S_WORKER, Dropped(1, 0)))
    assert peers.say(S_WORKER, DropCache(SESSION, 0, 1)) == (Send(S_WORKER, Dropped(1, 0)),)
    peers.lose(NEIGHBOUR)
    assert isinstance(peers.from_peer(STRANGER, REPLICA), Welcome), "its memory is free"


def test_files_end_with_a_replica_that_was_in_one(peers: Peers) -> None:
    """Up to the link that is named, and none, where it was in memory."""
    removed = RemoveReplica(HolderId(0), SESSION, 3)
    assert removed in peers.say(S_WORKER, DropCache(SESSION, 0, 1, link=3))
    assert peers.say(S_WORKER, DropCache(SESSION, 0, 1)) == (Send(S_WORKER, Dropped(1, 0)),)


def test_a_cache_that_was_taken_over_is_dropped_when_nothing_is_left_of_it(peers: Peers) -> None:
    peers.lose(NEIGHBOUR)
    assert counts(peers.from_peer(S_WORKER, take((2, 9)))) != []
    assert peers.say(S_WORKER, DropCache(SESSION, 0, 1))[0] == Drop(HolderId(0))
    assert isinstance(peers.from_peer(S_WORKER, Open(9, 4)), Accepted)


@pytest.mark.parametrize("session", [SESSION + 1, 0, -1])
def test_nobody_drops_the_cache_of_another_session(peers: Peers, session: int) -> None:
    failed = peers.from_peer(S_WORKER, DropCache(session, 0, 1))
    assert isinstance(failed, Failed)
    assert isinstance(peers.from_peer(NEIGHBOUR, Open(9, 4)), Accepted)

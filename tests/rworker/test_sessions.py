"""Caches that outlive their S-worker: kept for its session, continued by another S-worker of it,
or freed when none arrives. A peer that is gone costs only what was to be sent to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from state_machine import HELLO, KV, KV_BYTES, Worker, attend, step_of
from values import replace

from cpu_kernels import reference
from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import HolderId
from fastdecode.schedule.simulation.clock import VirtualClock
from fastdecode.wire.blocks import (
    SESSION_RESUMED,
    Fetch,
    Name,
    Replicate,
    Retain,
    TakenOver,
    TakeOver,
)
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.messages import (
    Close,
    Failed,
    FromRWorker,
    Hello,
    Inspect,
    Open,
    Report,
    Shutdown,
    ToRWorker,
    Welcome,
)
from rworker.attention import AttentionExecutor
from rworker.instructions import Drop, HangUp, LinkReplica, Prepare, Send, Stop, Unlink
from rworker.serving_terms import ServingTerms
from rworker.state import RWorkerState
from rworker.worker import GracePeriod, RWorker, serve_next

FIRST, SECOND, STRANGER = range(3)
SESSION = 77
OURS = replace(HELLO, session=SESSION, outlives=True)
RESUMING = replace(OURS, resumes=True)
THEIRS = replace(HELLO, session=78, outlives=True)
KEEP_S = 300.0
KEEPING = ServingTerms(return_s=60.0, keep_s=KEEP_S)
KEY = np.arange(2, dtype=np.int64).reshape(1, 2)


class Peers(Worker):
    """A worker whose first S-worker has two sequences, of 3 and of 20 tokens,
    the second of which is in an open step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(KV_BYTES, **({"serving": KEEPING} | options))
        self.say(FIRST, OURS)
        for sequence, num_tokens in ((4, 3), (9, 20)):
            self.say(FIRST, Open(sequence, 40))
            self.step_from(FIRST, step_of((sequence, 0, num_tokens)))
        begin = step_of((9, 20, 1), step=1)
        self.say(FIRST, begin)
        self.say(FIRST, attend(begin, 0))

    def hold(self, peer: int, **counts: int) -> list[int]:
        """What it says that it has of sequences, asked for so many tokens of each."""
        ids = np.array([int(name[1:]) for name in counts], np.int64)
        most = np.array(list(counts.values()), np.int32)
        (send,) = self.say(peer, TakeOver(SESSION, ids, most))
        assert isinstance(send.message, TakenOver)
        found: list[int] = send.message.num_tokens.tolist()
        return found


def test_another_s_worker_of_the_session_goes_on_with_what_is_there_in_every_layer() -> None:
    peers = Peers()
    assert peers.lose(FIRST) == (Unlink(HolderId(0)),) and peers.state.is_deserted
    unlink, welcome = peers.say(SECOND, RESUMING)  # and no Prepare, which would empty it
    assert unlink == Unlink(HolderId(0)) and welcome.message.is_resumed
    assert not peers.state.is_deserted
    assert peers.hold(SECOND, _9=40, _4=2, _5=8) == [20, 2, -1]
    peers.step_from(SECOND, step_of((9, 20, 1), (4, 2, 1)))


def test_what_is_not_named_is_closed_and_what_was_kept_is_forgotten() -> None:
    peers = Peers()
    peers.say(FIRST, Name(9, 0, KEY))
    peers.say(FIRST, Close(4, tail=(KEY + 7).tobytes().hex()))
    peers.lose(FIRST)
    peers.say(SECOND, RESUMING)
    assert peers.hold(SECOND) == []
    (cache,) = peers.state._caches
    assert cache.books.store.pool.num_free == cache.books.store.num_blocks


def test_the_first_is_fenced_from_the_moment_the_second_has_attached() -> None:
    peers = Peers()
    _, welcome, told, hang_up = peers.say(SECOND, RESUMING)
    assert welcome.to == SECOND and isinstance(told.message, Failed)
    assert told.to == FIRST and told.message.code == SESSION_RESUMED
    assert hang_up == HangUp(FIRST)
    _, refusal = peers.say(FIRST, Open(11, 8)), peers.lose(FIRST, may_return=False)
    assert refusal == ()  # nothing is dropped, and the worker doesn't stop
    assert peers.hold(SECOND, _9=40, _4=40) == [20, 3]


@pytest.mark.parametrize("hello", [THEIRS, replace(THEIRS, resumes=True), HELLO])
def test_a_stranger_changes_nothing_and_is_told_that_memory_is_kept(hello: Hello) -> None:
    peers = Peers()
    peers.lose(FIRST)
    refusal, hang_up = peers.say(STRANGER, hello)
    assert refusal.message.code == "session_kept" and "--session-keep-s" in refusal.message.message
    assert hang_up == HangUp(STRANGER) and peers.lose(STRANGER, may_return=False) == ()
    peers.say(SECOND, RESUMING)
    assert peers.hold(SECOND, _9=40, _4=40) == [20, 3]


def test_a_stranger_beside_one_that_lives_is_refused_too() -> None:
    peers = Peers()
    refusal, _ = peers.say(STRANGER, replace(THEIRS, resumes=True))
    assert refusal.message.code == "busy"
    peers.step_from(FIRST, step_of((4, 3, 1), step=2, lane=1))


@pytest.mark.parametrize(
    "other",
    [
        replace(RESUMING, model_hash="another"),
        replace(RESUMING, kv=replace(KV, block_size=2 * KV.block_size)),
        replace(OURS),
        replace(RESUMING, max_blocks=1),
    ],
)
def test_an_s_worker_of_the_session_that_wants_another_cache_gets_a_new_one(other: Hello) -> None:
    peers = Peers()
    peers.lose(FIRST)
    prepare, welcome = peers.say(SECOND, other)
    assert isinstance(prepare, Prepare) and not welcome.message.is_resumed
    assert peers.hold(SECOND, _9=40) == [-1]


def test_a_goodbye_ends_the_session_at_once() -> None:
    assert Peers().say(FIRST, Shutdown()) == (Stop(),)
    peers = Peers(serving=replace(KEEPING, keeps_serving=True))
    assert peers.say(FIRST, Shutdown()) == (HangUp(FIRST),)
    assert peers.lose(FIRST, may_return=False) == (Drop(HolderId(0)),)
    prepare, _ = peers.say(STRANGER, THEIRS)
    assert isinstance(prepare, Prepare)


def test_whoever_broke_the_protocol_is_kept_nothing() -> None:
    assert Peers().lose(FIRST, may_return=False) == (Drop(HolderId(0)), Stop())
    assert Peers(serving=ServingTerms()).lose(FIRST) == (Drop(HolderId(0)), Stop())


def test_a_replicated_cache_has_no_replica_when_it_is_gone_on_with() -> None:
    peers = Peers()
    (link,) = peers.say(FIRST, Replicate("r8", 1 << 20, 1, 9.0))
    assert isinstance(link, LinkReplica)
    assert peers.lose(FIRST) == (Unlink(HolderId(0)),)
    peers.say(SECOND, RESUMING)
    assert peers.hold(SECOND, _9=20) == [20]
    (again,) = peers.say(SECOND, Replicate("r8", 1 << 20, 1, 9.0))
    assert isinstance(again, LinkReplica) and again.number == 1


@pytest.mark.parametrize("keeps_serving", [False, True])
def test_no_s_worker_arrives_in_time(keeps_serving: bool) -> None:
    serving = replace(KEEPING, keeps_serving=keeps_serving)
    peers, time = Peers(serving=serving), VirtualClock()
    grace_period = GracePeriod(serving, time)
    assert grace_period.wait_s(peers.state) is None and grace_period.end(peers.state) == ()
    peers.lose(FIRST)
    assert grace_period.wait_s(peers.state) == KEEP_S
    time.now = KEEP_S - 1
    assert grace_period.end(peers.state) == () and grace_period.wait_s(peers.state) == 1
    time.now = KEEP_S
    assert grace_period.end(peers.state) == (Drop(HolderId(0)),)
    assert grace_period.end(peers.state) == (() if keeps_serving else (Stop(),))
    if keeps_serving:
        prepare, _ = peers.say(STRANGER, THEIRS)
        assert isinstance(prepare, Prepare)


def test_the_time_begins_anew_with_every_loss() -> None:
    peers, time = Peers(), VirtualClock()
    grace_period = GracePeriod(KEEPING, time)
    peers.lose(FIRST)
    grace_period.wait_s(peers.state)
    time.now = 200.0
    peers.say(SECOND, RESUMING)
    assert grace_period.wait_s(peers.state) is None
    time.now = 1000.0
    peers.lose(SECOND)
    assert grace_period.wait_s(peers.state) == KEEP_S


def test_the_time_runs_from_the_loss_of_whose_cache_it_is() -> None:
    """However many others come and are lost meanwhile."""
    state, time = Worker(KV_BYTES, serving=KEEPING).state, VirtualClock()
    grace_period = GracePeriod(KEEPING, time)
    for peer, hello in enumerate((OURS, THEIRS)):
        state.handle(peer, replace(hello, holder=peer, max_blocks=1))
    state.lost(FIRST, may_return=True)
    assert grace_period.wait_s(state) == KEEP_S
    time.now = 200.0
    state.lost(SECOND, may_return=True)
    assert grace_period.wait_s(state) == KEEP_S - 200
    time.now = KEEP_S
    assert grace_period.end(state) == (Drop(HolderId(0)),)
    assert grace_period.wait_s(state) == 200
    time.now = KEEP_S + 200
    assert grace_period.end(state) == (Drop(HolderId(1)),)


def test_who_is_refused_is_told_for_how_long_and_what_to_do() -> None:
    peers, time = Peers(), VirtualClock()
    grace_period = GracePeriod(KEEPING, time)
    peers.lose(FIRST)
    grace_period.look(peers.state)
    time.now = 200.0
    grace_period.look(peers.state)
    refusal, _ = peers.say(STRANGER, THEIRS)
    for words in ("100 s more", "--resume", "--overwrite"):
        assert words in refusal.message.message


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("is_over", [False, True])
def test_blocks_were_on_their_way_to_disk_when_the_s_worker_was_lost(
    is_over: bool, is_known: bool
) -> None:
    """``is_known``: the R-worker knows that it is; else the connection is open
    at this end still. What is on its way ends with ``Unlink``."""
    peers = Peers(has_tier=True)
    peers.say(FIRST, Name(9, 0, KEY))
    peers.say(FIRST, Retain(1, KEY, np.array([KV.block_size], np.int32)))
    peers.say(FIRST, Fetch(2, KEY + 100))
    (cache,) = peers.state._caches
    if is_over:
        for job in (1, 2):
            cache.books.store.cached.end(job)
    if is_known:
        assert peers.lose(FIRST) == (Unlink(HolderId(0)),) and not cache.books.store.cached.jobs
    unlink, welcome, *fence = peers.say(SECOND, RESUMING)
    assert unlink == Unlink(HolderId(0))
    assert isinstance(welcome.message, Welcome)
    assert bool(fence) != is_known
    assert peers.hold(SECOND, _9=40) == [20]
    (cache,) = peers.state._caches
    assert not len(cache.books.store.cached) and not cache.books.store.cached.jobs
    peers.say(SECOND, Name(9, 0, KEY))
    peers.say(SECOND, Retain(1, KEY, np.array([KV.block_size], np.int32)))


def test_only_a_session_is_kept() -> None:
    with pytest.raises(ConfigError, match="cache of a session"):
        replace(HELLO, outlives=True)


def test_a_worker_with_a_cache_without_owner_is_new_to_a_resumed_s_worker() -> None:
    worker = Worker(KV_BYTES, serving=KEEPING)
    prepare, welcome = worker.state.handle(SECOND, RESUMING)
    assert isinstance(prepare, Prepare) and isinstance(welcome, Send)


WAIT_S = 60.0


class Loop:
    """An R-worker whose loop is turned by the test."""

    def __init__(self) -> None:
        self.hub: InprocHub[FromRWorker, ToRWorker] = InprocHub(keeps_places=False)
        self._state = RWorkerState("r0", kv_bytes=KV_BYTES, serving=KEEPING)
        self._executor = AttentionExecutor(kernels=reference)

    def connect(self) -> InprocConnection[ToRWorker, FromRWorker]:
        here, _ = connect(InprocHub(), "a peer", self.hub, "R-worker r0")
        return here

    def turn(self) -> None:
        worker = RWorker(self.hub, self._state, self._executor)
        assert serve_next(self.hub, worker, None)


def test_an_s_worker_is_fenced_though_the_one_that_resumed_is_gone() -> None:
    loop = Loop()
    first, second = loop.connect(), loop.connect()
    first.send(OURS)
    loop.turn()
    assert isinstance(first.receive(WAIT_S), Welcome)
    second.send(replace(OURS, resumes=True))
    second.close()  # before the R-worker has read it
    loop.turn()
    told = first.poll()
    assert isinstance(told, Failed) and told.code == SESSION_RESUMED
    assert not loop.hub.connections[0].is_open


def test_a_report_to_a_peer_that_is_gone_ends_nothing() -> None:
    loop = Loop()
    first, second = loop.connect(), loop.connect()
    first.send(Inspect())
    first.close()
    second.send(Inspect())
    for _ in range(3):  # both messages, and the end of the first peer
        loop.turn()
    assert isinstance(second.poll(), Report)

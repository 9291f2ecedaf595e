"""Several peers of one R-worker: who may say what, whose caches are whose, and
that a stranger changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from state_machine import HELLO, KV, Worker, attend, chunk, step_of
from values import replace

from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import Replicate, TakeOver
from fastdecode.wire.messages import Accepted, Close, Failed, Inspect, Open, Shutdown, Welcome
from fastdecode.wire.traits import Role
from rworker.instructions import Drop, HangUp, Prepare, Send, Stop, TellAboutHost
from rworker.serving_terms import ServingTerms

FEW = replace(HELLO, max_blocks=8)
ONE, OTHER, STRANGER = 0, 1, 2


class Peers(Worker):
    def greet(self, peer: int, hello: Any) -> Welcome:
        prepare, send = self.say(peer, hello)
        assert isinstance(prepare, Prepare) and prepare.holder == hello.holder
        assert isinstance(send, Send) and send.to == peer and isinstance(send.message, Welcome)
        return send.message

    def refuses(self, peer: int, message: Any, reason: str, code: str = "protocol_error") -> None:
        send, hang_up = self.say(peer, message)
        assert isinstance(send, Send) and isinstance(send.message, Failed) and send.to == peer
        told, is_mistake = send.message.message, code == "protocol_error"
        assert send.message.code == code and reason in told
        assert told.startswith(f"{type(message).__name__}: ") is is_mistake
        assert hang_up == HangUp(peer)


def test_two_s_workers_have_caches_of_their_own() -> None:
    worker = Peers()
    assert worker.greet(ONE, FEW).num_blocks == 8
    assert worker.greet(OTHER, replace(FEW, holder=5)).num_blocks == 8
    for peer in (ONE, OTHER):
        assert worker.say(peer, Open(1, 8)) == (Send(peer, Accepted(1)),)
    worker.step_from(ONE, step_of((1, 0, 3)))
    worker.step_from(OTHER, step_of((1, 0, 7)))
    assert worker.lose(ONE, may_return=False) == (Drop(HolderId(0)),)
    worker.step_from(OTHER, step_of((1, 7, 1), step=1))
    assert worker.lose(OTHER, may_return=False) == (Drop(HolderId(5)), Stop())


def test_one_s_worker_may_have_several_holders_which_its_messages_name() -> None:
    worker = Peers()
    for holder in (0, 1):
        worker.greet(ONE, replace(FEW, holder=holder))
        worker.say(ONE, Open(1, 8, holder=holder))
    worker.step_from(ONE, step_of((1, 0, 3), holder=0))
    worker.step_from(ONE, step_of((1, 0, 5), holder=1))
    worker.refuses(ONE, Close(1), "names no holder, but has 2")
    worker.refuses(ONE, Close(1, 7), "holder 7 is not one that this peer has opened")
    assert worker.lose(ONE, may_return=False) == (Drop(HolderId(0)), Drop(HolderId(1)), Stop())


def test_a_second_s_worker_for_a_holder_that_is_served_is_refused() -> None:
    worker = Peers()
    worker.greet(ONE, FEW)
    worker.say(ONE, Open(1, 8))
    worker.refuses(OTHER, FEW, "it is busy with another job: wait until", code="busy")
    assert worker.lose(OTHER, may_return=False) == ()
    worker.step_from(ONE, step_of((1, 0, 3)))


def test_nor_is_there_memory_for_a_second_where_the_first_has_it_all() -> None:
    worker = Peers()
    worker.greet(ONE, HELLO)
    worker.refuses(OTHER, replace(HELLO, holder=1), "busy with another job", code="busy")


def test_memory_is_free_again_when_its_owner_has_gone() -> None:
    worker = Peers(serving=ServingTerms(keeps_serving=True))
    offered = worker.greet(ONE, HELLO).num_blocks
    assert worker.lose(ONE, may_return=False) == (Drop(HolderId(0)),)
    assert worker.greet(OTHER, replace(HELLO, holder=3)).num_blocks == offered


@pytest.mark.parametrize(
    "message",
    [
        Open(1, 8, holder=0),
        Close(1, 0),
        step_of((1, 0, 1), holder=0),
        attend(step_of((1, 0, 1)), 0, holder=0),
    ],
)
def test_nobody_touches_what_is_anothers(message: Any) -> None:
    worker = Peers()
    worker.greet(ONE, FEW)
    worker.say(ONE, Open(1, 8))
    worker.refuses(STRANGER, message, "holder 0 is not one that this peer has opened")
    worker.refuses(STRANGER, replace(message, holder=-1), "first message must be Hello")
    worker.refuses(STRANGER, "hello", "str is not a message")
    assert worker.lose(STRANGER, may_return=False) == ()
    assert worker.say(STRANGER, Shutdown()) == (HangUp(STRANGER),)
    worker.step_from(ONE, step_of((1, 0, 3)))


def test_a_reader_looks_and_changes_nothing() -> None:
    worker = Peers()
    worker.greet(ONE, FEW)
    worker.say(ONE, Open(1, 8))
    (told,) = worker.say(OTHER, Inspect())
    assert isinstance(told, TellAboutHost) and told.to == OTHER
    worker.refuses(OTHER, Open(2, 8), "a reader may not say that")
    worker.refuses(OTHER, FEW, "busy with another job", code="busy")
    nobody = np.zeros(0, np.int64), np.zeros(0, np.int32)
    worker.refuses(OTHER, TakeOver(7, *nobody, 0), "a reader may not say that")
    worker.refuses(OTHER, Replicate("r1", 1 << 20, 1, 60.0, 0), "a reader may not say that")
    assert worker.say(OTHER, Shutdown()) == (HangUp(OTHER),)
    assert worker.lose(OTHER, may_return=False) == ()
    worker.step_from(ONE, step_of((1, 0, 3)))


def test_whoever_only_looks_does_not_end_the_worker() -> None:
    """The doctor measures the way to an R-worker with a cache of its own, and
    goes; the job comes after."""
    worker = Peers(serving=ServingTerms(model_hash="another"))
    worker.say(ONE, Inspect())
    worker.greet(ONE, HELLO)
    assert worker.lose(ONE, may_return=False) == (Drop(HolderId(0)),)
    remedy = "kept for another: start it with another --model-hash, or without"
    worker.refuses(OTHER, HELLO, remedy, code="model_mismatch")


def test_a_neighbours_replica_is_stored_and_never_steps() -> None:
    worker = Peers()
    worker.greet(ONE, FEW)
    worker.greet(OTHER, replace(FEW, holder=1, role=Role.NEIGHBOUR))
    worker.say(OTHER, Open(1, 8))
    assert worker.say(OTHER, chunk((1, 0, 3)))[-1] == Send(OTHER, Accepted(1))
    worker.refuses(OTHER, step_of((1, 3, 1), step=1), "a neighbour may not say that")
    worker.refuses(OTHER, replace(FEW, holder=2), "greeted as neighbour, and now as S-worker")
    assert worker.lose(OTHER, may_return=False) == (Drop(HolderId(1)),)
    assert worker.lose(ONE, may_return=False) == (Drop(HolderId(0)), Stop())


def test_the_last_s_worker_that_leaves_ends_it() -> None:
    worker = Peers()
    worker.greet(ONE, FEW)
    worker.greet(OTHER, replace(FEW, holder=1))
    assert worker.say(ONE, Shutdown()) == (HangUp(ONE),)
    assert worker.lose(ONE, may_return=False) == (Drop(HolderId(0)),)
    assert worker.say(OTHER, Shutdown()) == (Stop(),)


def test_a_reader_cannot_greet_as_one() -> None:
    with pytest.raises(ConfigError, match="reader keeps no cache"):
        replace(HELLO, role=Role.READER)


def test_blocks_of_one_cache_are_not_anothers() -> None:
    worker = Peers()
    worker.greet(ONE, replace(FEW, max_blocks=2))
    worker.greet(OTHER, replace(FEW, holder=1, max_blocks=2))
    room = 2 * KV.block_size
    assert worker.say(ONE, Open(1, room)) == (Send(ONE, Accepted(1)),)
    (refused,) = worker.say(ONE, Open(2, 1))
    assert isinstance(refused, Send) and refused.message != Accepted(2)
    assert worker.say(OTHER, Open(2, room)) == (Send(OTHER, Accepted(2)),)

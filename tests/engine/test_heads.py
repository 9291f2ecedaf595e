"""Groups of R-workers that share out the KV heads: members that answer what cannot be are
lost alone, and what members report is joined."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastdecode import LLM
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import Shard
from fastdecode.engine.fleet.groups import GroupPool
from fastdecode.engine.fleet.joined_moves import JoinedMoves
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.fleet.resharing import GROUP, in_heads, share_heads
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.kv.kept import keys_of, words_of
from fastdecode.wire.kv.tiers import Moved, Stocked
from fastdecode.wire.messages import (
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    FromRWorker,
    OpenSequence,
    ToRWorker,
    Welcome,
)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"r_workers": 2, "r_partition": "heads"},
            "greeting 2 R-worker(s): R-worker r0, R-worker r1",
        ),
        ({"kv_placement": "gpu"}, "no R-workers: the KV cache on cpu"),
    ],
)
def test_who_is_greeted(options: dict[str, Any], line: str, llama: str) -> None:
    told: list[str] = []
    LLM(llama, kv_memory_gb=0.01, progress=told.append, **options).close()
    told = [each for each in told[1:] if not each.startswith("compiling kernels")]
    assert told == [line]


def group_of(num_members: int) -> tuple[GroupPool, list[Any]]:
    """That shares out two query heads and a KV head a member; and the other ends."""
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    peers = [
        connect(hub, "S", InprocHub[FromRWorker, ToRWorker](), f"r{i}")[1]
        for i in range(num_members)
    ]
    fleet = in_heads(WorkerPool(hub, timeout_s=5.0))
    shares = share_heads(2 * num_members, num_members, num_members)
    fleet.groups[0].begin({HolderId(i): Shard(share) for i, share in enumerate(shares)})
    return fleet, peers


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Accepted(8), "answered OpenSequence for sequence_id=8, where 7 was due"),
        (Welcome("r1", 20, 16, 1), "sent Welcome, which nobody asked for"),
    ],
)
def test_an_answer_to_something_else_is_one_members_alone(answer: FromRWorker, reason: str) -> None:
    fleet, peers = group_of(3)
    fleet.send(GROUP, OpenSequence(7, 100))
    for peer, said in zip(peers, (Accepted(7), answer, Accepted(7)), strict=True):
        peer.send(said)
    assert_lost(fleet, f"r1 {reason}")


def assert_lost(fleet: GroupPool, reason: str) -> None:
    """The second member is, alone, and the group with it; it is reported once."""
    while fleet.is_owed and not fleet.gone:
        assert fleet.receive(most_s=0.0) is None
    assert list(fleet.gone) == [1]
    ((holder, error),) = fleet.take_losses()
    assert holder == GROUP and re.search(reason, error.message), error.message
    assert fleet.take_losses() == [] and list(fleet.lost) == [GROUP]
    assert fleet.take_lost_members(GROUP) == [1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"o": np.zeros((2, 2, 8), np.uint16)},
            r"answered o of uint16 \(2, 2, 8\), not float32 \(2, 2, 8\)",
        ),
        ({"o": np.zeros((2, 3, 8), np.float32)}, r"answered o of float32 \(2, 3, 8\), not"),
        ({"o": np.zeros((2, 2, 7), np.float32)}, r"answered o of float32 \(2, 2, 7\), not"),
        ({"o": np.zeros((1, 2, 8), np.float32)}, r"answered o of float32 \(1, 2, 8\), not"),
        ({"lse": None}, r"answered lse of shape None, where \(2, 2\) was asked"),
        ({"lse": np.zeros((2, 3), np.float32)}, r"answered lse of shape \(2, 3\), where"),
        ({"layer": 1}, "answered Attend for layer=1, where 0 was due"),
        ({"step": 8}, "answered Attend for step=8, where 9 was due"),
    ],
)
def test_arrays_that_nobody_asked_for_are_one_members_alone(
    changes: dict[str, Any], reason: str
) -> None:
    fleet, peers = group_of(3)
    one = np.ones(1, np.int64)
    two = np.full(1, 2, np.int32)
    fleet.send(GROUP, BeginStep(9, 1, one, 0 * two, two, two, two, want_lse=True))
    q, kv = (np.zeros((2, heads, 8), np.float32) for heads in (6, 3))
    fleet.send(GROUP, Attend(9, 1, 0, q, kv, kv))
    honest = AttendResult(9, 1, 0, q[:, :2], np.zeros((2, 2), np.float32), 0.1)
    for peer, said in zip(peers, (honest, replace(honest, **changes), honest), strict=True):
        peer.send(said)
    assert_lost(fleet, f"r1 {reason}")


def test_members_that_answered_for_bad_heads_are_given_up() -> None:
    fleet, _ = group_of(3)
    fleet.lose_heads(GROUP, np.array([False, False, True, False, False, False]), "answered NaN")
    assert_lost(fleet, "r1 answered NaN")


def test_a_block_has_moved_where_all_have_their_heads_of_it_and_faults_are_those_of_all() -> None:
    moves, keys = JoinedMoves(GROUP, [0, 1]), [bytes([number]) * 16 for number in range(3)]
    moves.take(1, Moved(1, 5, words_of(keys[:2]), 100, 0.5, num_damaged=2))
    assert not moves.news
    moves.take(0, Moved(0, 5, words_of(keys[1:]), 70, 0.7, num_unread=1, num_damaged=1))
    (moved,) = moves.news
    assert isinstance(moved, Moved) and keys_of(moved.failed) == keys
    assert (moved.holder, moved.num_bytes, moved.seconds) == (GROUP, 170, 0.7)
    assert moved.faults == (1, 3, 0, 0)


def stocked(*keys: bytes, num_slots: int = 9, is_last: bool = True) -> Stocked:
    return Stocked(3, num_slots, words_of(keys), np.full(len(keys), 5, np.int32), is_last)


def test_a_block_is_there_where_all_members_have_it_and_others_drop_it() -> None:
    keys = [bytes([i]) * 16 for i in range(4)]
    moves = JoinedMoves(GROUP, [0, 1])
    assert not moves.take(1, stocked(keys[0], keys[1], is_last=False))
    assert not moves.take(0, stocked(keys[1], keys[2], num_slots=7))
    assert not moves.news
    dropped = moves.take(1, stocked(keys[3]))
    (found,) = moves.news
    assert isinstance(found, Stocked) and keys_of(found.keys) == [keys[1]]
    assert (found.holder, found.num_slots) == (GROUP, 7)
    assert dropped == {0: {keys[2]}, 1: {keys[0], keys[3]}}

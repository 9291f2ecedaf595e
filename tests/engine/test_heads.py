"""R-workers that share out the KV heads: the tokens of R-workers that each have
whole sequences, also after a loss."""

from __future__ import annotations

import math
import re
import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import prompts
from stream_suite import hello_for
from trouble import Trouble, give
from values import replace

from fastdecode import LLM, SamplingParams
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import AttentionSpec, KVSpec, Shard
from fastdecode.engine.fleet import resharing as resharing_module
from fastdecode.engine.fleet.groups import GroupPool
from fastdecode.engine.fleet.joined_moves import JoinedMoves
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.pool import MixedPool, WorkerPool
from fastdecode.engine.fleet.resharing import GROUP, Resharing, in_heads, share_heads
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.kv.kept import keys_of, words_of
from fastdecode.wire.kv.tiers import Moved
from fastdecode.wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    CloseSequence,
    FromRWorker,
    Hello,
    OpenSequence,
    Refused,
    ToRWorker,
    Welcome,
)

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FORKED = SamplingParams(temperature=0.9, seed=5, max_tokens=20, n=3, ignore_eos=True)
SHAPES: dict[str, dict[str, Any]] = {
    # 5 KV heads: uneven among 2 and 3.
    "qwen3": {"num_attention_heads": 10, "num_key_value_heads": 5},
    "bloom": {},  # a slope for each head
    "gemma2": {},
}


def tokens(path: Path, **options: Any) -> tuple[list[list[tuple[int, ...]]], LLM]:
    """Everybody's tokens, and the closed LLM."""
    shared = {"dtype": "float32", "r_threads": 1, "kv_memory_gb": 0.01, "prefill_chunk": 8}
    with LLM(str(path), **shared, **options) as llm:
        outputs = llm.generate(
            prompts([3, 30, 11, 1, 19, 8, 5], seed=2), [GREEDY] * 5 + [FORKED] * 2
        )
        return [[c.token_ids for c in output.completions] for output in outputs], llm


@cache
def whole(path: Path) -> list[list[tuple[int, ...]]]:
    """Everybody's tokens from one R-worker that has all heads."""
    return tokens(path)[0]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"r_workers": 2}, "greeting 2 R-worker(s): R-worker r0, R-worker r1"),
        (
            {"r_workers": 2, "r_partition": "heads"},
            "greeting 2 R-worker(s): R-worker r0, R-worker r1",
        ),
        ({"kv_placement": "gpu"}, "no R-workers: the KV cache on cpu"),
    ],
)
def test_who_is_greeted(
    options: dict[str, Any], line: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    told: list[str] = []
    LLM(str(tiny_checkpoint("llama")), kv_memory_gb=0.01, progress=told.append, **options).close()
    told = [each for each in told[1:] if not each.startswith("compiling kernels")]
    assert told == [line]


def test_one_that_hangs_is_given_up(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint("qwen3", **SHAPES["qwen3"])
    expected = whole(path)
    woken = threading.Event()

    def hang() -> None:
        assert woken.wait(60)

    give(monkeypatch, {"r1": lambda: Trouble(13, hang)})
    try:
        found, llm = tokens(path, r_workers=3, r_partition="heads", worker_timeout_s=3.0)
    finally:
        woken.set()
    assert found == expected
    assert (
        llm.snapshot().engine.num_live_r_workers == 2 and llm.snapshot().engine.has_hung_r_workers
    )


def test_shares_are_even_and_cover_all_heads() -> None:
    shares = share_heads(20, 10, 4)
    assert [s.kv for s in shares] == [slice(0, 2), slice(2, 5), slice(5, 7), slice(7, 10)]
    assert [s.q for s in shares] == [slice(0, 4), slice(4, 10), slice(10, 14), slice(14, 20)]
    spec = AttentionSpec(20, 10, 8, 1.0, alibi_slopes=tuple(np.arange(20.0)))
    assert [s.of(spec).alibi_slopes for s in shares][1] == (4.0, 5.0, 6.0, 7.0, 8.0, 9.0)


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


def test_a_sequence_that_one_refuses_is_closed_on_the_others() -> None:
    fleet, peers = group_of(2)
    fleet.send(GROUP, OpenSequence(7, 100))
    refused = Refused(7, "out_of_capacity", "full")
    peers[0].send(Accepted(7))
    assert fleet.receive(most_s=0.0) is None
    peers[1].send(refused)
    assert fleet.receive() == (GROUP, refused)
    assert [peer.poll() for peer in peers] == [OpenSequence(7, 100)] * 2
    assert [peer.poll() for peer in peers] == [CloseSequence(7), None]


class Device:
    """A cache that answers at once, beside two R-workers."""

    peer = "the device"
    heard_s = None
    is_open = True

    def __init__(self) -> None:
        self._answers: deque[FromRWorker] = deque()

    def send(self, message: ToRWorker) -> None:
        assert isinstance(message, OpenSequence)
        self._answers.append(Accepted(message.sequence_id))

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        return self._answers.popleft()

    def poll(self) -> FromRWorker | None:
        return None

    def close(self) -> None:
        """Nothing is open."""


def test_members_without_the_memory_for_all_heads_are_greeted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With replicas; then the group is not sure to come back any more."""

    def no_memory(*_: Any) -> int:
        raise ConfigError("there is no memory for replicas")

    monkeypatch.setattr(resharing_module, "most_blocks", no_memory)
    fleet, peers = group_of(2)
    resharing = Resharing(fleet, hello_for(KVSpec(1, 2, 8, DType.FLOAT32, 16)), Deadlines(5.0, 5.0))
    resharing.keep_replicas(lambda: True)
    peers[1].close()
    fleet.look()
    fleet.take_losses()
    assert resharing.timeout_s == math.inf
    assert resharing.look([GROUP]) == {}
    assert isinstance(peers[0].poll(), Hello)
    peers[0].send(Welcome("r0", 9, 16, 1))
    for _ in range(3):
        assert resharing.look([GROUP]) == {}
    assert resharing.timeout_s == 0.0 and peers[0].poll() is None
    assert not fleet.is_greeting


def test_answers_of_a_device_are_kept_while_the_heads_are_shared_anew() -> None:
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    peers = [connect(hub, "S", InprocHub[FromRWorker, ToRWorker](), f"r{i}")[1] for i in range(2)]
    fleet = in_heads(MixedPool(hub, timeout_s=5.0, device=Device()))
    shares = share_heads(4, 2, 2)
    fleet.groups[0].begin({HolderId(i): Shard(share) for i, share in enumerate(shares)})
    device = HolderId(1)
    assert fleet.holders == [GROUP, device]
    peers[0].close()
    fleet.send(GROUP, OpenSequence(4, 100))
    while not fleet.gone:
        assert fleet.receive(most_s=0.0) is None
    assert [holder for holder, _ in fleet.take_losses()] == [GROUP]
    hello = hello_for(KVSpec(1, 2, 8, DType.FLOAT32, 16))
    resharing = Resharing(fleet, hello, Deadlines(5.0, 5.0))
    for sequence in (5, 6, 7):
        fleet.send(device, OpenSequence(sequence, 100))
    for _ in range(4):
        assert resharing.look([GROUP]) == {}
    assert fleet.is_owed and fleet.is_owed_at_once
    assert [fleet.receive() for _ in range(3)] == [(device, Accepted(x)) for x in (5, 6, 7)]
    assert not fleet.is_owed_at_once


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


def test_who_is_greeted_twice_is_heard_once() -> None:
    """Another one is lost while the heads are shared anew: what comes of the
    first greeting isn't for the second."""
    fleet, peers = group_of(2)
    kv, spec = KVSpec(1, 2, 16, DType.FLOAT32, 16), AttentionSpec(4, 2, 16, 1.0)
    hello = Hello(PROTOCOL_VERSION, "model", kv, (spec,), DType.FLOAT32)
    fleet.send(GROUP, OpenSequence(7, 100))
    fleet.send(GROUP, hello)
    peers[1].close()
    while not fleet.gone:
        assert fleet.receive() is None
    fleet.send(GROUP, hello)
    peers[0].send(Accepted(7))
    peers[0].send(Welcome("r0", 20, 16, 1))
    assert fleet.receive(most_s=0.0) is None
    peers[0].send(Welcome("r0", 10, 16, 1))
    assert fleet.receive() == (GROUP, Welcome("r0", 10, 16, 1))
    fleet.send(GROUP, OpenSequence(8, 100))
    peers[0].send(Accepted(8))
    assert fleet.receive() == (GROUP, Accepted(8))


def test_answers_come_in_the_order_of_what_was_asked() -> None:
    fleet, peers = group_of(2)
    full = Refused(2, "out_of_capacity", "full")
    for message in (OpenSequence(1, 10), CloseSequence(7), OpenSequence(2, 10)):
        fleet.send(GROUP, message)  # the second has no answer
    peers[1].send(Accepted(1))
    peers[1].send(full)
    assert fleet.receive(most_s=0.0) is None
    peers[0].send(Accepted(1))
    assert fleet.receive() == (GROUP, Accepted(1))
    assert fleet.receive(most_s=0.0) is None
    peers[0].send(Accepted(2))
    assert fleet.receive() == (GROUP, full)
    assert not fleet.is_owed


def test_answers_to_what_is_forgotten_are_passed_over() -> None:
    fleet, peers = group_of(2)
    group = fleet.groups[0]
    fleet.send(GROUP, OpenSequence(1, 10))
    peers[0].send(Accepted(1))
    assert fleet.receive(most_s=0.0) is None
    fleet.send(GROUP, OpenSequence(2, 10))
    group.begin(group.shards)  # the first owes one answer, the second owes two
    fleet.send(GROUP, OpenSequence(3, 10))
    peers[0].send(Accepted(2))
    peers[0].send(Accepted(3))
    peers[1].send(Accepted(1))
    peers[1].send(Accepted(2))
    assert fleet.receive(most_s=0.0) is None
    peers[1].send(Accepted(3))
    assert fleet.receive() == (GROUP, Accepted(3))


def test_a_block_has_moved_where_all_have_their_heads_of_it_and_faults_are_those_of_all() -> None:
    moves, keys = JoinedMoves(GROUP, [0, 1]), [bytes([number]) * 16 for number in range(3)]
    moves.take(1, Moved(1, 5, words_of(keys[:2]), 100, 0.5, num_damaged=2))
    assert not moves.news
    moves.take(0, Moved(0, 5, words_of(keys[1:]), 70, 0.7, num_unread=1, num_damaged=1))
    (moved,) = moves.news
    assert isinstance(moved, Moved) and keys_of(moved.failed) == keys
    assert (moved.holder, moved.num_bytes, moved.seconds) == (GROUP, 170, 0.7)
    assert moved.faults == (1, 3, 0, 0)

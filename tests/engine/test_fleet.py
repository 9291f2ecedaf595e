"""Pools of R-workers: which R-workers are given up, and when, and what groups of R-workers
that share out the KV heads make of their members' answers and reports."""

from __future__ import annotations

import math
import re
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chunk_memory import hello_for
from values import replace

from fastdecode import LLM
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import KVSpec, Shard
from fastdecode.engine.fleet import resharing as resharing_module
from fastdecode.engine.fleet.groups import GroupPool
from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.pool import MixedPool, WorkerPool
from fastdecode.engine.fleet.resharing import GROUP, Resharing, in_heads, share_heads
from fastdecode.wire.blocks import Done, Retain, no_keys, words_of
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import (
    Accepted,
    Attend,
    AttendResult,
    BeginStep,
    FromRWorker,
    Hello,
    Open,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.transport import TIMEOUT, closed_error, timeout_error


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
    """Return a group with two query heads and a KV head per member, and the other ends."""
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
        (Accepted(8), "answered Open for sequence_id=8, where 7 was due"),
        (Welcome("r1", 20, 16, 1), "sent Welcome, which was not asked for"),
    ],
)
def test_an_answer_to_something_else_is_one_members_alone(answer: FromRWorker, reason: str) -> None:
    fleet, peers = group_of(3)
    fleet.send(GROUP, Open(7, 100))
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


class Hub:
    """Time passes only while somebody waits here. ``signs`` and ``answers``: (when, worker)."""

    def __init__(
        self, num_workers: int, signs: list[tuple[float, int]], answers: list[tuple[float, int]]
    ) -> None:
        self.now = 100.0
        self.signs = sorted(signs)
        self.answers = deque(sorted(answers))
        self.connections = [
            SimpleNamespace(peer=f"R-worker {i}", heard_s=None, send=lambda message: None)
            for i in range(num_workers)
        ]

    def receive_any(self, timeout_s: float) -> Any:
        end = self.now + timeout_s
        answer = self.answers[0] if self.answers and self.answers[0][0] <= end else None
        self.now = max(self.now, end if answer is None else answer[0])
        for when, worker in self.signs:
            if when <= self.now:
                self.connections[worker].heard_s = max(
                    when, self.connections[worker].heard_s or 0.0
                )
        if answer is None:
            raise timeout_error("somebody", timeout_s)
        self.answers.popleft()
        return answer[1], Accepted(0)


def timed_pool(
    signs: list[tuple[float, int]], answers: list[tuple[float, int]]
) -> tuple[Hub, WorkerPool]:
    hub = Hub(2, signs, answers)
    made = WorkerPool(hub, timeout_s=50.0, silence_s=5.0, clock=lambda: hub.now)  # type: ignore[arg-type]
    for worker in range(2):
        made.send(worker, Open(0, 1))
    return hub, made


def everything(pool: WorkerPool, num_answers: int) -> list[int]:
    """Receive until ``num_answers`` R-workers have answered or are lost. Return the former."""
    answered = []
    while len(answered) + len(pool.lost) < num_answers:
        received = pool.receive()
        if received is not None:
            answered.append(received[0])
    return answered


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "R-worker 1 has closed the connection",
            "R-worker 1 is lost: it has closed the connection",
        ),
        ("R-worker 1 is lost: its process has died", "R-worker 1 is lost: its process has died"),
        ("out of memory", "R-worker 1 is lost: out of memory"),
        ("R-worker 12 failed", "R-worker 1 is lost: R-worker 12 failed"),
    ],
)
def test_a_loss_is_told_with_one_name(
    said: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, made = timed_pool([], [])
    made.lose(1, WorkerError(said))
    assert caplog.messages == [shown]


def test_a_slow_worker_that_gives_signs_of_life_is_not_given_up() -> None:
    signs = [(100.0 + i, worker) for i in range(41) for worker in range(2)]
    _, made = timed_pool(signs, [(140.0, 0), (141.0, 1)])
    assert everything(made, 2) == [0, 1]
    assert not made.lost


def test_one_that_falls_silent_is_given_up_by_name_after_the_time_asked_for() -> None:
    signs = [(100.0 + i, 0) for i in range(41)] + [(100.0, 1), (101.0, 1), (103.0, 1)]
    hub, made = timed_pool(signs, [(140.0, 0)])
    while not made.lost:
        assert made.receive() is None
    assert hub.now == pytest.approx(108.0)
    assert list(made.lost) == [1] and made.lost[1].code == TIMEOUT
    assert "R-worker 1 has given no sign of life for 5 s" in made.lost[1].message
    assert everything(made, 2) == [0]


def test_one_that_lives_but_never_answers_is_given_up_too() -> None:
    hub, made = timed_pool(
        [(100.0 + i, worker) for i in range(90) for worker in range(2)], [(110.0, 0)]
    )
    assert everything(made, 2) == [0]
    assert (
        hub.now == pytest.approx(150.0, abs=1.0)
        and "hasn't answered for 50 s" in made.lost[1].message
    )


def test_time_in_which_nobody_looked_is_nobodys_silence() -> None:
    """The S-worker computed for long, and took no signs of life in."""
    hub, made = timed_pool([(100.0, 0), (100.0, 1), (131.0, 0)], [(132.0, 0), (130.5, 1)])
    hub.connections[0].heard_s = hub.connections[1].heard_s = 100.0
    hub.now = 130.0
    assert everything(made, 2) == [1, 0]
    assert not made.lost


def test_whoever_is_absent_from_the_beginning_is_lost_and_told_once() -> None:
    """So that others may come in its place."""
    hub = Hub(2, [], [])
    reason = WorkerError("R-worker 1 isn't there")
    made = WorkerPool(hub, timeout_s=50.0, clock=lambda: hub.now, absent={1: reason})  # type: ignore[arg-type]
    assert made.lost == {1: reason}
    assert made.take_losses() == [(1, reason)] and not made.placement.has_moved
    assert made.take_losses() == []


def test_what_a_lost_worker_said_before_is_no_answer_that_is_owed() -> None:
    """Worker 1 is gone; looking for whom, the timed_pool finds an answer of worker 0's."""
    hub, made = timed_pool([], [])

    def receive_any(timeout_s: float) -> Any:
        raise closed_error("somebody", by_peer=True)

    def gone() -> Any:
        raise closed_error("R-worker 1", by_peer=True)

    hub.receive_any = receive_any  # type: ignore[method-assign]
    hub.connections[0].poll = lambda: Accepted(0)
    hub.connections[1].poll = gone
    assert made.receive() is None and list(made.lost) == [1] and made.is_owed
    made.lose(HolderId(0), WorkerError("R-worker 0 sent nonsense before"))
    assert not made.is_owed


class Device:
    """A cache that answers at once, beside two R-workers."""

    peer = "the device"
    heard_s = None
    is_open = True

    def __init__(self) -> None:
        self._answers: deque[FromRWorker] = deque()

    def send(self, message: ToRWorker) -> None:
        if isinstance(message, Retain):
            self._answers.append(Done(2, message.job, no_keys(), 0, 0.0))
        else:
            assert isinstance(message, Open)
            self._answers.append(Accepted(message.sequence_id))

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        return self._answers.popleft()

    def poll(self) -> FromRWorker | None:
        return self._answers.popleft() if self._answers else None

    def close(self) -> None:
        """Nothing to close."""


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
    fleet.send(GROUP, Open(4, 100))
    while not fleet.gone:
        assert fleet.receive(most_s=0.0) is None
    assert [holder for holder, _ in fleet.take_losses()] == [GROUP]
    hello = hello_for(KVSpec(1, 2, 8, DType.FLOAT32, 16))
    resharing = Resharing(fleet, hello, Deadlines(5.0, 5.0))
    for sequence in (5, 6, 7):
        fleet.send(device, Open(sequence, 100))
    for _ in range(4):
        assert resharing.look([GROUP]) == {}
    assert fleet.is_owed and fleet.is_owed_at_once
    assert [fleet.receive() for _ in range(3)] == [(device, Accepted(x)) for x in (5, 6, 7)]
    assert not fleet.is_owed_at_once
    fleet.send(device, Retain(0, words_of([b"k" * 16]), np.ones(1, np.int32)))
    assert fleet.is_greeting and fleet.is_owed  # a step may wait for the report
    assert fleet.receive(most_s=0.0) is None
    assert [type(news) for news in fleet.take_moves()] == [Done]

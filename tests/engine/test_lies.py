"""An R-worker that lies: it is given up by name, what it said is believed
nowhere, and the others go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import prompts
from state_machine import HELLO
from trouble import give

from cpu_kernels import reference
from fastdecode import LLM, SamplingParams
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.messages import (
    Accepted,
    AttendResult,
    Failed,
    FromRWorker,
    OpenSequence,
    Refused,
    ToRWorker,
    Welcome,
)
from rworker.attention import AttentionExecutor
from rworker.instructions import Compute
from rworker.worker import start_worker_thread

WAIT_S = 60.0
HONEST = Welcome("r", 10, HELLO.kv.block_size, 1)


def fleet_of(num_peers: int) -> tuple[Fleet, list[InprocConnection[FromRWorker, ToRWorker]]]:
    """A fleet, and what its R-workers have in their hands."""
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    ends = [
        connect(hub, "S", InprocHub[FromRWorker, ToRWorker](), f"R-worker r{i}")[1]
        for i in range(num_peers)
    ]
    return Fleet(hub, WAIT_S), ends


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_blocks": -5}, "num_blocks=-5"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"num_blocks": 1 << 62}, f"num_blocks={1 << 62}, which is not within"),
        ({"num_threads": -1}, "num_threads=-1"),
        ({"block_size": 999}, "KV blocks of 999 tokens"),
    ],
)
def test_a_welcome_that_cannot_be(changes: dict[str, int], reason: str) -> None:
    fleet, (end,) = fleet_of(1)
    end.send(replace(HONEST, **changes))
    assert fleet.greet(HELLO) == {}
    assert reason in fleet.lost[0].message and fleet.lost[0].code == "protocol_error"


def test_an_answer_of_another_kind_than_was_asked() -> None:
    fleet, (one, other) = fleet_of(2)
    for end in (one, other):
        end.send(HONEST)
    assert fleet.greet(HELLO) == {0: HONEST, 1: HONEST}
    for holder in (0, 1):
        fleet.send(holder, OpenSequence(1, 8))
    one.send(HONEST)
    other.send(Accepted(1))
    other.send(Accepted(1))
    assert fleet.receive() is None
    assert fleet.receive() == (1, Accepted(1))
    fleet.send(1, OpenSequence(2, 8))
    assert [holder for holder, _ in fleet.take_losses()] == [0]
    assert "sent Welcome, which nobody asked for" in fleet.lost[0].message
    assert fleet.take_losses() == []


def test_control_characters_reach_no_log(caplog: pytest.LogCaptureFixture) -> None:
    fleet, (end,) = fleet_of(1)
    end.send(Failed("r\x1b[2J", "protocol_error", "a\nERROR all is well\x07"))
    assert fleet.greet(HELLO) == {}
    assert r"r\x1b[2J failed: a\nERROR all is well\x07" in fleet.lost[0].message
    assert all(message.isprintable() for message in caplog.messages) and caplog.messages
    assert Refused(1, "x", "a\rb").message == r"a\rb"


def test_a_neighbour_takes_over_a_lost_holder() -> None:
    """The fleet routes holders to peers: one R-worker keeps two."""
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    kernels: Any = reference
    workers = [
        start_worker_thread(
            f"r{i}", kv_bytes=1 << 20, hub=hub, executor=AttentionExecutor(kernels=kernels)
        )
        for i in range(2)
    ]
    fleet = Fleet(hub, WAIT_S)
    hello = replace(HELLO, max_blocks=8)
    assert [welcome.worker for welcome in fleet.greet(hello).values()] == ["r0", "r1"]
    workers[0].connection.close()
    fleet.send(0, OpenSequence(1, 8))
    assert [holder for holder, _ in fleet.take_losses()] == [0]
    fleet.move(0, to=1)
    assert not fleet.lost and fleet.peer(0) == fleet.peer(1) == "R-worker r1"
    fleet.send(0, hello)
    answered = fleet.receive()
    assert answered is not None and answered[0] == 0 and isinstance(answered[1], Welcome)
    for holder in (0, 1):
        fleet.send(holder, OpenSequence(1, 8))
    assert [fleet.receive(), fleet.receive()] == [(0, Accepted(1)), (1, Accepted(1))]
    workers[1].connection.close()
    fleet.send(1, OpenSequence(2, 8))
    assert [holder for holder, _ in fleet.take_losses()] == [HolderId(0), HolderId(1)]
    for worker in workers:
        worker.join(WAIT_S)


class OfAnotherDtype(AttentionExecutor):
    """Answers with half of what was agreed."""

    def compute(self, compute: Compute) -> AttendResult:
        result = super().compute(compute)
        return replace(result, o=np.ones(result.o.shape, np.uint16))


def test_o_of_another_dtype_is_not_believed(
    tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "dtype": "float32",
        "r_threads": 1,
        "kv_memory_gb": 0.01,
        "r_workers": 2,
    }
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def tokens() -> tuple[list[tuple[int, ...]], int]:
        with LLM(str(tiny_checkpoint("llama")), **options) as llm:
            outputs = llm.generate(prompts([3, 9, 4, 5], seed=2), greedy)
            return [
                output.completions[0].token_ids for output in outputs
            ], llm.snapshot().engine.num_live_r_workers

    expected, num_live = tokens()
    assert num_live == 2
    give(monkeypatch, {"r1": OfAnotherDtype})
    assert tokens() == (expected, 1)

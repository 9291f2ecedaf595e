"""An R-worker that lies: it is given up by name, what it said is believed
nowhere, and the others go on."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import prompts
from safetensors.torch import load_file, save_file
from state_machine import HELLO
from trouble import NotFinite, give
from values import replace

from fastdecode import LLM, SamplingParams
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.greeting import greet
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.step import remote
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.messages import (
    Accepted,
    AttendResult,
    Failed,
    FromRWorker,
    Open,
    Refused,
    ToRWorker,
    Welcome,
)
from rworker.attention import AttentionExecutor
from rworker.instructions import Compute
from sworker.buffers import LENT_LAYERS, Staging

WAIT_S = 60.0
PROMPTS = prompts([3, 30, 90, 45, 7], seed=2)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
HERE: dict[str, Any] = {"r_threads": 1, "kv_memory_gb": 0.01, "r_workers": 2}
HONEST = Welcome("r", 10, HELLO.kv.block_size, 1)


def fleet_of(num_peers: int) -> tuple[WorkerPool, list[InprocConnection[FromRWorker, ToRWorker]]]:
    """A fleet, and what its R-workers have in their hands."""
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    ends = [
        connect(hub, "S", InprocHub[FromRWorker, ToRWorker](), f"R-worker r{i}")[1]
        for i in range(num_peers)
    ]
    return WorkerPool(hub, WAIT_S), ends


def test_no_layer_is_written_over_one_that_is_still_lent() -> None:
    """Members of a holder that only stores answer in any order. Memory of a layer is used again
    ``LENT_LAYERS`` later: the first one must have been stored by then, not only as many."""
    begin = SimpleNamespace(step=7, lane=0, want_lse=False, num_queries=np.zeros(4, np.int32))
    span: Any = SimpleNamespace(
        query_rows=slice(0, 0), closed=(), begin=begin, rows=slice(0, 4), holder=HolderId(0)
    )
    sent: list[Any] = []
    plan: Any = SimpleNamespace(
        staging=lambda lane: Staging(),
        fleet=SimpleNamespace(send=lambda holder, message: sent.append(message)),
        sinks=None,
        specs=(None,) * 9,
    )
    batch: Any = SimpleNamespace(spans=(span,), local=())
    step = remote.RemotePart(plan, batch, remote.StepRecord(batch.spans))
    for layer in range(LENT_LAYERS):
        step.scatter(layer, *torch.zeros(3, 4, 1, 8), None)
        assert step.ready() == (layer < LENT_LAYERS - 1)
        if layer == 2:  # a later stage's member is quicker than the first one's
            step.answered(HolderId(0), stored(2))
            step.answered(HolderId(0), stored(1))
    step.answered(HolderId(0), stored(3))
    assert not step.ready() and not step.settled
    step.answered(HolderId(0), stored(0))
    assert step.ready() and not step.settled
    step.answered(HolderId(0), stored(4))
    assert step.settled


def stored(layer: int) -> AttendResult:
    return AttendResult(7, 0, layer, np.zeros((0, 1, 8), np.float32), None, 0.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_blocks": -5}, "num_blocks=-5"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"num_blocks": 1 << 62}, f"num_blocks={1 << 62}, which is not within"),
        ({"block_size": 999}, "KV blocks of 999 tokens"),
    ],
)
def test_a_welcome_that_cannot_be(changes: dict[str, int], reason: str) -> None:
    fleet, (end,) = fleet_of(1)
    end.send(replace(HONEST, **changes))
    assert greet(fleet, HELLO) == {}
    assert reason in fleet.lost[0].message and fleet.lost[0].code == "protocol_error"


def test_an_answer_of_another_kind_than_was_asked() -> None:
    fleet, (one, other) = fleet_of(2)
    for end in (one, other):
        end.send(HONEST)
    assert greet(fleet, HELLO) == {0: HONEST, 1: HONEST}
    for holder in (0, 1):
        fleet.send(holder, Open(1, 8))
    one.send(HONEST)
    other.send(Accepted(1))
    other.send(Accepted(1))
    assert fleet.receive() is None
    assert fleet.receive() == (1, Accepted(1))
    fleet.send(1, Open(2, 8))
    assert [holder for holder, _ in fleet.take_losses()] == [0]
    assert "sent Welcome, which was not asked for" in fleet.lost[0].message
    assert fleet.take_losses() == []


def test_an_answer_to_something_else_than_was_asked() -> None:
    fleet, (one, other) = fleet_of(2)
    for holder, end in enumerate((one, other)):
        fleet.send(holder, Open(1, 8))
        end.send(Accepted(1 + holder))
    assert fleet.receive() == (0, Accepted(1))
    assert fleet.receive() is None
    assert "answered Open for sequence_id=2, where 1 was due" in fleet.lost[1].message


def test_control_characters_reach_no_log(caplog: pytest.LogCaptureFixture) -> None:
    fleet, (end,) = fleet_of(1)
    end.send(Failed("r\x1b[2J", "protocol_error", "a\nERROR all is well\x07"))
    assert greet(fleet, HELLO) == {}
    assert r"r\x1b[2J failed: a\nERROR all is well\x07" in fleet.lost[0].message
    assert all(message.isprintable() for message in caplog.messages) and caplog.messages
    assert Refused(1, "x", "a\rb").message == r"a\rb"


class OfAnotherDtypeLater(AttentionExecutor):
    """From its 10th layer on."""

    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self._left = 10

    def compute(self, compute: Compute) -> AttendResult:
        result = super().compute(compute)
        self._left -= 1
        return replace(result, o=result.o.astype(np.uint16)) if self._left < 0 else result


@pytest.mark.parametrize("partition", ["sequences", "heads"])
def test_o_of_another_dtype_is_one_r_workers_alone(
    partition: str,
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_checkpoint("qwen3", num_attention_heads=10, num_key_value_heads=5)
    options = {**HERE, "r_workers": 3, "r_partition": partition, "lanes": 2}
    expected, _ = answers(model, **options)
    give(monkeypatch, {"r1": OfAnotherDtypeLater})
    assert answers(model, **options) == (expected, 2)
    assert caplog.text.count("R-worker r1 is lost: it answered o of uint16 (") == 1


def answers(model: Path | str, **options: Any) -> tuple[list[Any], int]:
    """Tokens or error codes of some requests, and how many R-workers are left."""
    sampled = replace(GREEDY, temperature=0.9, top_p=0.9, seed=5, n=2)
    asked = [GREEDY, sampled, GREEDY, GREEDY, sampled]
    with LLM(str(model), **{"dtype": "float32", **(options or HERE)}) as llm:
        outputs = llm.generate(PROMPTS, asked)
        found = [o.error.code if o.error else [c.token_ids for c in o.completions] for o in outputs]
        return found, llm.snapshot().engine.num_live_r_workers


@pytest.fixture(scope="module")
def undisturbed(tiny_checkpoint: Callable[..., Path]) -> tuple[Path, list[Any]]:
    model = tiny_checkpoint("llama", num_key_value_heads=2)
    return model, answers(model)[0]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, np.nan),
        ({"lanes": 2, "prefill_chunk": 16}, np.inf),
        ({"r_partition": "heads"}, np.nan),
        ({"split_tokens": 64}, np.nan),
        ({"prompt_attention": "r"}, np.nan),
    ],
)
def test_o_that_is_not_finite_fails_its_request_alone(
    options: dict[str, Any],
    what: float,
    undisturbed: tuple[Path, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its error names the R-workers that attended the step."""
    model, expected = undisturbed
    give(monkeypatch, {"r1": lambda: NotFinite(what=what)})
    found, num_live = answers(model, **HERE, **options)
    failed = [x for x in found if isinstance(x, str)]
    assert failed and set(failed) == {"non_finite_logits"} and num_live == 2
    tokens = [(x, y) for x, y in zip(found, expected, strict=True) if not isinstance(x, str)]
    assert all(x == y for x, y in tokens)
    assert re.search("Its step was attended by .*R-worker r1", caplog.text)


def with_weights(model: Path | str, to: Path, name: str, change: Callable[[Any], None]) -> Path:
    """A copy of a model, one of whose weights is another."""
    shutil.copytree(model, to)
    weights = load_file(to / "model.safetensors")
    change(weights[name])
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize(
    "options", [{}, {"r_partition": "heads", "lanes": 2}, {"split_tokens": 64}]
)
def test_a_request_that_is_not_finite_by_itself_fails_alone(
    options: dict[str, Any], undisturbed: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """One whose prompt has a token with a damaged embedding."""
    model, expected = undisturbed
    damaged_token = PROMPTS[2][50]
    others = [i for i, prompt in enumerate(PROMPTS) if damaged_token not in prompt]
    damaged = with_weights(
        model,
        tmp_path / "damaged",
        "model.embed_tokens.weight",
        lambda embedding: embedding[damaged_token].fill_(float("nan")),
    )
    found, num_live = answers(damaged, **HERE, **options)
    assert num_live == 2 and len(others) >= 2
    assert found[2] == "non_finite_logits"
    assert [found[i] for i in others] == [expected[i] for i in others]


def test_kv_that_overflows_in_the_cache_is_nobodys_fault(llama: str, tmp_path: Path) -> None:
    """What was sent is finite; as float16, in which it is kept, it isn't."""
    hot = with_weights(
        llama,
        tmp_path / "hot",
        "model.layers.0.self_attn.v_proj.weight",
        lambda weight: weight.mul_(1e8),
    )
    found, num_live = answers(hot, **HERE, kv_dtype="float16")
    assert (set(found), num_live) == ({"non_finite_logits"}, 2)

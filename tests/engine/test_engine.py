"""The engine, built of its parts: a scripted S-worker, whose tokens anybody can
work out, and R-workers as threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trouble import Trouble

from fastdecode.core.dtype import DType
from fastdecode.core.errors import RequestError, WorkerError
from fastdecode.core.holders import Holder, HolderKind
from fastdecode.core.sequence import Request, RequestOutput, SamplingParams
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.engine.engine import Engine
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.engine.step.pipeline import Pipeline
from fastdecode.engine.step.remote import AttentionPlan
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.life.lives import Status
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.options import ScheduleOptions
from fastdecode.text.codec import TextCodec
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import PROTOCOL_VERSION, FromRWorker, Hello, OpenSequence, ToRWorker
from rworker.worker import start_worker_thread
from sworker.sampler import SampledToken

VOCAB = 97
BLOCK_SIZE = 16
NUM_LAYERS = 2
SPEC = AttentionSpec(1, 1, 16, 1.0)
KV = KVSpec(NUM_LAYERS, 1, 16, DType.FLOAT32, BLOCK_SIZE)


def next_token(context: Sequence[int]) -> int:
    """What the scripted model says to so many tokens."""
    return (3 * sum(context) + len(context)) % VOCAB


def continued(prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


class ScriptedPass:
    """All keys are alike, so attention gives the mean of all values: the tokens themselves."""

    def __init__(self, token_ids: np.ndarray, positions: np.ndarray) -> None:
        self.layer = 0
        self._lengths = torch.from_numpy(positions + 1)
        self.q = torch.zeros(len(token_ids), 1, 16)
        self.k = torch.zeros(len(token_ids), 1, 16)
        self.v = torch.from_numpy(token_ids).float()[:, None, None].expand(-1, 1, 16).contiguous()
        self._sums = torch.empty(0)

    def advance(self, o: Tensor) -> bool:
        self._sums = (o[:, 0, 0] * self._lengths).round().long()
        self.layer += 1
        return self.layer < NUM_LAYERS

    def logits(self, rows: np.ndarray) -> Tensor:
        places = torch.from_numpy(rows)
        drawn = (3 * self._sums[places] + self._lengths[places]) % VOCAB
        return torch.nn.functional.one_hot(drawn, VOCAB).float()

    def device_s(self) -> float:
        return 0.0


class ScriptedSWorker:
    """Stands in for ``SWorker``. ``fails_at``: a request that meets an error at
    its token of this number."""

    def __init__(self, fails_at: dict[str, int] | None = None) -> None:
        self.spec = SimpleNamespace(attention=(SPEC,) * NUM_LAYERS, vocab_size=VOCAB)
        self.lanes: list[int] = []
        self._num_drawn: dict[int, int] = {}
        self._fails_at = fails_at or {}

    def begin(self, token_ids: np.ndarray, positions: np.ndarray, lane: int) -> ScriptedPass:
        self.lanes.append(lane)
        return ScriptedPass(token_ids, positions)

    def set_num_lanes(self, num_lanes: int) -> None:
        pass

    def sample(self, logits: Tensor, states: Sequence[Any]) -> list[SampledToken]:
        assert len(logits) == len(states)
        return [self._draw(row, state) for row, state in zip(logits, states, strict=True)]

    def _draw(self, row: Tensor, state: Any) -> SampledToken:
        drawn = self._num_drawn[id(state)] = self._num_drawn.get(id(state), 0) + 1
        if (
            self._fails_at.get(state.params.stop_token_ids and str(state.params.stop_token_ids[0]))
            == drawn
        ):
            return SampledToken(-1, error=RequestError("no token is left"))
        return SampledToken(int(row.argmax()))


@dataclass
class Rig:
    """An engine and what it is made of."""

    engine: Engine
    fleet: Fleet
    lifecycle: Lifecycle
    s_worker: ScriptedSWorker

    def run(self) -> dict[str, RequestOutput]:
        """Until nothing is left. The books are right after every step."""
        outputs: dict[str, RequestOutput] = {}
        for _ in range(2000):
            if not self.engine.num_unfinished:
                return outputs
            outputs.update((output.request_id, output) for output in self.engine.step())
            self.lifecycle.check_invariants()
        raise AssertionError("it doesn't get on")


@contextlib.contextmanager
def rig(
    num_workers: int = 2,
    *,
    lanes: int = 1,
    crash: dict[int, int] | None = None,
    num_blocks: int = 64,
    said_blocks: int | None = None,
    fails_at: dict[str, int] | None = None,
    **options: Any,
) -> Iterator[Rig]:
    """R-workers of ``num_blocks`` KV blocks, of which the scheduler is told
    ``said_blocks``. ``crash``: after how many layers an R-worker does."""
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    threads = [
        start_worker_thread(
            f"r{i}",
            kv_bytes=num_blocks * KV.block_bytes,
            hub=hub,
            executor=Trouble(crash[i]) if crash and i in crash else None,
        )
        for i in range(num_workers)
    ]
    fleet = Fleet(hub, timeout_s=60.0)
    fleet.greet(Hello(PROTOCOL_VERSION, "scripted", KV, (SPEC,) * NUM_LAYERS, DType.FLOAT32))
    holders = (
        Holder(HolderKind.R_WORKER, attends_prompts=True, answers_at_once=False, token_bytes=1),
    ) * num_workers
    plan = AttentionPlan((SPEC,) * NUM_LAYERS, DType.FLOAT32, fleet, torch.device("cpu"), holders)
    chosen = {
        "max_num_sequences": 8,
        "max_step_tokens": 8 + 24,
        "prefill_chunk": 10,
        "mode": "greedy",
    }
    schedule = ScheduleOptions(num_lanes=lanes, **(chosen | options))  # type: ignore[arg-type]
    blocks = (said_blocks or num_blocks,) * num_workers
    lifecycle = Lifecycle(make_scheduler(schedule, blocks, BLOCK_SIZE, opening_steps=1))
    s_worker = ScriptedSWorker(fails_at)
    pipeline = Pipeline(s_worker, plan, lanes)  # type: ignore[arg-type]
    engine = Engine(s_worker, pipeline, fleet, lifecycle, TextCodec(None), (VOCAB,))  # type: ignore[arg-type]
    try:
        yield Rig(engine, fleet, lifecycle, s_worker)
    finally:
        for i, thread in enumerate(threads):
            thread.stop()
            if i in fleet.lost:
                thread.connection.close()
            else:
                thread.join(30)


def request(name: str, num_prompt_tokens: int, num_tokens: int, n: int = 1, **more: Any) -> Request:
    params = SamplingParams(max_tokens=num_tokens, n=n, ignore_eos=True, **more)
    prompt = tuple((7 * i + len(name)) % VOCAB for i in range(num_prompt_tokens))
    return Request(name, prompt, params, num_tokens, seed=0)


ASKED = [
    request("a", 3, 20),
    request("b", 40, 9),
    request("c", 1, 30, n=2),
    request("d", 25, 12, n=3),
]
MORE = [request("e" * i, 5 + 9 * i, 10 + i) for i in range(2, 9)]


def assert_right(asked: Sequence[Request], outputs: dict[str, RequestOutput]) -> None:
    assert set(outputs) == {one.request_id for one in asked}
    for one in asked:
        output = outputs[one.request_id]
        assert output.error is None
        expected = continued(one.prompt_token_ids, one.max_tokens)
        assert [completion.token_ids for completion in output.completions] == [
            expected
        ] * one.params.n


@pytest.mark.parametrize(
    "options", [{}, {"lanes": 3}, {"split_tokens": 16}, {"length_quantile": 0.1, "lanes": 2}]
)
def test_every_token_comes_of_all_that_is_cached(options: dict[str, Any]) -> None:
    with rig(**options) as made:
        for one in [*ASKED, *MORE]:
            made.engine.submit(one)
        assert_right([*ASKED, *MORE], made.run())
        assert not made.lifecycle.lives.by_sequence and not made.lifecycle.grants
        assert made.engine.stats.num_recomputed == 0


@pytest.mark.parametrize("options", [{}, {"lanes": 2}, {"split_tokens": 16, "lanes": 2}])
@pytest.mark.parametrize("after", [0, 1, 12])
def test_a_loss_is_told_once_and_changes_no_token(after: int, options: dict[str, Any]) -> None:
    with rig(3, crash={1: after}, **options) as made:
        for one in ASKED:
            made.engine.submit(one)
        assert_right(ASKED, made.run())
        assert list(made.fleet.lost) == [1] and made.fleet.take_losses() == []
        assert made.engine.stats.num_recomputed > 0


def test_a_loss_recomputes_each_sequence_once() -> None:
    with rig(2, crash={1: 12}) as made:
        made.engine.submit(ASKED[0])
        made.engine.submit(ASKED[1])
        assert_right(ASKED[:2], made.run())
        assert made.engine.stats.num_recomputed == 1


def test_when_all_are_lost_the_first_loss_is_raised() -> None:
    with rig(2, crash={0: 20, 1: 20}) as made:
        for one in ASKED:
            made.engine.submit(one)
        with pytest.raises(WorkerError, match="no more memory"):
            made.run()


@pytest.mark.parametrize("lanes", [1, 2])
def test_r_workers_with_less_room_than_they_said_make_sequences_wait(lanes: int) -> None:
    with rig(2, num_blocks=4, said_blocks=9, lanes=lanes) as made:
        asked = [request(str(i), 20, 20) for i in range(6)]
        for one in asked:
            made.engine.submit(one)
        assert_right(asked, made.run())


def test_what_an_empty_r_worker_refuses_has_failed() -> None:
    with rig(1, num_blocks=2, said_blocks=9) as made:
        made.engine.submit(request("long", 60, 30))
        made.engine.submit(request("short", 6, 3))
        outputs = made.run()
        assert str(outputs["long"].error).startswith("R-worker r0 refused request long: ")
        assert outputs["short"].ok


def test_requests_are_cancelled_whatever_they_are_doing() -> None:
    """Waiting, being opened, with a step in flight: what is open is closed when
    they are at rest."""
    with rig(2, lanes=2) as made:
        asked = [replace(one, request_id=f"{one.request_id}{i}") for i in range(4) for one in ASKED]
        for one in asked:
            made.engine.submit(one)
        outputs: dict[str, RequestOutput] = {}
        cancelled = set()
        seen = set()
        for _ in range(40):
            outputs.update((output.request_id, output) for output in made.engine.step())
            lives = made.lifecycle.lives
            flying = {i for ids in lives.flying.values() for i in ids}
            for request_id, kind in [
                (
                    life.sequence.request.request_id,
                    (life.status, life.sequence.sequence_id in flying),
                )
                for life in lives.by_sequence.values()
                if life.fate is None
            ]:
                if kind not in seen and request_id not in cancelled and len(cancelled) < 8:
                    seen.add(kind)
                    cancelled.add(request_id)
                    made.engine.cancel(request_id)
                    made.lifecycle.check_invariants()
        outputs |= made.run()
        assert {(Status.RUNNING, True), (Status.WAITING, False)} <= seen
        assert_right([one for one in asked if one.request_id not in cancelled], outputs)


def test_an_error_ends_the_request_with_all_its_siblings() -> None:
    with rig(2, fails_at={"96": 5}) as made:
        made.engine.submit(ASKED[0])
        made.engine.submit(request("f", 7, 12, n=3, stop_token_ids=(96,)))
        outputs = made.run()
        assert isinstance(outputs["f"].error, RequestError)
        assert_right(ASKED[:1], {"a": outputs["a"]})


def test_what_can_t_be_queued_leaves_nothing_behind() -> None:
    with rig(1) as made:
        with pytest.raises(RequestError, match="tokenizer"):
            made.engine.submit(request("s", 3, 4, stop=("x",)))
        assert not made.engine.num_unfinished and not made.lifecycle.scheduler.num_waiting
        made.engine.submit(ASKED[0])
        with pytest.raises(RequestError, match="unfinished"):
            made.engine.submit(ASKED[0])
        assert_right(ASKED[:1], made.run())


def test_an_answer_that_nobody_asked_for_costs_the_r_worker_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with rig(2) as made:
        for one in ASKED:
            made.engine.submit(one)
        made.engine.step()
        made.fleet.send(0, OpenSequence(1 << 40, 16))
        assert_right(ASKED, made.run())
        assert list(made.fleet.lost) == [0] and "which nobody asked for" in caplog.text

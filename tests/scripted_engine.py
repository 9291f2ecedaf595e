"""An engine built of its parts: a scripted S-worker, whose tokens anybody can
work out, and R-workers as threads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from schedule_choices import schedule_options
from torch import Tensor
from trouble import Trouble
from values import replace

from fastdecode.core.clock import Clock
from fastdecode.core.delta import Delta, Listener, OutputFold
from fastdecode.core.dtype import DType
from fastdecode.core.errors import RequestError
from fastdecode.core.holders import Holder, HolderKind
from fastdecode.core.resuming import Session
from fastdecode.core.sequence import Request, RequestOutput, SamplingParams
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.engine.engine import Engine
from fastdecode.engine.extensions import EngineState, Extension, Recovery, ReplicaRecovery
from fastdecode.engine.fleet.greeting import greet
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.fleet.replicas import Replicas
from fastdecode.engine.requests import Requests
from fastdecode.engine.session import Recorder
from fastdecode.engine.setup.workers import Replacements
from fastdecode.engine.step.pipeline import Pipeline
from fastdecode.engine.step.remote import AttentionPlan
from fastdecode.engine.transfers import Transfers
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.modes import make_scheduler
from fastdecode.text.codec import TextCodec
from fastdecode.text.grammars import GrammarMasks
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import FromRWorker, Hello, ToRWorker
from rworker.worker import start_worker_thread
from sworker.buffers import Fetched
from sworker.sampling.sampler import SampledToken

VOCAB = 97
BLOCK_SIZE = 16
NUM_LAYERS = 2
SPEC = AttentionSpec(1, 1, 16, 1.0)
KV = KVSpec(NUM_LAYERS, 1, 16, DType.FLOAT32, BLOCK_SIZE)
NUM_HEADS = 4  # of those that share out heads
HEADS_SPEC = AttentionSpec(NUM_HEADS, NUM_HEADS, 16, 1.0)
HEADS_KV = replace(KV, num_kv_heads=NUM_HEADS)
HELLO = Hello("scripted", KV, (SPEC,) * NUM_LAYERS, DType.FLOAT32)
HEADS_HELLO = replace(HELLO, kv=HEADS_KV, attention=(HEADS_SPEC,) * NUM_LAYERS)


def next_token(context: Sequence[int]) -> int:
    """What the scripted model says to so many tokens."""
    return (3 * sum(context) + len(context)) % VOCAB


def continued(prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


class ScriptedPass:
    """All keys are alike, so attention gives the mean of all values: the tokens
    themselves, in every head. Where heads differ, another token comes out."""

    place = None

    def __init__(self, token_ids: np.ndarray, positions: np.ndarray, num_heads: int) -> None:
        self.layer = 0
        self._lengths = torch.from_numpy(positions + 1)
        self.q = torch.zeros(len(token_ids), num_heads, 16)
        self.k = torch.zeros(len(token_ids), num_heads, 16)
        values = torch.from_numpy(token_ids).float()[:, None, None]
        self.v = values.expand(-1, num_heads, 16).contiguous()
        self._sums = torch.empty(0)

    def advance(self, o: Tensor) -> bool:
        sums = (o[:, :, 0] * self._lengths[:, None]).round().long()
        self._sums = sums[:, 0] + (sums != sums[:, :1]).any(dim=1)
        self.layer += 1
        return self.layer < NUM_LAYERS

    def logits(self, rows: np.ndarray) -> Tensor:
        places = torch.from_numpy(rows)
        drawn = (3 * self._sums[places] + self._lengths[places]) % VOCAB
        return torch.nn.functional.one_hot(drawn, VOCAB).float()

    def device_s(self) -> float:
        return 0.0


@dataclass
class ScriptedDrawing:
    tokens: list[SampledToken]
    fetched = Fetched(torch.empty(0))


class ScriptedSWorker:
    """Stands in for ``SWorker``. ``fails_at``: a request that meets an error at
    its token of this number."""

    gpu = None

    def __init__(
        self, fails_at: dict[str, int] | None = None, attention: AttentionSpec = SPEC
    ) -> None:
        self.spec = SimpleNamespace(attention=(attention,) * NUM_LAYERS, vocab_size=VOCAB)
        self._num_heads = attention.num_kv_heads
        self.lanes: list[int] = []
        self.failure: Exception | None = None
        """Raised by the next step."""
        self._num_drawn: dict[int, int] = {}
        self._fails_at = fails_at or {}

    def begin(self, rows: Tensor, lane: int, feed: None, x: None) -> ScriptedPass:
        if self.failure is not None:
            raise self.failure
        self.lanes.append(lane)
        return ScriptedPass(*rows.numpy(), self._num_heads)

    def draw(self, logits: Tensor, states: Sequence[Any], lane: int) -> ScriptedDrawing:
        assert len(logits) == len(states)
        return ScriptedDrawing(
            [self._draw(row, state) for row, state in zip(logits, states, strict=True)]
        )

    def drawn(self, drawing: ScriptedDrawing) -> list[SampledToken]:
        return drawing.tokens

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
    fleet: HolderPool
    lifecycle: Lifecycle
    s_worker: ScriptedSWorker

    _folds: dict[str, OutputFold] = field(default_factory=dict)
    _outputs: dict[str, RequestOutput] = field(default_factory=dict)

    def submit(self, request: Request) -> None:
        self.engine.submit(request, Listener(self._take, every_step=True))
        self._folds[request.request_id] = OutputFold(
            request.request_id, None, request.prompt_token_ids, request.params.n
        )

    def _take(self, delta: Delta) -> None:
        output = self._folds[delta.request_id].add(delta)
        if output is not None:
            self._outputs[delta.request_id] = output

    def run(self) -> dict[str, RequestOutput]:
        """Until nothing is left: what all requests have come to. The books are
        right after every step."""
        for _ in range(2000):
            if not self.engine.requests:
                return self._outputs
            self.engine.step()
            self.lifecycle.check_invariants()
        raise AssertionError("it doesn't get on")


def assemble(
    fleet: HolderPool,
    blocks: tuple[int, ...],
    lanes: int,
    replacements: Replacements | None = None,
    clock: Clock = time.monotonic,
    replicas: Replicas | None = None,
    session: Session | None = None,
    fails_at: dict[str, int] | None = None,
    keeps_blocks: bool = False,
    attention: AttentionSpec = SPEC,
    **options: Any,
) -> Rig:
    """An engine before holders that have been greeted, of so many KV blocks each."""
    holder = Holder(HolderKind.R_WORKER, attends_prompts=True, answers_at_once=False, token_bytes=1)
    specs = (attention,) * NUM_LAYERS
    plan = AttentionPlan(specs, DType.FLOAT32, fleet, torch.device("cpu"), (holder,) * len(blocks))
    chosen = {"max_num_sequences": 8, "max_step_tokens": 8 + 24, "prefill_chunk": 10}
    schedule = schedule_options("greedy", lanes, **(chosen | options))
    scheduler = make_scheduler(
        schedule, blocks, BLOCK_SIZE, opening_steps=1, keeps_blocks=keeps_blocks
    )
    lifecycle = Lifecycle(scheduler)
    s_worker = ScriptedSWorker(fails_at, attention)
    pipeline = Pipeline(s_worker, plan, lanes)  # type: ignore[arg-type]
    state = EngineState(
        fleet,
        lifecycle,
        Requests(TextCodec(None), (VOCAB,), VOCAB, GrammarMasks(TextCodec(None), VOCAB, ())),
    )
    own = replacements, clock
    recovery = ReplicaRecovery(state, replicas, *own) if replicas else Recovery(state, *own)
    extensions: list[Extension] = [Transfers(state)]
    if session is not None:
        extensions.append(Recorder(session, lifecycle.sequences))
    engine = Engine(s_worker, pipeline, state, recovery, extensions)  # type: ignore[arg-type]
    return Rig(engine, fleet, lifecycle, s_worker)


@contextlib.contextmanager
def rig(
    num_workers: int = 2,
    *,
    lanes: int = 1,
    crash: dict[int, int] | None = None,
    num_blocks: int = 64,
    said_blocks: int | None = None,
    fails_at: dict[str, int] | None = None,
    replacements: Replacements | None = None,
    **options: Any,
) -> Iterator[Rig]:
    """R-workers of ``num_blocks`` KV blocks, of which the scheduler is told ``said_blocks``.
    ``crash``: after how many layers an R-worker does; ``replacements``: who comes in its place."""
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
    fleet = WorkerPool(hub, timeout_s=60.0)
    greet(fleet, HELLO)
    blocks = (said_blocks or num_blocks,) * num_workers
    made = assemble(fleet, blocks, lanes, replacements, fails_at=fails_at, **options)
    try:
        yield made
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

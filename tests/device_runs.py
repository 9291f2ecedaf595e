"""Steps of several lanes on a recorded GPU: the real pipeline, staging, graphs
and layers, with R-workers that answer late."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from recorded_gpu import RecordedGpu
from values import replace

from fastdecode.core.dtype import DType
from fastdecode.core.holders import Holder, HolderId, HolderKind, Part, PartId, Residence
from fastdecode.core.model.families import read_model_spec
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.engine.step.batch import StepBatch
from fastdecode.engine.step.pipeline import Attention, LaneStep, Pipeline
from fastdecode.engine.step.remote import AttentionPlan
from fastdecode.schedule.plan import Chunk
from fastdecode.wire.messages import Attend, AttendResult, BeginStep
from sworker.buffers import Feed
from sworker.graphs import StepGraphs
from sworker.load.weights import random_model
from sworker.model.skeleton import Model
from sworker.sampling.sampler import Drawing, SamplingState
from sworker.worker import Pass, SWorker

CPU = torch.device("cpu")
NUM_LAYERS = 7


def spec_of(num_layers: int) -> ModelSpec:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32",
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": num_layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": 1e4, "tie_word_embeddings": False,
    }  # fmt: skip
    return read_model_spec(config, name="tiny")


HOLDERS = (Holder(HolderKind.R_WORKER, False, False, 1),) * 4
PROMPT = tuple(range(3, 23))


@dataclass
class LateFleet:
    """R-workers that read q, k and v when they answer, which is some time
    later; each in the order in which it was asked."""

    gpu: RecordedGpu
    at_once: bool = False  # whether an answer is here as soon as it is owed
    log: list[str] = field(default_factory=list)
    num_queries: int = 0  # rows of q that were sent
    lost: dict[int, object] = field(default_factory=dict)
    gone: dict[int, object] = field(default_factory=dict)
    has_moves: bool = False
    _asked: dict[int, deque[Attend]] = field(default_factory=dict)
    _o: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)
    _wants_lse: dict[tuple[int, int], bool] = field(default_factory=dict)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def peer(self, holder: int) -> str:
        return f"r{holder}"

    def take_losses(self) -> list[object]:
        return []

    @property
    def is_owed(self) -> bool:
        return any(self._asked.values())

    def send(self, holder: int, message: object) -> None:
        if isinstance(message, BeginStep):
            self._wants_lse[holder, message.lane] = message.want_lse
        if isinstance(message, Attend):
            self.log.append(f"send {lane_layer(message)}")
            self.num_queries += len(message.q)
            self._read(message, "what is sent")
            self._asked.setdefault(holder, deque()).append(message)

    def receive(self, *, most_s: float = math.inf) -> tuple[int, AttendResult] | None:
        if most_s == 0.0 and not self.at_once and self._random.random() < 0.7:
            return None
        holder = self._random.choice([holder for holder, asked in self._asked.items() if asked])
        asked = self._asked[holder].popleft()
        self._read(asked, "what was lent")
        self.log.append(f"receive {lane_layer(asked)}")
        o = self._room(holder, asked.lane, asked.q.shape)
        wants_lse = self._wants_lse[holder, asked.lane]
        lse = self._room(holder, asked.lane, asked.q.shape[:2]) if wants_lse else None
        return holder, AttendResult(asked.step, asked.lane, asked.layer, o, lse, 0.0)

    def _room(self, *key: Any) -> np.ndarray:
        """Of an answer, the same in every layer: it is written again."""
        if key not in self._o:
            self._o[key] = np.ones(key[-1], np.float32)
            self.gpu.host(self._o[key])
        self.gpu.write(self._o[key], "an answer")
        return self._o[key]

    def _read(self, asked: Attend, what: str) -> None:
        for array in (asked.q, asked.k, asked.v):
            self.gpu.read(array, what)


def lane_layer(message: Attend) -> str:
    return f"{'ABC'[message.lane]}{message.layer}"


class LoggedSWorker(SWorker):
    """Says when a unit is launched."""

    def __init__(
        self, model: Model, graphs: StepGraphs | None, log: list[str], gpu: RecordedGpu
    ) -> None:
        super().__init__(model.spec, model, CPU, graphs, gpu)
        self._log = log

    def begin(
        self,
        rows: torch.Tensor,
        lane: int = 0,
        feed: Feed | None = None,
        x: torch.Tensor | None = None,
    ) -> Pass:
        step = super().begin(rows, lane, feed, x)
        advance = step.advance
        self._log.append(f"launch {'ABC'[lane]}0")

        def advanced(o: torch.Tensor) -> bool:
            goes_on = advance(o)
            if goes_on:
                self._log.append(f"launch {'ABC'[lane]}{step.layer}")
            return goes_on

        step.advance = advanced  # type: ignore[method-assign]
        return step


@dataclass
class Run:
    """Steps of several lanes on a recorded GPU."""

    lanes: int
    graphs: bool = True
    prompts: int = 0  # of the sequences of each step: first chunks
    later: int = 0  # later chunks
    split: int = 0  # sequences with a closed part elsewhere
    draws: bool = False  # whether a token is drawn of each step's first row
    feeds: bool = False  # whether the lane's next step begins with it, before the host knows it
    rows: tuple[int, ...] = (6,)
    """Sequences of each step."""
    num_steps: int = 2
    num_holders: int = 2
    num_layers: int = NUM_LAYERS
    at_once: bool = False
    capture: bool = False
    direct: bool = False  # whether what R-workers answer goes to the device from where it is
    gpu: RecordedGpu = field(default_factory=RecordedGpu)

    def __post_init__(self) -> None:
        self.spec = spec_of(self.num_layers)
        self.fleet = LateFleet(self.gpu, self.at_once)
        fleet: Any = self.fleet
        self.remote = AttentionPlan(
            self.spec.attention, DType.FLOAT32, fleet, CPU, HOLDERS, gpu=self.gpu, slot_bytes=4096
        )
        self.plan: Attention = self.remote

    def run(
        self,
        mistake: Callable[[Run], None] = lambda run: None,
        on_step: Callable[[LaneStep], None] = lambda step: None,
    ) -> Run:
        with self.gpu:
            model = random_model(self.spec, device=CPU, dtype=torch.float32)
            graphs = None
            if self.graphs:
                graphs = StepGraphs(
                    model, CPU, capture=self.capture, num_lanes=self.lanes, max_rows=8, gpu=self.gpu
                )
                if self.capture:
                    graphs.prepare()
            pipeline = Pipeline(
                LoggedSWorker(model, graphs, self.fleet.log, self.gpu), self.plan, self.lanes
            )
            self.remote.prepare(self.lanes)
            for lane in range(self.lanes):
                self._record_landing(self.remote.staging(lane))
                if graphs is not None:
                    self.gpu.stays(graphs.buffers(lane).o)
            self.graphs_of, self.s_worker = graphs, pipeline._s_worker
            self.pipeline = pipeline
            mistake(self)
            self.gpu.calls.clear()
            numbers = itertools.count()
            self.coming: dict[int, Drawing] = {}
            for step in range(self.num_steps):
                for lane in range(self.lanes):
                    batch = self._batch(lane, self.rows[step % len(self.rows)], next(numbers))
                    fed_by = None
                    if (drawing := self.coming.get(lane)) is not None:
                        batch = replace(batch, feed=self.feed(drawing.tokens))
                        fed_by = drawing.fetched
                    pipeline.launch(lane, batch, np.arange(1), fed_by=fed_by)
                while pipeline.in_flight:
                    finished = pipeline.run(
                        self._draw if self.draws or self.feeds else None, self.take_in
                    )
                    assert finished is not None
                    if self.draws:
                        self.take_in(finished.lane)
                    on_step(finished)
            for lane, drawing in list(self.coming.items()):
                if not drawing.fetched.done:
                    drawing.fetched.wait()
                self.take_in(lane)
        return self

    def _record_landing(self, staging: Any) -> None:
        """The host writes what arrives beside torch."""
        receive = staging.receive
        staging._direct_bytes = 0 if self.direct else 1 << 40

        def received(array: np.ndarray, o: torch.Tensor, rows: slice) -> None:
            if not self.direct:
                self.gpu.write(staging._step.landing[rows], "what arrives")
            receive(array, o, rows)

        staging.receive = received

    def feed(self, tokens: torch.Tensor) -> Feed:
        """The first of drawn tokens, for the next step's first row."""
        return Feed(tokens, np.zeros(1, np.int64), np.zeros(1, np.int64))

    def _draw(self, step: LaneStep) -> Any:
        assert step.logits is not None
        state = SamplingState(SamplingParams(temperature=0), 0, PROMPT, (), 50, 0)
        drawing = self.coming[step.lane] = self.s_worker.draw(step.logits, [state], step.lane)
        return SimpleNamespace(done=True) if self.feeds else drawing.fetched

    def take_in(self, lane: int) -> None:
        """The host takes in what was drawn for the lane's step before."""
        drawing: Any = self.coming.pop(lane)
        self.gpu.read(drawing.fetched.host.numpy(), "what was drawn")

    def _batch(self, lane: int, num_rows: int, step: int) -> StepBatch:
        request = Request("r", PROMPT, SamplingParams(temperature=0), 1, seed=0)
        chunks = []
        for i in range(num_rows):
            sequence = Sequence.of(lane * 100 + i, request, 0)  # type: ignore[arg-type]
            is_new = i >= num_rows - self.prompts
            is_later = not is_new and i >= num_rows - self.prompts - self.later
            sequence.num_cached = 0 if is_new else 12 if is_later else len(PROMPT) - 1
            holder = HolderId(i % self.num_holders)
            parts: tuple[Part, ...] = (Part(PartId(lane * 100 + i), holder, 0, 64),)
            if i < self.split:
                other = HolderId((i + 1) % self.num_holders)
                parts = (
                    Part(PartId(lane * 100 + 50 + i), other, 0, 8),
                    Part(PartId(lane * 100 + i), holder, 8, 64),
                )
            sequence.residence = Residence(parts)
            num_tokens = len(PROMPT) - sequence.num_cached
            chunks.append(Chunk(sequence, num_tokens))
        return StepBatch.build(chunks, HOLDERS[: self.num_holders], step=step, lane=lane)

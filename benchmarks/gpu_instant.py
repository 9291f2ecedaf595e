"""Decode steps through the real pipeline with R-workers that answer at once:
used by gpu_suite.py."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fastdecode.core.holders import (
    Holder,
    HolderId,
    HolderKind,
    Part,
    PartId,
    Residence,
    SequenceId,
)
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.pipeline import Pipeline
from fastdecode.engine.step.remote import AttentionPlan
from fastdecode.schedule.plan import Chunk
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.messages import Attend, AttendResult
from sworker.graphs import StepGraphs
from sworker.model.skeleton import Model
from sworker.worker import SWorker

PAST = 100


class InstantFleet:
    """R-workers whose answers are there as soon as they are asked for, and are
    always the same. They lie where messages are received."""

    def __init__(self) -> None:
        self.lost: dict[int, Any] = {}
        self.kept_by_gone: list[int] = []
        self.moves = SimpleNamespace(of_tiers=())
        self._answers: deque[tuple[int, AttendResult]] = deque()
        self._pool = BufferPool()
        self._o: dict[tuple[int, ...], np.ndarray] = {}

    def peer(self, worker: int) -> str:
        return "nobody"

    def take_losses(self) -> list[Any]:
        return []

    def send(self, worker: int, message: object) -> None:
        if isinstance(message, Attend):
            shape = message.q.shape
            if shape not in self._o:
                q = message.q
                self._o[shape] = self._pool.take(q.nbytes).view(q.dtype).reshape(shape)
                self._o[shape][:] = q
            result = AttendResult(
                message.step, message.lane, message.layer, self._o[shape], None, 0.0
            )
            self._answers.append((worker, result))

    @property
    def is_owed(self) -> bool:
        return bool(self._answers)

    def receive(self, *, most_s: float = math.inf) -> tuple[int, AttendResult]:
        return self._answers.popleft()


def instant_steps(
    model: Model,
    device: torch.device,
    num_lanes: int,
    rows: int,
    num_steps: int,
    capture: bool,
    num_r_workers: int = 1,
) -> tuple[float, float]:
    """(seconds of a step of all lanes, median; seconds of all its units one
    after the other, the least). What the ratio hides is nothing: batches are
    laid out before the clock starts, and units are timed without what comes
    between them."""
    graphs = StepGraphs(model, device, capture=capture, num_lanes=num_lanes)
    graphs.prepare([graphs.buckets.of(rows)])
    s_worker = SWorker(model.spec, model, device, graphs)
    holder = Holder(
        HolderKind.R_WORKER, attends_prompts=False, answers_at_once=False, token_bytes=1
    )
    holders = (holder,) * num_r_workers
    plan = AttentionPlan(
        model.spec.attention, model.embed_tokens.weight.dtype, InstantFleet(), device, holders  # type: ignore[arg-type]
    )  # fmt: skip
    pipeline = Pipeline(s_worker, plan, num_lanes)
    steps_s, units_s = [], []
    for step in range(num_steps + 4):
        batches = [_batch(holders, step, lane, num_lanes, rows) for lane in range(num_lanes)]
        steps_s.append(_timed(device, partial(_run_step, pipeline, batches)))
        units_s.append(_timed(device, partial(_run_units, graphs, num_lanes, rows)))
    return statistics.median(steps_s[4:]), min(units_s[4:])


def _batch(
    holders: tuple[Holder, ...], step: int, lane: int, num_lanes: int, rows: int
) -> StepBatch:
    request = Request(
        "instant", tuple(range(3, 3 + PAST + 1)), SamplingParams(temperature=0), 1, seed=0
    )
    chunks = []
    for i in range(rows):
        sequence = Sequence.of(SequenceId(lane * rows + i), request, 0)
        holder = HolderId(i % len(holders))
        part = Part(PartId(sequence.sequence_id), holder, 0, PAST + 1)
        sequence.num_cached, sequence.residence = PAST, Residence((part,))
        chunks.append(Chunk(sequence, 1))
    return StepBatch.build(chunks, holders, step=step * num_lanes + lane, lane=lane)


def _run_step(pipeline: Pipeline, batches: list[StepBatch]) -> None:
    for lane, batch in enumerate(batches):
        pipeline.launch(lane, batch, np.arange(0))
    while pipeline.in_flight:
        pipeline.run()


def _run_units(graphs: StepGraphs, num_lanes: int, rows: int) -> None:
    for unit in range(graphs.num_units):
        for lane in range(num_lanes):
            graphs.run(lane, unit, graphs.buckets.of(rows))


def _timed(device: torch.device, run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started

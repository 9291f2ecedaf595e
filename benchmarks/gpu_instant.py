"""Decode steps through the real pipeline with R-workers that answer at once: used by
gpu_fast.py."""

from __future__ import annotations

import itertools
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
from gpu_setup import distance

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
        self.gone: dict[int, Any] = {}
        self.moves = SimpleNamespace(has_moves=False)
        self.answers: dict[int, np.ndarray] = {}
        """By R-worker."""
        self._owed: deque[tuple[int, AttendResult]] = deque()
        self._pool = BufferPool()

    def peer(self, worker: int) -> str:
        return "nobody"

    def take_losses(self) -> list[Any]:
        return []

    def send(self, worker: int, message: object) -> None:
        if isinstance(message, Attend):
            q = message.q
            if worker not in self.answers:
                self.answers[worker] = self._pool.take(q.nbytes).view(q.dtype).reshape(q.shape)
                self.answers[worker][:] = q
            result = AttendResult(
                message.step, message.lane, message.layer, self.answers[worker], None, 0.0
            )
            self._owed.append((worker, result))

    @property
    def is_owed(self) -> bool:
        return bool(self._owed)

    def receive(self, *, most_s: float = math.inf) -> tuple[int, AttendResult]:
        return self._owed.popleft()


class Instant:
    """Steps of some lanes, of like rows each.

    Args:
        capture: whether units are CUDA graphs.
    """

    def __init__(
        self,
        model: Model,
        device: torch.device,
        num_lanes: int,
        rows: int,
        capture: bool,
        num_r_workers: int = 1,
    ) -> None:
        self._device, self._num_lanes, self._rows = device, num_lanes, rows
        self._graphs = StepGraphs(model, device, capture=capture, num_lanes=num_lanes)
        self._graphs.prepare([self._graphs.buckets.of(rows)])
        s_worker = SWorker(model.spec, model, device, self._graphs)
        holder = Holder(
            HolderKind.R_WORKER, attends_prompts=False, answers_at_once=False, token_bytes=1
        )
        self._holders = (holder,) * num_r_workers
        self._fleet: Any = InstantFleet()
        dtype = model.embed_tokens.weight.dtype
        plan = AttentionPlan(model.spec.attention, dtype, self._fleet, device, self._holders)
        self._pipeline = Pipeline(s_worker, plan, num_lanes)
        self._steps = itertools.count()

    def seconds(self, num_steps: int) -> tuple[float, float]:
        """(seconds of a step of all lanes, median; seconds of all its units one
        after the other, the least). What the ratio hides is nothing: batches are
        laid out before the clock starts, and units are timed without what comes
        between them."""
        steps_s, units_s = [], []
        for _ in range(num_steps + 4):
            batches = self._batches()
            steps_s.append(_timed(self._device, partial(self._run_step, batches)))
            units_s.append(_timed(self._device, self._run_units))
        return statistics.median(steps_s[4:]), min(units_s[4:])

    def max_error(self) -> float:
        """How far a step's result is from that of its units as they are, by the
        answers that R-workers gave."""
        self._run_step(self._batches())
        _finish(self._device)
        answers = [self._fleet.answers[worker] for worker in range(len(self._holders))]
        worst = 0.0
        for lane in range(self._num_lanes):
            buffers = self._graphs.buffers(lane)
            found = buffers.x[: self._rows].clone()
            o = torch.from_numpy(np.concatenate(answers)).view(buffers.o.dtype)
            buffers.o[: self._rows].copy_(o)
            for unit in range(self._graphs.num_units):
                self._graphs.unit(lane, unit, self._graphs.buckets.of(self._rows))
            worst = max(worst, distance(found, buffers.x[: self._rows]))
        return worst

    def _batches(self) -> list[StepBatch]:
        step = next(self._steps)
        lanes = range(self._num_lanes)
        return [_batch(self._holders, step, lane, self._num_lanes, self._rows) for lane in lanes]

    def _run_step(self, batches: list[StepBatch]) -> None:
        for lane, batch in enumerate(batches):
            self._pipeline.launch(lane, batch, np.arange(0))
        while self._pipeline.lanes.in_flight:
            self._pipeline.run()

    def _run_units(self) -> None:
        for unit in range(self._graphs.num_units):
            for lane in range(self._num_lanes):
                self._graphs.run(lane, unit, self._graphs.buckets.of(self._rows))


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


def _timed(device: torch.device, run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    _finish(device)
    return time.perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

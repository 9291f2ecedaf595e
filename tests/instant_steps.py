"""Decode steps through the real pipeline with R-workers that answer at once."""

from __future__ import annotations

import itertools
import math
from collections import deque
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
from fastdecode.engine.step.batch import StepBatch
from fastdecode.engine.step.pipeline import Pipeline
from fastdecode.engine.step.remote import AttentionPlan
from fastdecode.schedule.plan import Chunk
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.messages import Attend, AttendResult
from sworker.graphs import StepGraphs
from sworker.model.skeleton import Model
from sworker.worker import SWorker


class InstantFleet:
    """R-workers whose answers are there as soon as they are requested, and are always the same."""

    def __init__(self) -> None:
        self.lost: dict[int, Any] = {}
        self.gone: dict[int, Any] = {}
        self.has_moves = False
        self.answers: dict[int, np.ndarray] = {}
        """Answers by R-worker, in memory of received messages."""
        self._owed: deque[tuple[int, AttendResult]] = deque()
        self._pool = BufferPool()

    def peer(self, worker: int) -> str:
        return "instant"

    def take_losses(self) -> list[Any]:
        return []

    def send(self, worker: int, message: object) -> None:
        if not isinstance(message, Attend):
            return
        q = message.q
        if worker not in self.answers:
            self.answers[worker] = self._pool.take(q.nbytes).view(q.dtype).reshape(q.shape)
            self.answers[worker][:] = q
        o = self.answers[worker]
        answer = AttendResult(message.step, message.lane, message.layer, o, None, 0.0)
        self._owed.append((worker, answer))

    @property
    def is_owed(self) -> bool:
        return bool(self._owed)

    def receive(self, *, most_s: float = math.inf) -> tuple[int, AttendResult]:
        return self._owed.popleft()


class InstantSteps:
    """Steps of some lanes with equal rows.

    Args:
        capture: Units are CUDA graphs.
        gpu: Device of tests without a GPU. By default that of ``device``.
    """

    def __init__(
        self,
        model: Model,
        device: torch.device,
        num_lanes: int,
        rows: int,
        num_r_workers: int,
        *,
        capture: bool,
        gpu: Any = None,
    ) -> None:
        self._lanes, self._rows = range(num_lanes), rows
        self._graphs = StepGraphs(model, device, capture=capture, num_lanes=num_lanes, gpu=gpu)
        self._bucket = self._graphs.buckets.of(rows)
        self._graphs.prepare([self._bucket])
        s_worker = SWorker(model.spec, model, device, self._graphs, gpu)
        holder = Holder(
            HolderKind.R_WORKER, attends_prompts=False, answers_at_once=False, token_bytes=1
        )
        self._holders = (holder,) * num_r_workers
        fleet: Any = InstantFleet()
        dtype = model.embed_tokens.weight.dtype
        plan = AttentionPlan(model.spec.attention, dtype, fleet, device, self._holders, gpu=gpu)
        self._pipeline = Pipeline(s_worker, plan, num_lanes)
        self._steps = itertools.count()

    def batches(self) -> list[StepBatch]:
        """Lay out the next step, a batch for each lane."""
        step = next(self._steps)
        return [self._batch(step, lane) for lane in self._lanes]

    def run(self, batches: list[StepBatch]) -> None:
        for lane, batch in enumerate(batches):
            self._pipeline.launch(lane, batch, np.arange(0))
        while self._pipeline.in_flight:
            self._pipeline.run()

    def run_units(self) -> None:
        """Run the step's units one after the other, without what comes between them."""
        for unit in range(self._graphs.num_units):
            for lane in self._lanes:
                self._graphs.run(lane, unit, self._bucket)

    def _batch(self, step: int, lane: int) -> StepBatch:
        """Return a batch of sequences with 100 cached tokens, spread over the holders."""
        request = Request("r", tuple(range(3, 104)), SamplingParams(temperature=0), 1, seed=0)
        chunks = []
        for i in range(self._rows):
            sequence = Sequence.of(SequenceId(lane * self._rows + i), request, 0)
            holder = HolderId(i % len(self._holders))
            part = Part(PartId(sequence.sequence_id), holder, 0, 101)
            sequence.num_cached, sequence.residence = 100, Residence((part,))
            chunks.append(Chunk(sequence, 1))
        number = step * len(self._lanes) + lane
        return StepBatch.build(chunks, self._holders, step=number, lane=lane)

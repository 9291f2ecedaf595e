"""Decode steps through the real pipeline with R-workers that answer at once:
used by gpu_suite.py."""

from __future__ import annotations

import statistics
import time
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
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.pipeline import Pipeline
from fastdecode.engine.step.remote import AttentionPlan
from fastdecode.schedule.plan import Chunk
from fastdecode.wire.messages import Attend, AttendResult
from sworker.graphs import StepGraphs
from sworker.model.skeleton import Model
from sworker.worker import SWorker

PAST = 100


class InstantFleet:
    """One R-worker whose answers are there as soon as they are asked for, and
    are always the same."""

    def __init__(self) -> None:
        self.lost: dict[int, Any] = {}
        self._answers: deque[tuple[int, AttendResult]] = deque()
        self._o: dict[tuple[int, ...], np.ndarray] = {}

    def peer(self, worker: int) -> str:
        return "nobody"

    def take_losses(self) -> list[Any]:
        return []

    def send(self, worker: int, message: object) -> None:
        if isinstance(message, Attend):
            shape = message.q.shape
            if shape not in self._o:
                self._o[shape] = message.q.copy()
            result = AttendResult(
                message.step, message.lane, message.layer, self._o[shape], None, 0.0
            )
            self._answers.append((worker, result))

    @property
    def is_owed(self) -> bool:
        return bool(self._answers)

    def receive(self, *, wait: bool = True) -> tuple[int, AttendResult]:
        return self._answers.popleft()


def instant_steps(
    model: Model, device: torch.device, num_lanes: int, rows: int, num_steps: int, capture: bool
) -> tuple[float, float]:
    """Medians over steps of all lanes: (seconds of the host's clock, seconds of
    the S-part's compute)."""
    spec = model.spec
    s_worker = SWorker(spec, model, device, StepGraphs(model, device, capture=capture))
    holders = (
        Holder(HolderKind.R_WORKER, attends_prompts=False, answers_at_once=False, token_bytes=1),
    )
    fleet = InstantFleet()
    plan = AttentionPlan(spec.attention, model.embed_tokens.weight.dtype, fleet, device, holders)  # type: ignore[arg-type]
    pipeline = Pipeline(s_worker, plan, num_lanes)
    request = Request(
        "instant", tuple(range(3, 3 + PAST + 1)), SamplingParams(temperature=0), 1, seed=0
    )
    times: list[tuple[float, float]] = []
    number = 0
    for _ in range(num_steps + 4):
        started, finished = time.perf_counter(), []
        for lane in range(num_lanes):
            sequences = [Sequence.of(SequenceId(lane * rows + i), request, 0) for i in range(rows)]
            for sequence in sequences:
                part = Part(PartId(sequence.sequence_id), HolderId(0), 0, PAST + 1)
                sequence.num_cached, sequence.residence = PAST, Residence((part,))
            batch = StepBatch.build(
                [Chunk(sequence, 1) for sequence in sequences], holders, step=number, lane=lane
            )
            number += 1
            if lane == 0:
                started = time.perf_counter()
            pipeline.launch(lane, batch, np.arange(0))
        while pipeline.in_flight:
            step = pipeline.run()
            assert step is not None
            finished.append(step)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed_s = time.perf_counter() - started
        times.append(
            (elapsed_s, sum(step.forward.device_s() or step.s_compute_s for step in finished))
        )
    steps, s_parts = zip(*times[4:], strict=True)
    return statistics.median(steps), statistics.median(s_parts)

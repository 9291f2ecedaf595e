"""What a finished step says about how long its parts took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from device_runs import NUM_LAYERS, Run

from fastdecode.core.holders import Holder, HolderKind, Part, Residence
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.engine.extensions import StepTiming
from fastdecode.engine.step.batch import StepBatch
from fastdecode.engine.step.pipeline import Begun, LaneStep, StepRecord
from fastdecode.schedule.plan import Chunk
from fastdecode.schedule.times import MeasuredTimes, RPartTime


class Told(MeasuredTimes):
    def observe(
        self, num_decoding: int, num_prompt_tokens: int, s_part_s: float, r_parts: object
    ) -> None:
        self.told = num_decoding, num_prompt_tokens, r_parts


def chunk(
    sequence_id: int, num_cached: int, num_tokens: int, holders: tuple[int, ...] = (0,)
) -> Chunk:
    sequence = Sequence.of(sequence_id, Request("r", (1,) * 100, SamplingParams(), 1, seed=0), 0)
    size = 100 if len(holders) == 1 else 32
    parts = (Part(10 * sequence_id + i, holder, size * i, size) for i, holder in enumerate(holders))
    sequence.num_cached, sequence.residence = num_cached, Residence(tuple(parts))
    return Chunk(sequence, num_tokens)


@pytest.mark.parametrize("prompts_on_r", [False, True])
def test_what_a_chunk_attends_of_its_past_is_load(prompts_on_r: bool) -> None:
    """Its own tokens are counted as a prompt's, whoever attends them."""
    chunks = [
        chunk(0, 50, 1),
        chunk(1, 30, 7),
        chunk(2, 0, 9),
        chunk(3, 40, 4, (1, 0)),  # 32 of its past are on R-worker 1
    ]
    batch = StepBatch.build(
        chunks, (Holder(HolderKind.R_WORKER, prompts_on_r, False, 1),) * 2, step=0
    )
    record = StepRecord(batch.spans)
    record.r_s.update({0: 0.25, 1: 0.5})  # type: ignore[dict-item]
    forward: Any = SimpleNamespace(device_s=lambda: 0.0, layer=0)
    times = Told()
    step = LaneStep(0, batch, np.zeros(0, np.int64), record, Begun(), forward)
    StepTiming(times).completed(step, 0.0)
    parts = {0: RPartTime(51 + 30 + 8, 7 + 9 + 4, 0.25), 1: RPartTime(32, 4, 0.5)}
    assert times.told == (1, 20, parts)


def test_messages_are_the_hosts_time_and_not_the_way_out_and_back() -> None:
    """Else a host that can't keep up would be told that more lanes help."""
    run, steps, now = Run(1, num_steps=1, num_holders=1, at_once=True), [], [0.0]
    send = run.fleet.send

    def slow_send(holder: int, message: object) -> None:
        now[0] += 100.0
        send(holder, message)

    run.fleet.send = slow_send  # type: ignore[method-assign]
    with mock.patch("time.perf_counter", side_effect=lambda: now[0]):
        run.run(on_step=steps.append)
    assert steps[0].s_compute_s >= 100.0 * NUM_LAYERS
    assert steps[0].record.round_trip_s == 0.0

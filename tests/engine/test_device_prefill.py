"""Prompts in several chunks whose K and V stay on the device until they are
done: R-workers store, and are asked nothing. (``test_late_device`` runs whole
engines with them.)"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from device_runs import CPU, HOLDERS, PROMPT, Run, spec_of
from recorded_gpu import RecordedGpu

from fastdecode.core.dtype import DType
from fastdecode.core.holders import HolderId, Part, PartId, Residence
from fastdecode.core.sequence import Request, Sequence
from fastdecode.core.sequence import SamplingParams as Params
from fastdecode.core.spec import KVSpec
from fastdecode.engine.step.device_prefill import DevicePrefill, DevicePrefillChunks
from fastdecode.engine.step.layout import StepBatch
from fastdecode.schedule.plan import Chunk
from sworker.paged import PagedKV

CHUNKS = (8, 8, 4)
"""Of a prompt of 20 tokens."""


def held_prompts(num_tokens: int, num_layers: int = 2) -> DevicePrefill:
    spec = spec_of(num_layers).attention
    kv = KVSpec(num_layers, spec[0].num_kv_heads, spec[0].head_dim, DType.FLOAT32, 4)
    return DevicePrefill(PagedKV(kv, spec, num_tokens // 4, CPU))


def sequence(number: int, holder: int = 0) -> Sequence:
    request = Request("r", PROMPT, Params(temperature=0), 9, seed=0)
    made = Sequence.of(number, request, 0)  # type: ignore[arg-type]
    made.residence = Residence((Part(PartId(number), HolderId(holder), 0, 64),))
    return made


def step(*chunks: Chunk) -> StepBatch:
    return StepBatch.build(chunks, HOLDERS, step=0)


def run_chunk(held: DevicePrefill, *sequences: Sequence) -> DevicePrefillChunks | None:
    """Begin the next chunk of each, which is then over."""
    nexts = [Chunk(one, CHUNKS[one.num_cached // 8]) for one in sequences]
    begun = held.begin(step(*nexts))
    for chunk in nexts:
        chunk.sequence.num_cached += chunk.num_tokens
    return begun


def test_whoever_begins_anew_is_held_anew() -> None:
    held, one, two = held_prompts(40), sequence(1), sequence(2)
    run_chunk(held, one)
    run_chunk(held, one)
    one.num_cached = 0  # its R-worker was lost
    assert run_chunk(held, one) is not None
    assert held.num_held == 20
    one.num_cached = 4  # a replica has so many
    begun = held.begin(step(Chunk(one, 8)))
    assert begun is None
    assert held.num_held == 0
    run_chunk(held, two)
    two.num_cached = 0  # cancelled, say
    assert run_chunk(held, sequence(3)) is not None
    assert held.num_held == 20
    del two
    assert held.num_held == 0


@dataclass
class HeldRun(Run):
    """Every second row's prompt comes in chunks; then it decodes, as the others
    do."""

    num_steps: int = 4
    num_held: int = 256
    sequences: dict[int, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        prompts = held_prompts(self.num_held, self.num_layers)
        self.plan = self.remote = replace(self.remote, prompts=prompts)

    def _batch(self, lane: int, num_rows: int, step: int) -> StepBatch:
        chunks, num_before = [], step // self.lanes
        for i in range(num_rows):
            number = lane * 100 + i
            one = self.sequences.setdefault(number, sequence(number, i % self.num_holders))
            is_prompt = i % 2 == 0 and num_before < len(CHUNKS)
            one.num_cached = 8 * num_before if is_prompt else len(PROMPT) - 1
            chunks.append(Chunk(one, CHUNKS[num_before] if is_prompt else 1))
        return StepBatch.build(chunks, HOLDERS[: self.num_holders], step=step, lane=lane)


@pytest.mark.parametrize("lanes", [1, 2])
def test_no_races(lanes: int) -> None:
    run = HeldRun(lanes, gpu=RecordedGpu(3))
    with torch.inference_mode():
        run.run()
    assert run.gpu.checker.num_accesses > 500
    assert run.gpu.checker.races == [] and run.gpu.checker.unkept == []
    # Three rows of six decode in the first three steps, and all in the fourth.
    assert run.fleet.num_queries == lanes * run.num_layers * (3 * 3 + 6)


def test_a_lane_of_prompts_runs_ahead_of_r_workers() -> None:
    """Which may owe answers while they only store."""
    run = HeldRun(1, rows=(1,), num_holders=1, num_steps=3, gpu=RecordedGpu(0))
    with torch.inference_mode():
        log = run.run().fleet.log
    ahead = [entry for entry in log if entry.startswith(("launch", "receive"))]
    second = ahead[ahead.index("launch A0", 1) :]
    assert second.index("receive A0") > second.index("launch A1")

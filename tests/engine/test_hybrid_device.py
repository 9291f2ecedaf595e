"""KV on both sides on a recorded GPU: the home lane beside away lanes, and rows
of both in one lane. Nothing races, and the home lane runs ahead by a few layers
only."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from device_runs import CPU, PROMPT, Run
from recorded_gpu import RecordedGpu

from fastdecode.core.dtype import DType
from fastdecode.core.holders import Holder, HolderId, HolderKind, Part, PartId, Residence
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.core.spec import KVSpec
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.local import LocalConnection
from fastdecode.engine.step.mixed import MixedAttention
from fastdecode.schedule.plan import Chunk
from fastdecode.wire.messages import PROTOCOL_VERSION, Hello, OpenSequence, Welcome

R_WORKERS = 2
DEVICE = HolderId(R_WORKERS)
KINDS = (HolderKind.R_WORKER,) * R_WORKERS + (HolderKind.DEVICE,)
HOLDERS = tuple(Holder(kind, False, kind is HolderKind.DEVICE, 1) for kind in KINDS)


@dataclass
class HybridRun(Run):
    """Lane 0 is on the device, the others are away; or all rows are dealt out."""

    is_mixed: bool = False
    graphs: bool = True
    num_steps: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.connection = LocalConnection(CPU, 1 << 20)
        spec = self.spec.attention[0]
        kv = KVSpec(self.num_layers, spec.num_kv_heads, spec.head_dim, DType.FLOAT32, 16)
        hello = Hello(PROTOCOL_VERSION, "m", kv, self.spec.attention, DType.FLOAT32)
        self.connection.send(hello)
        assert isinstance(self.connection.poll(), Welcome)
        object.__setattr__(self.remote, "holders", HOLDERS)
        self.plan = MixedAttention(self.remote, self.connection, self.gpu)
        self.opened: set[int] = set()

    def _batch(self, lane: int, num_rows: int, step: int) -> StepBatch:
        """Prompts first, then a token each."""
        request = Request("r", (*PROMPT, 7, 8), SamplingParams(temperature=0), 9, seed=0)
        chunks = []
        num_before = step // self.lanes
        for i in range(num_rows):
            number = lane * 100 + i
            sequence = Sequence.of(number, request, 0)  # type: ignore[arg-type]
            at_home = i % 2 == 0 if self.is_mixed else lane == 0
            part = Part(PartId(number), DEVICE if at_home else HolderId(i % R_WORKERS), 0, 64)
            if at_home and number not in self.opened:
                self.opened.add(number)
                self.connection.send(OpenSequence(number, 64))
                self.connection.poll()
            sequence.num_cached = len(PROMPT) + num_before - 1 if num_before else 0
            sequence.residence = Residence((part,))
            chunks.append(Chunk(sequence, 1 if num_before else len(PROMPT)))
        return StepBatch.build(chunks, HOLDERS, step=step, lane=lane)


@pytest.mark.parametrize(
    ("lanes", "is_mixed", "looks"),
    [(2, False, 0), (3, False, 3), (1, True, 3), (2, True, 0)],
    ids=["two", "three", "mixed", "mixed-two"],
)
def test_no_races(lanes: int, is_mixed: bool, looks: int) -> None:
    gpu = RecordedGpu(looks_until_done=looks)
    with torch.inference_mode():
        run = HybridRun(lanes, is_mixed=is_mixed, gpu=gpu).run()
    assert run.gpu.checker.num_accesses > 300
    assert run.gpu.checker.races == [] and run.gpu.checker.unkept == []


def test_the_home_lane_is_ahead_by_a_few_layers_only() -> None:
    """Else all of its layers would stand before the next one of an away lane."""
    run = HybridRun(2, gpu=RecordedGpu(looks_until_done=4))
    with torch.inference_mode():
        run.run()
    launches = [entry for entry in run.fleet.log if entry.startswith(("launch", "receive"))]
    decode = launches[len(launches) // 3 :]  # behind the prompts
    of_home = [i for i, entry in enumerate(decode) if entry.startswith("launch A")]
    of_away = [i for i, entry in enumerate(decode) if entry.startswith("launch B")]
    first, last = of_home[0], of_home[-1]
    assert sum(first < i < last for i in of_away) >= 2

"""KV on both sides on a recorded GPU: the home lane beside away lanes, and rows of both in one
lane. Nothing races, and the home lane runs ahead by a few layers only."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_runs import CPU, PROMPT, Run
from recorded_gpu import RecordedGpu
from torch_kernels import TorchKernels

from fastdecode.core.dtype import DType
from fastdecode.core.holders import Holder, HolderId, HolderKind, Part, PartId, Residence
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.core.spec import KVSpec
from fastdecode.engine.step import mixed_step
from fastdecode.engine.step.batch import StepBatch
from fastdecode.engine.step.device import DeviceWorker
from fastdecode.engine.step.mixed_step import DeviceLane, MixedAttention, StepMode
from fastdecode.engine.step.pipeline import LaneStep
from fastdecode.engine.step.torch_executor import TorchExecutor
from fastdecode.schedule.plan import Chunk
from fastdecode.wire.messages import Hello, Open, Welcome
from sworker import whole
from sworker.whole import WholeSteps
from sworker.worker import WholePass

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
        self.connection = DeviceWorker(TorchExecutor(CPU, None, TorchKernels), 1 << 20)
        spec = self.spec.attention[0]
        kv = KVSpec(self.num_layers, spec.num_kv_heads, spec.head_dim, DType.FLOAT32, 16)
        hello = Hello("m", kv, self.spec.attention, DType.FLOAT32)
        self.connection.send(hello)
        assert isinstance(self.connection.poll(), Welcome)
        object.__setattr__(self.remote, "holders", HOLDERS)
        self.plan = MixedAttention(self.remote, self.connection)
        self.opened: set[int] = set()

    def _batch(self, lane: int, num_rows: int, step: int) -> StepBatch:
        """Prompts first, then a token each."""
        request = Request("r", (*PROMPT, 7, 8, 9, 10, 11), SamplingParams(temperature=0), 9, seed=0)
        chunks = []
        num_before = step // self.lanes
        for i in range(num_rows):
            number = lane * 100 + i
            sequence = Sequence.of(number, request, 0)  # type: ignore[arg-type]
            at_home = i % 2 == 0 if self.is_mixed else lane == 0
            part = Part(PartId(number), DEVICE if at_home else HolderId(i % R_WORKERS), 0, 64)
            if at_home and number not in self.opened:
                self.opened.add(number)
                self.connection.send(Open(number, 64))
                self.connection.poll()
            sequence.num_cached = len(PROMPT) + num_before - 1 if num_before else 0
            sequence.residence = Residence((part,))
            chunks.append(Chunk(sequence, 1 if num_before else len(PROMPT)))
        return StepBatch.build(chunks, HOLDERS, step=step, lane=lane)


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


def on_graphs(run: Run) -> None:
    """The home lane's decode steps run in fixed memory, two layers at a time."""
    assert isinstance(run, HybridRun) and run.graphs_of is not None
    steps = WholeSteps(run.graphs_of, run.connection.cache, 256)
    steps.prepare(only_lane=0)
    run.plan.home.whole = steps  # type: ignore[attr-defined]
    run_slice = steps.run_slice

    def logged(lane: int, number: int, bucket: int) -> None:
        run.fleet.log.append(f"slice {number}")
        run_slice(lane, number, bucket)

    steps.run_slice = logged  # type: ignore[method-assign]


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step runs layer by layer to be timed; slices are of two layers."""
    monkeypatch.setattr(mixed_step, "_TIMED_FIRST", 0)
    monkeypatch.setattr(whole, "SLICE_LAYERS", 2)


@pytest.mark.usefixtures("untimed")
@torch.inference_mode()
def test_the_home_lane_alone_is_one_graph_a_step() -> None:
    """As with all KV on the device. Before, it was one a layer, and attention."""
    run = HybridRun(1, capture=True, num_steps=4)
    calls = []

    def note(step: LaneStep) -> None:
        calls.append(dict(run.gpu.calls))
        run.gpu.calls.clear()

    run.run(on_graphs, note)
    assert [one.get("replay", 0) for one in calls] == [0, 1, 1, 1]  # behind the prompts
    assert all(sum(one.values()) < 70 for one in calls[1:])
    assert run.gpu.checker.races == [] and run.gpu.checker.unkept == []


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize(("lanes", "looks"), [(2, 0), (2, 3), (3, 3)])
@torch.inference_mode()
def test_beside_away_lanes_it_runs_in_slices(lanes: int, looks: int) -> None:
    run = HybridRun(lanes, capture=True, num_steps=5, gpu=RecordedGpu(looks_until_done=looks))
    run.run(on_graphs)
    assert run.gpu.checker.races == [] and run.gpu.checker.unkept == []
    slices = [entry for entry in run.fleet.log if entry.startswith("slice")]
    assert slices == ["slice 0", "slice 1", "slice 2"] * 4
    entries = [x for x in run.fleet.log if x.startswith(("launch B", "slice"))]
    between = {a for a, b in itertools.pairwise(entries) if b.startswith("launch B")}
    assert not looks or {"slice 0", "slice 1"} & between, "away lanes come between slices"


@torch.inference_mode()
def test_attention_at_home_is_written_where_the_next_unit_reads_it() -> None:
    """Before, o was copied there, once a layer."""
    run, found = HybridRun(1, num_steps=3), []
    run.run(on_step=lambda step: found.append(step.begun.parts[0].take(None) is step.forward.place))
    assert found == [False, True, True]  # prompts have no fixed memory


def test_how_the_home_lane_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph again from the second step on in which nobody was away: an away
    lane that only ends a step begins its next at once."""
    monkeypatch.setattr(mixed_step, "_TIMED_FIRST", 0)
    home = DeviceLane(SimpleNamespace())  # type: ignore[arg-type]
    assert home.next_way() is StepMode.WHOLE
    step = type("Step", (), {})()
    home.goes_away(step)
    assert [home.next_way() for _ in range(3)] == [StepMode.SLICED] * 3
    del step
    assert [home.next_way() for _ in range(2)] == [StepMode.SLICED, StepMode.WHOLE]
    home.goes_away(type("Step", (), {})())  # it is over before the next begins
    assert [home.next_way() for _ in range(3)] == [StepMode.SLICED, StepMode.SLICED, StepMode.WHOLE]
    assert DeviceLane().next_way() is StepMode.LAYERED


def test_some_steps_are_timed_layer_by_layer() -> None:
    home = DeviceLane(SimpleNamespace())  # type: ignore[arg-type]
    ways = [home.next_way() for _ in range(100)]
    layered = [i for i, way in enumerate(ways, 1) if way is StepMode.LAYERED]
    assert layered == [1, 2, 3, 4, 32, 64, 96]


def test_attention_within_graphs_is_foreseen_by_what_was_timed() -> None:
    home = DeviceLane()
    assert home.attention_s(1000) == 0.0
    timer: Any = SimpleNamespace(seconds=lambda: 0.0)
    home.time(timer, 500)
    assert home.attention_s(1000) == 0.0  # it hasn't come so far
    timer.seconds = lambda: 0.05
    assert home.attention_s(1000) == pytest.approx(0.1)
    timer.seconds = lambda: 0.5
    assert home.attention_s(1000) == pytest.approx(0.1)
    home.time(timer, 500)
    assert home.attention_s(1000) == pytest.approx(0.8 * 0.1 + 0.2 * 1.0)


def test_time_in_graphs_is_told_apart() -> None:
    """S-part and attention, which the rule wants to know one by one."""
    forward = WholePass.__new__(WholePass)
    forward._timer = SimpleNamespace(seconds=lambda: 3.0)  # type: ignore[assignment]
    assert forward.device_s() == 3.0
    forward.attended_s = lambda: 1.0
    assert forward.device_s() == 2.0
    forward.attended_s = lambda: 4.0
    assert forward.device_s() == 0.0

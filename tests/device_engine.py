"""Whole engines whose S-worker is on a GPU that isn't there."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import prompts
from recorded_gpu import RecordedGpu
from schedule_choices import schedule_options
from torch.utils._python_dispatch import TorchDispatchMode

from fastdecode.core.delta import Delta, Listener, OutputFold
from fastdecode.core.dtype import DType
from fastdecode.core.holders import Holder, HolderId, HolderKind
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.sequence import Request, SamplingParams
from fastdecode.core.spec import KVSpec
from fastdecode.engine.engine import Engine
from fastdecode.engine.extensions import EngineState, StepTiming
from fastdecode.engine.fleet.greeting import greet
from fastdecode.engine.fleet.pool import MixedPool, WorkerPool
from fastdecode.engine.requests import Requests
from fastdecode.engine.setup.reach import reach_device
from fastdecode.engine.setup.workers import Reached, reach_threads
from fastdecode.engine.step.device import DeviceWorker, whole_steps
from fastdecode.engine.step.mixed_step import DeviceLane, MixedAttention
from fastdecode.engine.step.pipeline import Pipeline
from fastdecode.engine.step.prompts import DevicePrefill
from fastdecode.engine.step.remote import Attention, AttentionPlan
from fastdecode.engine.step.swapped import LaneExecutor, SwappedLanes
from fastdecode.engine.step.torch_executor import TorchExecutor
from fastdecode.schedule.hybrid.control import HybridOptions
from fastdecode.schedule.hybrid.forecast import Costs, Course, Guess, Known, Layout
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.reserving.starts import OwnHolders
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.text.codec import TextCodec
from fastdecode.text.grammars import GrammarMasks
from fastdecode.wire.messages import Attend, AttendResult, Hello, ToRWorker
from sworker.device import Gpu
from sworker.graphs import StepGraphs
from sworker.load.weights import load_model
from sworker.model.skeleton import Model
from sworker.paged import PagedKV
from sworker.ranks.group import Ranks
from sworker.ranks.parallel import ParallelSWorker
from sworker.ranks.sharding import parallelize, shard_kv
from sworker.sampling.sampler import Drawing, SampledToken
from sworker.worker import SWorker

CPU = torch.device("cpu")
BLOCK_SIZE = 16
KV_BYTES = 20_000_000
LANE_BYTES = 1_000_000  # on the device


@contextlib.contextmanager
def device_engine(
    path: Path, gpu: Gpu | None, ranks: Ranks | None = None, **options: Any
) -> Iterator[Engine]:
    """Start an engine of float32 on ``gpu``, which takes in operators from then on.

    Args:
        gpu: None for the CPU.
        ranks: S-workers that act as one, of which this one is the first. Each keeps K and V
            on its device.
    """
    shard = None if ranks is None else ranks.shard
    spec, model = load_model(path, device=CPU, dtype=torch.float32, shard=shard)
    if ranks is not None:
        parallelize(model, ranks.shard, ranks.add_up)
    with gpu if isinstance(gpu, TorchDispatchMode) else contextlib.nullcontext():
        yield from _running(spec, model, gpu, ranks, **options)


def _running(
    spec: ModelSpec,
    model: Model,
    gpu: Gpu | None,
    ranks: Ranks | None = None,
    *,
    lanes: int = 1,
    workers: int = 1,
    kv_placement: str = "r",
    kernels: Any = None,
    captures: bool = False,
    split_tokens: int | None = None,
    held_tokens: int = 0,
    device_blocks: int = 0,
    layout: Layout = Layout.SPLIT,
    direct: bool = False,
    see: Callable[[Any], None] = lambda attention: None,
) -> Iterator[Engine]:
    kv = KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, DType.FLOAT32, BLOCK_SIZE)
    kept = (kv, spec.attention) if ranks is None else shard_kv(kv, spec.attention, ranks.shard)
    swap, is_local = kv_placement == "swap", kv_placement != "r"
    swapped = SwappedLanes(CPU, lanes, gpu, kernels)
    reached: Reached = (
        reach_device([LaneExecutor(swapped) for _ in range(lanes)], LANE_BYTES, swapped)
        if swap
        else reach_device([TorchExecutor(CPU, gpu, kernels)], KV_BYTES)
        if is_local
        else reach_threads(workers, kv_bytes=KV_BYTES, num_threads=1)
    )
    beside = None
    if device_blocks:  # KV on both sides
        beside = DeviceWorker(TorchExecutor(CPU, gpu, kernels), device_blocks * kv.block_bytes)
    make = WorkerPool if beside is None else MixedPool
    fleet = make(reached.hub, timeout_s=60.0, device=beside)
    hello = Hello("late", *kept, DType.FLOAT32)
    welcomes = greet(fleet, hello)
    blocks = tuple(welcomes[holder].num_blocks for holder in sorted(welcomes))
    graphs = None
    if captures:
        graphs = StepGraphs(model, CPU, capture=True, num_lanes=lanes, max_rows=4, gpu=gpu)
        if swap or not is_local:
            graphs.prepare()
    if ranks is None:
        s_worker = SWorker(spec, model, CPU, graphs, gpu, num_lanes=lanes)
    else:
        s_worker = ParallelSWorker(spec, model, ranks, graphs, num_lanes=lanes)
    holder = Holder(reached.kind, False, reached.answers_at_once, kv.token_bytes)
    attention: Attention
    if reached.attention is not None:
        attention = reached.attention(fleet, holder, s_worker)
    else:
        prompts = None
        if held_tokens:
            num_blocks = held_tokens // BLOCK_SIZE
            prompts = DevicePrefill(PagedKV(kv, spec.attention, num_blocks, CPU, kernels))
        holders = (holder,) * workers
        if beside is not None:
            holders += (Holder(HolderKind.DEVICE, False, True, kv.token_bytes),)
        plan = AttentionPlan(
            spec.attention, DType.FLOAT32, fleet, CPU, holders, gpu=gpu,
            slot_bytes=4096, prompts=prompts,
        )  # fmt: skip
        plan.prepare(lanes)
        for lane in range(lanes if direct else 0):
            staging: Any = plan.staging(lane)
            staging._direct_bytes = 0
        if isinstance(gpu, RecordedGpu):
            record_messages(gpu, fleet)
            for lane in range(lanes):
                record_landing(gpu, plan.staging(lane))
                if graphs is not None:
                    gpu.stays(graphs.buffers(lane).o)
        attention = plan
        if beside is not None:
            whole = whole_steps(s_worker, beside)
            if whole is not None:
                whole.prepare(only_lane=0)
            attention = MixedAttention(plan, beside, DeviceLane(whole))
    if isinstance(gpu, RecordedGpu):
        record_drawn(gpu, s_worker)
    see(attention)
    options = schedule_options(
        "greedy", 1 if device_blocks else lanes, max_num_sequences=8, max_step_tokens=8 + 24,
        prefill_chunk=9, split_tokens=split_tokens,
    )  # fmt: skip
    times = MeasuredTimes(min_observed=1)
    scheduler = make_scheduler(
        options, blocks, BLOCK_SIZE, times if device_blocks else None,
        opening_steps=0 if is_local else 1,
        hybrid=_sent_away(HolderId(workers), layout) if device_blocks else None,
        places=OwnHolders() if swap else None,
    )  # fmt: skip
    requests = Requests(
        TextCodec(None), (spec.vocab_size,), spec.vocab_size, GrammarMasks(TextCodec(None), 1, ())
    )
    state = EngineState(fleet, Lifecycle(scheduler), requests)
    timing = [StepTiming(times, scheduler.hybrid)] if device_blocks else []
    try:
        yield Engine(
            s_worker, Pipeline(s_worker, attention, options.num_lanes), state, extensions=timing
        )
    finally:
        reached.close(fleet.lost, 30.0)


def record_messages(gpu: RecordedGpu, fleet: WorkerPool) -> None:
    """R-workers read what was lent to them until they answer, and write their answers."""
    lent: dict[HolderId, deque[Attend]] = defaultdict(deque)
    send, receive = fleet.send, fleet.receive

    def sent(holder: HolderId, message: ToRWorker) -> None:
        if isinstance(message, Attend):
            read(message, "what is sent")
            lent[holder].append(message)
        send(holder, message)

    def received(*, most_s: float = math.inf) -> Any:
        found = receive(most_s=most_s)
        if found is not None and isinstance(found[1], AttendResult):
            if lent[found[0]]:  # not of a device, which is sent nothing
                read(lent[found[0]].popleft(), "what was lent")
            if not gpu.reads(found[1].o):
                gpu.host(found[1].o)
            gpu.write(found[1].o, "an answer")
        return found

    def read(message: Attend, what: str) -> None:
        for array in (message.q, message.k, message.v):
            gpu.read(array, what)

    fleet.send, fleet.receive = sent, received  # type: ignore[method-assign]


def record_landing(gpu: RecordedGpu, staging: Any) -> None:
    """The host writes what arrives beside torch, unless the device reads it from where it is."""
    receive = staging.receive

    def received(array: np.ndarray, o: torch.Tensor, rows: slice) -> None:
        if array.nbytes < staging._direct_bytes:
            gpu.write(staging._step.landing[rows], "what arrives")
        receive(array, o, rows)

    staging.receive = received


def record_drawn(gpu: RecordedGpu, s_worker: SWorker) -> None:
    """The host reads drawn tokens once they have come."""
    drawn = s_worker.drawn

    def read(drawing: Drawing) -> list[SampledToken]:
        drawing.fetched.wait()
        gpu.read(drawing.fetched.host.numpy(), "what was drawn")
        return drawn(drawing)

    s_worker.drawn = read  # type: ignore[method-assign]


def _sent_away(device: HolderId, layout: Layout) -> HybridOptions:
    """Whoever finds no room on the device goes to R-workers."""

    def rule(known: Known, now: Course, costs: Costs, error: float) -> Course:
        return Course(layout, len(known.waiting))

    # However long asking takes: else the next time might be too soon.
    return HybridOptions(device, Guess(1.0), rule=rule, clock=lambda: 0.0)


def run(
    engine: Engine, lengths: Sequence[int], num_tokens: int, stop: tuple[int, ...] = ()
) -> list[tuple[int, ...]]:
    """What prompts of such lengths come to; every third is drawn, not greedy.
    ``stop``: token ids that end a text."""
    outputs: dict[str, tuple[int, ...]] = {}
    folds: dict[str, OutputFold] = {}

    def take(delta: Delta) -> None:
        output = folds[delta.request_id].add(delta)
        if output is not None:
            assert output.error is None, output.error
            outputs[delta.request_id] = output.completions[0].token_ids

    for i, prompt in enumerate(prompts(lengths, seed=2)):
        temperature = 0.8 if i % 3 == 2 else 0.0
        params = SamplingParams(
            temperature=temperature, top_p=0.9, max_tokens=num_tokens, ignore_eos=True, seed=i,
            stop_token_ids=stop,
        )  # fmt: skip
        folds[str(i)] = OutputFold(str(i), None, tuple(prompt), 1)
        engine.submit(
            Request(str(i), tuple(prompt), params, num_tokens, seed=i),
            Listener(take, every_step=True),
        )
    for _ in range(3000):
        if not engine.requests:
            return [outputs[str(i)] for i in range(len(lengths))]
        engine.step()
    raise AssertionError("it doesn't get on")

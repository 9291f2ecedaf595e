"""The grid of KV on both sides: contexts by how much of the KV the device has
room for by R-workers beside it. Each cell is one model on one GPU of the data
file, run by the real scheduler and rule, alone and with R-workers.

A cell's requests have as much KV as the whole memory of the GPU has room for.
Where twice or ten times as much is asked as fits, the device has a half or a
tenth of that memory (``--gpu-memory-fraction``), for the same requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

import numpy as np
from shared_device import SharedDevice

from cost_model.goodput.workload import unit_gaps
from cost_model.hardware import Hardware
from cost_model.predict import System
from cost_model.shapes import model_named
from cost_model.stages import LinkModel, RPartModel, SPartModel
from cost_model.workload import TokenCosts, Workload
from fastdecode.core.config.groups import Batching
from fastdecode.core.dtype import DType
from fastdecode.core.holders import HolderId
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.hybrid.control import HybridControl, HybridOptions
from fastdecode.schedule.hybrid.forecast import Costs, Course, Known, Layout, paces
from fastdecode.schedule.hybrid.inputs import Guess
from fastdecode.schedule.hybrid.rule import Margins, choose
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.options import ScheduleOptions
from fastdecode.schedule.simulation.clock import VirtualClock
from fastdecode.schedule.simulation.simulation import Simulation, SimulationOutcome
from fastdecode.schedule.simulation.trace import RequestTrace, TracedRequest
from fastdecode.schedule.times import Prompts, StepTime, num_tokens_of

_BLOCK = 64
_STEP_TOKENS = 2048
"""Of prompts, in a step."""
_MOST_OUTPUT = 1024
"""Tokens that are drawn of a sequence, on average."""
_SPREAD = 0.5
"""Prompts and outputs are so much shorter or longer than the mean, at most."""
_STEP = 1.2
"""From one number of sequences on R-workers that is looked at to the next."""
_ASKING_S = 0.005
"""That asking the rule takes the engine: it asks the less often for that."""


@dataclass(frozen=True)
class GridMachine:
    """What a grid is of, by the names of the data file."""

    model: str = "Llama-3 8B"
    gpu: str = "H200"
    cpu: str = "EPYC 9654"
    nic: str = "200GbE"

    def system(self, workload: Workload) -> System:
        """In bfloat16, KV and all."""
        hardware, spec = Hardware.load(), model_named(self.model)
        costs = TokenCosts(spec, DType.BFLOAT16, "bfloat16")
        return System(
            SPartModel.from_gpu(hardware.gpu(self.gpu), 1, costs),
            RPartModel.from_cpu(hardware.cpu(self.cpu), costs),
            LinkModel.from_nic(hardware.nic(self.nic)),
            num_nics=1,
            costs=costs,
            workload=workload,
        )


@dataclass(frozen=True)
class GridTimes(StepTime):
    """Step times of a system, the device's attention as if it were an
    R-worker's: ``fastdecode.schedule.times.StepTime``.

    Args:
        device: which holder it is.
        home_pace: what the S-part and the device's attention take, times so much.
        away_pace: R-workers, and the way to them.
        way_s: to R-workers and back, over all layers.
    """

    system: System
    device: HolderId
    way_s: float = 0.0
    home_pace: float = 1.0
    away_pace: float = 1.0

    def s_part_s(self, num_decoding: int, prompts: Prompts = ()) -> float:
        """As ``StepTime``."""
        num_tokens = num_tokens_of(num_decoding, prompts)
        found = self._s_parts.get(num_tokens)
        if found is None:
            layers = self.system.costs.num_layers
            found = self._s_parts[num_tokens] = layers * self.system.s.t_of_b(num_tokens)
        return self.home_pace * found

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        """As ``StepTime``."""
        if worker == self.device:
            return self.home_pace * self._device_token_s * load_tokens
        call_s, token_s = self._r_worker
        return self.away_pace * (call_s + token_s * load_tokens)

    def trip_s(self, num_tokens: int) -> float:
        """As ``StepTime``."""
        return self.away_pace * self.way_s

    @cached_property
    def _s_parts(self) -> dict[int, float]:
        return {}

    @cached_property
    def _device_token_s(self) -> float:
        return self.system.costs.kv_bytes / self.system.s.kv_read_bytes_per_s

    @cached_property
    def _r_worker(self) -> tuple[float, float]:
        """Of a step, and of a cached token: over all layers."""
        r, layers = self.system.r, self.system.costs.num_layers
        sequence_s = r.sequence_s / self.system.workload.mean_context_tokens
        return r.pace * layers * r.call_s, r.pace * layers * (sequence_s + r.token_s)


@dataclass(frozen=True)
class Cell:
    """One of the grid."""

    context: int
    """Tokens that a sequence has in the end, on average."""
    demand: float
    """KV that is asked for, over what the device has room for."""
    num_r_workers: int
    all_at_once: bool = True
    """Requests come at the start; else at random, within half of the time that
    the device alone would take for them."""
    num_requests: int | None = None
    """None: as many as the whole GPU has room for."""
    machine: GridMachine = GridMachine()

    @property
    def device(self) -> HolderId:
        return HolderId(self.num_r_workers)

    @cached_property
    def system(self) -> System:
        output = min(self.context // 4, _MOST_OUTPUT)
        return self.machine.system(Workload(self.context - output, output))

    @cached_property
    def requests(self) -> tuple[TracedRequest, ...]:
        """Three quarters of a context are its prompt, or more of a long one."""
        random, workload = Random(self.context), self.system.workload

        def about(num_tokens: int) -> int:
            return round(num_tokens * random.uniform(1 - _SPREAD, 1 + _SPREAD))

        found = []
        for _ in range(self.num_requests or self._most_sequences):
            num_prompt, num_output = about(workload.prompt_tokens), about(workload.output_tokens)
            found.append(TracedRequest(num_prompt, num_output, num_output))
        return tuple(found)

    @cached_property
    def home_blocks(self) -> int:
        """KV blocks of the device; at least what the longest sequence needs."""
        needed = [_blocks(request) for request in self.requests]
        return max(max(needed), int(sum(needed) / self.demand))

    @cached_property
    def away_blocks(self) -> int:
        """KV blocks of each R-worker."""
        return int(self.system.r.capacity_bytes / (self.system.costs.kv_bytes * _BLOCK))

    @cached_property
    def link_s(self) -> float:
        """The way to R-workers and back over all layers, as if all for whom the
        device has no room were under way in one lane: rather too long."""
        num_away = max(1, round(len(self.requests) * (1 - 1 / self.demand)))
        lane = self.system.lane(num_away, self.num_r_workers)
        one_s = lane.messages_s + lane.out_s + lane.back_s + lane.round_trip_s
        return self.system.costs.num_layers * one_s

    @property
    def _most_sequences(self) -> int:
        system = self.system
        room = system.s.usable_memory_bytes - system.costs.weight_bytes
        room -= (_STEP_TOKENS + 512) * system.costs.peak_activation_bytes
        return int(room / (system.costs.kv_bytes * self.context))


@dataclass(frozen=True)
class GridRun:
    """A cell that was run, one way."""

    total_s: float
    tokens_per_s: float
    tpot_p50_s: float
    modes: dict[str, int]
    """Steps of the home lane by mode."""


@dataclass(frozen=True)
class Steady:
    """A full device and so many sequences away, decoding for ever."""

    ratio: float
    """Tokens a second, over those of the device alone."""
    layout: str
    num_home: int
    num_away: int
    home_tpot_ratio: float
    """A token at home takes so much longer than on the device alone."""


class _Clock:
    """The engine's, as the rule's control reads it: virtual time, and what
    asking the rule has taken."""

    def __init__(self, virtual: VirtualClock) -> None:
        self._virtual = virtual
        self._asking_s = 0.0

    def __call__(self) -> float:
        return self._virtual.now + self._asking_s

    def rule(self, known: Known, now: Course, costs: Costs, margins: Margins) -> Course:
        """Asked in that time."""
        self._asking_s += _ASKING_S
        return choose(known, now, costs, margins)


def run(cell: Cell, *, alone: bool, error: float = 0.0, within_s: float = 0.0) -> GridRun:
    """Run a cell.

    Args:
        alone: with no R-workers.
        error: R-workers and the way to them are slower, and the device faster,
            by this part than the rule is told, for good; it knows that it may
            be so far off.
        within_s: in which requests come.
    """
    trace = _trace(cell, within_s)
    times = GridTimes(cell.system, cell.device, cell.link_s)
    away = 0 if alone else cell.away_blocks
    blocks = (*([away] * cell.num_r_workers), cell.home_blocks)
    clock = VirtualClock()
    scheduler = _scheduler(cell, times, blocks, _Clock(clock), None if alone else error)
    truth = replace(times, home_pace=1 - error, away_pace=1 + error)
    simulation = Simulation(
        trace,
        scheduler,
        SharedDevice(truth, cell.device),
        worker_blocks=blocks,
        block_size=_BLOCK,
        clock=clock,
    )
    return _result(simulation.run(), scheduler.hybrid)


def steady(cell: Cell) -> Steady:
    """The most that R-workers add, with as many sequences away as there are."""
    times, system = GridTimes(cell.system, cell.device, cell.link_s), cell.system
    load = system.attended_tokens
    num_all = len(cell.requests)
    num_home = max(1, int(num_all / cell.demand))
    costs = Costs.of(times, cell.device, {HolderId(w): 1 for w in range(cell.num_r_workers)})
    home = (num_home, num_home * load)
    alone_s = costs.home_s(*home)
    best = Steady(1.0, "gpu-only", num_home, 0, 1.0)
    number = 1.0
    while number <= num_all - num_home:
        num_away = int(number)
        for layout in Layout:
            found = paces(costs, layout, home, (num_away, num_away * load))
            rate = num_home / found.home_s + num_away / found.away_s
            if rate * alone_s / num_home > best.ratio:
                ratio = rate * alone_s / num_home
                slower = found.home_s / alone_s
                best = Steady(ratio, layout.value, num_home, num_away, slower)
        number = max(number + 1, number * _STEP)
    return best


def _trace(cell: Cell, within_s: float) -> RequestTrace:
    if not within_s:
        return RequestTrace(cell.requests)
    rate = len(cell.requests) / within_s
    gaps = unit_gaps(len(cell.requests) - 1, 1.0, seed=cell.context)
    at_s = [0.0, *np.cumsum(gaps) / rate]
    pairs = zip(cell.requests, at_s, strict=True)
    return RequestTrace(tuple(replace(request, arrival=at) for request, at in pairs))


def _scheduler(
    cell: Cell, times: GridTimes, blocks: tuple[int, ...], clock: _Clock, error: float | None
) -> ContinuousScheduler:
    """As the engine makes it; ``error`` None: for the device alone."""
    hybrid = None
    if error is not None:
        hybrid = HybridOptions(
            cell.device,
            Guess(0, round_trip_s=cell.link_s),
            error=error,
            measured_steps=1 << 60 if error else 0,
            clock=clock,
            rule=clock.rule,
        )
    most = len(cell.requests)
    batching = Batching(
        max_num_sequences=most,
        schedule="greedy",
        lanes=1,
        max_step_tokens=most + _STEP_TOKENS,
        prefill_chunk=_STEP_TOKENS,
    )
    return make_scheduler(ScheduleOptions(batching), blocks, _BLOCK, times, hybrid=hybrid)


def _result(outcome: SimulationOutcome, control: HybridControl | None) -> GridRun:
    tokens = sum(each.traced.num_output_tokens for each in outcome.served)
    tpots = sorted(each.tpot_s for each in outcome.served if each.tpot_s is not None)
    return GridRun(
        outcome.total_s,
        tokens / outcome.total_s,
        tpots[len(tpots) // 2],
        {} if control is None else dict(control.counts.steps),
    )


def _blocks(request: TracedRequest) -> int:
    return -(-(request.num_prompt_tokens + request.num_output_tokens - 1) // _BLOCK)

"""Cases of KV on both sides, drawn at random: what steps cost, how long sequences are, how much
room there is. Each is run by the real scheduler, on the device alone and with R-workers beside."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from fastdecode.core.config.groups import Batching
from fastdecode.core.holders import HolderId
from fastdecode.schedule.continuous import ContinuousScheduler
from fastdecode.schedule.hybrid.control import HybridControl, HybridOptions
from fastdecode.schedule.hybrid.forecast import Guess
from fastdecode.schedule.life.events import Run
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.options import ScheduleOptions
from fastdecode.schedule.simulation.clock import VirtualClock
from fastdecode.schedule.simulation.resources import Flight, SimulatedStep, loads_of, tokens_of
from fastdecode.schedule.simulation.simulation import Simulation, SimulationOutcome
from fastdecode.schedule.simulation.trace import RequestTrace, TracedRequest
from fastdecode.schedule.times import Prompts, StepTime, num_tokens_of


@dataclass
class SharedDevice:
    """KV on both sides: lanes share a device and R-workers, and step when they are ready. Lane 0
    has the sequences whose KV is on the device.

    In between, lanes continue at the speed that the device and the R-workers leave them: an away
    lane needs the device for its S-part, and R-workers for its attention, and waits for a layer
    of the home lane's before each of its own; the home lane has what is left of the device.

    Args:
        times: what steps take, the device's attention as if it were an R-worker's.
        device: which holder it is.
    """

    times: StepTime
    device: HolderId
    steps: list[SimulatedStep] = field(default_factory=list)
    """Always empty, since lanes don't step in rounds."""

    def flight(self, run: Run) -> Flight:
        """As ``Resources``. A step of lane 0 has rows of both sides: R-workers
        attend while the device does."""
        loads, times = loads_of(run.chunks), self.times
        num_tokens = sum(chunk.num_tokens for chunk in run.chunks)
        s_part_s, trip_s = times.s_part_s(*tokens_of(run.chunks)), times.trip_s(num_tokens)
        at_home = loads.get(self.device)
        attend_s = 0.0 if at_home is None else times.r_part_s(self.device, at_home)
        away = [times.r_part_s(w, load) for w, load in loads.items() if w != self.device]
        if run.lane == 0:
            attend_s = max(attend_s, max(away) + trip_s if away else 0.0)
            return Flight(run, s_part_s + attend_s, (), 0.0, loads, num_tokens)
        return Flight(run, s_part_s, (max(away),), trip_s, loads, num_tokens)

    def steps_s(self, flights: Mapping[int, Flight], now_s: float) -> Mapping[int, float]:
        home = flights.get(0)
        home_s = 0.0 if home is None else home.s_part_s
        away = {lane: flight for lane, flight in flights.items() if lane}
        alone_s = {lane: max(flight.way_s + home_s, 1e-12) for lane, flight in away.items()}
        device_s = sum(flight.s_part_s for flight in away.values())
        used = sum(away[lane].s_part_s / step_s for lane, step_s in alone_s.items())
        r_used = sum(max(away[lane].r_parts_s) / step_s for lane, step_s in alone_s.items())
        most = device_s / (device_s + home_s) if device_s else 1.0
        slower = min(1.0, most / used if used else 1.0, 1 / r_used if r_used else 1.0)
        found = {lane: step_s / slower for lane, step_s in alone_s.items()}
        if home is not None:
            found[0] = max(home_s, 1e-12) / (1 - slower * used)
        return found


_BLOCK = 16


@dataclass(frozen=True)
class DrawnTimes(StepTime):
    """Step times: ``fastdecode.schedule.times.StepTime``."""

    weights_s: float  # to read the weights: what an S-part takes at least
    row_s: float  # seconds of a row, where the S-part is bound by arithmetic
    step_s: float  # fixed seconds of every S-part
    token_s: tuple[float, ...]  # A cached token on each holder
    way_s: float  # to R-workers and back

    def s_part_s(self, num_decoding: int, prompts: Prompts = ()) -> float:
        num_tokens = num_tokens_of(num_decoding, prompts)
        return self.step_s + max(self.weights_s, self.row_s * num_tokens)

    def r_part_s(self, worker: int, load_tokens: float, num_sequences: float = 1.0) -> float:
        return self.token_s[worker] * load_tokens

    def trip_s(self, num_tokens: int) -> float:
        return self.way_s

    def misjudged(self, random: Random, error: float) -> DrawnTimes:
        """Return predictions that are off by up to this part of each time."""

        def off() -> float:
            return 1 + random.uniform(-error, error)

        s_part = off()
        return DrawnTimes(
            self.weights_s * s_part,
            self.row_s * s_part,
            self.step_s * s_part,
            tuple(seconds * off() for seconds in self.token_s),
            self.way_s * off(),
        )


@dataclass(frozen=True)
class DrawnCase:
    """One of them. The last holder is the device."""

    trace: RequestTrace
    times: DrawnTimes
    blocks: tuple[int, ...]
    most_running: int

    @property
    def device(self) -> HolderId:
        return HolderId(len(self.blocks) - 1)


@dataclass(frozen=True)
class DrawnVerdict:
    """What R-workers beside the device came to."""

    ratio: float  # tokens a second, over those of the device alone
    modes: dict[str, int]  # steps of the home lane by mode


def draw(random: Random, *, most_requests: int = 40, most_tokens: int = 60) -> DrawnCase:
    """A case: few or many requests, of equal or quite different lengths, on a
    device with room for one of them or for most."""

    def between(low: float, high: float) -> float:
        return math.exp(random.uniform(math.log(low), math.log(high)))

    spread = between(1, 8)
    length = between(4 * spread**0.5, most_tokens / 2)
    prompt = between(1, 4 * _BLOCK)
    requests = []
    for _ in range(round(between(2, most_requests))):
        num_output = min(most_tokens, max(1, round(length * between(spread**-0.5, spread**0.5))))
        num_prompt = max(1, round(prompt * between(0.5, 2)))
        requests.append(TracedRequest(num_prompt, num_output, num_output))
    needed = [-(-(r.num_prompt_tokens + r.num_output_tokens - 1) // _BLOCK) for r in requests]
    num_workers = random.randint(1, 4)
    at_home = max(max(needed), round(sum(needed) * between(0.03, 1.1)))
    each = max(1, round(sum(needed) * between(0.05, 2) / num_workers))
    weights_s = between(2e-3, 5e-2)
    mean_load = at_home * _BLOCK * 0.7
    token_s = weights_s * between(0.05, 4) / mean_load
    r_s = token_s * between(0.3, 60)
    r_token_s = [r_s * between(1, 2) for _ in range(num_workers)]
    row_s = weights_s / between(2, 200)
    times = DrawnTimes(
        weights_s, row_s, weights_s * between(0.01, 0.5), (*r_token_s, token_s), between(1e-4, 0.1)
    )
    blocks = (*([each] * num_workers), at_home)
    return DrawnCase(RequestTrace(tuple(requests)), times, blocks, random.choice((4, 16, 64, 64)))


def judge(case: DrawnCase, *, error: float = 0.0, random: Random | None = None) -> DrawnVerdict:
    """Run a case both ways.

    Args:
        error: what is predicted may be off by this part, for good; the rule knows it.
        random: what predictions are drawn by.
    """
    alone = run(replace(case, blocks=(*([0] * (len(case.blocks) - 1)), case.blocks[-1])), None)[0]
    predicted = case.times.misjudged(random, error) if random is not None else case.times
    both, control = run(case, predicted, error)
    assert control is not None
    assert len(both.served) == len(alone.served) == len(case.trace.requests)
    return DrawnVerdict(alone.total_s / both.total_s, dict(control.counts.steps))


def run(
    case: DrawnCase, predicted: DrawnTimes | None, error: float = 0.0
) -> tuple[SimulationOutcome, HybridControl | None]:
    """Run a case with the times that the rule predicts. With None it runs on the device alone."""
    clock = VirtualClock()
    options = None
    if predicted is not None:
        options = HybridOptions(
            case.device,
            Guess(0, round_trip_s=predicted.way_s),
            error=error,
            measured_steps=1 << 60 if error else 0,
            clock=clock,
        )
    batching = Batching(
        max_num_sequences=case.most_running,
        schedule="greedy",
        lanes=1,
        max_step_tokens=case.most_running + 512,
    )
    scheduler = make_scheduler(
        ScheduleOptions(batching), case.blocks, _BLOCK, predicted or case.times, hybrid=options
    )
    return simulate(case, scheduler, clock), scheduler.hybrid


def simulate(
    case: DrawnCase, scheduler: ContinuousScheduler, clock: VirtualClock | None = None
) -> SimulationOutcome:
    """Run a case's requests with its own times."""
    return Simulation(
        case.trace,
        scheduler,
        SharedDevice(case.times, case.device),
        worker_blocks=case.blocks,
        block_size=_BLOCK,
        clock=clock or VirtualClock(),
    ).run()

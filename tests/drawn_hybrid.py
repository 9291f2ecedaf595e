"""Cases of KV on both sides, drawn at random: what steps cost, how long
sequences are, how much room there is. Each is run by the real scheduler, on the
device alone and with R-workers beside."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

from shared_device import SharedDevice

from fastdecode.core.config.groups import Batching
from fastdecode.core.holders import HolderId
from fastdecode.schedule.hybrid.control import HybridControl, HybridOptions
from fastdecode.schedule.hybrid.inputs import Guess
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.options import ScheduleOptions
from fastdecode.schedule.simulation.clock import VirtualClock
from fastdecode.schedule.simulation.simulation import Simulation, SimulationOutcome
from fastdecode.schedule.simulation.trace import RequestTrace, TracedRequest
from fastdecode.schedule.times import Prompts, StepTime, num_tokens_of

_BLOCK = 16


@dataclass(frozen=True)
class DrawnTimes(StepTime):
    """Step times: ``fastdecode.schedule.times.StepTime``."""

    weights_s: float
    """To read the weights: what an S-part takes at least."""
    row_s: float
    """Seconds of a row, where the S-part is bound by arithmetic."""
    step_s: float
    """Fixed seconds of every S-part."""
    token_s: tuple[float, ...]
    """A cached token on each holder."""
    way_s: float
    """To R-workers and back."""

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

    ratio: float
    """Tokens a second, over those of the device alone."""
    modes: dict[str, int]
    """Steps of the home lane by mode."""


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
        error: what is predicted may be off by this part, for good; the rule is
            told so.
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
    simulation = Simulation(
        case.trace,
        scheduler,
        SharedDevice(case.times, case.device),
        worker_blocks=case.blocks,
        block_size=_BLOCK,
        clock=clock,
    )
    return simulation.run(), scheduler.hybrid

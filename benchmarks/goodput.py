"""The rate that instances carry within an SLO: simulated beforehand, and measured.

    python benchmarks/goodput.py --out benchmarks/results/goodput.json
    python benchmarks/goodput.py --quick --requests 150 --out goodput.json  # 10 minutes

A Llama-shaped random checkpoint of 32 M parameters (or ``--model DIR``). Instances are processes at
addresses, each on a core of its own; the controller is this process, on whichever core is free, or
on theirs (``controller``: the part of a core that it took). The ways: one instance for both phases,
two of them, and a prefill beside a decode instance; each with short and with longer prompts.

Instances are **observed** first: other requests than those that count run at about ``OBSERVED_AT``
of what is carried. The simulator is given lines fitted to the instances' own totals, as
``--replan-slo`` does it (``cost_model/goodput/replanning``), but to the CPU time of each instance's
process, which also sends and receives KV between steps. The controller and the clients (this
process) take the cores that no instance has, and then an equal part of each instance's
(``SharedCores``). What that carries within the SLO is **predicted**. **measured**: the same
requests, sent at those moments, and the same bisection over rates. ``error``: predicted over
measured - 1. ``seen``: simulated and measured TTFT and TPOT at the SLO's quantile, at the last rate
that was carried. A workload's SLO is ``--slack`` times what a lone request takes by the first way.

``--quick`` runs each row at two rates in place of a bisection: so far below and above the
prediction that both tell whether the measured rate is within ``--tolerance`` of it. Exit code 1:
fewer than ``--least`` rows are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from end_to_end import VOCAB
from provenance import keep, provenance
from r_worker_processes import add_model_options, model_or_random, pinned_instances

from cost_model.goodput.replanning import (
    InstanceProfile,
    LinearTimes,
    Roles,
    StepLog,
    simulation_of,
)
from cost_model.goodput.simulator import GoodputRun
from cost_model.goodput.slo import RequestTimes, Slo
from cost_model.goodput.workload import Draw, Lengths, drawn
from fastdecode import LLM, SamplingParams
from fastdecode.core.config.groups import Batching
from fastdecode.core.delta import DeltaQueue
from fastdecode.core.sequence import Request
from fastdecode.engine.instances.replanning import totals_of
from fastdecode.engine.stats import EngineStats
from fastdecode.schedule.simulation.instance_time import InstanceTime

WAYS = {"one": Roles(0, 0, 1), "two": Roles(0, 0, 2), "apart": Roles(1, 1)}
WORKLOADS = {"short": ("128", "32"), "long": ("lognormal:384,0.4", "16")}
BATCH_TOKENS = 512
PRECISION = 0.06
LOOK_S = 0.2
OBSERVED_AT = 0.8
ATTAINMENT = 0.9
MOST_TAKEN = 0.9
"""Of an instance's core, by the controller: beyond that nothing is carried anyway."""


def asked(name: str, num_prompt: int, num_tokens: int) -> Request:
    chance = random.Random(name)
    prompt = tuple(chance.randrange(3, VOCAB) for _ in range(num_prompt))
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return Request(name, prompt, params, num_tokens, seed=0)


@dataclass(frozen=True)
class SharedCores:
    """Cores of a machine that instances share with their controller and clients.

    Args:
        num_cores: of the machine.
        token_s: CPU seconds that the controller and the clients take for each output token.
    """

    num_cores: int
    token_s: float

    def slowed(
        self, alike: InstanceProfile, num_instances: int, tokens_per_s: float
    ) -> InstanceProfile:
        """The instances at this rate, each on a core of its own, without what the controller
        takes of their cores."""
        free = self.num_cores - num_instances
        taken = max(0.0, tokens_per_s * self.token_s - free) / num_instances
        slower = 1 / (1 - min(taken, MOST_TAKEN))
        names = ("step_s", "token_s", "cached_s", "prompt_s")
        longer = {name: slower * getattr(alike.times, name) for name in names}
        return replace(alike, times=replace(alike.times, **longer))


@dataclass(frozen=True)
class Observed:
    """What instances are like, and the cores that they run on."""

    alike: InstanceProfile
    cores: SharedCores

    def run(self, roles: Roles, draw: Draw, rate: float, num: int) -> GoodputRun:
        """Simulate so many requests."""
        alike = self.cores.slowed(self.alike, roles.num, rate * draw.mean_output)
        return simulation_of(alike, roles)(draw.at(rate, num))


class Driver:
    """Sends requests to an LLM at their moments, and notes when tokens come.

    Args:
        llm: the controller.
        processes: of the instances, by address.
    """

    def __init__(self, llm: LLM, processes: Mapping[str, psutil.Process]) -> None:
        self._llm = llm
        self._processes = processes
        self._numbers = itertools.count()

    def observe(self, requests: Sequence[tuple[float, int, int]]) -> Observed:
        """Fit lines to the instances' totals and CPU time while these requests run."""
        log, seen = StepLog(), dict[str, EngineStats]()
        running = self._llm._running
        token_bytes = running.spec.kv_spec(running.identity.kv_dtype).token_bytes

        def look() -> None:
            for each in running.engine.remote:
                name, stats = each.name, each.stats
                if stats is not seen.get(name):  # a new status: its CPU time is of this moment
                    seen[name] = stats
                    totals = totals_of(stats, token_bytes)
                    seconds = sum(self._processes[name].cpu_times()[:2])
                    log.look(name, replace(totals, seconds=seconds))

        before_s = time.process_time()
        self.run(requests, look)
        token_s = (time.process_time() - before_s) / sum(x[2] for x in requests)
        measured = log.measured()
        assert measured is not None, "too few steps: --requests"
        sizes = running.engine.remote[0]
        alike = InstanceProfile(measured, BATCH_TOKENS, sizes.num_tokens, sizes.max_sequences)
        return Observed(alike, SharedCores(len(os.sched_getaffinity(0)), token_s))

    def run(
        self,
        requests: Sequence[tuple[float, int, int]],
        look: Callable[[], object] = lambda: None,
    ) -> list[list[float]]:
        """Seconds, from the first moment on, of each request's tokens; ``look``: is
        called now and then meanwhile."""
        reader, first = DeltaQueue(), next(self._numbers)
        names = [f"{first}/{number}" for number in range(len(requests))]
        made = [asked(name, *x[1:]) for name, x in zip(names, requests, strict=True)]
        times: dict[str, list[float]] = {name: [] for name in names}
        left, waiting = sum(x[2] for x in requests), list(range(len(requests)))[::-1]
        started = time.perf_counter()
        while left:
            now = time.perf_counter() - started
            while waiting and requests[waiting[-1]][0] <= now:
                self._llm.service.submit([made[waiting.pop()]], reader)
            next_s = requests[waiting[-1]][0] - now if waiting else 1.0
            look()
            for delta in reader.take(max(0.0, min(LOOK_S, next_s))):
                assert delta.error is None, delta.error
                came_s = time.perf_counter() - started
                times[delta.request_id] += [came_s] * len(delta.token_ids)
                left -= len(delta.token_ids)
        return list(times.values())


def times_of(
    requests: Sequence[tuple[float, int, int]], tokens: list[list[float]]
) -> list[RequestTimes]:
    return [
        RequestTimes(
            arrived_s,
            came[0] - arrived_s,
            (came[-1] - came[0]) / (len(came) - 1) if len(came) > 1 else None,
        )
        for (arrived_s, _, _), came in zip(requests, tokens, strict=True)
    ]


def greatest(is_carried: Callable[[float], bool], guess: float) -> float:
    """Requests a second, to ``PRECISION``."""
    low, high = guess, guess
    if is_carried(guess):
        while is_carried(high := high * 1.3):
            low = high
    else:
        while not is_carried(low := low / 1.3):
            high = low
            if low < guess / 100:
                return 0.0
    while high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_carried(middle) else (low, middle)
    return low


def judged(run: GoodputRun, slo: Slo) -> bool:
    return slo.is_attained(run.times) and run.is_sustained


def predict(observed: Observed, roles: Roles, draw: Draw, slo: Slo, num: int) -> float:
    return greatest(lambda rate: judged(observed.run(roles, draw, rate, num), slo), 5.0)


def slo_of(fitted: LinearTimes, draw: Draw, slack: float) -> Slo:
    """So many times what a request by itself takes."""
    times = InstanceTime(fitted)
    prompt, output = int(draw.mean_prompt), int(draw.mean_output)
    step_s = float(times.decode_s(1, prompt + output // 2, 1)[0])
    return Slo(slack * times.prefill_s([prompt]), slack * step_s, ATTAINMENT)


class Measuring:
    """One way, and one workload."""

    def __init__(self, driver: Driver, draw: Draw, slo: Slo, num: int) -> None:
        self._driver, self._draw, self._slo, self._num = driver, draw, slo, num
        self.carried: tuple[float, GoodputRun] | None = None
        """The greatest rate so far, and what came of it."""
        self.controller: list[float] = []

    def is_carried(self, rate: float) -> bool:
        requests = self._draw.at(rate, self._num)
        before_s, began_s = time.process_time(), time.perf_counter()
        run = GoodputRun(times_of(requests, self._driver.run(requests)))
        used_s, seconds = time.process_time() - before_s, time.perf_counter() - began_s
        self.controller.append(used_s / seconds)
        print(f"  {rate:.2f}/s: {self._slo.share(run.times):.0%}", file=sys.stderr)
        is_carried = judged(run, self._slo)
        if is_carried and (self.carried is None or rate > self.carried[0]):
            self.carried = rate, run
        return is_carried


def bisected(measuring: Measuring, predicted: float, tolerance: float) -> dict[str, Any]:
    """The measured rate, to ``PRECISION``."""
    found = greatest(measuring.is_carried, max(0.1, predicted))
    error = predicted / found - 1 if found else math.inf
    return {"measured": found, "error": error if found else None, "within": abs(error) <= tolerance}


def bracketed(measuring: Measuring, predicted: float, tolerance: float) -> dict[str, Any]:
    """Whether the measured rate is within the tolerance, by two runs."""
    rates = predicted / (1 + tolerance), predicted / (1 - tolerance)
    carried = [measuring.is_carried(rate) for rate in rates]
    return {"rates": rates, "carried": carried, "within": carried == [True, False]}


def lengths_of(workload: str) -> list[Lengths]:
    return [Lengths.parse("length", text) for text in WORKLOADS[workload]]


def measure(
    driver: Driver, roles: Roles, workload: str, slo: Slo | None, options: argparse.Namespace
) -> dict[str, Any]:
    num, lengths = options.requests, lengths_of(workload)
    draw = drawn(lengths[0], lengths[1], 1.0, num, options.seed)
    other = drawn(lengths[0], lengths[1], 1.0, num, options.seed + 1)
    rough = driver.observe(other.at(options.first_rate * roles.num, num))
    slo = slo or slo_of(rough.alike.times, draw, options.slack)
    about = predict(rough, roles, other, slo, num)
    observed = driver.observe(other.at(OBSERVED_AT * max(about, 0.5), num))
    predicted = predict(observed, roles, draw, slo, num)
    measuring = Measuring(driver, draw, slo, num)
    row: dict[str, Any] = {
        "workload": workload, "slo": asdict(slo), **asdict(observed), "predicted": predicted,
        **(bracketed if options.quick else bisected)(measuring, predicted, options.tolerance),
        "controller": max(measuring.controller),
    }  # fmt: skip
    if measuring.carried is not None:
        rate, run = measuring.carried
        simulated = observed.run(roles, draw, rate, num)
        row["seen"] = {
            "rate": rate,
            "simulated": slo.quantiles(simulated.times),
            "measured": slo.quantiles(run.times),
        }
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--first-rate", type=float, default=2.0, help="an instance; seen first")
    parser.add_argument("--slack", type=float, default=4.0, help="of the SLO")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two rates a row")
    parser.add_argument("--tolerance", type=float, default=0.15)
    parser.add_argument("--least", type=int, default=5, help="rows that are to be within it")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = {name: value for name, value in vars(options).items() if name != "out"}
    rows: list[dict[str, Any]] = []
    slos: dict[str, Slo] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = model_or_random(options.model, options.shape, directory)
        step_tokens = Batching.max_num_sequences + BATCH_TOKENS
        engine = ("--kv-memory-gb", "0.5", "--max-step-tokens", str(step_tokens))
        for way in options.ways:
            roles = WAYS[way]
            named = asdict(roles).items()
            each = [name for name, count in named for _ in range(count)]
            with (
                pinned_instances(model, each, *engine) as processes,
                LLM(model, instances=list(processes)) as llm,
            ):
                driver = Driver(llm, processes)
                driver.run([(0.1 * i, 100 + 40 * i, 8) for i in range(16)])  # compiles
                for workload in WORKLOADS:
                    slo = slos.get(workload)
                    row = measure(driver, roles, workload, slo, options)
                    slos[workload] = Slo(**row["slo"])
                    rows.append({"way": way, **row})
                    print(json.dumps(rows[-1]), file=sys.stderr)
    num_within = sum(row["within"] for row in rows)
    print(f"{num_within} of {len(rows)} within {options.tolerance:.0%}", file=sys.stderr)
    keep({**provenance(), "options": chosen, "rows": rows}, options.out)
    return 0 if num_within >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())

"""The rate that instances carry within an SLO: simulated beforehand, and measured.

    python benchmarks/goodput.py --out benchmarks/results/goodput.json

A Llama-shaped random checkpoint of 32 M parameters (or ``--model DIR``), one
engine, and a prefill beside a decode instance, threads of this process. First
each way's own steps are timed: prompts of several lengths by themselves, and
decode steps of several batches and contexts; both are fitted by least squares
(``fit``, with its worst residual). Instances that share a machine slow each other
down: **beside** says how many times as long a batch of prompts takes while eight
sequences decode, and a step of these while prompts run; each counts for the part
of the time in which the other is busy, which is what the simulation says (found
by iteration; ``alone`` is what would be predicted without). With those times the
simulator of ``fastdecode plan goodput`` says what rate would be carried: **predicted**.
**observed** is what it says by the engines' own totals (``--replan``'s way) of a run of
the same requests at half of the rate that is predicted alone.
**measured**: the same requests, sent at those moments, and the same bisection over
rates. ``error``: predicted over measured, less 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from end_to_end import VOCAB
from provenance import keep, provenance
from r_worker_processes import add_model_options, model_or_random

from cost_model.goodput.replanning.measured import LinearTimes, Measured, StepLog
from cost_model.goodput.simulator import (
    DecodeSpec,
    PrefillSpec,
    Run,
    simulate,
    simulate_colocated,
)
from cost_model.goodput.slo import RequestTimes, Slo
from cost_model.goodput.workload import Draw, Lengths, drawn
from fastdecode import LLM, SamplingParams
from fastdecode.core.delta import DeltaQueue
from fastdecode.core.sequence import Request
from fastdecode.engine.replanning.replanner import totals_of

WAYS: dict[str, dict[str, Any]] = {
    "one engine": {"r_workers": 2},
    "instances": {"prefill_instances": 1, "decode_instances": 1},
}
WORKLOADS = {"short": ("128", "32"), "long": ("lognormal:384,0.4", "16")}
BATCH_TOKENS = 512
PRECISION = 0.05
ITERATIONS = 4
LOOK_S = 0.2
OBSERVED_AT = 0.5


@dataclass(frozen=True)
class Fitted:
    """Step times as ``InstanceTimes``: linear in what is there."""

    prompt: tuple[float, float, float]
    """Seconds of a batch, a token, a token squared."""
    step: tuple[float, float, float]
    """Of a step, a sequence, a cached token."""
    slower: tuple[float, float] = (1.0, 1.0)
    """How many times as long prompts and steps take, beside others."""
    num_stages: int = 1

    def prefill_s(self, lengths: Sequence[int]) -> float:
        a, b, c = self.prompt
        alone_s = a + b * sum(lengths) + c * sum(length * length for length in lengths)
        return self.slower[0] * alone_s

    def decode_s(self, num_sequences: int, context: int, num_steps: int) -> np.ndarray:
        a, b, c = self.step
        contexts = context + num_sequences * np.arange(num_steps)
        steps_s: np.ndarray = a + b * num_sequences + c * contexts
        return self.slower[1] * steps_s

    def mixed_s(self, num_sequences: int, context: int, chunks: Sequence[tuple[int, int]]) -> float:
        _, b, c = self.prompt
        fixed_s = self.prompt[0] if chunks else 0.0
        prompts_s = sum(b * new + c * ((past + new) ** 2 - past**2) for past, new in chunks)
        alone_s = float(self.decode_s(num_sequences, context, 1)[0]) if num_sequences else 0.0
        return prompts_s + max(alone_s, fixed_s)


def asked(name: str, num_prompt: int, num_tokens: int) -> Request:
    chance = random.Random(name)
    prompt = tuple(chance.randrange(3, VOCAB) for _ in range(num_prompt))
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return Request(name, prompt, params, num_tokens, seed=0)


class Driver:
    """Sends requests to an LLM at their moments, and notes when tokens come."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._numbers = itertools.count()

    def observe(self, requests: Sequence[tuple[float, int, int]]) -> Measured | None:
        """What the engines' own steps took while these ran, as ``--replan`` has it."""
        log = StepLog()

        def look() -> None:
            engine = self._llm._running.engine
            each = getattr(engine, "each_stats", {"one": self._llm.stats})
            for name, stats in each.items():
                log.look(name, totals_of(stats, 1))

        self.run(requests, look)
        return log.measured()

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


def least_squares(rows: list[list[float]], seconds: list[float]) -> tuple[tuple[float, ...], float]:
    """Coefficients, none below 0, that make the relative errors small; and the
    worst of these."""
    a, t = np.array(rows), np.array(seconds)
    keep_columns = list(range(a.shape[1]))
    while True:
        scaled = a[:, keep_columns] / t[:, None]
        found, *_ = np.linalg.lstsq(scaled, np.ones(len(t)), rcond=None)
        if (found >= 0).all():
            break
        keep_columns.remove(keep_columns[int(np.argmin(found))])
    whole = np.zeros(a.shape[1])
    whole[keep_columns] = found
    return tuple(whole.tolist()), float(np.abs(a @ whole / t - 1).max())


def fit(driver: Driver, rounds: int) -> tuple[Fitted, dict[str, Any]]:
    prompts, prompt_s, steps, step_s = [], [], [], []
    for lengths in ([32], [128], [256], [512], [128] * 2, [128] * 4, [256] * 2):
        seconds = [
            max(x[0] for x in driver.run([(0.0, length, 1) for length in lengths]))
            for _ in range(rounds)
        ]
        prompts.append([1.0, float(sum(lengths)), float(sum(x * x for x in lengths))])
        prompt_s.append(median(seconds))
    for batch, context in itertools.product((1, 4, 16), (64, 384)):
        gaps = []
        for _ in range(rounds):
            times = driver.run([(0.0, context, 24)] * batch)
            began = max(x[0] for x in times)
            gaps += [
                after - before
                for x in times
                for before, after in itertools.pairwise(x)
                if before >= began
            ]
        steps.append([1.0, float(batch), float(batch * (context + 12))])
        step_s.append(median(gaps))
    (a, b, c), prompt_error = least_squares(prompts, prompt_s)
    (d, e, f), step_error = least_squares(steps, step_s)
    told = {"prompt_s": prompt_s, "step_s": step_s, "worst": [prompt_error, step_error]}
    return Fitted((a, b, c), (d, e, f)), told


BESIDE = (8, 128, 160)
"""Sequences that decode beside prompts, their prompts, and their tokens."""
PROMPTS_BESIDE = (24, 256)


def beside(driver: Driver, fitted: Fitted) -> tuple[float, float]:
    """How many times as long a batch of prompts takes while others decode, and a
    step of these meanwhile."""
    batch, prompt, tokens = BESIDE
    count, length = PROMPTS_BESIDE
    times = driver.run([(0.0, prompt, tokens)] * batch + [(0.0, length, 1)] * count)
    decoding, prompts = times[:batch], [came[0] for came in times[batch:]]
    began = max(came[0] for came in decoding)
    over = min(came[-1] for came in decoding)
    done = sorted({round(at, 4) for at in prompts if began <= at <= over})
    batches = [after - before for before, after in itertools.pairwise(done)]
    each = BATCH_TOKENS // length
    # Those of a batch are told within a moment.
    batches = [seconds for seconds in batches if seconds > 0.3 * fitted.prefill_s([length])]
    last = min(over, max(prompts))
    gaps = [
        after - before
        for came in decoding
        for before, after in itertools.pairwise(came)
        if before >= began and after <= last
    ]
    steps_s = fitted.decode_s(batch, batch * (prompt + tokens // 2), 1)
    if len(batches) < 3 or not gaps:
        return 1.0, 1.0
    longer = sum(batches) / len(batches) / fitted.prefill_s([length] * each)
    return max(1.0, longer), max(1.0, float(np.mean(gaps)) / float(steps_s[0]))


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


def predict(
    way: str,
    fitted: Fitted | LinearTimes,
    slower: tuple[float, float],
    draw: Draw,
    slo: Slo,
    options: argparse.Namespace,
) -> float:
    def run_at(requests: list[tuple[float, int, int]]) -> Run:
        if way != "instances":
            return simulate_colocated(requests, [DecodeSpec(fitted)], BATCH_TOKENS)
        times = fitted
        for _ in range(ITERATIONS):
            run = simulate(requests, [PrefillSpec(times, BATCH_TOKENS)], [DecodeSpec(times)], 0.0)
            shares = run.decode_busy[0], run.prefill_busy[0]
            longer = (1 + (slow - 1) * share for slow, share in zip(slower, shares, strict=True))
            if isinstance(fitted, LinearTimes):
                break  # measured as they slowed each other down
            times = replace(fitted, slower=(next(longer), next(longer)))
        return run

    def is_carried(rate: float) -> bool:
        run = run_at(draw.at(rate, options.requests))
        return slo.is_attained(run.times) and run.is_sustained

    return greatest(is_carried, 5.0)


def measure_rate(
    driver: Driver, draw: Draw, slo: Slo, guess: float, options: argparse.Namespace
) -> float:
    def is_carried(rate: float) -> bool:
        requests = draw.at(rate, options.requests)
        run = Run(times_of(requests, driver.run(requests)))
        print(f"  {rate:.2f}/s: {slo.share(run.times):.0%}", file=sys.stderr)
        return slo.is_attained(run.times) and run.is_sustained

    return greatest(is_carried, guess)


def slo_of(fitted: Fitted, draw: Draw, options: argparse.Namespace) -> Slo:
    """So many times what a request by itself takes."""
    prompt, output = int(draw.mean_prompt), int(draw.mean_output)
    alone_s = fitted.prefill_s([prompt])
    step_s = float(fitted.decode_s(1, prompt + output // 2, 1)[0])
    return Slo(options.slack * alone_s, options.slack * step_s, 0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3, help="of each timing")
    parser.add_argument("--slack", type=float, default=4.0, help="of the SLO")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    chosen = {name: value for name, value in vars(options).items() if name != "out"}
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        model = model_or_random(options.model, options.shape, directory)
        for way, given in WAYS.items():
            common = {"dtype": "float32", "kv_memory_gb": 0.3, "prefix_cache": "off"}
            more = {"r_threads": 1, "prefill_batch_tokens": BATCH_TOKENS}
            with LLM(model, **common, **(more if way == "instances" else {"r_threads": 1}),
                     **given) as llm:  # fmt: skip
                driver = Driver(llm)
                fit(driver, 1)  # compiles
                fitted, told = fit(driver, options.rounds)
                slower = (1.0, 1.0)
                if way == "instances":
                    found_slower = [beside(driver, fitted) for _ in range(options.rounds)]
                    slower = tuple(median(each) for each in zip(*found_slower, strict=True))
                for name, (prompt, output) in WORKLOADS.items():
                    lengths = [Lengths.parse("length", text) for text in (prompt, output)]
                    draw = drawn(lengths[0], lengths[1], 1.0, options.requests, options.seed)
                    slo = slo_of(fitted, draw, options)
                    predicted = predict(way, fitted, slower, draw, slo, options)
                    alone = predict(way, fitted, (1.0, 1.0), draw, slo, options)
                    seen = driver.observe(draw.at(OBSERVED_AT * alone, options.requests))
                    observed = None
                    if seen is not None:
                        observed = predict(way, seen.times, slower, draw, slo, options)
                    found = measure_rate(driver, draw, slo, max(0.1, predicted), options)
                    rows.append({
                        "way": way, "workload": name, "slo": asdict(slo), "fit": told,
                        "beside": slower, "alone": alone, "predicted": predicted,
                        "observed": observed, "measured": found,
                        "error": predicted / found - 1 if found else None,
                    })  # fmt: skip
                    print(json.dumps(rows[-1]), file=sys.stderr)
    keep({**provenance(), "options": chosen, "rows": rows}, options.out)


if __name__ == "__main__":
    main()

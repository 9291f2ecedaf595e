"""How right the ETA of a batch job is.

    python benchmarks/remaining_time.py drawn [--jobs N] [--out FILE]
    python benchmarks/remaining_time.py real [--lines N] [--out FILE]

``drawn``: jobs of drawn shapes in virtual time, estimates at 10% to 90% of the time.
``real``: a job of a random model of 44 million parameters, 64 sequences, whose answers
have log-normal lengths. The lines say only 1,024 tokens at most. The ETA is recorded
once a second by two clocks: the wall clock, and the CPU time of the job's processes, which
other programs of the machine slow down less.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from provenance import keep, provenance

from fastdecode.core.answer_lengths import EndedAnswers
from fastdecode.core.remaining_time import JobCounts, TokenTimes, remaining_s

MARKS = tuple(tenth / 10 for tenth in range(1, 10))
SAMPLE_S = 1.0
MEAN = 150


@dataclass(frozen=True)
class Shape:
    """A job in virtual time: what its answers get, and what its steps cost."""

    lengths: list[int]
    most: int | None
    """Tokens that an answer may get."""
    width: int = 64
    prompt: int = 200
    prompt_s: float = 0.0003
    step_s: float = 0.15
    """Of a full batch."""
    fixed: float = 0.5
    """The share of it that doesn't depend on how many sequences run."""


def samples(job: Shape) -> Iterator[tuple[float, JobCounts, int]]:
    """Seconds, counts and output tokens, whenever an answer began or ended, and at
    least once in 32 steps."""
    waiting = list(reversed(job.lengths))
    most = job.most or 1 << 30
    running: list[tuple[int, int]] = []  # the rounds at which each ends and began
    now_s, rounds, prompts, outputs, done = 0.0, 0, 0, 0, 0
    ended = EndedAnswers()
    each_s = job.step_s * (1.0 - job.fixed) / job.width
    num = len(job.lengths)
    while waiting or running:
        while waiting and len(running) < job.width:
            running.append((rounds + min(waiting.pop(), most), rounds))
            prompts += job.prompt
            now_s += job.prompt * job.prompt_s
        steps = min(32, min(running)[0] - rounds)
        rounds += steps
        now_s += steps * (job.step_s * job.fixed + each_s * len(running))
        outputs += steps * len(running)
        for end, begin in running:
            if end == rounds:
                ended.add(end - begin, is_cut=end - begin == most)
                done += 1
        running = [each for each in running if each[0] > rounds]
        ages = Counter((rounds - begin, job.most or 0) for _, begin in running)
        limits = {job.most or 0: num}
        yield now_s, JobCounts(num, done, ages, prompts, ended, limits, num), outputs


def judged(job: Shape, marks: tuple[float, ...] = MARKS) -> list[tuple[float, float]]:
    """Of a job: the ETA and the truth, in seconds, at these shares of its time."""
    *_, (end_s, _, _) = samples(job)
    left, found, times = list(marks), [], TokenTimes()
    for now_s, counts, outputs in samples(job):
        times.add(now_s, counts.prompt_tokens, outputs, counts.num_running)
        while left and now_s >= left[0] * end_s:
            left.pop(0)
            found.append((remaining_s(counts, times) or 0.0, end_s - now_s))
    return found


def _log_normal(sigma: float) -> Callable[[random.Random], float]:
    return lambda rng: MEAN * math.exp(rng.gauss(-sigma * sigma / 2, sigma))


LENGTHS: Mapping[str, Callable[[random.Random], float]] = {
    "log-normal, sigma 0.25": _log_normal(0.25),
    "log-normal, sigma 0.5": _log_normal(0.5),
    "log-normal, sigma 0.8": _log_normal(0.8),
    "log-normal, sigma 1": _log_normal(1.0),
    "exponential": lambda rng: rng.expovariate(1 / MEAN),
    "100 to 300": lambda rng: rng.uniform(100, 300),
    "short and long": lambda rng: rng.gauss(*((40, 10) if rng.random() < 0.6 else (400, 60))),
}


def drawn_shape(kind: str, seed: int) -> Shape:
    """A job whose answers have such lengths; all else is drawn, too."""
    rng = random.Random(f"{kind} {seed}")
    num = rng.choice([640, 1000, 1500, 3000])
    return Shape(
        [max(1, round(LENGTHS[kind](rng))) for _ in range(num)],
        most=rng.choice([None, 1024, 512, 256]),
        width=rng.choice([32, 64, 128]),
        prompt=rng.randint(50, 400),
        fixed=rng.uniform(0.2, 0.8),
    )


def is_right(estimate: float, true: float) -> bool:
    """Within a fifth."""
    return abs(estimate - true) <= 0.2 * true


def drawn(num_jobs: int) -> dict[str, Any]:
    """By lengths: of how many jobs the estimate is within a fifth, at each mark."""
    rows: dict[str, Any] = {}
    for kind in LENGTHS:
        right = [0] * len(MARKS)
        ratios: dict[int, list[float]] = defaultdict(list)
        for seed in range(num_jobs):
            for place, (estimate, true) in enumerate(judged(drawn_shape(kind, seed))):
                right[place] += is_right(estimate, true)
                ratios[place].append(estimate / true)
        middle = [sorted(each)[len(each) // 2] for each in ratios.values()]
        rows[kind] = {"jobs": num_jobs, "right": right, "median_ratio": middle}
        print(f"{kind}: {right} of {num_jobs}; median {[round(each, 2) for each in middle]}")
    return rows


def real(num_lines: int) -> dict[str, Any]:
    """Run it; the series, and how much of it is within a fifth."""
    from random_llama import llama_config, write_checkpoint

    config = llama_config(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=8192, eos_token_id=8191,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), config, "random")
        series = _run(directory, num_lines)
    right = {}
    for clock in ("wall", "cpu"):
        end_s = series[-1][f"{clock}_s"]
        after = [row for row in series if row["wall_s"] >= 60 and row[f"{clock}_s"] < 0.95 * end_s]
        hits = [is_right(row[f"{clock}_eta_s"], end_s - row[f"{clock}_s"]) for row in after]
        right[clock] = [sum(hits), len(hits)]
        print(f"{clock}: {end_s:.0f} s; right {sum(hits)} times of {len(hits)}")
    return {"lines": num_lines, "right": right, "series": series}


def _run(model: str, num_lines: int) -> list[dict[str, float]]:
    from fastdecode import LLM, SamplingParams
    from fastdecode.core.progress import Progress
    from fastdecode.core.sequence import PromptRequest

    rng, drawing = random.Random(3), _log_normal(0.7)
    params = [
        SamplingParams(
            max_tokens=1024, min_tokens=max(1, min(1024, round(drawing(rng)))),
            logit_bias={8191: 100.0}, seed=place,
        )
        for place in range(num_lines)
    ]  # fmt: skip
    prompts = [[rng.randrange(8000) for _ in range(rng.randint(30, 250))] for _ in params]
    series: list[dict[str, float]] = []
    with LLM(model, max_num_sequences=64, seed=0) as llm:
        clocks = {"wall": time.monotonic, "cpu": _cpu_s}
        began = {name: clock() for name, clock in clocks.items()}
        bars = {name: Progress(io.StringIO(), clock=clock) for name, clock in clocks.items()}
        for each in bars.values():
            each.begin(num_lines, limits={1024: num_lines})
        ended, done = EndedAnswers(), 0

        def tick() -> None:
            wall_s = time.monotonic() - began["wall"]
            if series and wall_s - series[-1]["wall_s"] < SAMPLE_S:
                return
            now = {name: clock() - began[name] for name, clock in clocks.items()}
            running = llm.running_answers()
            for each in bars.values():
                each.update(
                    done=done, num_failed=0, num_tokens=llm.stats.num_output_tokens,
                    workers=(1, 1), num_prompt_tokens=llm.stats.num_prompt_tokens,
                    num_running=llm.snapshot().engine.num_running, running=running, ended=ended,
                )  # fmt: skip
            row = {f"{name}_s": now[name] for name in clocks}
            row |= {f"{name}_eta_s": bars[name].remaining_s or 0.0 for name in clocks}
            series.append({name: round(value, 1) for name, value in row.items()} | {"done": done})

        requests = (PromptRequest(str(i), p, params[i]) for i, p in enumerate(prompts))
        for output in llm.stream(requests, tick):
            done += 1
            ended.add_output(output)
        series.append({f"{name}_s": clock() - began[name] for name, clock in clocks.items()})
        series[-1] |= {"wall_eta_s": 0.0, "cpu_eta_s": 0.0, "done": done}
    return series


def _cpu_s() -> float:
    """Of this process and its children."""
    total, me = 0.0, psutil.Process()
    for process in (me, *me.children()):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["drawn", "real"])
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--lines", type=int, default=3000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = drawn(args.jobs) if args.what == "drawn" else real(args.lines)
    if args.out is not None:
        keep({**provenance(), args.what: rows}, args.out)


if __name__ == "__main__":
    main()

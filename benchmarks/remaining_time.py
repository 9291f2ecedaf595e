"""How right the ETA of a batch job is.

    python benchmarks/remaining_time.py drawn [--jobs N] [--out FILE]
    python benchmarks/remaining_time.py real [--lines N] [--out FILE]

``drawn``: jobs of drawn shapes in virtual time, estimates at 10% to 90% of the time.
``real``: `fastdecode run-batch` with a random model of 44 million parameters, 64 sequences,
whose answers have log-normal lengths. The lines say only 1,024 tokens at most. The ETA is
read once a second from the file of ``--status``. Needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provenance import keep, provenance

from fastdecode.core.answer_lengths import EndedAnswers
from fastdecode.core.remaining_time import JobCounts, TokenTimes, remaining_s

MARKS = tuple(tenth / 10 for tenth in range(1, 10))
SAMPLE_S = 1.0
MEAN = 150
END_TOKEN = 8191


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
    with tempfile.TemporaryDirectory() as directory:
        series = _watched(Path(directory), num_lines)
    end_s = series[-1]["wall_s"]
    after = [row for row in series if 60 <= row["wall_s"] < 0.95 * end_s]
    hits = [is_right(row["eta_s"], end_s - row["wall_s"]) for row in after]
    print(f"{end_s:.0f} s; right {sum(hits)} times of {len(hits)}")
    return {"lines": num_lines, "right": [sum(hits), len(hits)], "series": series}


def _watched(directory: Path, num_lines: int) -> list[dict[str, float]]:
    """Once a second what ``--status`` has written, until the job is over."""
    model, status = directory / "model", directory / "status.json"
    _write_model(model)
    _write_lines(directory / "in.jsonl", num_lines)
    command = [sys.executable, "-m", "fastdecode", "run-batch", str(model)]
    command += ["--input", str(directory / "in.jsonl"), "--output", str(directory / "out.jsonl")]
    command += ["--status", str(status), "--max-num-sequences", "64"]
    series: list[dict[str, float]] = []
    began_s = time.time()
    with subprocess.Popen(command) as job:
        while job.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(SAMPLE_S)
            if status.exists():
                series.append(_looked(json.loads(status.read_text()), began_s))
    if job.returncode:
        raise SystemExit(f"the job ended with exit code {job.returncode}")
    return series


def _looked(status: dict[str, Any], began_s: float) -> dict[str, float]:
    """What counts of a status."""
    return {
        "wall_s": round(status["written"] - began_s, 1),
        "eta_s": round(status["eta_s"] or 0.0, 1),
        "done": status["done"],
        "tokens": status["generation_tokens"],
    }


def _write_model(directory: Path) -> None:
    from random_llama import llama_config, write_checkpoint

    config = llama_config(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=8192, eos_token_id=END_TOKEN,
    )  # fmt: skip
    directory.mkdir()
    write_checkpoint(directory, config, "random")


def _write_lines(file: Path, num_lines: int) -> None:
    """Batch lines; an answer ends as soon as its drawn ``min_tokens`` let it."""
    rng, sigma = random.Random(3), 0.7
    with file.open("w") as lines:
        for place in range(num_lines):
            length = rng.lognormvariate(math.log(MEAN) - sigma * sigma / 2, sigma)
            body = {
                "model": "model",
                "prompt": [rng.randrange(8000) for _ in range(rng.randint(30, 250))],
                "max_tokens": 1024,
                "min_tokens": max(1, min(1024, round(length))),
                "logit_bias": {str(END_TOKEN): 100.0},
                "seed": place,
                "temperature": 1.0,
            }
            line = {"custom_id": str(place), "method": "POST", "url": "/v1/completions"}
            lines.write(json.dumps({**line, "body": body}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["drawn", "real"])
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--lines", type=int, default=7000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = drawn(args.jobs) if args.what == "drawn" else real(args.lines)
    if args.out is not None:
        keep({**provenance(), args.what: rows}, args.out)


if __name__ == "__main__":
    main()

"""Is this tree slower on a CPU than another one was? Both run the same batches,
in turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/in_turns.py --before /tmp/before --rounds 8 --out F.json
    python benchmarks/in_turns.py --before /tmp/before --neighbour 0.5 --add --out F.json
    python benchmarks/in_turns.py --before /tmp/before --pipeline --rounds 2 --out F.json

Each tree has a process with an engine, which is warm and waits; a round runs one
and then the other, in another order every time, so that what else the machine
does falls on both. The workloads are those of ``end_to_end.py``: seconds to the
first token, and of the whole, by the clock and of the CPU. What counts is the
median of the rounds' ratios. With ``--neighbour``, a loop of another process
wants that share of the last core meanwhile, 10 ms at a time. With ``--pipeline``,
each tree's own ``pipeline.py`` is run in turns: cycles in one lane and in two.
With ``--add``, rows are added to those that the file has.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from end_to_end import MODELS, PROMPTS, WORKLOADS, make_checkpoint
from provenance import keep, provenance

ROOT = Path(__file__).parents[1]
ENGINE = """
import inspect
from fastdecode import LLM, SamplingParams
try:
    from fastdecode.core.config.engine import EngineConfig
    more = {"prefix_cache": "off"}
except ImportError:  # blocks weren't kept then
    more = {}
with LLM(path, dtype="bfloat16", kv_memory_gb=2, **more) as llm:
    def run(n):
        started, cpu = time.perf_counter(), time.process_time()
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        outputs = llm.generate(prompts, params)
        assert all(len(output.completions[0].token_ids) == n for output in outputs)
        return time.perf_counter() - started, time.process_time() - cpu
    run(new)
    print("warm", flush=True)
    for line in sys.stdin:
        (first, first_cpu), (total, total_cpu) = run(1), run(new)
        found = {"first_s": first, "total_s": total}
        found |= {"first_cpu_s": first_cpu, "total_cpu_s": total_cpu}
        print(json.dumps(found), flush=True)
"""
NEIGHBOUR = """
import os, sys, time
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
share = float(sys.argv[1])
while True:
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end:
        pass
    time.sleep(0.01 / share - 0.01)
"""
SIDES = ("before", "after")
CYCLES = ("one_lane_ms", "two_lanes_ms", "delayed_1ms_ms")
"""Of what ``pipeline.py`` says."""
Round = dict[str, dict[str, float]]


class Engine:
    """A tree's, in a process of its own."""

    def __init__(self, tree: Path, model: Path, workload: tuple[int, int, int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROMPTS + ENGINE, str(model), *map(str, workload)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ(tree),
            cwd=tree,
        )
        assert self._line() == "warm"

    def __call__(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self._line())
        return found

    def close(self) -> None:
        self._process.communicate(timeout=60)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"an engine ended with exit code {self._process.wait()}")
        return line


def environ(tree: Path) -> dict[str, str]:
    """In which that tree's packages are found, and no other's."""
    return {**os.environ, "PYTHONPATH": str(tree)}


def in_turns(runs: dict[str, Callable[[], dict[str, float]]], rounds: int) -> list[Round]:
    """Each side once in every round."""
    found = []
    for number in range(rounds):
        order = random.Random(number).sample(SIDES, 2)
        one = {side: runs[side]() for side in order}
        found.append(one)
        print(json.dumps(one), flush=True)
    return found


def ratios(found: list[Round]) -> dict[str, float]:
    """The median of after over before, of everything that was measured."""
    keys = found[0]["after"].keys()
    return {
        key: statistics.median(one["after"][key] / one["before"][key] for one in found)
        for key in keys
    }


@contextlib.contextmanager
def neighbour(share: float) -> Iterator[None]:
    """Another process, which wants that share of the last core."""
    if share == 0:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(share)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def end_to_end(trees: dict[str, Path], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models:
            make_checkpoint(Path(scratch) / model, MODELS[model])
        for model, workload in itertools.product(options.models, options.workloads):
            path = Path(scratch) / model
            engines = {side: Engine(trees[side], path, WORKLOADS[workload]) for side in SIDES}
            with neighbour(options.neighbour):
                found = in_turns(dict(engines), options.rounds)
            for engine in engines.values():
                engine.close()
            row = {"model": model, "workload": workload, "neighbour": options.neighbour}
            row |= {"ratios": ratios(found), "rounds": found}
            print(model, workload, row["ratios"], flush=True)
            yield row


def pipelines(trees: dict[str, Path], rounds: int) -> Iterator[dict[str, Any]]:
    def cycles(tree: Path) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch, "pipeline.json")
            command = [sys.executable, "benchmarks/pipeline.py", "--out", str(out)]
            subprocess.run(
                command, cwd=tree, env=environ(tree), check=True, stdout=subprocess.DEVNULL
            )
            summary = json.loads(out.read_text())["summary"]
        return {key: summary[key] for key in CYCLES}

    runs = {side: lambda tree=tree: cycles(tree) for side, tree in trees.items()}
    found = in_turns(runs, rounds)
    yield {"ratios": ratios(found), "rounds": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="the other tree")
    parser.add_argument("--pipeline", action="store_true", help="pipeline.py instead")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--workloads", nargs="+", default=["A", "C"], choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--neighbour", type=float, default=0.0, metavar="SHARE")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", action="store_true", help="keep the rows that are in --out")
    options = parser.parse_args()
    trees = {"before": options.before.resolve(), "after": ROOT}
    before = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=options.before, capture_output=True, text=True
    )
    rows: list[dict[str, Any]] = []
    if options.add and options.out is not None and options.out.exists():
        rows = json.loads(options.out.read_text())["rows"]
    sitting = {"provenance": provenance(), "before": before.stdout.strip()}
    measured = pipelines(trees, options.rounds) if options.pipeline else end_to_end(trees, options)
    for row in measured:
        rows.append({**row, **sitting})
        keep({"rows": rows}, options.out)


if __name__ == "__main__":
    main()

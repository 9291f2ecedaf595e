"""Speed of this tree beside another one's on a CPU. Both run the same batches, in turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/in_turns.py --before /tmp/before --rounds 8 --out F.json
    python benchmarks/in_turns.py --before /tmp/before --neighbour 0.5 --add --out F.json
    python benchmarks/in_turns.py --before /tmp/before --part pipeline --rounds 2 --out F.json
    python benchmarks/in_turns.py --before /tmp/before --part transport serving --out F.json

Each tree has a process with an engine, which is warm and waits. A round runs one and then the
other, in another order every time. The workloads are those of ``end_to_end.py``: seconds to the
first token, and of the whole, by the clock and of the CPU. The result is the median of the rounds'
ratios. With ``--neighbour``, a loop of another process takes that share of the last core.

With ``--part``, parts of an engine run in place of a whole one, by each tree's own benchmark:
``pipeline`` is cycles in one lane and in two, ``transport`` a layer's round trip to 1 and 3
R-workers, the others small runs of the benchmark of that name. With ``--add``, rows are added to
those that the file has.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
Part = Callable[[dict[str, Path], int], dict[str, Any]]


class Program:
    """A tree's, in a process of its own: it says that it is warm, and then measures once for
    each line that it reads."""

    def __init__(self, tree: Path, text: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", text, *arguments],
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
            raise RuntimeError(f"a program ended with exit code {self._process.wait()}")
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
            words = (str(path), *map(str, WORKLOADS[workload]))
            engines = {side: Program(trees[side], PROMPTS + ENGINE, *words) for side in SIDES}
            with neighbour(options.neighbour):
                found = in_turns(dict(engines), options.rounds)
            for engine in engines.values():
                engine.close()
            row = {"model": model, "workload": workload, "neighbour": options.neighbour}
            row |= {"ratios": ratios(found), "rounds": found}
            print(model, workload, row["ratios"], flush=True)
            yield row


def pipelines(trees: dict[str, Path], rounds: int) -> dict[str, Any]:
    def cycles(tree: Path) -> dict[str, float]:
        summary = _run_own(tree, "pipeline.py")["summary"]
        return {key: summary[key] for key in CYCLES}

    return _in_turns_by(cycles, trees, rounds)


def transports(trees: dict[str, Path], rounds: int, kinds: Sequence[str] = ()) -> dict[str, Any]:
    """``kinds``: of transports; none: all."""

    def trips(tree: Path) -> dict[str, float]:
        only = ["--transports", *kinds] if kinds else []
        rows = _run_own(tree, "transport.py", "--r-workers", "1", "3", *only)["rows"]
        return {
            f"{row['transport']}, {row['r_workers']} x {row['bytes_out']} bytes: {side}_us":
            row[f"{side}_s"] * 1e6
            for row in rows for side in ("raw", "ours")
        }  # fmt: skip

    return _in_turns_by(trips, trees, rounds)


@dataclass(frozen=True)
class Own:
    """A tree's own benchmark."""

    options: str
    seconds: Callable[[dict[str, Any]], dict[str, float]]
    """From what it wrote."""


def _failover(found: dict[str, Any]) -> dict[str, float]:
    rows = (row for row in found["rows"] if row["way"] in ("recomputed", "replicas"))
    return {f"stall, {row['way']}": row["stall_s"] for row in rows}


def _conversations(found: dict[str, Any]) -> dict[str, float]:
    rows = (row for row in found["rows"] if row["pace"] == "peak")
    return {f"cache {row['mode']}": row["total_s"] for row in rows}


def _serving(found: dict[str, Any]) -> dict[str, float]:
    rates = found["decode"]["results"]["tokens_per_s"]
    return {f"token {way}": 1 / rate for way, rate in rates.items()}


OWN = {
    "failover": Own("--rounds 2 --contexts 1024", _failover),
    "conversations": Own("--conversations 6 --shrink 16 --kv-memory-gb 0.2", _conversations),
    "serving": Own("decode --rounds 2", _serving),
}


def _own(name: str, trees: dict[str, Path], rounds: int) -> dict[str, Any]:
    def measure(tree: Path) -> dict[str, float]:
        own = OWN[name]
        return own.seconds(_run_own(tree, f"{name}.py", *own.options.split()))

    return _in_turns_by(measure, trees, rounds)


PARTS: dict[str, Part] = {
    "pipeline": pipelines,
    "transport": transports,
    **{name: partial(_own, name) for name in OWN},
}


def _run_own(tree: Path, name: str, *options: str) -> dict[str, Any]:
    """A tree's own benchmark of that name; what it wrote."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out.json")
        command = [sys.executable, f"benchmarks/{name}", "--out", str(out), *options]
        subprocess.run(command, cwd=tree, env=environ(tree), check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def _in_turns_by(
    measure: Callable[[Path], dict[str, float]], trees: dict[str, Path], rounds: int
) -> dict[str, Any]:
    found = in_turns({side: partial(measure, tree) for side, tree in trees.items()}, rounds)
    return {"ratios": ratios(found), "rounds": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="the other tree")
    parser.add_argument(
        "--part", nargs="+", default=[], choices=PARTS, help="these parts, and no whole engine"
    )
    parser.add_argument("--transports", nargs="+", default=[], help="with that part; default: all")
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
    chosen: dict[str, Part] = {**PARTS, "transport": partial(transports, kinds=options.transports)}
    parts = ({"part": name, **chosen[name](trees, options.rounds)} for name in options.part)
    for row in parts if options.part else end_to_end(trees, options):
        rows.append({**row, **sitting})
        keep({"rows": rows}, options.out)


if __name__ == "__main__":
    main()

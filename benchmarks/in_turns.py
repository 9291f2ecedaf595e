"""Is this tree slower on a CPU than another one was? Both run the same batches,
in turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/in_turns.py --before /tmp/before --rounds 8 --out F.json
    python benchmarks/in_turns.py --before /tmp/before --neighbour 0.5 --add --out F.json
    python benchmarks/in_turns.py --before /tmp/before --part pipeline --rounds 2 --out F.json
    python benchmarks/in_turns.py --before /tmp/before --part host_turns transport --out F.json
    python benchmarks/in_turns.py --before /tmp/before --part restore serving --out F.json

Each tree has a process with an engine, which is warm and waits; a round runs one
and then the other, in another order every time, so that what else the machine
does falls on both. The workloads are those of ``end_to_end.py``: seconds to the
first token, and of the whole, by the clock and of the CPU. What counts is the
median of the rounds' ratios. With ``--neighbour``, a loop of another process
wants that share of the last core meanwhile, 10 ms at a time.

With ``--part``, parts of an engine run in place of a whole one. ``pipeline``: each
tree's own ``pipeline.py``, cycles in one lane and in two. ``transport``: each tree's
own ``transport.py``, what a layer's round trip to 1 and 3 R-workers takes. ``host_turns``:
what a lane and layer takes of the CPU beside 1, 4 and 16 R-workers that answer at
once, where layers are tiny, so that the host's loop is most of it; the best of 12
steps. ``OWN``: each tree's own benchmark of that name, small, in seconds. With ``--add``,
rows are added to those that the file has.
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
HOST_TURNS = """
import json, sys, time
from collections import deque
from types import SimpleNamespace
import numpy as np
import torch
from fastdecode.core.sequence import Request, SamplingParams, Sequence
from fastdecode.wire.messages import Attend, AttendResult
from sworker.worker import SWorker
torch.set_num_threads(1)
torch.set_grad_enabled(False)
LANES, LAYERS, ROWS, PAST = 2, 32, 64, 100
CPU, params = torch.device("cpu"), SamplingParams(temperature=0)
request = Request("a", tuple(range(3, 3 + PAST + 1)), params, 1, seed=0)
config = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], torch_dtype="bfloat16",
    vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=LAYERS,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    rms_norm_eps=1e-5, hidden_act="silu", rope_theta=1e4, tie_word_embeddings=False,
)

class Fleet:
    def __init__(self):
        self.lost, self.gone, self.kept_by_gone = {}, {}, []
        self.moves = SimpleNamespace(has_moves=False, of_tiers=())
        self._o, self._owed = {}, deque()
    def peer(self, worker):
        return "nobody"
    def take_losses(self):
        return []
    def send(self, worker, message):
        if isinstance(message, Attend):
            o = self._o.setdefault((worker, message.q.shape), message.q.copy())
            answer = AttendResult(message.step, message.lane, message.layer, o, None, 0.0)
            self._owed.append((worker, answer))
    @property
    def is_owed(self):
        return bool(self._owed)
    def receive(self, *, most_s=None):
        return self._owed.popleft()

try:
    from fastdecode.core.dtype import DType
    from fastdecode.core.holders import (
        Holder, HolderId, HolderKind, Part, PartId, Residence, SequenceId,
    )
    from fastdecode.core.model.families import read_model_spec
    from fastdecode.engine.step.layout import StepBatch
    from fastdecode.engine.step.pipeline import Pipeline
    from fastdecode.engine.step.remote import AttentionPlan
    from fastdecode.schedule.plan import Chunk
    from sworker.load.weights import random_model
    holder = Holder(
        HolderKind.R_WORKER, attends_prompts=False, answers_at_once=False, token_bytes=1
    )
    def place(number, worker):
        sequence = Sequence.of(SequenceId(number), request, 0)
        part = Part(PartId(sequence.sequence_id), HolderId(worker), 0, PAST + 1)
        sequence.num_cached, sequence.residence = PAST, Residence((part,))
        return Chunk(sequence, 1)
    def build(chunks, num_workers, step, lane):
        return StepBatch.build(chunks, (holder,) * num_workers, step=step, lane=lane)
    def plan(spec, num_workers):
        holders = (holder,) * num_workers
        return AttentionPlan(spec.attention, DType.BFLOAT16, Fleet(), CPU, holders)
except ImportError:  # before holders were told apart from R-workers
    from fastdecode.core.dtype import DType
    from fastdecode.core.families import read_model_spec
    from fastdecode.engine.attend import AttentionPlan
    from fastdecode.engine.layout import StepBatch
    from fastdecode.engine.pipeline import Pipeline
    from fastdecode.schedule.scheduler import Chunk
    from sworker.weights import random_model
    def place(number, worker):
        sequence = Sequence.of(number, request, 0)
        sequence.num_cached, sequence.worker = PAST, worker
        return Chunk(sequence, 1)
    def build(chunks, num_workers, step, lane):
        return StepBatch.build(chunks, step=step, lane=lane)
    def plan(spec, num_workers):
        return AttentionPlan(spec.attention, DType.BFLOAT16, Fleet(), CPU)

spec = read_model_spec(config, name="tiny")
model = random_model(spec, device=CPU, dtype=torch.bfloat16)

class Turns:
    def __init__(self, num_workers):
        self._num_workers, self._step = num_workers, 0
        worker = SWorker(spec, model, CPU)
        self._pipeline = Pipeline(worker, plan(spec, num_workers), LANES)
    def us(self):
        self._step += 1
        batches = []
        for lane in range(LANES):
            chunks = [place(lane * ROWS + i, i % self._num_workers) for i in range(ROWS)]
            batches.append(build(chunks, self._num_workers, self._step * LANES + lane, lane))
        started = time.thread_time()
        for lane, batch in enumerate(batches):
            self._pipeline.launch(lane, batch, np.arange(0))
        while getattr(self._pipeline, "lanes", self._pipeline).in_flight:
            self._pipeline.run()
        return (time.thread_time() - started) / (LANES * LAYERS) * 1e6

turns = dict((num_workers, Turns(num_workers)) for num_workers in (1, 4, 16))
for each in turns.values():
    each.us(), each.us()
print("warm", flush=True)
for line in sys.stdin:
    found = dict((f"{n}_us", min(t.us() for _ in range(12))) for n, t in turns.items())
    print(json.dumps(found), flush=True)
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


def host_turns(trees: dict[str, Path], rounds: int) -> dict[str, Any]:
    programs = {side: Program(trees[side], HOST_TURNS) for side in SIDES}
    found = in_turns(dict(programs), rounds)
    for program in programs.values():
        program.close()
    return {"ratios": ratios(found), "rounds": found}


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
    needs_disk: bool = False


def _fetching(found: dict[str, Any]) -> dict[str, float]:
    fetched_s = found["fetch"]["prompt_bytes"] / found["fetch"]["fetch_bytes_per_s"]
    return {"fetch": fetched_s} | {step["way"]: step["step_p50_s"] for step in found["steps"]}


def _restore(found: dict[str, Any]) -> dict[str, float]:
    return {
        f"{way} {what}": found[way][f"{what}_s"]
        for way in ("pipelined", "whole") for what in ("ttft", "others_p90_tpot")
    }  # fmt: skip


def _replication(found: dict[str, Any]) -> dict[str, float]:
    return {
        f"{row['context']} tokens, {way}": seconds
        for row in found["rows"]
        for way, seconds in zip(("without", "with"), row["step_s"], strict=True)
    }


def _failover(found: dict[str, Any]) -> dict[str, float]:
    rows = (row for row in found["rows"] if row["way"] in ("recomputed", "replicas"))
    return {f"stall, {row['way']}": row["stall_s"] for row in rows}


def _conversations(found: dict[str, Any]) -> dict[str, float]:
    rows = (row for row in found["rows"] if row["pace"] == "peak")
    return {f"cache {row['mode']}": row["total_s"] for row in rows}


def _disaggregation(found: dict[str, Any]) -> dict[str, float]:
    seconds = {}
    for row in found["rows"]:
        for phase in ("quiet", "prompts"):
            seconds[f"gap {row['way']}, {phase}"] = row[phase]["gap_s"]["p50"]
        seconds[f"first token {row['way']}"] = row["prompts"]["first_s"]["p50"]
    return seconds


def _serving(found: dict[str, Any]) -> dict[str, float]:
    rates = found["decode"]["results"]["tokens_per_s"]
    return {f"token {way}": 1 / rate for way, rate in rates.items()}


OWN = {
    "fetching": Own("--tokens 2048 --rounds 3 --steps 30", _fetching),
    "restore": Own("--history 1024 --turns 8 --others 2", _restore, needs_disk=True),
    "replication": Own("--rounds 3 --contexts 256 1024 --kv-memory-gb 0.2", _replication),
    "failover": Own("--rounds 2 --contexts 1024", _failover),
    "conversations": Own("--conversations 6 --shrink 16 --kv-memory-gb 0.2", _conversations),
    "disaggregation": Own("--rounds 2 --tokens 80", _disaggregation),
    "serving": Own("decode --rounds 2", _serving),
}


def _own(name: str, trees: dict[str, Path], rounds: int) -> dict[str, Any]:
    def measure(tree: Path) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as disk:
            more = ["--disk", disk] if OWN[name].needs_disk else []
            return OWN[name].seconds(
                _run_own(tree, f"{name}.py", *OWN[name].options.split(), *more)
            )

    return _in_turns_by(measure, trees, rounds)


PARTS: dict[str, Part] = {
    "host_turns": host_turns, "pipeline": pipelines, "transport": transports,
    **{name: partial(_own, name) for name in OWN},
}  # fmt: skip


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

"""What the prefix cache costs where prompts never begin alike, and what it
spares where they do.

    python benchmarks/prefix_cache.py --short --out benchmarks/results/prefix_cache.json

A Llama-shaped random checkpoint of 100 M parameters (or ``--model DIR``),
greedy, EOS ignored, all cores. A, B and C are the workloads of
``end_to_end.py``; D is 64 prompts with 1,024 common and 32 own tokens.

Of each workload a process has two engines, one with the cache and one without,
which run in turns, another first in every round: so both meet the same other
work of the machine. There are two such processes, since of two equal engines
the one that was made first is the slower one by 6%: the second process makes
them in the other order. What is told is the geometric mean over both of the
median over rounds of on to off, of seconds and of CPU seconds, which count what
other work doesn't, beside all ratios, lest noise be taken for a result. A first
round isn't counted: compilers do their work in it. Memory is another
matter: it is the peak of a process with one engine, which runs the workload
twice. ``--short`` is an eighth of A, B and C in seven pairs a process, some 14
minutes on two idle cores, and ends by saying whether having nothing to reuse costs at
most 1.02 of the time and 1.05 of the memory. Single rounds differ by 3%, so
``--workloads ABC --scale 8 --rounds 15`` says it more surely.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from end_to_end import MODELS, VOCAB, WORKLOADS
from provenance import keep, provenance

from fastdecode import LLM, SamplingParams
from fastdecode.core.config.groups import Batching
from fastdecode.core.sequence import Request
from fastdecode.schedule.life.events import (
    Drawn,
    LaneIdle,
    LaneReady,
    Open,
    Opened,
    Resume,
    Run,
    StepDone,
    Submitted,
)
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.options import ScheduleOptions

MOST_TIME = 1.02
MOST_MEMORY = 1.05
"""Of what it is without the cache, where there is nothing to reuse."""

COMMON = {"A": 0, "B": 0, "C": 0, "D": 1024}
SHAPES = {**WORKLOADS, "D": (64, 1024 + 32, 16)}


def prompts(workload: str, scale: int, rng: random.Random) -> list[list[int]]:
    """Of one round: no other round has the like."""
    count, num_tokens, _ = SHAPES[workload]
    common = [rng.randrange(3, VOCAB) for _ in range(COMMON[workload])]
    own = num_tokens - len(common)
    return [common + [rng.randrange(3, VOCAB) for _ in range(own)] for _ in range(count // scale)]


def run_round(llm: LLM, workload: str, batch: list[list[int]]) -> dict[str, float]:
    """What a round takes."""
    _, _, new_tokens = SHAPES[workload]
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    tokens, cpu_s, started_s = llm.stats.num_prompt_tokens, _cpu_s(), time.perf_counter()
    llm.generate(batch, params)
    return {
        "total_s": time.perf_counter() - started_s,
        "cpu_s": _cpu_s() - cpu_s,
        "prompt_tokens": llm.stats.num_prompt_tokens - tokens,
    }


def bookkeeping_ms(workload: str, identity: str | None) -> dict[str, float]:
    """What the S-worker's bookkeeping takes of a workload of full size, with
    nothing computed: CPU seconds of this thread, least of five. ``identity``:
    None is without the cache."""
    _, _, new_tokens = SHAPES[workload]
    rng = random.Random(7)
    batches = [prompts(workload, 1, rng) for _ in range(6)]
    options = ScheduleOptions(Batching(schedule="greedy", lanes=1, max_num_sequences=128))
    scheduler = make_scheduler(options, (4096,), 64, cache_identity=identity)
    life, took, num_steps, name = Lifecycle(scheduler), [], 0, 0
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    for batch in batches:
        for prompt in batch:
            life.handle(Submitted(Request(str(name), tuple(prompt), params, new_tokens, 0)))
            name += 1
        started_s, num_steps = time.thread_time(), 0
        while steps := _step(life):
            num_steps += steps
        took.append(time.thread_time() - started_s)
    return {"all_ms": min(took[1:]) * 1e3, "steps": num_steps}


def _step(life: Lifecycle) -> int:
    """A step in which every token that is due is drawn. Returns 0 if there is
    nothing to do."""
    for instruction in life.handle(LaneIdle(0)):
        if isinstance(instruction, (Open, Resume)):
            life.handle(Opened(instruction.part.part_id))
    for run in life.handle(LaneReady(0)):
        assert isinstance(run, Run)
        drawing = [
            chunk.sequence
            for chunk in run.chunks
            if chunk.first + chunk.num_tokens == len(chunk.sequence.token_ids)
        ]
        life.handle(StepDone(0, tuple([Drawn(sequence, 5) for sequence in drawing])))
        return 1
    return 0


def engine(model: str, mode: str) -> LLM:
    return LLM(model, kv_memory_gb=4.0, max_num_sequences=128, prefix_cache=mode)


def take_turns(
    model: str, workload: str, first: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Both modes in this process, the engine of mode ``first`` made first:
    medians over rounds of on to off."""
    rng = random.Random(7)
    ratios: dict[str, list[float]] = {}
    runs: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
    second = "off" if first == "on" else "on"
    with engine(model, first) as one, engine(model, second) as other:
        modes = {first: one, second: other}
        for number in range(options.rounds + 1):
            batch = prompts(workload, options.scale, rng)
            order = ("off", "on") if number % 2 else ("on", "off")
            one = {mode: run_round(modes[mode], workload, batch) for mode in order}
            print(workload, json.dumps(one), file=sys.stderr, flush=True)
            if number:
                for mode in order:
                    runs[mode].append(one[mode])
                for measure in one["on"]:
                    ratios.setdefault(measure, []).append(one["on"][measure] / one["off"][measure])
    return {
        measure: {
            **{mode: median(run[measure] for run in runs[mode]) for mode in modes},
            "ratio": median(values),
            "ratios": [round(value, 4) for value in sorted(values)],
        }
        for measure, values in ratios.items()
    }


def peak_gb(model: str, workload: str, mode: str, scale: int) -> float:
    """Of this process, with one engine that runs the workload twice."""
    rng = random.Random(7)
    with engine(model, mode) as llm:
        for _ in range(2):
            run_round(llm, workload, prompts(workload, scale, rng))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a workload."""
    line = [sys.executable, __file__, "--model", model]
    line += ["--scale", str(options.scale), "--rounds", str(options.rounds)]
    rows = []
    for workload in options.workloads:

        def ask(*what: str) -> Any:
            done = subprocess.run([*line, "--one", *what], check=True, stdout=subprocess.PIPE)
            return json.loads(done.stdout)

        turns = {first: ask(workload, f"{first}-first") for first in ("on", "off")}
        row = {"workload": workload, "shape": SHAPES[workload], "made_first": turns}
        row["ratios"] = {
            measure: math.sqrt(turns["on"][measure]["ratio"] * turns["off"][measure]["ratio"])
            for measure in turns["on"]
        }
        peaks = {mode: ask(workload, mode) for mode in ("on", "off")}
        row["peak_rss_gb"] = {**peaks, "ratio": peaks["on"] / peaks["off"]}
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def verdict(row: dict[str, Any]) -> dict[str, Any]:
    """Of a workload with nothing to reuse: whether it costs more than it may."""
    time_ratio, memory_ratio = row["ratios"]["total_s"], row["peak_rss_gb"]["ratio"]
    return {
        "time_ratio": round(time_ratio, 4),
        "cpu_ratio": round(row["ratios"]["cpu_s"], 4),
        "memory_ratio": round(memory_ratio, 4),
        "holds": time_ratio <= MOST_TIME and memory_ratio <= MOST_MEMORY,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model directory; default: 100 M random parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", default="ABCD")
    parser.add_argument(
        "--short", action="store_true", help="as --rounds 7 --workloads ABC --scale 8"
    )
    parser.add_argument("--scale", type=int, default=1, help="requests are divided by this")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--bookkeeping", action="store_true", help="only what the schedule itself takes, no model"
    )
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "WHAT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.short:
        options.rounds, options.workloads, options.scale = 7, "ABC", 8
    if options.one:
        workload, what = options.one
        one: Any = (
            take_turns(options.model, workload, what.removesuffix("-first"), options)
            if what.endswith("-first")
            else peak_gb(options.model, workload, what, options.scale)
        )
        print(json.dumps(one))
        return
    if options.bookkeeping:
        for workload in options.workloads:
            took = {mode: bookkeeping_ms(workload, i) for mode, i in (("off", None), ("on", "a"))}
            print(workload, json.dumps(took))
        return
    with tempfile.TemporaryDirectory() as directory:
        model = options.model
        if model is None:
            from random_llama import llama_config, write_checkpoint

            config = llama_config(vocab_size=VOCAB, **MODELS["gqa100m"])
            write_checkpoint(Path(directory), config, "gqa100m")
            model = directory
        rows = measure(model, options)
        verdicts = {row["workload"]: verdict(row) for row in rows if row["workload"] != "D"}
        shape = {"scale": options.scale, "rounds": options.rounds}
        result = {**provenance(), **shape, "verdicts": verdicts, "rows": rows}
        print(json.dumps(verdicts, indent=1), file=sys.stderr)
    keep(result, options.out)


if __name__ == "__main__":
    main()

"""What prompts do to tokens that decode beside them: on stages of their own, and in
the same steps.

    python benchmarks/disaggregation.py --out benchmarks/results/disaggregation.json

A Llama-shaped random checkpoint of 32 M parameters (or ``--model DIR``), greedy, in
an MPI job on this host, whose ranks are bound to CPUs:

* ``apart`` (``--prompt-pp 1``): S-worker and R-worker on ``--cpus``, the prompt
  stage on ``--prompt-cpus``;
* ``together``: S-worker and R-worker on ``--cpus``, and nothing else.

Both have ``--lanes`` lanes of sequences that decode: as S-worker and R-worker share
their CPUs, one is best.

Some sequences decode all the time. Phases take turns: in one nothing else happens,
in the next a prompt of ``--prompt`` tokens comes every ``--every-s`` seconds, which
generates ``--prompt-tokens`` tokens. ``gap_s``: the time between two tokens of a
sequence that decodes (TPOT), over all of them and all phases of a kind; ``ratio``:
its 99th percentile with prompts over that without. Goal: 1.1, for ``apart``.
``first_s``: from a prompt's coming to its first token.

Both phases of a pair run in one job, right after each other, so that what else the
machine does touches both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from instances import asked
from percentiles import percentile
from provenance import keep, provenance
from r_worker_processes import add_model_options, model_or_random

from fastdecode import LLM
from fastdecode.core.delta import DeltaQueue
from fastdecode.core.sequence import Request
from fastdecode.wire.mpirun_line import JobHost, JobLine

WAYS = {"apart": 1, "together": 0}
PHASES = ("quiet", "prompts")


class Clients:
    """Requests to an engine, and when each of their tokens came."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._reader = DeltaQueue()
        self.times: dict[str, list[float]] = {}
        self.came_s: dict[str, float] = {}

    def submit(self, request: Request) -> None:
        name = request.request_id
        self.times[name], self.came_s[name] = [], time.perf_counter()
        self._llm.service.submit([request], self._reader)

    def take(self, wait_s: float) -> None:
        for delta in self._reader.take(wait_s):
            assert delta.error is None, delta.error
            self.times[delta.request_id] += [time.perf_counter()] * len(delta.token_ids)


def phase(
    llm: LLM, seed: int, options: argparse.Namespace, *, with_prompts: bool
) -> dict[str, Any]:
    """Seconds between tokens, and from prompts' coming to their first ones."""
    clients = Clients(llm)
    decoding = [f"d{number}" for number in range(options.sequences)]
    for name in decoding:
        clients.submit(asked(name, 32, options.tokens, seed))
    while any(len(clients.times[name]) < 4 for name in decoding):
        clients.take(1.0)
    numbers, next_s = itertools.count(), time.perf_counter()
    while any(len(clients.times[name]) < options.tokens for name in decoding):
        if with_prompts and time.perf_counter() >= next_s:
            name = f"p{next(numbers)}"
            clients.submit(asked(name, options.prompt, options.prompt_tokens, seed))
            next_s += options.every_s
        wait_s = next_s - time.perf_counter() if with_prompts else 1.0
        clients.take(max(0.0, wait_s))
    prompts = [name for name in clients.times if name.startswith("p")]
    while any(len(clients.times[name]) < options.prompt_tokens for name in prompts):
        clients.take(1.0)
    return {
        "gap_s": [
            after - before
            for name in decoding
            for before, after in itertools.pairwise(clients.times[name][4:])
        ],
        "first_s": [clients.times[name][0] - clients.came_s[name] for name in prompts],
    }


def inner(options: argparse.Namespace) -> None:
    """Rank 0 of a job: write what was found to a file."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in PHASES}
    more = {"prompt_pp": 1} if options.prompt_pp else {}
    more |= {"lanes": options.lanes, "prefix_cache": "off"}
    with LLM(options.model, dtype=options.dtype, **more) as llm:
        for number in range(-1, options.rounds):  # the first one compiles
            for kind in PHASES[:: 1 if number % 2 else -1]:
                told = phase(llm, options.seed + number, options, with_prompts=kind == "prompts")
                for name, values in told.items() if number >= 0 else ():
                    found[kind].setdefault(name, []).extend(values)
                print(options.prompt_pp, number, kind, median(told["gap_s"]), file=sys.stderr)
    Path(options.inner).write_text(json.dumps(found))


def job(model: str, way: str, out: Path, options: argparse.Namespace) -> list[str]:
    """The command."""
    bound, of_prompts = (["taskset", "-c", each] for each in (options.cpus, options.prompt_cpus))
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    line = JobLine((), (), (JobHost("localhost"),), mpirun=mpirun, as_root=os.geteuid() == 0)
    started = line.words()
    own = [
        f"--{name.replace('_', '-')}={getattr(options, name)}"
        for name in (
            "rounds",
            "seed",
            "sequences",
            "tokens",
            "prompt",
            "prompt_tokens",
            "every_s",
            "lanes",
        )
    ]
    given = ["--model", model, "--dtype", options.dtype]
    lanes = ["--lanes", str(options.lanes)]
    fastdecode = [sys.executable, "-m", "fastdecode.cli.main"]
    first = [*bound, sys.executable, __file__, f"--inner={out}", f"--prompt-pp={WAYS[way]}"]
    stage = [*of_prompts, *fastdecode, "generate", "--prompt-pp", "1", "--prefix-cache", "off"]
    words = [*started[: started.index("-n")], "--oversubscribe", "-n", "1", *first, *given, *own]
    if WAYS[way]:
        words += [":", "-n", "1", *stage, *lanes, *given]
        words += ["--input", os.devnull, "--output", os.devnull]
    r_worker = [*bound, *fastdecode, "r-worker", "--threads", "1", "--kv-memory-gb", "0.5"]
    return [*words, ":", "-n", "1", *r_worker]


def row(way: str, found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    told = {
        kind: {
            name: {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
            for name, values in of_kind.items()
            if values
        }
        for kind, of_kind in found.items()
    }
    ratio = told["prompts"]["gap_s"]["p99"] / told["quiet"]["gap_s"]["p99"]
    num_gaps = {kind: len(of_kind["gap_s"]) for kind, of_kind in found.items()}
    came = len(found["prompts"]["first_s"])
    return {"way": way, "ratio": ratio, **told, "gaps": num_gaps, "prompts_came": came}


def measure(model: str, directory: str, options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for way in WAYS:
        out = Path(directory, f"{way}.json")
        subprocess.run(job(model, way, out, options), check=True, timeout=options.timeout_s)
        rows.append(row(way, json.loads(out.read_text())))
        print(json.dumps(rows[-1]), file=sys.stderr)
    return {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cpus", default="0", help="of S-worker and R-worker")
    parser.add_argument("--prompt-cpus", default="1", help="of the prompt stage")
    parser.add_argument("--lanes", type=int, default=1, help="of sequences that decode")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=2)
    parser.add_argument("--every-s", type=float, default=1.0)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    parser.add_argument("--prompt-pp", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        inner(options)
        return
    if shutil.which("taskset") is None:
        parser.error("taskset binds ranks to CPUs, and isn't there (util-linux)")
    with tempfile.TemporaryDirectory() as directory:
        model = model_or_random(options.model, options.shape, directory)
        chosen = {
            name: value
            for name, value in vars(options).items()
            if name not in ("out", "inner", "prompt_pp")
        }
        result = {
            **provenance(),
            "options": chosen,
            **measure(model, directory, options),
        }
    keep(result, options.out)


if __name__ == "__main__":
    main()

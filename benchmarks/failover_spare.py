"""How much longer a whole run takes when an R-worker is killed and a spare one
comes in its place: against the same run in which nothing happens.

    python benchmarks/failover_spare.py --out benchmarks/results/failover_spare.json

An MPI job on this host: three R-workers of one thread each that keep replicas,
and a spare one (``--spare-r-workers 1``); a Llama-shaped random checkpoint of 32 M
parameters (or ``--model DIR``), float32, greedy. When each sequence has ``--at``
tokens, an R-worker that the seed chooses is killed (SIGKILL). Runs with and
without that take turns, in another order in every round.

``run_s``: from the first token of any sequence to the last of all; ``ratio``:
with a loss over without, the median over rounds. ``stall_s``: the longest time
between two tokens of a sequence after the kill; ``away_s``: from the kill until
the spare one went on; ``copy_s``, ``drain_s``, ``resume_s``: as ``--summary`` has
them of its coming. Tokens are the same in all runs, or the program ends with an
error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from end_to_end import VOCAB
from provenance import keep, provenance
from r_worker_processes import COMMAND, add_model_options, model_or_random

NUM_WORKERS = 3
LIMIT_S = 3600.0
OPEN_MPI = [
    "--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1",
    "--mca", "btl", "self,sm",
]  # fmt: skip
ENVIRON = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def run_as_rank_0(options: argparse.Namespace) -> dict[str, Any]:
    """One run, in this process, which is rank 0 of an MPI job."""
    from fastdecode import LLM, SamplingParams
    from fastdecode.core.sequence import PromptRequest

    chance = random.Random(options.seed)
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    prompts = [
        [chance.randrange(3, VOCAB) for _ in range(options.context)]
        for _ in range(options.sequences)
    ]
    victim = 1 + chance.randrange(NUM_WORKERS)
    asked = [PromptRequest(str(i), ids, params) for i, ids in enumerate(prompts)]
    times: dict[str, list[float]] = {request.request_id: [] for request in asked}
    tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
    killed_s = None
    with LLM(
        options.model,
        dtype="float32",
        lanes=1,
        prefill_chunk=options.context,
        replicas=1,
        spare_r_workers=1,
    ) as llm:
        for delta in llm.deltas(asked):
            times[delta.request_id] += [time.monotonic()] * len(delta.token_ids)
            tokens[delta.request_id] += delta.token_ids
            reached = min(map(len, times.values())) >= options.at
            if options.kill and killed_s is None and reached:
                _process_of(victim).send_signal(signal.SIGKILL)
                killed_s = time.monotonic()
        stats = llm.stats
    every = list(itertools.chain.from_iterable(times.values()))
    found: dict[str, Any] = {"run_s": max(every) - min(every), "tokens": tokens}
    if killed_s is not None:
        gaps = [
            b - a for each in times.values() for a, b in itertools.pairwise(each) if b > killed_s
        ]
        assert stats.replicas is not None
        (failover,) = stats.replicas.failovers
        (back,) = stats.replicas.returns
        stalls = {name: getattr(back, name) for name in ("copy_s", "drain_s", "resume_s")}
        found |= {
            "stall_s": max(gaps),
            "away_s": back.went_on_s - killed_s,
            "failover_s": failover.drain_s + failover.resume_s,
            **stalls,
            "sequences_recomputed": stats.num_recomputed,
            "tokens_run_again": stats.resumed.num_tokens_lost,
        }
    return found


def _process_of(rank: int) -> psutil.Process:
    """Of the same job."""
    for process in psutil.Process(os.getppid()).children(recursive=True):
        if process.environ().get("OMPI_COMM_WORLD_RANK") == str(rank):
            return process
    raise AssertionError(f"there is no rank {rank}")


def run_job(options: argparse.Namespace, model: str, seed: int, *, kill: bool) -> dict[str, Any]:
    """One run, as an MPI job."""
    with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as directory:
        result = Path(directory, "result.json")
        same = [
            word
            for name in ("context", "sequences", "at", "tokens")
            for word in (f"--{name}", str(getattr(options, name)))
        ]
        rank_0 = [sys.executable, __file__, *same, "--model", model, "--seed", str(seed)]
        rank_0 += ["--as-rank-0", str(result), *(["--kill"] if kill else [])]
        memory = ["--kv-memory-gb", str(options.kv_memory_gb)]
        mpirun = str(Path(sys.executable).with_name("mpirun"))
        line = [mpirun, *OPEN_MPI, "-n", "1", *rank_0]
        line += [":", "-n", str(NUM_WORKERS + 1), *COMMAND, *memory]
        environ = {**os.environ, **ENVIRON, "OMP_NUM_THREADS": "1", "TMPDIR": directory}
        # A rank that was killed makes mpirun's exit code another one.
        subprocess.run(line, env=environ, timeout=LIMIT_S, stdout=sys.stderr, check=False)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, and what each has come to."""
    runs: list[dict[str, Any]] = []
    for number in range(options.rounds):
        seed = options.seed + number
        both: dict[bool, dict[str, Any]] = {}
        for kill in (False, True) if number % 2 == 0 else (True, False):
            both[kill] = run_job(options, model, seed, kill=kill)
        tokens = {kill: found.pop("tokens") for kill, found in both.items()}
        assert tokens[False] == tokens[True], "the loss has changed tokens"
        ratio = both[True]["run_s"] / both[False]["run_s"]
        runs.append({"ratio": ratio, "undisturbed_s": both[False]["run_s"], **both[True]})
        print(json.dumps(runs[-1]), file=sys.stderr)
    medians = {name: median(run[name] for run in runs) for name in runs[0]}
    return {**medians, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--sequences", type=int, default=3)
    parser.add_argument("--at", type=int, default=700, help="tokens of each, before the kill")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--kv-memory-gb", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-rank-0", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank_0 is not None:
        options.as_rank_0.write_text(json.dumps(run_as_rank_0(options)))
        return
    with tempfile.TemporaryDirectory() as directory:
        model = model_or_random(options.model, options.shape, directory)
        shape = {name: getattr(options, name) for name in ("context", "sequences", "at", "tokens")}
        result = {**provenance(), **shape, **measure(model, options)}
    keep(result, options.out)


if __name__ == "__main__":
    main()

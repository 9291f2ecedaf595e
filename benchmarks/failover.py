"""How long sequences stand still when their R-worker is killed: with replicas,
and where they are recomputed.

    python benchmarks/failover.py --rounds 3 --out benchmarks/results/failover.json

A Llama-shaped random checkpoint of 100 M parameters (or ``--model DIR``), float32,
greedy, three R-workers of one thread each at addresses of this host, six
sequences. When each has ``--at`` tokens, the first R-worker is killed (SIGKILL).

The **stall** is the longest time between two tokens of any sequence that comes
after the kill; ``usual_s`` is the median between two tokens. With replicas it is
split: until the loss was noticed, until no step was in flight (``drain_s``),
until the neighbour had taken over (``resume_s``).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from end_to_end import MODELS, VOCAB
from provenance import provenance

NUM_WORKERS = 3
NUM_SEQUENCES = 6
COMMAND = [sys.executable, "-m", "fastdecode.cli.main", "r-worker", "--threads", "1"]


@contextlib.contextmanager
def r_workers(kv_memory_gb: float) -> Iterator[tuple[list[subprocess.Popen[str]], list[str]]]:
    """Processes, and the addresses at which they listen."""
    bind = ["--bind", "tcp://127.0.0.1:*", "--kv-memory-gb", str(kv_memory_gb)]
    processes = [
        subprocess.Popen([*COMMAND, *bind], stdout=subprocess.PIPE, text=True)
        for _ in range(NUM_WORKERS)
    ]
    try:
        said = [process.stdout.readline() for process in processes if process.stdout]
        yield processes, [line.split(" listens at ")[1].strip() for line in said]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_once(
    model: str, context: int, replicas: int, options: argparse.Namespace
) -> dict[str, float]:
    """One job with one kill, in this process."""
    from fastdecode import LLM, SamplingParams
    from fastdecode.core.sequence import PromptRequest

    rng = random.Random(7)
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    asked = [
        PromptRequest(str(i), [rng.randrange(3, VOCAB) for _ in range(context)], params)
        for i in range(NUM_SEQUENCES)
    ]
    times: dict[str, list[float]] = {request.request_id: [] for request in asked}
    killed_s = 0.0
    given = {"dtype": "float32", "lanes": 1, "replicas": replicas}
    with (
        r_workers(options.kv_memory_gb) as (processes, addresses),
        LLM(model, r_worker_addresses=addresses, **given) as llm,
    ):
        for delta in llm.deltas(asked):
            times[delta.request_id] += [time.monotonic()] * len(delta.token_ids)
            if not killed_s and min(map(len, times.values())) >= options.at:
                processes[0].send_signal(signal.SIGKILL)
                killed_s = time.monotonic()
        stats = llm.stats
    gaps = [
        (after - before, after > killed_s)
        for each in times.values()
        for before, after in itertools.pairwise(each)
    ]
    found = {
        "stall_s": max(gap for gap, is_after in gaps if is_after),
        "usual_s": median(gap for gap, _ in gaps),
        "recomputed": float(stats.num_recomputed),
    }
    if stats.replicas is not None:
        (failover,) = stats.replicas.failovers
        found["notice_s"] = failover.noticed_s - killed_s
        found["drain_s"], found["resume_s"] = failover.drain_s, failover.resume_s
        found["tokens_run_again"] = float(stats.resumed.num_tokens_lost)
    return found


def measure(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a context and way: medians over the rounds."""
    rows = []
    for context in options.contexts:
        for replicas in (0, 1):
            runs = []
            for _ in range(options.rounds):
                runs.append(run_once(model, context, replicas, options))
                print(context, replicas, json.dumps(runs[-1]), file=sys.stderr)
            medians = {name: median(run[name] for run in runs) for name in runs[0]}
            rows.append({"context": context, "replicas": replicas, **medians})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model directory; default: 100 M random parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--at", type=int, default=20, help="tokens of each, before the kill")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--kv-memory-gb", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = options.model
        if model is None:
            from random_llama import llama_config, write_checkpoint

            shape = {**MODELS["gqa100m"], "max_position_embeddings": 16384}
            write_checkpoint(Path(directory), llama_config(vocab_size=VOCAB, **shape), "gqa100m")
            model = directory
        result = {**provenance(), "rows": measure(model, options)}
    text = json.dumps(result, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""What replicas cost while nothing is lost: step time and KV memory.

    python benchmarks/replication.py --out benchmarks/results/replication.json

A Llama-shaped random checkpoint of 32 M parameters (or ``--model DIR``), float32,
greedy, R-workers of one thread each at addresses of this host. One engine has
replicas, another none; both are there all the time, each with R-workers of its
own, and they take turns, in another order in every round. Those with replicas
have twice the KV memory, and so offer as many blocks.

``step_s``: the median time between two tokens of a sequence, over all sequences
and rounds, of the tokens behind the first. ``ratio``: with replicas over
without, the median over rounds. ``lag_steps``: how often an owner said of its
replica that it has a step, by the number of steps that had begun since.
``memory_ratio``: what R-workers' resident memory has grown by since they were
started, with over without.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from end_to_end import VOCAB
from provenance import keep, provenance
from r_worker_processes import RWorkers, add_model_options, model_or_random, r_workers

from fastdecode import LLM, SamplingParams
from fastdecode.core.sequence import PromptRequest

WAYS = (0, 1)


@dataclass(frozen=True)
class Side:
    """An engine, and its R-workers."""

    llm: LLM
    workers: RWorkers
    bytes_before: int

    @property
    def grown_bytes(self) -> int:
        return self.workers.resident_bytes - self.bytes_before


def start(
    stack: contextlib.ExitStack, model: str, replicas: int, options: argparse.Namespace
) -> Side:
    """One way."""
    kv_memory_gb = options.kv_memory_gb * (1 + replicas)
    workers = stack.enter_context(r_workers(options.workers, kv_memory_gb))
    bytes_before = workers.resident_bytes
    given = {"dtype": "float32", "kv_dtype": options.kv_dtype, "lanes": options.lanes}
    llm = LLM(model, r_worker_addresses=workers.addresses, replicas=replicas, **given)
    return Side(stack.enter_context(llm), workers, bytes_before)


def step_s(llm: LLM, context: int, seed: int, options: argparse.Namespace) -> float:
    """The median time between two tokens."""
    chance = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    asked = [
        PromptRequest(str(i), [chance.randrange(3, VOCAB) for _ in range(context)], params)
        for i in range(options.sequences)
    ]
    times: dict[str, list[float]] = {request.request_id: [] for request in asked}
    for delta in llm.deltas(asked):
        times[delta.request_id] += [time.perf_counter()] * len(delta.token_ids)
    decoding_s = max(each[0] for each in times.values())  # from then on no prompt runs
    return median(
        after - before
        for each in times.values()
        for before, after in itertools.pairwise(each)
        if before >= decoding_s
    )


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row a context, and what it took."""
    with contextlib.ExitStack() as stack:
        sides = [start(stack, model, replicas, options) for replicas in WAYS]
        for side in sides:
            step_s(side.llm, 64, 0, options)  # compiles, and touches memory for the first time
        rows = []
        for context in options.contexts:
            found: tuple[list[float], list[float]] = ([], [])
            for number in range(options.rounds):
                for replicas in WAYS if number % 2 == 0 else WAYS[::-1]:
                    seed = options.seed + number
                    found[replicas].append(step_s(sides[replicas].llm, context, seed, options))
            ratios = [with_s / without_s for without_s, with_s in zip(*found, strict=True)]
            row = {"context": context, "step_s": [median(each) for each in found]}
            rows.append({**row, "ratio": median(ratios), "ratios": ratios})
            print(json.dumps(rows[-1]), file=sys.stderr)
        grown = [side.grown_bytes for side in sides]
        figures = sides[1].llm.stats.replicas
        assert figures is not None
        return {
            "rows": rows,
            "grown_bytes": grown,
            "memory_ratio": grown[1] / grown[0],
            "lag_steps": {str(lag): count for lag, count in sorted(figures.lags.items())},
            "unprotected_s": figures.unprotected_s,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--kv-memory-gb", type=float, default=0.6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = model_or_random(options.model, options.shape, directory)
        result = {**provenance(), **measure(model, options)}
    keep(result, options.out)


if __name__ == "__main__":
    main()

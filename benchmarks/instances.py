"""How much prompts delay tokens that decode at the same time: on instances for both phases,
and on a prefill and a decode instance.

    python benchmarks/instances.py --out benchmarks/results/instances.json

A Llama-shaped random checkpoint of 32 M parameters (or ``--model DIR``), greedy.
Some sequences decode all the time, and a prompt of ``--prompt`` tokens comes
every ``--every-s`` seconds, which generates a few tokens. The ways take turns, in
another order in every round. Both have two instances, processes on a core each; the
controller and the clients (this process) share the first one's, the prefill instance's, and
run there before it (``nice``: their priority, -10 if this user may set it).

``gap_s``: the time between two tokens of a sequence that decodes, over all of
them and all rounds; ``ratio``: its 99th percentile over its median (goal: 1.5, apart).
``second_s``: from the first to the second token of a prompt that came, and
``first_s`` from its coming to its first. ``fetch_bytes_per_s``: K and V of prompts
over the time that each took to fetch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from end_to_end import VOCAB
from provenance import keep, provenance
from r_worker_processes import add_model_options, model_or_random, pinned_instances

from fastdecode import LLM, SamplingParams
from fastdecode.core.delta import DeltaQueue
from fastdecode.core.sequence import Request

WAYS = {"both": ("both", "both"), "apart": ("prefill", "decode")}
"""The roles of the instances."""


def asked(name: str, num_prompt: int, num_tokens: int, seed: int) -> Request:
    chance = random.Random(f"{seed}/{name}")
    prompt = tuple(chance.randrange(3, VOCAB) for _ in range(num_prompt))
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return Request(name, prompt, params, num_tokens, seed=0)


def run(llm: LLM, seed: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds at which each request had each of its tokens."""
    reader, times = DeltaQueue(), dict[str, list[float]]()
    came_s: dict[str, float] = {}

    def submit(request: Request) -> None:
        times[request.request_id], came_s[request.request_id] = [], time.perf_counter()
        llm.service.submit([request], reader)

    def take(wait_s: float) -> None:
        for delta in reader.take(wait_s):
            assert delta.error is None, delta.error
            times[delta.request_id] += [time.perf_counter()] * len(delta.token_ids)

    for number in range(options.sequences):
        submit(asked(f"d{number}", 32, options.tokens, seed))
    while any(len(each) < 4 for each in times.values()):
        take(1.0)
    arrivals = itertools.count()
    next_s = time.perf_counter()
    decoding = [f"d{number}" for number in range(options.sequences)]
    while any(len(times[name]) < options.tokens for name in decoding):
        if time.perf_counter() >= next_s:
            submit(asked(f"p{next(arrivals)}", options.prompt, 8, seed))
            next_s += options.every_s
        take(max(0.0, next_s - time.perf_counter()))
    while any(len(each) < 8 for each in times.values()):
        take(1.0)
    prompts = [name for name in times if name.startswith("p")]
    return {
        "gap_s": [
            after - before
            for name in decoding
            for before, after in itertools.pairwise(times[name][4:])
        ],
        "first_s": [times[name][0] - came_s[name] for name in prompts],
        "second_s": [times[name][1] - times[name][0] for name in prompts],
    }


def row(way: str, llm: LLM, found: dict[str, list[float]]) -> dict[str, Any]:
    told = {
        name: {f"p{percent}": float(np.percentile(values, percent)) for percent in (50, 90, 99)}
        for name, values in found.items()
    }
    stats = llm.stats
    return {
        "way": way,
        **told,
        "ratio": told["gap_s"]["p99"] / told["gap_s"]["p50"],
        "prompts": len(found["first_s"]),
        "recomputed": stats.num_recomputed,
        "fetched_bytes": stats.fetched_bytes,
        "fetch_bytes_per_s": stats.fetched_bytes / stats.fetching_s if stats.fetching_s else None,
    }


def measure(model: str, options: argparse.Namespace) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        processes = {
            way: stack.enter_context(pinned_instances(model, roles, "--kv-memory-gb", "0.3"))
            for way, roles in WAYS.items()
        }
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        with contextlib.suppress(PermissionError):
            os.nice(-10)
        llms = {
            way: stack.enter_context(LLM(model, instances=list(addresses)))
            for way, addresses in processes.items()
        }
        found: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
        for number in range(-1, options.rounds):  # the first one compiles
            for way in list(WAYS)[:: 1 if number % 2 else -1]:
                told = run(llms[way], options.seed + number, options)
                for name, values in told.items() if number >= 0 else ():
                    found[way].setdefault(name, []).extend(values)
                print(way, number, median(told["gap_s"]), file=sys.stderr)
        rows = [row(way, llms[way], found[way]) for way in WAYS]
        print(json.dumps(rows), file=sys.stderr)
        return {"nice": os.nice(0), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--every-s", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = model_or_random(options.model, options.shape, directory)
        chosen = {name: value for name, value in vars(options).items() if name != "out"}
        result = {**provenance(), "options": chosen, **measure(model, options)}
    keep(result, options.out)


if __name__ == "__main__":
    main()

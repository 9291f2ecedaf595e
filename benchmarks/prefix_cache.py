"""What the prefix cache costs where prompts never begin alike, and what it
spares where they do.

    python benchmarks/prefix_cache.py --rounds 3 --out benchmarks/results/prefix_cache.json

A Llama-shaped random checkpoint of 100 M parameters (or ``--model DIR``),
greedy, EOS ignored, all cores. Every run is a process of its own, on and off in
turns, another order in every round. Each first runs as many other prompts, so
that compilers have done their work; the cache has been of use to nobody then.
A, B and C are the workloads of ``end_to_end.py``; their cost is the ratio of
medians, on to off: CPU seconds count what the machine's other work doesn't. D
is 64 prompts with 1,024 common and 32 own tokens.
"""

from __future__ import annotations

import argparse
import json
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
from provenance import provenance

COMMON = {"A": 0, "B": 0, "C": 0, "D": 1024}
SHAPES = {**WORKLOADS, "D": (64, 1024 + 32, 16)}
MEASURES = ("total_s", "cpu_s", "peak_rss_gb", "prompt_tokens")


def run_once(model: str, workload: str, mode: str, scale: int) -> dict[str, float]:
    """One run, in this process."""
    from fastdecode import LLM, SamplingParams

    count, prompt_tokens, new_tokens = SHAPES[workload]
    rng = random.Random(7)

    def prompts() -> list[list[int]]:
        common = [rng.randrange(3, VOCAB) for _ in range(COMMON[workload])]
        own = prompt_tokens - len(common)
        return [
            common + [rng.randrange(3, VOCAB) for _ in range(own)] for _ in range(count // scale)
        ]

    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    with LLM(model, kv_memory_gb=4.0, max_num_sequences=128, prefix_cache=mode) as llm:
        llm.generate(prompts(), params)
        tokens, cpu_s, started_s = llm.stats.num_prompt_tokens, _cpu_s(), time.perf_counter()
        llm.generate(prompts(), params)
        return {
            "total_s": time.perf_counter() - started_s,
            "cpu_s": _cpu_s() - cpu_s,
            "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
            "prompt_tokens": llm.stats.num_prompt_tokens - tokens,
        }


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a workload: medians of both modes, and their ratios."""
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(options.rounds):
        for workload in options.workloads:
            for mode in ("off", "on") if number % 2 else ("on", "off"):
                line = [sys.executable, __file__, "--model", model, "--scale", str(options.scale)]
                out = subprocess.run(
                    [*line, "--one", workload, mode], check=True, capture_output=True, text=True
                ).stdout
                runs.setdefault((workload, mode), []).append(json.loads(out))
                print(workload, mode, out.strip(), file=sys.stderr)
    rows = []
    for workload in options.workloads:
        row: dict[str, Any] = {"workload": workload, "shape": SHAPES[workload]}
        for measure in MEASURES:
            on, off = (median(run[measure] for run in runs[workload, m]) for m in ("on", "off"))
            row[measure] = {"on": on, "off": off, "ratio": on / off}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model directory; default: 100 M random parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", default="ABCD")
    parser.add_argument("--scale", type=int, default=1, help="requests are divided by this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("WORKLOAD", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_once(options.model, *options.one, options.scale)))
        return
    with tempfile.TemporaryDirectory() as directory:
        model = options.model
        if model is None:
            from random_llama import llama_config, write_checkpoint

            config = llama_config(vocab_size=VOCAB, **MODELS["gqa100m"])
            write_checkpoint(Path(directory), config, "gqa100m")
            model = directory
        result = {**provenance(), "scale": options.scale, "rows": measure(model, options)}
    text = json.dumps(result, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

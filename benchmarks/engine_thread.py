"""What it costs that an engine has a thread of its own, beside one that the
waiting thread runs.

Each way in a process of its own, taking turns, several rounds: seconds to load,
tokens a second of decoding (the best of a process's runs, and the median of
processes), and CPU seconds of a run.

    python benchmarks/engine_thread.py --model examples/model/checkpoint
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

from provenance import provenance

WAYS = ("own", "waiting")


def run(way: str, options: argparse.Namespace) -> dict[str, float]:
    """One process's part."""
    from fastdecode import LLM, SamplingParams
    from fastdecode.wire.mpi import job as module

    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    prompts = [[5 + i % 90] * 20 for i in range(options.requests)]
    with mock.patch.object(module, "takes_calls_of_one_thread", return_value=way != "own"):
        started = time.perf_counter()
        llm = LLM(options.model, kv_memory_gb=0.5, prefix_cache="off")
        load_s = time.perf_counter() - started
    llm.generate(prompts[:4], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    speeds, cpu = [], []
    for _ in range(options.runs):
        cpu_before, started = time.process_time(), time.perf_counter()
        llm.generate(prompts, params)
        speeds.append(options.requests * options.tokens / (time.perf_counter() - started))
        cpu.append(time.process_time() - cpu_before)
    llm.close()
    return {"load_s": load_s, "tokens_per_s": max(speeds), "cpu_s": min(cpu)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--way", choices=WAYS, help="measure this one alone, and print what comes out"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(run(options.way, options)))
        return
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for round_ in range(options.rounds):
        for way in WAYS if round_ % 2 == 0 else WAYS[::-1]:
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            rows[way].append(
                json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
            )
    for name in ("load_s", "tokens_per_s", "cpu_s"):
        own, waiting = (statistics.median(row[name] for row in rows[way]) for way in WAYS)
        best = max if name == "tokens_per_s" else min
        best_own, best_waiting = (best(row[name] for row in rows[way]) for way in WAYS)
        print(
            f"{name:14} own thread {own:8.4g}  waiting thread {waiting:8.4g}  ratio "
            f"{own / waiting:.3f}"
            f"  (best {best_own:.4g} / {best_waiting:.4g} = {best_own / best_waiting:.3f})"
        )
    if options.out is not None:
        options.out.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

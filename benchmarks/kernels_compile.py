"""How long the first use of kernels takes: compiling from nothing, and loading
what an earlier process compiled.

    python benchmarks/kernels_compile.py --out
    benchmarks/results/kernels_compile.json

Each round starts two processes one after the other with the same, at first
empty, cache directory, and times the first call of every variant in them. The
first variant's call also brings what all variants share: the partition over
threads. ``--beside DIR`` times another tree's kernels in turns with this one's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from provenance import provenance

CASES = (
    ("bfloat16", 32, 8), ("bfloat16", 64, 8), ("bfloat16", 32, 32), ("float16", 32, 8), ("float32",
        32, 8),
    ("int8", 32, 8), ("int4", 32, 8),
)  # fmt: skip
"""Cache's dtype, query heads, KV heads; of 128 dims."""


def time_first_calls() -> dict[str, float]:
    """Seconds of the first call of everything, in this process."""
    from cpu_kernels.bench import Case, Workload

    seconds = {}
    for dtype, num_q_heads, num_kv_heads in CASES:
        begin = time.perf_counter()
        workload = Workload(Case(num_q_heads, num_kv_heads, 128, 64, 1, dtype))
        appended = time.perf_counter()
        workload.attend()
        seconds.setdefault("append", appended - begin)
        seconds[f"{num_q_heads}/{num_kv_heads} {dtype}"] = time.perf_counter() - appended
    return seconds


def time_tree(tree: Path, cache: str) -> dict[str, float]:
    """``time_first_calls`` of a tree's kernels, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": cache}
    child = subprocess.run(
        [sys.executable, __file__, "--child"],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    return dict(json.loads(child.stdout))


def main() -> int:
    """Entry point; returns the exit code."""
    here = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, help="another tree, whose kernels are timed too")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(time_first_calls()))
        return 0
    trees = {"these": here} | ({"beside": args.beside.resolve()} if args.beside else {})
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for name, tree in trees.items():
            with tempfile.TemporaryDirectory() as cache:
                for use in ("compiled", "loaded"):
                    runs.setdefault((name, use), []).append(time_tree(tree, cache))
    results = {
        f"{name}, {use}": {
            case: round(median(run[case] for run in several), 3) for case in several[0]
        }
        for (name, use), several in runs.items()
    }
    for name, seconds in results.items():
        print(f"{name}: " + ", ".join(f"{case} {value:.2f} s" for case, value in seconds.items()))
    if args.out:
        args.out.write_text(json.dumps({**provenance(), "first_call_s": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""KV on both sides beside the device alone, in cases drawn at random, on a
virtual clock: is it ever slower?

    python benchmarks/hybrid_rule.py --out benchmarks/results/hybrid_rule.json

Each case is run by the real scheduler, lifecycle and rule
(``benchmarks/hybrid_drawn.py``): once with what the rule is told being true,
once with each cost off by up to 20% for good. Ratios are tokens a second over
those of the device alone, ends of jobs included. A case is its seed: it repeats
itself on every machine. Parts may be run side by side and put together:

    python benchmarks/hybrid_rule.py --first 5000 --cases 5000 --kept b.jsonl
    python benchmarks/hybrid_rule.py --kept a.jsonl --kept b.jsonl --out OUT.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import astuple
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from hybrid_drawn import DrawnVerdict, draw, judge
from provenance import provenance

ERROR = 0.2
Cases: TypeAlias = dict[float, dict[int, DrawnVerdict]]
"""By how far costs are off, and by seed."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000, help="of each kind (default: 10000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument(
        "--kept",
        type=Path,
        action="append",
        help="cases that were run, a line each; the first file is written on (may be repeated)",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.cases)
    cases = run(seeds, options.kept or [])
    found = {
        "provenance": provenance(),
        "costs as told": summary(cases[0.0]),
        f"costs off by up to {ERROR:.0%}": summary(cases[ERROR]),
    }
    text = json.dumps(found, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", "utf-8")


def run(seeds: Iterable[int], kept: Seq[Path]) -> Cases:
    """Run those that aren't kept yet, of each kind."""
    cases: Cases = {0.0: {}, ERROR: {}}
    for path in kept:
        for line in path.read_text("utf-8").splitlines() if path.exists() else ():
            error, seed, ratio, modes = json.loads(line)
            cases[error][seed] = DrawnVerdict(ratio, modes)
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(kept[0].open("a", encoding="utf-8")) if kept else None
        for seed, error in itertools.product(seeds, cases):
            if seed not in cases[error]:
                random = Random(seed)
                case = draw(random)
                verdict = judge(case, error=error, random=random if error else None)
                cases[error][seed] = verdict
                if lines is not None:
                    print(json.dumps([error, seed, *astuple(verdict)]), file=lines, flush=True)
    return cases


def summary(verdicts: dict[int, DrawnVerdict]) -> dict[str, Any]:
    """Of all cases: how many were slower, and what was gained."""
    ratios = sorted((verdict.ratio, seed) for seed, verdict in verdicts.items())
    values = [ratio for ratio, _ in ratios]
    modes = Counter(mode for verdict in verdicts.values() for mode in verdict.modes)
    return {
        "cases": len(values),
        "slower": sum(value < 1 - 1e-9 for value in values),
        "below 0.99": sum(value < 0.99 for value in values),
        "below 0.97": sum(value < 0.97 for value in values),
        "lowest": [{"ratio": ratio, "seed": seed} for ratio, seed in ratios[:5]],
        "median": statistics.median(values),
        "faster by 5%": sum(value > 1.05 for value in values),
        "median where faster": statistics.median([v for v in values if v > 1 + 1e-9] or [1.0]),
        "highest": values[-1],
        "cases by mode that some steps ran in": dict(modes),
    }


if __name__ == "__main__":
    main()

"""KV on both sides beside the device alone, in cases drawn at random, on a
virtual clock: is it ever slower?

    python benchmarks/hybrid_rule.py --out benchmarks/results/hybrid_rule.json

Each case is run by the real scheduler, lifecycle and rule
(``cost_model/simulate/drawn.py``): once with what the rule is told being true,
once with each cost off by up to 20% for good. Ratios are tokens a second over
those of the device alone, ends of jobs included. A case is its seed: it repeats
itself on every machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from provenance import provenance

from cost_model.simulate.drawn import Verdict, draw, judge

ERROR = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000, help="of each kind (default: 10000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    true: dict[int, Verdict] = {}
    misjudged: dict[int, Verdict] = {}
    for seed in range(options.first, options.first + options.cases):
        if time.perf_counter() - began > options.seconds:
            break
        true[seed] = judge(draw(Random(seed)))
        random = Random(seed)
        misjudged[seed] = judge(draw(random), error=ERROR, random=random)
    found = {
        "provenance": provenance(),
        "costs as told": summary(true),
        f"costs off by up to {ERROR:.0%}": summary(misjudged),
    }
    text = json.dumps(found, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", "utf-8")


def summary(verdicts: dict[int, Verdict]) -> dict[str, Any]:
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

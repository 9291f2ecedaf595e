"""Faults at random moments of many small jobs.

    make campaign        # or: python tests/campaign/campaign.py --jobs 40 --minutes 20

``jobs``: processes of batch jobs are killed, stopped and told to stop. ``systems``: whole systems
and servers are struck. ``frames``: messages are damaged. ``slots``: blocks on disk are damaged, or
R-workers are killed while they write them.

Answers, greedy and sampled, are compared with those of an undisturbed run, whose length is that of
the random moments.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import damaged_frames  # noqa: E402
import hurt_slots  # noqa: E402
from inherited_signals import hear_interrupts  # noqa: E402
from jobs import Jobs, drawn  # noqa: E402
from provenance import provenance  # noqa: E402
from systems import BAD as BAD_SYSTEMS  # noqa: E402
from systems import SYSTEMS, Systems  # noqa: E402

GOOD = ("right", "ended by MPI")
Row = dict[str, Any]
COUNTED: dict[str, Callable[[int, random.Random], Counter[str]]] = {
    "frames to the codec": damaged_frames.to_codec,
    "frames to an R-worker's state": damaged_frames.to_state,
    "frames to an R-worker's port": damaged_frames.to_port,
    "slots: killed movers": hurt_slots.kills,
    "slots: flipped bits": hurt_slots.flips,
}
"""Name -> function of a number and a random generator that counts outcomes."""
SHARES = {"frames to the codec": 0.6}
"""Share of ``--frames``, where it is not an eighth."""
BAD = ("changed", "failed", "orphans")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Run all parts, and yield a row for each job and each count."""
    logging.disable(logging.CRITICAL)
    for name, act in COUNTED.items():
        number = getattr(options, name.split()[0].rstrip(":"))
        if name.startswith("frames"):
            number = round(number * SHARES.get(name, 0.125))
        if number:
            counts = act(number, random.Random(options.seed))
            verdict = "changed" if any(counts[bad] for bad in BAD) else "right"
            yield {"part": name, "number": number, "counts": counts, "verdict": verdict}
    logging.disable(logging.NOTSET)
    if options.jobs:
        chance = random.Random(options.seed)
        with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as directory:
            jobs = Jobs(Path(directory), chance)
            for job in drawn(options.jobs, chance, options.of):
                yield {"part": f"jobs: {job.kind}", **jobs.strike(job)}
    if options.systems:
        yield from struck_systems(options)


def struck_systems(options: argparse.Namespace) -> Iterator[Row]:
    """Strike each system, and yield its counts."""
    with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as directory:
        systems = Systems(Path(directory), random.Random(options.seed))
        for name, system in SYSTEMS.items():
            if name.startswith(options.of):
                counts = systems.run(system, options.systems)
                verdict = "changed" if any(counts[bad] for bad in BAD_SYSTEMS) else "right"
                row = {"part": f"systems: {name}", "number": options.systems}
                yield {**row, "counts": counts, "verdict": verdict}


def table(found: list[Row]) -> str:
    """Return counts of verdicts by part, and of blows by victim and signal."""
    parts: dict[str, Counter[str]] = {}
    hits = Counter(hit for row in found for hit in row.get("hits", ()))
    for row in found:
        parts.setdefault(row["part"], Counter())[row["verdict"]] += 1
    lines = [f"{part}: {_counted(counts)}" for part, counts in sorted(parts.items())]
    return "\n".join([*lines, f"{sum(hits.values())} blows: {_counted(hits)}"])


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, number, what in (
        ("jobs", 120, "jobs that are struck"),
        ("systems", 16, "blows on each system or server"),
        ("frames", 800_000, "messages that are damaged"),
        ("slots", 50, "movers that are killed, and bits that are flipped on disk"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=number, help=f"{what} (default: {number})"
        )
    parser.add_argument("--minutes", type=float, default=120, help="start nothing after this time")
    parser.add_argument("--of", default="", help="beginning of the names of kinds and systems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to which this run is added")
    options = parser.parse_args()
    hear_interrupts()
    end_s, found = time.monotonic() + 60 * options.minutes, []
    out: Path | None = options.out
    before = json.loads(out.read_text())["runs"] if out is not None and out.exists() else []
    for row in rows(options):
        found.append(row)
        print(" ".join(f"{k}={v}" for k, v in row.items() if k != "last_words"), flush=True)
        if out is not None:
            run = {**provenance(), "seed": options.seed, "rows": found}
            out.write_text(json.dumps({"runs": [*before, run]}, indent=1) + "\n")
        if time.monotonic() >= end_s:
            break
    print(table(found))
    sys.exit(0 if all(row["verdict"] in GOOD for row in found) else 1)


if __name__ == "__main__":
    main()

"""Faults at random moments of many small jobs.

    make campaign        # or: python tests/campaign/campaign.py --losses 20 --minutes 5

R-workers are killed, stopped and terminated (``losses``), and so are pipeline
stages and theirs (``stage_losses``), and instances that are ranks
(``placement_losses``), jobs are told to stop (``stops``), S-workers are killed
and others go on with their sessions (``returns``), servers under load lose
R-workers and processes of their own, or are told to stop (``servers``), calls are
interrupted (``interrupts``), batches of conversations are killed and resumed
(``turns``), messages are damaged (``damaged_frames``), and what R-workers keep on
disk is damaged, or they are killed while they write it (``hurt_slots``), or in
conversations (``disks``).
Every job's answers, greedy and sampled, are held against those of an
undisturbed one. Counted are jobs that **hung**, that were **lost** (an answer
is missing though an R-worker is left) and whose answers were **changed**. The
moments are random within a phase, whose beginning is an event and whose length
an undisturbed job's.
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
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import damaged_frames  # noqa: E402
import disks  # noqa: E402
import hurt_slots  # noqa: E402
import losses  # noqa: E402
import placement_losses  # noqa: E402
import returns  # noqa: E402
import servers  # noqa: E402
import stage_losses  # noqa: E402
import stops  # noqa: E402
import turns  # noqa: E402
from damaged_links import to_links  # noqa: E402
from inherited_signals import hear_interrupts  # noqa: E402
from mpi_launch import mpirun, open_mpi_options, running  # noqa: E402
from provenance import provenance  # noqa: E402
from small_jobs import FASTDECODE, LIMIT_S, PATHS, R_WORKER, SmallJobs, addresses  # noqa: E402

T = TypeVar("T")
GOOD = ("right", "ended by MPI")
INTERRUPTED: dict[str, dict[str, Any]] = {
    "one thread": {"r_workers": 1},
    "threads": {"r_workers": 2},
    "lanes": {"r_workers": 2, "lanes": 2},
    "zmq": {},
    "mpi": {},
}
FRAMES = {
    "codec": (damaged_frames.to_codec, 5),
    "state": (damaged_frames.to_state, 1),
    "port": (damaged_frames.to_port, 1),
    "links": (to_links, 1),
}
"""Targets, and their shares."""


class Campaign:
    """Runs the parts one after another, until the time is over, and keeps what became of them.

    Args:
        options: see ``main``.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._end = time.monotonic() + 60 * options.minutes
        self.rows: dict[str, list[dict[str, Any]]] = {
            "losses": [], "stages": [], "placements": [], "stops": [], "returns": [],
            "servers": [], "kills": [], "interrupts": [], "frames": [], "slots": [],
        }  # fmt: skip
        self._before = runs_of(options.out)

    def run(self) -> None:
        """All parts."""
        options = self._options
        self._frames(options.frames)
        self._slots(hurt_slots, {"kills": options.slot_kills, "flips": options.slot_flips})
        self._slots(disks, {"killed": options.disk_kills})
        self._interrupts(options.interrupts)
        self._returns(options.returns)
        self._of_ranks(
            "stages", options.stages, stage_losses.StageLosses,
            partial(stage_losses.stage_losses, of=options.of), stage_losses.row,
        )  # fmt: skip
        self._of_ranks(
            "placements", options.placements, placement_losses.PlacementLosses,
            placement_losses.placement_losses, placement_losses.row,
        )  # fmt: skip
        if not (options.losses or options.signals or options.servers or options.kills):
            return
        with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as directory:
            jobs = SmallJobs(Path(directory), losses.TIMES if options.replicas else 1)
            chance = random.Random(options.seed)
            hurt = losses.Losses(jobs, chance)
            chosen = losses.losses(
                options.losses, chance, replicated=options.replicas, of=options.of
            )
            for loss in self._in_time(chosen):
                self._keep("losses", losses.row(hurt.lose(loss)))
            told = stops.Stops(jobs, chance)
            for stop in self._in_time(stops.stops(options.signals, chance)):
                self._keep("stops", stops.row(told.stop(stop)))
            serving = servers.Servers(jobs, chance)
            for blow in self._in_time(servers.blows(options.servers, chance)):
                self._keep("servers", servers.row(serving.strike(blow)))
            if options.kills:
                talks = turns.Kills(jobs, chance)
                for kill in self._in_time(turns.kills(options.kills, chance)):
                    self._keep("kills", turns.row(talks.kill(kill)))

    def write(self) -> None:
        """What is known so far, behind the runs that the file has already."""
        if self._options.out is not None and any(self.rows.values()):
            found = {kind: rows for kind, rows in self.rows.items() if rows}
            runs = [*self._before, {**provenance(), "seed": self._options.seed, **found}]
            self._options.out.write_text(json.dumps({"runs": runs}, indent=1) + "\n")

    @property
    def is_good(self) -> bool:
        return all(row["verdict"] in GOOD for rows in self.rows.values() for row in rows)

    def table(self) -> str:
        """How many of what became of what."""
        told = []
        for kind in ("losses", "stages", "placements", "stops", "returns", "servers",
                     "kills"):  # fmt: skip
            rows = self.rows[kind]
            told.append(f"{len(rows)} {kind}: {_counted(Counter(row['verdict'] for row in rows))}")
            for column in ("transport", "partition", "command", "trouble", "phase", "memory",
                           "shape"):  # fmt: skip
                values = sorted({row[column] for row in rows if column in row})
                for value in values:
                    counts = Counter(row["verdict"] for row in rows if row[column] == value)
                    told.append(f"    {column:10} {value:10} {_counted(counts)}")
        hits = Counter(hit for row in self.rows["losses"] for hit in row["hits"])
        told.append(f"losses: {_counted(Counter(hit.split()[0] for hit in hits.elements()))}")
        told.append(f"    {_counted(hits)}")
        for kind in ("stages", "placements"):
            blows = Counter(blow for row in self.rows[kind] for blow in row["blows"])
            told.append(f"{kind}: {sum(blows.values())} blows: {_counted(blows)}")
        kills = Counter(kill for row in self.rows["returns"] for kill in row["kills"])
        told.append(f"returns: killed {_counted(kills)}")
        for kind in ("interrupts", "frames", "slots"):
            for row in self.rows[kind]:
                told.append(f"{kind} {row['where']}: {row['verdict']}, {_counted(row['counts'])}")
        return "\n".join(told)

    def _in_time(self, items: Iterable[T]) -> Iterator[T]:
        for item in items:
            if time.monotonic() >= self._end:
                return
            yield item

    def _keep(self, kind: str, row: dict[str, Any]) -> None:
        self.rows[kind].append(row)
        self.write()
        print(" ".join(f"{k}={v}" for k, v in row.items() if k != "last_words"), flush=True)

    def _frames(self, number: int) -> None:
        logging.disable(logging.CRITICAL)
        share = number / sum(weight for _, weight in FRAMES.values())
        for target, (act, weight) in self._in_time(FRAMES.items()):
            if number:
                counts = act(round(share * weight), random.Random(self._options.seed))
                verdict = "changed" if counts["changed"] else "right"
                row = {"where": target, "number": round(share * weight), "counts": counts}
                self._keep("frames", {**row, "verdict": verdict})

    def _slots(self, module: Any, numbers: dict[str, int]) -> None:
        for where, number in self._in_time(numbers.items()):
            if number:
                act = getattr(module, where)
                counts = act(number, random.Random(self._options.seed))
                is_bad = counts["changed"] or counts["failed"] or counts["orphans"]
                verdict = "changed" if is_bad else "right"
                self._keep("slots", {"where": where, "counts": counts, "verdict": verdict})

    def _returns(self, number: int) -> None:
        if not number:
            return
        chance = random.Random(self._options.seed)
        with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as directory:
            comes = returns.Returns(SmallJobs(Path(directory), returns.TIMES), chance)
            for job in self._in_time(returns.returns(number, chance)):
                self._keep("returns", returns.row(comes.kill(job)))

    def _of_ranks(self, kind: str, number: int, make: Any, choose: Any, row: Any) -> None:
        """Jobs over MPI that lose ranks."""
        if not number:
            return
        chance = random.Random(self._options.seed)
        with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as directory:
            hurt = make(SmallJobs(Path(directory)), chance)
            for loss in self._in_time(choose(number, chance)):
                self._keep(kind, row(hurt.lose(loss)))

    def _interrupts(self, number: int) -> None:
        each = -(-number // len(INTERRUPTED))
        for where, options in self._in_time(INTERRUPTED.items()):
            if number:
                outcome = interrupt(where, options, each, self._options.seed)
                last = outcome.output.strip().splitlines()[-1:] or [""]
                counts = json.loads(last[0]) if outcome.exit_code == 0 else {}
                verdict = "changed" if counts.get("changed") else "right"
                if outcome.exit_code != 0 or outcome.orphans:
                    verdict = "hung" if outcome.exit_code is None else "failed"
                row = {"where": where, "counts": counts, "verdict": verdict}
                words = {} if verdict == "right" else {"last_words": outcome.output[-5000:]}
                self._keep("interrupts", {**row, **words})


def runs_of(path: Path | None) -> list[dict[str, Any]]:
    """Those that a file has, in their order."""
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text())
    runs: list[dict[str, Any]] = found.get("runs", [found])
    return runs


def interrupt(where: str, options: dict[str, Any], number: int, seed: int) -> Any:
    """A program whose calls are interrupted so often. Returns its outcome."""
    script = str(Path(__file__).with_name("interrupts.py"))
    common = {"kv_memory_gb": 0.02, "r_threads": 1}
    limit_s = LIMIT_S + 5 * number

    def program(**more: Any) -> list[str]:
        given = json.dumps({**({} if where in ("zmq", "mpi") else common), **options, **more})
        return [sys.executable, script, str(number), str(seed), given]

    if where == "zmq":
        with (
            addresses(2, PATHS) as (_, at),
            running(program(r_worker_addresses=at[1::2]), **PATHS) as job,
        ):
            return job.wait(limit_s)
    if where == "mpi":
        line = [mpirun(), *open_mpi_options(), "-n", "1", *program()]
        with running([*line, ":", "-n", "2", *FASTDECODE, *R_WORKER], **PATHS) as job:
            return job.wait(limit_s)
    with running(program(), **PATHS) as job:
        return job.wait(limit_s)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, number, what in (
        ("losses", 90, "jobs that lose R-workers, six or eight each"),
        ("stages", 60, "jobs of pipeline stages that lose one of those, or R-workers of theirs"),
        ("placements", 30, "jobs of instances that lose ranks, or their controller"),
        ("signals", 60, "jobs that are told to stop"),
        ("returns", 60, "S-workers that are killed, and whose session another goes on with"),
        ("servers", 60, "servers under load that are hit"),
        ("kills", 20, "times that a batch of conversations is killed, and resumed"),
        ("interrupts", 50, "calls that are interrupted"),
        ("frames", 800_000, "messages that are damaged"),
        ("slot-kills", 50, "R-workers' movers that are killed while they store"),
        ("slot-flips", 10_000, "bits flipped in what is kept on disk"),
        ("disk-kills", 50, "R-workers with a disk that are killed in conversations"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=number, help=f"{what} (default: {number})"
        )
    parser.add_argument(
        "--minutes", type=float, default=120, help="begin nothing after so long (default: 120)"
    )
    parser.add_argument(
        "--replicas", action="store_true", help="losses: of R-workers that keep replicas"
    )
    parser.add_argument(
        "--of",
        default="",
        help="with --replicas: partitions whose names begin so (heads); of stages: shapes (swap)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file, to which this run is added")
    campaign = Campaign(parser.parse_args())
    hear_interrupts()
    try:
        campaign.run()
    finally:
        campaign.write()
        print(campaign.table())
    sys.exit(0 if campaign.is_good else 1)


if __name__ == "__main__":
    main()

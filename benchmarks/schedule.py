"""What the sequence-level load-stabilizing schedule gains on the real engine,
beside what the simulator foretells.

    python benchmarks/schedule.py --out benchmarks/results/schedule.json

One S-worker on one core, one R-worker on another, three lanes between them, as
an MPI job; sequences of equal length S, all there from the start. A first short
job measures T(B) and R, and S is chosen so that the R-part takes as long as the
S-part at the mean load B·S/2: the balance that the paper sizes its CPUs for
(FastDecode, arXiv 2403.11421). Then every mode runs a job of its own, round
after round in a changing order, and medians over the rounds count. Of each run,
throughput is taken in the middle, where neither the first B sequences fill the
engine nor the last B drain it.

Of steps at about the same load the median counts, since other processes come
and go on a shared machine.

The simulator runs the same scheduler over the same requests. Each job is
foretold from the T(B), the R and the time on the link that were measured in it,
so that a machine that slows down between two jobs doesn't count as an error.

A run may take some minutes; --add goes on with the rounds and the S of an
earlier one.

Exit code 1 if the load's peak misses its limit by more than 5%, or a gain its
prediction by more than 10%.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from provenance import provenance
from random_llama import llama_config, write_checkpoint
from schedule_job import (
    BLOCK_SIZE,
    NUM_BINS,
    NUM_LANES,
    SHAPE,
    Job,
    Observation,
    in_the_middle,
    run_job,
)

from cost_model.simulate.tables import Table, TabledTimes
from fastdecode.core.config.groups import Batching
from fastdecode.schedule.modes import make_scheduler
from fastdecode.schedule.options import ScheduleOptions
from fastdecode.schedule.simulation.resources import Rounds
from fastdecode.schedule.simulation.simulation import Simulation
from fastdecode.schedule.simulation.trace import RequestTrace, TracedRequest
from fastdecode.schedule.times import balanced_loads

MODES = ("stabilized", "greedy", "synchronized")
MPI_OPTIONS = (
    "--oversubscribe",
    "--bind-to",
    "none",
    "--mca",
    "pml",
    "ob1",
    "--mca",
    "btl",
    "self,sm",
)
JOB_LIMIT_S = 240
PILOT_LENGTH = 384
MAX_PEAK_ERROR, MAX_GAIN_ERROR = 0.05, 0.10


def main() -> int:
    args = _arguments()
    if args.job is not None:
        print(json.dumps(run_job(Job(**json.loads(args.job)))))
        return 0
    started, cores = time.time(), sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("this needs two cores: one for the S-part, one for the R-part")
    before = json.loads(args.out.read_text()) if args.add else {"rounds": [], "seconds": 0.0}
    rounds: list[dict[str, Any]] = before["rounds"]
    with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as name:
        write_checkpoint(Path(name), llama_config(**SHAPE), "llama-random")
        pilot = Job(name, "greedy", args.batch, PILOT_LENGTH, 2 * args.batch, cores[0])
        length = before["length"] if args.add else balanced_length(pilot, launch(pilot, cores[1]))
        job = replace(pilot, length=length, num_requests=args.generations * args.batch)
        say(f"B = {job.batch}, S = {job.length}, F = {job.interval}, limit {job.limit} tokens")
        for _ in range(args.rounds):
            rounds.append(one_round(job, cores[1], seed=len(rounds)))
            result = summarise(job, rounds)
            if args.out is not None:
                seconds = before["seconds"] + time.time() - started
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(
                    json.dumps({**provenance(), "seconds": seconds, **result}, indent=1) + "\n"
                )
    print(table(result))
    return 0 if result["passed"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write all numbers there, JSON")
    parser.add_argument(
        "--add", action="store_true", help="add rounds to those in --out, with the same B and S"
    )
    parser.add_argument("--batch", type=int, default=96, help="sequences at once, B (default: 96)")
    parser.add_argument(
        "--generations", type=int, default=4, help="requests, in multiples of B (default: 4)"
    )
    parser.add_argument("--rounds", type=int, default=4, help="jobs of every mode (default: 4)")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # one rank of an MPI job: see `launch`
    return parser.parse_args()


# One job: an MPI job of two ranks.


def launch(job: Job, r_core: int) -> dict[str, Any]:
    """Run a job to its end, the S-worker on its core and the R-worker on ``r_core``."""
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    s_rank = [sys.executable, __file__, "--job", json.dumps(asdict(job))]
    r_rank = [
        sys.executable,
        "-m",
        "fastdecode.cli.main",
        "r-worker",
        "--cpus",
        str(r_core),
        "--kv-memory-gb",
        "1",
    ]
    environ = {
        **os.environ, "OMP_NUM_THREADS": "1", "MPI4PY_RC_THREAD_LEVEL": "serialized",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # fmt: skip
    command = [mpirun, *MPI_OPTIONS, "-n", "1", *s_rank, ":", "-n", "1", *r_rank]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=JOB_LIMIT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        sys.exit(f"a job failed: {' '.join(command)}")
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    say(
        f"{job.mode}: {result['tokens_per_s']:.0f} tokens/s, peak load {result['load_peak_tokens']}"
    )
    return result


# Predictions.


def tabled(observed: Iterable[Observation]) -> TabledTimes:
    """T(B) and R of some jobs' steps. Tables, not lines: R bends where the load
    outgrows the caches."""
    rows = list(observed)
    return TabledTimes(
        s_part=binned((row[0], row[2]) for row in rows),
        r_parts=(binned((row[3], row[4]) for row in rows),),
    )


def binned(points: Iterable[tuple[float, float]]) -> Table:
    """Median seconds over size in bins of equally many points, those of one
    size together; neighbours that fall are pooled, so that it never does."""
    ascending = sorted(points)
    width = -(-len(ascending) // NUM_BINS)
    pools: list[tuple[list[float], list[float]]] = []  # sizes, seconds
    for first in range(0, len(ascending), width):
        part = ascending[first : first + width]
        sizes, seconds = [size for size, _ in part], [value for _, value in part]
        while pools and (
            pools[-1][0][0] == sizes[-1]
            or statistics.median(pools[-1][1]) >= statistics.median(seconds)
        ):
            before = pools.pop()
            sizes, seconds = before[0] + sizes, before[1] + seconds
        pools.append((sizes, seconds))
    return Table(
        tuple((statistics.fmean(sizes), statistics.median(seconds)) for sizes, seconds in pools)
    )


def balanced_length(pilot: Job, ran: Mapping[str, Any]) -> int:
    """S with which a lane's R-part, at its mean load, takes as long as its
    S-part; a multiple of F steps."""
    lane_size = pilot.batch // NUM_LANES
    loads = balanced_loads(tabled(ran["observed"]), lane_size, (1 << 24,))
    assert loads is not None
    length = round(2 * loads[0] / lane_size / lane_size) * lane_size
    return max(2 * lane_size, min(length, 1024))


def simulate(job: Job, times: TabledTimes) -> dict[str, float]:
    """The job as the simulator foretells it."""
    blocks = ((1 << 24) // BLOCK_SIZE,)
    batching = Batching(
        schedule=job.mode,
        max_num_sequences=job.batch,
        max_step_tokens=job.batch + 2048,
        lanes=NUM_LANES,
        load_limit=job.limit,
        expected_output_tokens=job.length,
    )
    scheduler = make_scheduler(ScheduleOptions(batching), blocks, BLOCK_SIZE, times)
    trace = RequestTrace((TracedRequest(1, job.length, job.length),) * job.num_requests)
    simulation = Simulation(
        trace,
        scheduler,
        Rounds(times, len(blocks)),
        worker_blocks=blocks,
        block_size=BLOCK_SIZE,
        num_lanes=NUM_LANES,
    )
    outcome = simulation.run()
    inside = in_the_middle(job, (step.num_tokens for step in outcome.steps))
    middle = [step for step, is_inside in zip(outcome.steps, inside, strict=True) if is_inside]
    tokens_per_s = sum(step.num_tokens for step in middle) / sum(step.step_s for step in middle)
    return {"tokens_per_s": tokens_per_s, "total_s": outcome.total_s}


# Rounds, and what they come to.


def one_round(job: Job, r_core: int, seed: int) -> dict[str, Any]:
    """Every mode once, in random order, and what the simulator says."""
    order = random.Random(seed).sample(MODES, len(MODES))
    ran, predicted = {}, {}
    for mode in order:
        ran[mode] = launch(replace(job, mode=mode), r_core)
        times = tabled(ran[mode].pop("observed"))
        predicted[mode] = simulate(
            replace(job, mode=mode), replace(times, way_s=ran[mode]["link_s"])
        )
        lane_size = job.batch // NUM_LANES
        ran[mode]["s_part_s"] = times.s_part_s(lane_size)
        ran[mode]["r_part_at_mean_load_s"] = times.r_part_s(0, lane_size * job.length // 2)
    return {"order": order, "ran": ran, "predicted": predicted}


def summarise(job: Job, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, and whether they are what they should be."""

    def median(kind: str, mode: str, name: str) -> float:
        return statistics.median(each[kind][mode][name] for each in rounds)

    def gain(kind: str, over: str, name: str) -> float:
        return statistics.median(
            each[kind]["stabilized"][name] / each[kind][over][name] for each in rounds
        )

    modes = {
        mode: {
            "tokens_per_s": median("ran", mode, "tokens_per_s"),
            "predicted_tokens_per_s": median("predicted", mode, "tokens_per_s"),
            "total_s": median("ran", mode, "total_s"),
            "s_busy": median("ran", mode, "s_busy"),
            "r_busy": median("ran", mode, "r_busy"),
            "load_mean_tokens": median("ran", mode, "load_mean_tokens"),
            "load_peak_tokens": median("ran", mode, "load_peak_tokens"),
        }
        for mode in MODES
    }
    gains = {
        over: {
            "measured": gain("ran", over, "tokens_per_s"),
            "predicted": gain("predicted", over, "tokens_per_s"),
        }
        for over in ("greedy", "synchronized")
    }
    peak = modes["stabilized"]["load_peak_tokens"]
    passed = abs(peak / job.limit - 1) <= MAX_PEAK_ERROR and all(
        abs(each["predicted"] / each["measured"] - 1) <= MAX_GAIN_ERROR for each in gains.values()
    )
    return {
        "batch": job.batch,
        "length": job.length,
        "interval": job.interval,
        "num_requests": job.num_requests,
        "limit_tokens": job.limit,
        "peak_over_limit": peak / job.limit,
        "limit_over_synchronized_peak": job.limit / modes["synchronized"]["load_peak_tokens"],
        "closed_form": (job.length + job.interval) / (2 * job.length),
        "r_part_over_s_part": statistics.median(
            ran["r_part_at_mean_load_s"] / ran["s_part_s"]
            for each in rounds
            for ran in each["ran"].values()
        ),
        "gains": gains,
        "passed": passed,
        "modes": modes,
        "rounds": list(rounds),
    }


def table(result: Mapping[str, Any]) -> str:
    lines = [
        "mode           tokens/s   predicted   off by   S busy   R busy   mean load   peak load"
    ]
    for mode, row in result["modes"].items():
        off = row["predicted_tokens_per_s"] / row["tokens_per_s"] - 1
        lines.append(
            f"{mode:<13} {row['tokens_per_s']:>9.0f} {row['predicted_tokens_per_s']:>11.0f} "
            f"{off:>+8.1%} {row['s_busy']:>8.0%} {row['r_busy']:>8.0%} "
            f"{row['load_mean_tokens']:>11.0f} {row['load_peak_tokens']:>11.0f}"
        )
    lines.append(f"R-part over S-part at the mean load: {result['r_part_over_s_part']:.2f}")
    lines.append(
        f"stabilized: the peak is {result['peak_over_limit']:.1%} of the limit of "
        f"{result['limit_tokens']} tokens; that is {result['limit_over_synchronized_peak']:.3f} of "
        f"the synchronized peak, (S + F)/2S = {result['closed_form']:.3f}"
    )
    lines += [
        f"gain over {over}: {each['measured']:.3f} measured, {each['predicted']:.3f} predicted "
        f"({each['predicted'] / each['measured'] - 1:+.1%})"
        for over, each in result["gains"].items()
    ]
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

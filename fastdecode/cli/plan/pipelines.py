"""``fastdecode plan pipelines``: the best pipeline of each kind over a trace, for
several numbers of machines.

Exit codes: 0 an answer; 1 nothing fits on any number of machines; 2 usage.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.cli.common import progress_teller
from fastdecode.cli.options import EXIT_INFEASIBLE, add_log_level_option, tell
from fastdecode.cli.plan.machine import add_machine, read_machine
from fastdecode.core.errors import ConfigError

if TYPE_CHECKING:
    from cost_model.disaggregate.compare import Comparison, Simulated
    from cost_model.simulate.pipelines import Failures
    from fastdecode.schedule.simulation.trace import RequestTrace

MAX_MACHINES = 256


def add_pipelines(questions: Any) -> None:
    """Add the subcommand to those of ``plan``."""
    parser: argparse.ArgumentParser = questions.add_parser(
        "pipelines",
        help="simulate pipelines over a trace",
        description="Simulate a trace on one pipeline, on several side by side, and on one for "
        "prompts and one for tokens; of each kind, the best for so many machines.",
    )
    parser.set_defaults(run=run_pipelines, command="plan pipelines")
    add = parser.add_argument
    add("--trace", type=Path, required=True, metavar="FILE", help="requests, JSON Lines")
    add(
        "--machines",
        required=True,
        metavar="D,…",
        help="numbers of machines to look at: 1,2,4,8",
    )
    add("--memory-gb", type=float, metavar="GB", help="of a machine; default: anything fits")
    add(
        "--transfer-time",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds that streaming K and V adds to each prompt stage (default: 0)",
    )
    add(
        "--failures",
        metavar="S,…",
        help="the one pipeline also loses a stage at these seconds: with replicas and without",
    )
    add(
        "--restart-time",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds from a failure until all stages run again (default: 0)",
    )
    add("--rate", type=float, metavar="R", help="draw arrivals: so many requests a second")
    add("--cv", type=float, default=1.0, help="of drawn gaps; 1 is Poisson (default: 1)")
    add("--seed", type=int, default=0, help="of drawn gaps (default: 0)")
    add("--price", type=float, metavar="X", help="of a machine, an hour")
    add_machine(parser)
    add("--json", action="store_true", help="print the answer as JSON")
    add_log_level_option(parser)


def run_pipelines(args: argparse.Namespace) -> int:
    """Simulate and print. Returns the exit code."""
    from cost_model.disaggregate.compare import KINDS, Comparison
    from cost_model.disaggregate.report import pipelines_as_json, pipelines_as_text
    from cost_model.numbers import exact
    from cost_model.printing import json_text

    counts = _machine_counts(args.machines)
    if args.price is not None:
        exact("price", args.price)
    trace = _trace(args)
    longest = max(each.num_prompt_tokens for each in trace.requests)
    outputs = sum(each.num_output_tokens for each in trace.requests) / len(trace.requests)
    machine, _ = read_machine(args, longest, max(1, round(outputs)))
    comparison = Comparison(
        trace,
        machine,
        None if args.memory_gb is None else exact("memory_gb", args.memory_gb),
        float(exact("transfer_time", args.transfer_time, above=False)),
    )
    failures = _failures(args)
    progress = _progress(sum(_num_layouts(comparison, count) for count in counts))
    rows: list[tuple[int, dict[str, Simulated | None]]] = [
        (count, {kind: comparison.best(kind, count, progress) for kind in KINDS})
        for count in counts
    ]
    for _, best in rows:
        one = best["one pipeline"]
        if failures is not None and one is not None:
            best |= comparison.with_failures(one, failures)
    if args.json:
        print(json_text(pipelines_as_json(rows, args.price)))
    else:
        print(pipelines_as_text(rows, args.price))
    return 0 if any(found for _, best in rows for found in best.values()) else EXIT_INFEASIBLE


def _trace(args: argparse.Namespace) -> RequestTrace:
    from cost_model.arrivals import GENERATOR, arrivals
    from cost_model.traces import read_trace
    from fastdecode.schedule.simulation.trace import RequestTrace

    trace = read_trace(args.trace)
    if args.rate is None:
        return trace
    times = arrivals(len(trace.requests), args.rate, args.cv, args.seed)
    tell(f"arrivals: {args.rate:g} a second, cv {args.cv:g}, {GENERATOR}, seed {args.seed}")
    return RequestTrace(
        tuple(
            replace(request, arrival=arrival)
            for request, arrival in zip(trace.requests, times, strict=True)
        )
    )


def _failures(args: argparse.Namespace) -> Failures | None:
    from cost_model.numbers import exact
    from cost_model.simulate.pipelines import Failures

    restart_s = float(exact("restart_time", args.restart_time, above=False))
    if args.failures is None:
        return None
    try:
        at_s = sorted(float(part) for part in args.failures.split(","))
    except ValueError:
        raise ConfigError(
            f"--failures {args.failures}: give seconds, with commas between, like 600,1200,1800"
        ) from None
    for each in at_s:
        exact("failures", each)
    return Failures(tuple(at_s), restart_s)


def _machine_counts(text: str) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(1 <= count <= MAX_MACHINES for count in counts):
        raise ConfigError(
            f"--machines {text}: give whole numbers from 1 to {MAX_MACHINES}, with commas between"
        )
    return list(dict.fromkeys(counts))


def _num_layouts(comparison: Comparison, machines: int) -> int:
    from cost_model.disaggregate.compare import KINDS

    return sum(1 for kind in KINDS for _ in comparison.layouts(kind, machines))


def _progress(most: int) -> Callable[[], object]:
    """Says now and then how far it is; some layouts needn't be run."""
    progress, done = progress_teller(), itertools.count(1)
    return lambda: progress(f"{next(done)} layouts simulated, of at most {most},")

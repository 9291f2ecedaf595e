"""``fastdecode simulate``: what a schedule would gain on given hardware,
answered without the hardware.

Exit codes: 0 done; 2 usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastdecode.cli.options import add_log_level_option, add_options
from fastdecode.core.config.groups import SCHEDULES, Batching
from fastdecode.core.config.options import declared
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.options import MODES, ScheduleOptions

if TYPE_CHECKING:
    from cost_model.simulate.tables import TabledTimes

T = TypeVar("T")

MAX_R_WORKERS = 4096
DEFAULT_KV_TOKENS = 1 << 20


def add_simulate(commands: Any) -> None:
    """Add the subcommand to the parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "simulate",
        help="compare schedules on a trace, without hardware",
        description="Run the real scheduler over a trace of requests, on simulated workers and a "
        'virtual clock. Trace lines: {"num_prompt_tokens": 512, "num_output_tokens": 128}, '
        'optionally with "max_tokens" and "arrival_s" or "arrival_step".',
    )
    parser.set_defaults(run=run_simulate)
    parser.add_argument(
        "--trace", required=True, type=Path, metavar="FILE", help="requests, JSON Lines"
    )
    parser.add_argument(
        "--json", action="store_true", help="print all numbers, step by step, as JSON"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE",
        help="draw load and latency over steps (.svg, .png, .pdf)",
    )  # fmt: skip
    add_log_level_option(parser)
    _add_conversations(parser.add_argument_group("conversations"))
    _add_hardware(parser.add_argument_group("hardware"))
    _add_schedule(parser.add_argument_group("schedule"))


def _add_conversations(group: Any) -> None:
    group.add_argument(
        "--instant", action="store_true",
        help='the trace is of turns, each done as it arrives: {"conversation": "A", '
        '"num_prompt_tokens": 24, "num_output_tokens": 8, "arrival_s": 0}; what do policies keep '
        "in --kv-tokens, move down, drop, and have computed again?",
    )  # fmt: skip
    group.add_argument(
        "--cache-policy", default="retention,lru,size-idle", metavar="NAMES",
        help="to compare (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--lower-kv-tokens", type=int, default=0, metavar="N",
        help="tokens that a lower tier holds (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--swap-threshold", type=float, default=0.25, metavar="F",
        help="move blocks down while less than this share of all is free (default: %(default)s)",
    )  # fmt: skip


def _add_hardware(group: Any) -> None:
    _add_times(group)
    group.add_argument(
        "--r-workers", type=int, default=1, metavar="P", help="R-workers (default: %(default)s)"
    )
    group.add_argument(
        "--kv-tokens", action="append", type=int, metavar="N",
        help="tokens that an R-worker holds; once for all, or once for each (default: "
        f"{DEFAULT_KV_TOKENS})",
    )  # fmt: skip
    group.add_argument(
        "--block-size", type=int, default=64, metavar="N",
        help="tokens in a KV block (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--lanes", type=int, default=2, metavar="N",
        help="1: S-part and R-part take turns (default: 2)",
    )  # fmt: skip


def _add_times(group: Any) -> None:
    group.add_argument(
        "--s-time", default="0.02", metavar="T",
        help="seconds of the S-part of a lane's step: a number, or a table over its tokens like "
        "1:0.010,256:0.016 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--r-time", action="append", metavar="R",
        help="seconds of the R-part for each cached token, or a table over cached tokens; once "
        "for all R-workers, or once for each (default: 1e-6)",
    )  # fmt: skip
    group.add_argument(
        "--link-time", type=float, default=0.0, metavar="L",
        help="seconds that a lane's step spends on the way between S-worker and R-workers "
        "(default: 0)",
    )  # fmt: skip


def _add_schedule(group: Any) -> None:
    group.add_argument(
        "--schedule", default=",".join(MODES), metavar="MODES",
        help="to compare (default: %(default)s); fixed intervals take the trace's mean for S, "
        "unless it is given",
    )  # fmt: skip
    add_options(group, Batching, leave_out=("schedule", "lanes"))


def run_simulate(args: argparse.Namespace) -> int:
    """Simulate every mode and print the outcome. Returns the exit code."""
    if args.instant:
        return _run_turns(args)
    from cost_model.numbers import number_within
    from cost_model.plot import check_plot, plot_run
    from cost_model.simulate.report import as_json, as_text
    from cost_model.traces import read_trace
    from fastdecode.schedule.modes import make_scheduler
    from fastdecode.schedule.simulation.resources import Rounds
    from fastdecode.schedule.simulation.simulation import Simulation, SimulationOutcome

    if args.plot is not None:
        check_plot(args.plot)
    number_within("link_time", args.link_time, 0, 3600, "number of seconds")
    times = _times(args)
    worker_blocks = _worker_blocks(args)
    modes = _names(args.schedule, SCHEDULES, "--schedule")
    trace = read_trace(args.trace)
    outcomes: dict[str, SimulationOutcome] = {}
    for mode in modes:
        options = _options(args, mode, round(trace.mean_output_tokens))
        scheduler = make_scheduler(options, worker_blocks, args.block_size, times)
        simulation = Simulation(
            trace,
            scheduler,
            Rounds(times, len(worker_blocks)),
            worker_blocks=worker_blocks,
            block_size=args.block_size,
            num_lanes=options.num_lanes,
        )
        outcomes[mode] = simulation.run()
    if args.plot is not None:
        plot_run(outcomes, args.plot)
    if args.json:
        json.dump(as_json(outcomes), sys.stdout)
        print()
    else:
        print(as_text(outcomes))
    return 0


def _run_turns(args: argparse.Namespace) -> int:
    """Play turns with every policy and print what it came to."""
    from cost_model.numbers import number_within, whole_number
    from cost_model.simulate.turns import TierSimulator, as_json, as_text, read_turns
    from fastdecode.schedule.cache.costs import FLAT_TO_HALF
    from fastdecode.schedule.cache.retention import POLICIES, policy_of

    whole_number("lower_kv_tokens", args.lower_kv_tokens, 0, 1 << 40)
    number_within("swap_threshold", args.swap_threshold, 0, 1)
    (num_blocks, *others) = _worker_blocks(args)
    if others:
        raise ConfigError("--instant is about one R-worker: leave --r-workers out")
    turns, played = read_turns(args.trace), {}
    for name in _names(args.cache_policy, POLICIES, "--cache-policy"):
        played[name] = tiers = TierSimulator(
            policy_of(name, args.block_size),
            num_blocks * args.block_size,
            args.lower_kv_tokens,
            args.block_size,
            args.swap_threshold,
            FLAT_TO_HALF,
        )
        for turn in turns:
            tiers.run(turn)
    print(json.dumps(as_json(played)) if args.json else as_text(played))
    return 0


def _times(args: argparse.Namespace) -> TabledTimes:
    from cost_model.simulate.tables import Table, TabledTimes

    r_times = _for_each_worker(args.r_time or ["1e-6"], args.r_workers, "--r-time")
    r_parts = tuple(Table.parse(text, option="--r-time", rate=True) for text in r_times)
    return TabledTimes(Table.parse(args.s_time, option="--s-time"), r_parts, args.link_time)


def _worker_blocks(args: argparse.Namespace) -> tuple[int, ...]:
    kv_tokens = _for_each_worker(
        args.kv_tokens or [DEFAULT_KV_TOKENS], args.r_workers, "--kv-tokens"
    )
    if not 1 <= args.block_size <= min(kv_tokens) <= max(kv_tokens) <= 1 << 40:
        raise ConfigError(
            f"--kv-tokens={kv_tokens} must hold at least one block of "
            f"--block-size={args.block_size} each"
        )
    return tuple(tokens // args.block_size for tokens in kv_tokens)


def _for_each_worker(values: list[T], num_workers: int, option: str) -> list[T]:
    if not 1 <= num_workers <= MAX_R_WORKERS:
        raise ConfigError(f"--r-workers={num_workers} is not within 1..{MAX_R_WORKERS}")
    if len(values) not in (1, num_workers):
        raise ConfigError(
            f"{option} was given {len(values)} times: give it once, or for each of {num_workers} "
            "R-workers"
        )
    return values if len(values) == num_workers else values * num_workers


def _names(text: str, known: Sequence[str], option: str) -> list[str]:
    """What an option lists of what there is."""
    names = [each for name in text.split(",") for each in known if each == name.strip()]
    if not names or len(names) < len(text.split(",")):
        raise ConfigError(
            f"{option}={text!r} names one that there isn't: choose from {', '.join(known)}"
        )
    return names


def _options(args: argparse.Namespace, mode: str, mean_length: int) -> ScheduleOptions:
    chosen = {each.name: getattr(args, each.name) for each in declared(Batching)}
    chosen["schedule"] = mode
    if mode == "fixed-f" and args.expected_output_tokens is None:
        chosen["expected_output_tokens"] = mean_length
    return ScheduleOptions(Batching(**chosen))

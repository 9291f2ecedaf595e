"""``fastdecode simulate``: what a schedule would gain on given hardware,
answered without the hardware.

Exit codes: 0 done; 2 usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fastdecode.cli.options import add_log_level_option
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.options import COLD_STARTS, MODES, Mode, ScheduleOptions

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
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw load and latency over steps (.svg, .png, .pdf)",
    )
    add_log_level_option(parser)
    _add_hardware(parser.add_argument_group("hardware"))
    _add_schedule(parser.add_argument_group("schedule"))


def _add_hardware(group: Any) -> None:
    _add_times(group)
    group.add_argument(
        "--r-workers", type=int, default=1, metavar="P", help="R-workers (default: %(default)s)"
    )
    group.add_argument(
        "--kv-tokens",
        action="append",
        type=int,
        metavar="N",
        help=(
            "tokens that an R-worker holds; once for all, or once for each (default: "
            f"{DEFAULT_KV_TOKENS})"
        ),
    )
    group.add_argument(
        "--block-size",
        type=int,
        default=64,
        metavar="N",
        help="tokens in a KV block (default: %(default)s)",
    )
    group.add_argument(
        "--lanes",
        dest="num_lanes",
        type=int,
        default=2,
        metavar="N",
        help="1: S-part and R-part take turns (default: 2)",
    )


def _add_times(group: Any) -> None:
    group.add_argument(
        "--s-time",
        default="0.02",
        metavar="T",
        help="seconds of the S-part of a lane's step: a number, or a table over its tokens like "
        "1:0.010,256:0.016 (default: %(default)s)",
    )
    group.add_argument(
        "--r-time",
        action="append",
        metavar="R",
        help="seconds of the R-part for each cached token, or a table over cached tokens; once "
        "for all R-workers, or once for each (default: 1e-6)",
    )
    group.add_argument(
        "--link-time",
        type=float,
        default=0.0,
        metavar="L",
        help=(
            "seconds that a lane's step spends on the way between S-worker and R-workers "
            "(default: 0)"
        ),
    )


_LIMITS: Final[tuple[tuple[str, type, int | None, str, str], ...]] = (
    ("--max-num-sequences", int, ScheduleOptions.max_num_sequences, "B",
     "most sequences that run at once"),
    ("--prefill-chunk", int, ScheduleOptions.prefill_chunk, "N",
     "most prompt tokens of one sequence in a step"),
    ("--max-step-tokens", int, None, "N",
     "most tokens of a lane's step; default: B + 2048, or B + a chunk"),
    ("--load-limit", int, None, "W",
     "W_lim in tokens; default: the load whose R-part takes as long as the S-part"),
    ("--target-length", int, None, "S",
     "tokens generated, for fixed intervals; default: the trace's mean"),
    ("--interval", int, None, "F",
     "for fixed intervals, in steps; default: S/16, or S/B if that is longer"),
    ("--length-quantile", float, None, "Q",
     "reserve blocks by this quantile of lengths; default: for max_tokens"),
)  # fmt: skip


def _add_schedule(group: Any) -> None:
    group.add_argument(
        "--schedule",
        default=",".join(MODES),
        metavar="MODES",
        help="to compare (default: %(default)s)",
    )
    for flag, kind, value, metavar, text in _LIMITS:
        shown = "" if value is None else " (default: %(default)s)"
        group.add_argument(flag, type=kind, default=value, metavar=metavar, help=text + shown)
    group.add_argument(
        "--learn-lengths",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="project load by the lengths of finished requests, not by max_tokens (default: yes)",
    )
    group.add_argument(
        "--cold-start",
        default=ScheduleOptions.cold_start,
        choices=COLD_STARTS,
        help="of stabilized (default: %(default)s)",
    )


def run_simulate(args: argparse.Namespace) -> int:
    """Simulate every mode and print the outcome. Returns the exit code."""
    from cost_model.plans.plot import check_plot
    from cost_model.simulate.plot import plot
    from cost_model.simulate.report import as_json, as_text
    from cost_model.simulate.simulator import Outcome, Simulator
    from cost_model.simulate.trace import read_trace
    from fastdecode.schedule.modes import make_scheduler

    if args.plot is not None:
        check_plot(args.plot)
    if not 0 <= args.link_time <= 3600:
        raise ConfigError(f"--link-time={args.link_time} is not a number of seconds from 0 to 3600")
    times = _times(args)
    worker_blocks = _worker_blocks(args)
    modes = _modes(args.schedule)
    trace = read_trace(args.trace)
    outcomes: dict[str, Outcome] = {}
    for mode in modes:
        options = _options(args, mode, round(trace.mean_output_tokens))
        scheduler = make_scheduler(options, worker_blocks, args.block_size, times)
        simulator = Simulator(
            trace,
            scheduler,
            times,
            worker_blocks=worker_blocks,
            block_size=args.block_size,
            num_lanes=options.num_lanes,
            link_s=args.link_time,
        )
        outcomes[mode] = simulator.run()
    if args.plot is not None:
        plot(outcomes, args.plot)
    if args.json:
        json.dump(as_json(outcomes), sys.stdout)
        print()
    else:
        print(as_text(outcomes))
    return 0


def _times(args: argparse.Namespace) -> TabledTimes:
    from cost_model.simulate.tables import Table, TabledTimes

    r_times = _for_each_worker(args.r_time or ["1e-6"], args.r_workers, "--r-time")
    r_parts = tuple(Table.parse(text, option="--r-time", rate=True) for text in r_times)
    return TabledTimes(Table.parse(args.s_time, option="--s-time"), r_parts)


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


def _modes(text: str) -> list[Mode]:
    modes = [mode for name in text.split(",") for mode in MODES if mode == name.strip()]
    if not modes or len(modes) < len(text.split(",")):
        raise ConfigError(
            f"--schedule={text!r} names a mode that there isn't: choose from {', '.join(MODES)}"
        )
    return modes


def _options(args: argparse.Namespace, mode: Mode, mean_length: int) -> ScheduleOptions:
    max_step_tokens = args.max_step_tokens
    if max_step_tokens is None:
        max_step_tokens = args.max_num_sequences + max(2048, args.prefill_chunk)
    return ScheduleOptions(
        mode=mode,
        max_num_sequences=args.max_num_sequences,
        prefill_chunk=args.prefill_chunk,
        max_step_tokens=max_step_tokens,
        num_lanes=args.num_lanes,
        load_limit=args.load_limit,
        target_length=mean_length if args.target_length is None else args.target_length,
        interval=args.interval,
        cold_start=args.cold_start,
        learn_lengths=args.learn_lengths,
        length_quantile=args.length_quantile,
    )

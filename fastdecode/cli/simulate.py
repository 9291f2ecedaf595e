"""``fastdecode simulate``: what a schedule would gain on given hardware, without the hardware."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fastdecode.cli.options import add_options, given, read_options
from fastdecode.core.config.groups import SCHEDULES, Batching
from fastdecode.core.config.options import REQUIRED, option, switch
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.options import MODES, ScheduleOptions

T = TypeVar("T")

MAX_R_WORKERS = 4096
DEFAULT_KV_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Run:
    trace: Path = option(REQUIRED, "requests, JSON Lines")
    json: bool = switch("print all numbers, step by step, as JSON")


@dataclass(frozen=True)
class Conversations:
    instant: bool = switch(
        'the trace is of turns, each done as it arrives: {"conversation": "A", '
        '"num_prompt_tokens": 24, "num_output_tokens": 8, "arrival_s": 0}; show what policies keep '
        "in --kv-tokens, move down, drop, and recompute"
    )
    cache_policy: str = option("retention,lru", "policies to compare", metavar="NAMES")
    lower_kv_tokens: int = option(0, "tokens that a lower tier holds", low=0, high=1 << 40)
    swap_threshold: float = option(
        0.25, "move blocks down while less than this share of all is free", low=0, high=1,
        metavar="F",
    )  # fmt: skip


@dataclass(frozen=True)
class Workers:
    s_time: str = option(
        "0.02", "seconds of the S-part of a lane's step: a number, or a table over its tokens like "
        "1:0.010,256:0.016", metavar="T",
    )  # fmt: skip
    r_time: tuple[str, ...] = option(
        (), "seconds of the R-part for each cached token, or a table over cached tokens; once for "
        "all R-workers, or once for each (default: 1e-6)", metavar="R",
    )  # fmt: skip
    link_time: float = option(
        0.0, "seconds that a lane's step spends on the way between S-worker and R-workers", low=0,
        high=3600, unit="seconds", metavar="L",
    )  # fmt: skip
    r_workers: int = option(1, "R-workers", low=1, high=MAX_R_WORKERS, metavar="P")
    kv_tokens: tuple[int, ...] = option(
        (), "tokens that an R-worker holds; once for all, or once for each (default: "
        f"{DEFAULT_KV_TOKENS})",
    )  # fmt: skip
    block_size: int = option(64, "tokens in a KV block")

    def blocks(self) -> tuple[int, ...]:
        kv_tokens = self.for_each(self.kv_tokens or (DEFAULT_KV_TOKENS,), "--kv-tokens")
        if not 1 <= self.block_size <= min(kv_tokens) <= max(kv_tokens) <= 1 << 40:
            raise ConfigError(
                f"--kv-tokens={kv_tokens} must hold at least one block of "
                f"--block-size={self.block_size} each"
            )
        return tuple(tokens // self.block_size for tokens in kv_tokens)

    def for_each(self, values: Sequence[T], option: str) -> list[T]:
        """Return the values of each R-worker, of which one stands for all."""
        if len(values) not in (1, self.r_workers):
            raise ConfigError(
                f"{option} was given {len(values)} times: give it once, or for each of "
                f"{self.r_workers} R-workers"
            )
        return list(values) * (self.r_workers // len(values))


def add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run the real scheduler over a trace of requests, on simulated workers and a "
        'virtual clock. Trace lines: {"num_prompt_tokens": 512, "num_output_tokens": 128}, '
        'optionally with "max_tokens" and "arrival_s" or "arrival_step".'
    )
    parser.set_defaults(run=run_simulate)
    add_options(parser, Run)
    add_options(parser, Conversations, "conversations")
    hardware = parser.add_argument_group("hardware")
    add_options(hardware, Workers)
    hardware.add_argument(
        "--lanes", type=int, default=2, metavar="N",
        help="1: S-part and R-part take turns (default: 2)",
    )  # fmt: skip
    schedule = parser.add_argument_group("schedule")
    schedule.add_argument(
        "--schedule", default=",".join(MODES), metavar="MODES",
        help="schedules to compare (default: %(default)s); fixed intervals take the trace's mean "
        "for S, unless it is given",
    )  # fmt: skip
    add_options(schedule, Batching, leave_out=("schedule", "lanes"))


def run_simulate(args: argparse.Namespace) -> int:
    workers = read_options(args, Workers)
    if args.instant:
        return _run_turns(args, workers)
    from cost_model.simulate import Table, TabledTimes, as_json, as_text
    from cost_model.traces import read_trace
    from fastdecode.schedule.modes import make_scheduler
    from fastdecode.schedule.simulation.resources import Rounds
    from fastdecode.schedule.simulation.simulation import Simulation, SimulationOutcome

    r_times = workers.for_each(workers.r_time or ("1e-6",), "--r-time")
    r_parts = tuple(Table.parse(text, option="--r-time", rate=True) for text in r_times)
    s_part = Table.parse(workers.s_time, option="--s-time")
    times, blocks = TabledTimes(s_part, r_parts, workers.link_time), workers.blocks()
    modes = _names(args.schedule, SCHEDULES, "--schedule")
    trace = read_trace(args.trace)
    outcomes: dict[str, SimulationOutcome] = {}
    for mode in modes:
        chosen = {**given(args, Batching), "schedule": mode}
        if mode == "fixed-f" and args.expected_output_tokens is None:
            chosen["expected_output_tokens"] = round(trace.mean_output_tokens)
        options = ScheduleOptions(Batching(**chosen))
        outcomes[mode] = Simulation(
            trace,
            make_scheduler(options, blocks, workers.block_size, times),
            Rounds(times, len(blocks)),
            worker_blocks=blocks,
            block_size=workers.block_size,
            num_lanes=options.num_lanes,
        ).run()
    print(json.dumps(as_json(outcomes)) if args.json else as_text(outcomes))
    return 0


def _run_turns(args: argparse.Namespace, workers: Workers) -> int:
    from cost_model.turns import TierSimulator, as_json, as_text, read_turns
    from fastdecode.schedule.cache.retention import FLAT_TO_HALF, POLICIES, policy_of

    asked = read_options(args, Conversations)
    (num_blocks, *others) = workers.blocks()
    if others:
        raise ConfigError("--instant is about one R-worker: leave --r-workers out")
    turns, played = read_turns(args.trace), {}
    for name in _names(asked.cache_policy, POLICIES, "--cache-policy"):
        played[name] = tiers = TierSimulator(
            policy_of(name, workers.block_size),
            num_blocks * workers.block_size,
            asked.lower_kv_tokens,
            workers.block_size,
            asked.swap_threshold,
            FLAT_TO_HALF,
        )
        for turn in turns:
            tiers.run(turn)
    print(json.dumps(as_json(played)) if args.json else as_text(played))
    return 0


def _names(text: str, known: Sequence[str], option: str) -> list[str]:
    names = [each for name in text.split(",") for each in known if each == name.strip()]
    if not names or len(names) < len(text.split(",")):
        raise ConfigError(f"{option}={text!r} has an unknown name. Choose from {', '.join(known)}")
    return names

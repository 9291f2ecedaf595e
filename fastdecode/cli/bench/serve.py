"""``fastdecode bench-serve``: a load on any server of OpenAI's API."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.cli.measuring import measuring
from fastdecode.cli.options import EXIT_SOME_FAILED, add_log_level_option, add_status_option
from fastdecode.core.errors import ConfigError, imports_for
from fastdecode.core.files import write_json
from fastdecode.measure.serving import KEY_VARIABLE, TIMEOUT_S

if TYPE_CHECKING:
    from fastdecode.measure.serving.client import Endpoint, Record
    from fastdecode.measure.serving.load import LoadShape, Planned
    from fastdecode.measure.serving.report import Slo

MAX_REQUESTS = 10_000_000
DEFAULTS = {
    "requests": 100,
    "prompt_tokens": 128,
    "output_tokens": 64,
    "spread": 0.0,
    "cv": 1.0,
    "speed": 1.0,
}
"""What holds where an option isn't given. None of them is a parser's default,
so that one is refused that would change nothing."""


def add_bench_serve(commands: Any) -> None:
    """Add the subcommand to the parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench-serve",
        help="measure a server of OpenAI's API under a load",
        description="Send requests to any server of OpenAI's API, as they would arrive or from a "
        f"number of clients, and measure the streams. A key is read from {KEY_VARIABLE}.",
    )
    parser.set_defaults(run=run_bench_serve)
    parser.add_argument("--base-url", required=True, metavar="URL", help="http://HOST:PORT")
    parser.add_argument("--model", metavar="NAME", help="default: the first that is served")
    _add_load(parser.add_argument_group("load"))
    parser.add_argument(
        "--timeout-s", type=float, default=TIMEOUT_S, metavar="S",
        help=f"a request that takes longer is given up, an error (default: {TIMEOUT_S:g})",
    )  # fmt: skip
    goals = parser.add_argument_group("goodput")
    goals.add_argument("--slo", metavar="LIMITS", help="such as ttft=400ms,tpot=40ms")
    goals.add_argument(
        "--attainment", type=float, default=0.9, metavar="A",
        help="part of the requests that is to keep the SLO (default: 0.9)",
    )  # fmt: skip
    goals.add_argument(
        "--find-goodput", action="store_true",
        help="look for the greatest rate at which it does, beginning at --rate",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    add_status_option(parser)
    add_log_level_option(parser)


def _add_load(group: argparse._ArgumentGroup) -> None:
    when = group.add_mutually_exclusive_group()
    when.add_argument("--rate", type=float, metavar="R", help="requests a second, that don't wait")
    when.add_argument(
        "--concurrency", type=int, metavar="N", help="clients, each with one request at a time"
    )
    when.add_argument("--trace", type=Path, metavar="FILE", help="a server's request log")
    group.add_argument(
        "--cv", type=float, metavar="C",
        help="variation of the gaps, with --rate: 1 (default) is Poisson, 0 a clock",
    )  # fmt: skip
    group.add_argument(
        "--speed", type=float, metavar="X", help="with --trace: so many times as fast"
    )
    for flag, default, text in (
        ("--requests", None, "how many (default: 100; of a trace: all)"),
        ("--prompt-tokens", None, "of each, on average (default: 128)"),
        ("--output-tokens", None, "of each, on average (default: 64)"),
        ("--vocab-size", 1000, "prompts are random tokens from 10 to this (default: 1000)"),
        ("--seed", 0, "of lengths, gaps and prompts (default: 0)"),
    ):
        group.add_argument(flag, type=int, default=default, metavar="N", help=text)
    group.add_argument(
        "--spread", type=float, metavar="S",
        help="lengths are log-normal with this sigma; 0 (default): all alike",
    )  # fmt: skip


def run_bench_serve(args: argparse.Namespace) -> int:
    """Run the load. Returns the exit code."""
    import asyncio

    with imports_for("fastdecode bench-serve"):
        from fastdecode.measure.serving.client import Endpoint
    from fastdecode.measure.serving.report import Slo, told

    _check(args)
    _set_defaults(args)
    slo = None if args.slo is None else Slo.parse(args.slo)
    endpoint = Endpoint(args.base_url, os.environ.get(KEY_VARIABLE), args.timeout_s)
    if args.model is not None:
        asyncio.run(endpoint.reach())
    model = args.model or asyncio.run(endpoint.model())
    with measuring(args, "bench-serve", lambda: _progress(args, endpoint), json=args.json) as say:
        figures = _measured(args, endpoint, model, slo, say)
    print(told(figures), flush=True)
    if args.json is not None:
        write_json(args.json, figures, "figures")
    return EXIT_SOME_FAILED if figures["errors"] else 0


def _progress(args: argparse.Namespace, endpoint: Endpoint) -> dict[str, Any]:
    """For the status file. How many requests there are is known of one load that
    isn't a trace."""
    is_known = not args.find_goodput and args.trace is None
    return {
        "unit": "requests",
        "done": endpoint.num_done,
        "total": args.requests if is_known else None,
        "num_failed": endpoint.num_failed,
        "eta_s": None,
    }


def _measured(
    args: argparse.Namespace,
    endpoint: Endpoint,
    model: str,
    slo: Slo | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    import asyncio

    from fastdecode.measure.serving.load import arriving, closed
    from fastdecode.measure.serving.report import report
    from fastdecode.measure.serving.run import find_goodput, run_closed, run_open

    shape = _shape(args)
    if not args.find_goodput:
        return report(_run(args, endpoint, model, _load(args, shape)), slo)

    def measure(rate: float) -> dict[str, Any]:
        load = arriving(shape, rate, args.cv)
        return report(asyncio.run(run_open(endpoint, model, load)), slo)

    def measure_alone() -> dict[str, Any]:
        return report(asyncio.run(run_closed(endpoint, model, closed(shape), 1)), slo)

    rate, figures = find_goodput(measure, measure_alone, args.rate, args.attainment, say)
    if figures is None:
        figures = measure(args.rate)
    return {**figures, "greatest_rate": rate, "wanted_attainment": args.attainment}


def _run(
    args: argparse.Namespace, endpoint: Endpoint, model: str, load: list[Planned]
) -> list[Record]:
    import asyncio

    from fastdecode.measure.serving.run import run_closed, run_open

    if args.rate is None and args.trace is None:
        return asyncio.run(run_closed(endpoint, model, load, args.concurrency or 1))
    return asyncio.run(run_open(endpoint, model, load))


def _load(args: argparse.Namespace, shape: LoadShape) -> list[Planned]:
    from fastdecode.measure.serving.load import arriving, closed, traced

    if args.trace is not None:
        return traced(args.trace, shape, args.speed)
    return closed(shape) if args.rate is None else arriving(shape, args.rate, args.cv)


def _shape(args: argparse.Namespace) -> LoadShape:
    from fastdecode.measure.serving.load import LoadShape

    return LoadShape(
        args.requests,
        args.prompt_tokens,
        args.output_tokens,
        args.spread,
        args.vocab_size,
        args.seed,
    )


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError: an option makes no sense."""
    limits = (
        ("requests", 1, MAX_REQUESTS), ("prompt_tokens", 1, 1 << 24), ("output_tokens", 1, 1 << 24),
        ("vocab_size", 11, 1 << 24), ("seed", 0, 1 << 62), ("spread", 0, 5), ("cv", 0, 100),
        ("speed", 1e-3, 1e6), ("attainment", 0, 1), ("rate", 1e-6, 1e6), ("concurrency", 1, 65536),
        ("timeout_s", 0.1, 1e6),
    )  # fmt: skip
    for name, low, high in limits:
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {value} is not a number from {low:g} to {high:g}")
    for name, needed in (("cv", "rate"), ("speed", "trace")):
        if getattr(args, name) is not None and getattr(args, needed) is None:
            raise ConfigError(f"--{name} changes nothing without --{needed}")
    for name in ("prompt_tokens", "output_tokens", "spread"):
        if args.trace is not None and getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} changes nothing with --trace")
    if args.find_goodput and (args.rate is None or args.slo is None):
        raise ConfigError("--find-goodput needs --rate, to begin at, and --slo")


def _set_defaults(args: argparse.Namespace) -> None:
    """Set what isn't given."""
    for name, default in DEFAULTS.items():
        if getattr(args, name) is None:
            is_whole_trace = name == "requests" and args.trace is not None
            setattr(args, name, MAX_REQUESTS if is_whole_trace else default)

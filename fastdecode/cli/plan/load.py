"""What comes, as ``fastdecode plan goodput`` is told it: a trace, or what is drawn."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fastdecode.cli.options import tell
from fastdecode.core.errors import ConfigError

if TYPE_CHECKING:
    from cost_model.goodput.rates import Load
    from cost_model.goodput.workload import Draw


def read_load(args: argparse.Namespace) -> tuple[Load, float, str]:
    """What comes, at which rate, and in words.

    Raises:
        ConfigError: an option is missing or makes no sense.
    """
    from cost_model.goodput.rates import Load
    from cost_model.goodput.slo import Slo
    from cost_model.numbers import whole_number

    whole_number("requests", args.requests, 1, 100_000)
    slo = Slo.parse(args.slo, args.attainment)
    how = "each" if args.each else "both"
    draw, rate, described = _traced(args) if args.trace is not None else _drawn(args)
    if rate is None:
        raise ConfigError("at which rate do they come? Give --rate, in requests a second")
    return Load(draw, slo, how), rate, described  # type: ignore[arg-type]


def _drawn(args: argparse.Namespace) -> tuple[Draw, float | None, str]:
    from cost_model.goodput.workload import GENERATOR, Lengths, drawn

    if args.prompt_len is None or args.output_len is None:
        raise ConfigError("what comes? Give --trace, or --prompt-len and --output-len")
    if args.replay:
        raise ConfigError("--replay needs a --trace to replay")
    cv = 1.0 if args.cv is None else args.cv
    lengths = [Lengths.parse(name, getattr(args, name)) for name in ("prompt_len", "output_len")]
    draw = drawn(lengths[0], lengths[1], cv, args.requests, args.seed)
    described = (
        f"drawn: prompts {args.prompt_len}, outputs {args.output_len}, cv {cv:g}, "
        f"{args.requests} requests, {GENERATOR}, seed {args.seed}"
    )
    return draw, args.rate, described


def _traced(args: argparse.Namespace) -> tuple[Draw, float | None, str]:
    from cost_model.goodput.workload import GENERATOR, fit_trace, replayed, resampled
    from cost_model.traces import read_any_trace

    if args.prompt_len is not None or args.output_len is not None:
        raise ConfigError("give --trace, or --prompt-len and --output-len, not both")
    read = read_any_trace(args.trace)
    fit = fit_trace(read.trace)
    for warning in fit.warnings:
        tell(f"--trace {args.trace}: {warning}")
    rate = fit.rate if args.rate is None else args.rate
    cv = fit.cv if args.cv is None else args.cv
    described = (
        f"trace ({read.form}): {fit.num_requests} requests, {read.num_left_out} left out, cv "
        f"{fit.cv:.3g}, mean prompt {fit.mean_prompt:.4g} and output {fit.mean_output:.4g} tokens"
    )
    if args.replay:
        return replayed(read.trace), rate, f"{described}; replayed"
    draw = resampled(read.trace, cv, args.requests, args.seed)
    return draw, rate, f"{described}; resampled with cv {cv:.3g}, {GENERATOR}, seed {args.seed}"

"""``fastdecode plot``: a picture of a run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdecode.cli.options import add_log_level_option, add_options
from fastdecode.core.config.options import REQUIRED, option
from fastdecode.core.files import check_writable


@dataclass(frozen=True)
class PlotOptions:
    """What is drawn, and where."""

    source: Path = option(REQUIRED, "what a run has left", flag="source", metavar="TRACE")
    output: Path | None = option(
        None, "the picture: png, svg or pdf (default: beside the source, .svg)", short="-o"
    )


def add_plot(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plot",
        help="draw a run from its trace",
        description="Draw a file of --trace: who computed when, sequences over time.",
    )
    parser.set_defaults(run=run_plot)
    add_options(parser, PlotOptions)
    add_log_level_option(parser, default="error")


def run_plot(args: argparse.Namespace) -> int:
    """Draw. Return the exit code."""
    from fastdecode.measure.plot import plot_run

    target = args.output or args.source.with_name(args.source.name + ".svg")
    check_writable(target, "picture")
    plot_run(args.source, target)
    print(target)
    return 0

"""``fastdecode plot``: a picture of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fastdecode.cli.options import add_log_level_option
from fastdecode.core.files import check_writable


def add_plot(commands: Any) -> None:
    """Add the subcommand to the parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plot",
        help="draw a run from its summary or its trace",
        description="Draw a file of --summary (shares of a step, latencies) or of --trace (who "
        "computed when, sequences over time).",
    )
    parser.set_defaults(run=run_plot)
    parser.add_argument("source", type=Path, metavar="SUMMARY|TRACE", help="what a run has left")
    parser.add_argument(
        "--output", "-o", type=Path, metavar="FILE",
        help="the picture: png, svg or pdf (default: beside the source, .svg)",
    )  # fmt: skip
    add_log_level_option(parser, default="error")


def run_plot(args: argparse.Namespace) -> int:
    """Draw. Returns the exit code."""
    from fastdecode.measure.run_plot import plot_run

    target = args.output or args.source.with_name(args.source.name + ".svg")
    check_writable(target, "picture")
    plot_run(args.source, target)
    print(target)
    return 0

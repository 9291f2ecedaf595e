"""``fastdecode merge``: the answers of a job's shards as one file, in the order of
the input.

Exit codes: 0 all lines are there; 2 usage, or outputs that don't belong together;
3 some answers are errors, or missing with ``--partial``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fastdecode.cli.options import EXIT_SOME_FAILED, add_log_level_option, tell
from fastdecode.core.files import STANDARD, check_readable, check_writable
from fastdecode.core.progress import Bar
from fastdecode.jobs.merging import merge

COMMAND = "fastdecode merge"


def add_merge(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "merge",
        help="join the answers of a job's shards, in the order of the input",
        description="Join the outputs of `fastdecode run-batch --shard 1/N` to `N/N` into one "
        "file, in the order of the input. One output of a whole job is put into that order.",
    )
    parser.set_defaults(run=run_merge)
    parser.add_argument("outputs", nargs="+", type=Path, metavar="OUTPUT", help="of run-batch")
    parser.add_argument(
        "--output", "-o", required=True, type=Path, metavar="FILE",
        help="all answers; replaced if it exists; FILE.gz: compressed; -: standard output",
    )  # fmt: skip
    parser.add_argument(
        "--partial", action="store_true", help="also if lines or shards are missing"
    )
    add_log_level_option(parser)


def run_merge(args: argparse.Namespace) -> int:
    """Join the outputs. Returns the exit code."""
    for path in args.outputs:
        check_readable(path)
    if args.output != STANDARD:
        check_writable(args.output, "output")
    with Bar(sys.stderr, "merging") as bar:
        found = merge(args.outputs, args.output, bar.update, partial=args.partial)
    missing = f", {found.num_missing} lines are missing" if found.num_missing else ""
    failed = f", {found.num_failed} of them with an error" if found.num_failed else ""
    tell(f"{COMMAND}: {found.num_answers} answers are in {args.output}{failed}{missing}")
    return EXIT_SOME_FAILED if found.num_failed or found.num_missing else 0

"""``fastdecode plan``: which machines for what. No torch, no GPU."""

from __future__ import annotations

import argparse
from typing import Any

from fastdecode.cli.plan.disaggregate import add_disaggregate
from fastdecode.cli.plan.goodput import add_goodput


def add_plan(commands: Any) -> None:
    """Add the subcommand, with one below it for each question."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="plan: machines for prompts and for tokens, and whether it pays",
        description="Which machines run prompts and which run tokens, and whether it pays to "
        "separate them. Needs no GPU and no torch.",
    )
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    add_goodput(questions)
    add_disaggregate(questions)

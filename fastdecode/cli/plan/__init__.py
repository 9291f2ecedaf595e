"""``fastdecode plan``: which machines for what. No torch, no GPU."""

from __future__ import annotations

import argparse

from fastdecode.cli.plan.disaggregate import add_disaggregate
from fastdecode.cli.plan.goodput import add_goodput


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each question."""
    parser.description = (
        "Which machines run prompts and which run tokens, and whether it pays to separate them. "
        "Needs no GPU and no torch."
    )
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    add_goodput(questions)
    add_disaggregate(questions)

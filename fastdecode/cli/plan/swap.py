"""``fastdecode plan swap``: does it pay to keep two microbatches' KV on the
device and the others' in host memory?

Exit codes: 0 an answer; 2 usage.
"""

from __future__ import annotations

import argparse
from typing import Any

from fastdecode.cli.options import add_log_level_option


def add_swap(questions: Any) -> None:
    """Add the subcommand to those of ``plan``."""
    parser: argparse.ArgumentParser = questions.add_parser(
        "swap",
        help="microbatches twice as large, whose KV is swapped",
        description="Whether microbatches of twice the size pay, if their KV is brought back from "
        "host memory for every token: DéjàVu's inequality as printed, and corrected.",
    )
    parser.set_defaults(run=run_swap, command="plan swap")
    for flag, kind, metavar, text in (
        ("--prompt-tokens", int, "P", "of each sequence"),
        ("--tokens", int, "N", "that each sequence generates"),
        ("--token-time", float, "S", "seconds a token of a microbatch, of either size"),
        ("--batch", int, "B", "sequences of a microbatch that fits without swapping"),
        ("--kv-kb", float, "KB", "K and V of one sequence's token on a stage, in 1000 bytes"),
        ("--bandwidth-gb", float, "GB", "from host memory to the device, in 10^9 bytes a second"),
    ):
        parser.add_argument(flag, type=kind, required=True, metavar=metavar, help=text)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    add_log_level_option(parser)


def run_swap(args: argparse.Namespace) -> int:
    """Answer one question. Returns the exit code."""
    from cost_model.disaggregate.report import swap_as_json, swap_as_text
    from cost_model.disaggregate.swap import Swapping
    from cost_model.printing import json_text

    asked = Swapping.given(
        args.prompt_tokens, args.tokens, args.token_time, args.batch, args.kv_kb, args.bandwidth_gb
    )
    print(json_text(swap_as_json(asked)) if args.json else swap_as_text(asked))
    return 0

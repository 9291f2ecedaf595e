"""``fastdecode plan swap``: does it pay to keep two microbatches' KV on the
device and the others' in host memory?

Exit codes: 0 an answer; 2 usage.
"""

from __future__ import annotations

import argparse
from typing import Any

from fastdecode.cli.options import add_log_level_option
from fastdecode.cli.plan.machine import add_machine, is_machine_given, read_machine
from fastdecode.core.errors import ConfigError


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
        ("--batch", int, "B", "sequences of a microbatch that fits without swapping"),
    ):
        parser.add_argument(flag, type=kind, required=True, metavar=metavar, help=text)
    for flag, metavar, text in (
        ("--token-time", "S", "seconds a token of a microbatch, of either size"),
        ("--kv-kb", "KB", "K and V of one sequence's token on a stage, in 1000 bytes"),
        ("--bandwidth-gb", "GB", "from host memory to the device, in 10^9 bytes a second"),
    ):
        parser.add_argument(flag, type=float, metavar=metavar, help=text)
    parser.add_argument(
        "--machines", type=int, default=1, metavar="D", help="stages of the pipeline (default: 1)"
    )
    add_machine(parser)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    add_log_level_option(parser)


def run_swap(args: argparse.Namespace) -> int:
    """Answer one question. Returns the exit code."""
    from cost_model.disaggregate.report import swap_as_json, swap_as_text
    from cost_model.disaggregate.swap import Swapping
    from cost_model.printing import json_text

    _fill(args)
    asked = Swapping(
        args.prompt_tokens, args.tokens, args.token_time, args.batch, args.kv_kb, args.bandwidth_gb
    )
    print(json_text(swap_as_json(asked)) if args.json else swap_as_text(asked))
    return 0


def _fill(args: argparse.Namespace) -> None:
    """What isn't typed in, by the machine's times: a stage has its part of them.

    Raises:
        ConfigError: a number is missing, and nothing says it.
    """
    from cost_model.numbers import whole_number

    stages = whole_number("machines", args.machines, 1, 1 << 16)
    if is_machine_given(args):
        machine, link = read_machine(args, args.prompt_tokens, args.tokens, [args.batch])
        found = {
            "token_time": machine.of(args.batch).token_s / stages,
            "kv_kb": float(machine.memory.kv_gb_per_token) * 1e6 / stages,
            "bandwidth_gb": None if link is None else link / 1e9,
        }
        for name, value in found.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
    for name in ("token_time", "kv_kb", "bandwidth_gb"):
        if getattr(args, name) is None:
            option = name.replace("_", "-")
            other = "a profile does not say it" if args.gpu else "or --model and --gpu"
            raise ConfigError(f"--{option} is missing: give it, {other}")

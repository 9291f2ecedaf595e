"""``fastdecode plan disaggregate``: how many of so many machines run prompts, and
does it pay?

Exit codes: 0 an answer; 1 no split fits; 2 usage.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from fastdecode.cli.options import EXIT_INFEASIBLE, add_log_level_option
from fastdecode.cli.plan.machine import add_machine, is_machine_given, read_machine
from fastdecode.core.errors import ConfigError

if TYPE_CHECKING:
    from cost_model.disaggregate.memory import StageMemory

_MEMORY = ("layers", "weights_gb", "prompt_kv_gb", "token_kv_gb", "memory_gb")


def add_disaggregate(questions: Any) -> None:
    """Add the subcommand to those of ``plan``."""
    parser: argparse.ArgumentParser = questions.add_parser(
        "disaggregate",
        help="machines for prompts and machines for tokens",
        description="How many of D machines run prompts and how many run tokens, by DéjàVu's "
        "equations over whole machines, and whether that beats one pipeline for both.",
    )
    parser.set_defaults(run=run_disaggregate, command="plan disaggregate")
    add = parser.add_argument
    add("--machines", type=int, required=True, metavar="D", help="machines in all")
    add(
        "--prompt-time",
        type=float,
        metavar="S",
        help="seconds of a stage for a microbatch's prompt, all machines in one pipeline",
    )
    add(
        "--token-time",
        type=float,
        metavar="S",
        help="seconds of a stage for one token of a microbatch, all machines in one pipeline",
    )
    add("--tokens", type=int, required=True, metavar="N", help="tokens that a microbatch generates")
    add("--batch", type=int, metavar="B", help="sequences of a microbatch, for a machine's times")
    add("--prompt-tokens", type=int, metavar="P", help="of a sequence, likewise")
    add_machine(parser)
    _add_streaming(parser.add_argument_group("streaming K and V to the token machines"))
    _add_memory(parser.add_argument_group("memory; all of these or none"))
    add("--json", action="store_true", help="print the answer as JSON")
    add_log_level_option(parser)


def _add_streaming(group: Any) -> None:
    group.add_argument(
        "--overhead",
        type=float,
        metavar="M",
        help="prompts take so many times as long (default: 1)",
    )
    group.add_argument(
        "--kv-gb",
        type=float,
        metavar="GB",
        help="instead: K and V that the largest prompt stage sends of a microbatch",
    )
    group.add_argument("--bandwidth-gbps", type=float, metavar="GBIT", help="of a machine's port")


def _add_memory(group: Any) -> None:
    for flag, kind, metavar, text in (
        ("--layers", int, "L", "of the model"),
        ("--weights-gb", float, "GB", "of one layer"),
        ("--prompt-kv-gb", float, "GB", "of one layer, for a microbatch's prompt"),
        ("--token-kv-gb", float, "GB", "of one layer, for the tokens a microbatch generates"),
        ("--memory-gb", float, "GB", "of a machine"),
    ):
        group.add_argument(flag, type=kind, metavar=metavar, help=text)


def run_disaggregate(args: argparse.Namespace) -> int:
    """Answer one question. Returns the exit code."""
    from cost_model.disaggregate.report import split_as_json, split_as_text
    from cost_model.disaggregate.split import Disaggregation
    from cost_model.printing import json_text

    _fill_times(args)
    asked = Disaggregation(
        args.machines, args.prompt_time, args.token_time, args.tokens, _overhead(args)
    )
    memory = _memory(args)
    best = asked.best(memory)
    if args.json:
        print(json_text(split_as_json(asked, best, memory)))
    else:
        print(split_as_text(asked, best, memory))
    return 0 if best or args.machines == 1 else EXIT_INFEASIBLE


def _fill_times(args: argparse.Namespace) -> None:
    """What isn't typed in, by the machine's times: a stage has its part of them.

    Raises:
        ConfigError: a number is missing, and nothing says it.
    """
    from cost_model.numbers import whole_number

    machines = whole_number("machines", args.machines, 1, 1 << 16)
    if is_machine_given(args):
        for name in ("batch", "prompt_tokens"):
            if getattr(args, name) is None:
                raise ConfigError(f"--{name.replace('_', '-')} is missing: times depend on it")
        machine, _ = read_machine(args, args.prompt_tokens, args.tokens, [args.batch])
        point = machine.of(args.batch)
        if args.prompt_time is None:
            args.prompt_time = point.prompt_s / machines
        if args.token_time is None:
            args.token_time = point.token_s / machines
    for name in ("prompt_time", "token_time"):
        if getattr(args, name) is None:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} is missing: give it, --profile, or --model and --gpu")


def _overhead(args: argparse.Namespace) -> float | Fraction:
    from cost_model.disaggregate.split import streaming_overhead, transfer_s

    sizes = (args.kv_gb, args.bandwidth_gbps)
    if args.overhead is not None:
        if sizes != (None, None):
            raise ConfigError("give --overhead, or --kv-gb and --bandwidth-gbps, not both")
        return float(args.overhead)
    if sizes == (None, None):
        return 1.0
    if None in sizes:
        raise ConfigError(
            "how long does streaming take? Give --kv-gb and --bandwidth-gbps together"
        )
    return streaming_overhead(transfer_s(*sizes), args.prompt_time)


def _memory(args: argparse.Namespace) -> StageMemory | None:
    from cost_model.disaggregate.memory import StageMemory

    values = {name: getattr(args, name) for name in _MEMORY}
    missing = [f"--{name.replace('_', '-')}" for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        raise ConfigError(f"does it fit? To know, {' and '.join(missing)} must be given as well")
    return StageMemory(**values)

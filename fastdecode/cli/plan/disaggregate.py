"""``fastdecode plan disaggregate``: machines for prompts and machines for tokens, and swapped
microbatches, by DéjàVu's closed forms.

Exit codes: 0 an answer; 1 no split fits; 2 usage.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fastdecode.cli.options import EXIT_INFEASIBLE, add_log_level_option
from fastdecode.cli.size import add_hardware_file, read_part_of_setup
from fastdecode.core.errors import ConfigError

if TYPE_CHECKING:
    from cost_model.disaggregate import StageMemory

_MEMORY = ("layers", "weights_gb", "prompt_kv_gb", "token_kv_gb", "memory_gb")
_SPLIT = ("prompt_time", "token_time")
_SWAP = ("prompt_tokens", "token_time", "batch", "kv_kb", "bandwidth_gb")


def add_disaggregate(questions: Any) -> None:
    """Add the subcommand to those of ``plan``."""
    parser: argparse.ArgumentParser = questions.add_parser(
        "disaggregate",
        help="machines for prompts and machines for tokens, and swapped microbatches",
        description="How many of D machines run prompts and how many run tokens, whether that "
        "beats one pipeline for both, and whether swapping microbatches pays: DéjàVu's equations "
        "over whole machines.",
    )
    parser.set_defaults(run=run_disaggregate, command="plan disaggregate")
    _add(parser, int, "--tokens", "N", "tokens that a microbatch generates", required=True)
    split = parser.add_argument_group("the split")
    _add(split, int, "--machines", "D", "machines in all; without them, swapping alone")
    _add(split, float, "--prompt-time", "S", "seconds of a stage for a microbatch's prompt, all "
         "machines in one pipeline")  # fmt: skip
    _add(split, float, "--token-time", "S", "the same of one token of a microbatch")
    _add(split, float, "--overhead", "M", "prompts take so many times as long, by streaming K and "
         "V to the token machines (default: 1)")  # fmt: skip
    _add(split, float, "--kv-gb", "GB", "instead: K and V that the largest prompt stage sends")
    _add(split, float, "--bandwidth-gbps", "GBIT", "of a machine's port")
    memory = parser.add_argument_group("memory; all of these or none")
    _add(memory, int, "--layers", "L", "of the model")
    _add(memory, float, "--weights-gb", "GB", "of one layer")
    _add(memory, float, "--prompt-kv-gb", "GB", "of one layer, for a microbatch's prompt")
    _add(memory, float, "--token-kv-gb", "GB", "of one layer, for the tokens of a microbatch")
    _add(memory, float, "--memory-gb", "GB", "of a machine")
    swap = parser.add_argument_group("swapping")
    _add(swap, int, "--prompt-tokens", "P", "of each sequence")
    _add(swap, int, "--batch", "B", "sequences of a microbatch that fits without swapping")
    _add(swap, float, "--kv-kb", "KB", "K and V of a sequence's token on a stage, in 1000 bytes")
    _add(swap, float, "--bandwidth-gb", "GB", "from host memory, in 10^9 bytes a second")
    model = parser.add_argument_group("or the times of a model on each machine's GPU")
    _add(model, str, "--model", "MODEL", "a name, a config.json, or a model directory")
    _add(model, str, "--gpu", "G", "name, or profile.json of `calibrate s`")
    _add(model, int, "--gpus", "N", "GPUs of a machine (default: 1)", default=1)
    _add(model, str, "--dtype", "D", "weights and activations (default: auto)", default="auto")
    _add(model, str, "--kv-dtype", "D", "KV cache (default: auto)", default="auto")
    add_hardware_file(model)
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    add_log_level_option(parser)


def _add(group: Any, kind: Any, flag: str, metavar: str, text: str, **more: Any) -> None:
    group.add_argument(flag, type=kind, metavar=metavar, help=text, **more)


def run_disaggregate(args: argparse.Namespace) -> int:
    """Answer one question. Returns the exit code."""
    from cost_model.disaggregate import Disaggregation, Swapping, as_json, as_text
    from cost_model.printing import json_text

    asked, swap = None, None
    if args.model is not None or args.gpu is not None:
        _fill(args)
    if args.machines is not None:
        _need(args, _SPLIT)
        asked = Disaggregation(
            args.machines, args.prompt_time, args.token_time, args.tokens, _overhead(args),
            _memory(args),
        )  # fmt: skip
    if args.kv_kb is not None or args.bandwidth_gb is not None or asked is None:
        _need(args, _SWAP)
        swap = Swapping(
            args.prompt_tokens, args.tokens, args.token_time, args.batch, args.kv_kb,
            args.bandwidth_gb,
        )  # fmt: skip
    print(json_text(as_json(asked, swap)) if args.json else as_text(asked, swap))
    return EXIT_INFEASIBLE if asked and asked.machines > 1 and not asked.best else 0


def _fill(args: argparse.Namespace) -> None:
    """Take what is not given from a model's times on a machine, of which a stage has its part.

    Raises:
        ConfigError: If the model, the GPU, or what the times depend on is missing.
    """
    from cost_model.numbers import whole_number
    from cost_model.step_time import machine_times

    _need(args, ("model", "gpu", "batch", "prompt_tokens"))
    stages = whole_number("machines", args.machines or 1, 1, 10_000)
    system = read_part_of_setup(args, args.prompt_tokens, args.tokens).system()
    prompt_s, token_s = machine_times(system, args.batch)
    link = system.s.host_link_bytes_per_s
    given = {
        "prompt_time": prompt_s / stages,
        "token_time": token_s / stages,
        "kv_kb": system.costs.kv_bytes / 1e3 / stages,
        "bandwidth_gb": None if link is None else link / 1e9,
    }
    for name, value in given.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _need(args: argparse.Namespace, names: tuple[str, ...]) -> None:
    missing = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} missing. Give times and sizes, or --model, --gpu, --batch "
            "and --prompt-tokens"
        )


def _overhead(args: argparse.Namespace) -> float:
    from cost_model.disaggregate import streaming_overhead

    sizes = (args.kv_gb, args.bandwidth_gbps)
    if args.overhead is not None:
        if sizes != (None, None):
            raise ConfigError("give --overhead, or --kv-gb and --bandwidth-gbps, not both")
        return float(args.overhead)
    if sizes == (None, None):
        return 1.0
    if None in sizes:
        raise ConfigError("streaming takes --kv-gb and --bandwidth-gbps. Give both, or neither")
    return streaming_overhead(*sizes, args.prompt_time)


def _memory(args: argparse.Namespace) -> StageMemory | None:
    from cost_model.disaggregate import StageMemory

    values = {name: getattr(args, name) for name in _MEMORY}
    if set(values.values()) == {None}:
        return None
    _need(args, _MEMORY)
    return StageMemory(**values)

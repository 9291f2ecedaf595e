"""``fastdecode plan disaggregate``: machines for prompts and machines for tokens, and swapped
microbatches, by DéjàVu's closed forms.

Exit codes: 0 an answer; 1 no split fits; 2 usage.
"""

from __future__ import annotations

import argparse
from typing import Any, TypeVar

from cost_model.disaggregate import (
    Disaggregation,
    StageMemory,
    Streaming,
    Swapping,
    as_json,
    as_text,
)
from cost_model.hardware import Hardware
from cost_model.plans.question import Setup
from cost_model.workload import Workload
from fastdecode.cli.options import (
    EXIT_INFEASIBLE,
    add_log_level_option,
    add_options,
    given,
    read_options,
)
from fastdecode.cli.size import Parts, Sequences, read_setup
from fastdecode.core.errors import ConfigError

T = TypeVar("T")


def add_disaggregate(questions: Any) -> None:
    parser = questions.add_parser(
        "disaggregate",
        help="machines for prompts and machines for tokens, and swapped microbatches",
        description="How many of D machines run prompts and how many run tokens, whether that "
        "beats one pipeline for both, and whether swapping microbatches pays: DéjàVu's equations "
        "over whole machines.",
    )
    parser.set_defaults(run=run_disaggregate, command="plan disaggregate")
    split = parser.add_argument_group("the split")
    add_options(split, Disaggregation)
    add_options(split, Streaming)
    add_options(parser, StageMemory, "memory; all of these or none")
    add_options(parser, Swapping, "swapping", leave_out=("tokens", "token_time"))
    model = parser.add_argument_group("or the times of a model on each machine's GPU")
    model.add_argument("--model", help="a name, a config.json, or a model directory")
    add_options(
        model, Parts, leave_out=("cpu", "nic", "pp", "own", "transport", "io_threads", "prices")
    )
    add_options(model, Setup, leave_out=("num_nics", "dram_gb"))
    add_options(model, Sequences, leave_out=("weights", "seq_len", "prompt_len", "output_len"))
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    add_log_level_option(parser)
    parser.require_nothing()


def run_disaggregate(args: argparse.Namespace) -> int:
    """Answer one question. Returns the exit code."""
    from cost_model.printing import json_text

    asked, swap = None, None
    if args.model is not None or args.gpu is not None:
        _fill(args)
    if args.machines is not None:
        _need(args, "prompt_time", "token_time", "tokens")
        streaming, memory = _all_or_none(args, Streaming), _all_or_none(args, StageMemory)
        if streaming is not None:
            if args.overhead != 1.0:
                raise ConfigError("give --overhead, or --kv-gb and --bandwidth-gbps, not both")
            args.overhead = streaming.overhead(args.prompt_time)
        asked = Disaggregation(**given(args, Disaggregation), memory=memory)
    if args.kv_kb is not None or args.bandwidth_gb is not None or asked is None:
        _need(args, *given(args, Swapping))
        swap = read_options(args, Swapping)
    print(json_text(as_json(asked, swap)) if args.json else as_text(asked, swap))
    return EXIT_INFEASIBLE if asked and asked.machines > 1 and not asked.best else 0


def _fill(args: argparse.Namespace) -> None:
    """Take what is not given from a model's times on a machine, of which a stage has its part.

    Raises:
        ConfigError: If the model, the GPU, or what the times depend on is missing.
    """
    from cost_model.step_time import machine_times

    _need(args, "model", "gpu", "batch", "prompt_tokens", "tokens")
    stages = args.machines or 1
    parts = Parts(gpu=args.gpu, cpu="EPYC 7452", hardware=args.hardware)
    args.weights, args.num_nics, args.dram_gb = "decoded", 1, None
    workload = Workload(args.prompt_tokens, args.tokens)
    system = read_setup(args, parts, Hardware.load(args.hardware), workload).system()
    prompt_s, token_s = machine_times(system, args.batch)
    link = system.s.host_link_bytes_per_s
    found = {
        "prompt_time": prompt_s / stages,
        "token_time": token_s / stages,
        "kv_kb": system.costs.kv_bytes / 1e3 / stages,
        "bandwidth_gb": None if link is None else link / 1e9,
    }
    for name, value in found.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _need(args: argparse.Namespace, *names: str) -> None:
    missing = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} missing. Give times and sizes, or --model, --gpu, --batch "
            "and --prompt-tokens"
        )


def _all_or_none(args: argparse.Namespace, group: type[T]) -> T | None:
    options = given(args, group)
    if set(options.values()) == {None}:
        return None
    _need(args, *options)
    return group(**options)

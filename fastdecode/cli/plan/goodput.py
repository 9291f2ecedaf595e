"""``fastdecode plan goodput``: instances for prefill and for decode that carry a
rate within an SLO, or instances for both, whichever takes less.

Exit codes: 0 a placement; 1 none keeps the SLO on these GPUs (the nearest SLO or
rate is printed); 2 usage.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.cli.options import EXIT_INFEASIBLE, add_log_level_option, progress_teller, tell
from fastdecode.cli.parser import add_model
from fastdecode.cli.plan.load import read_load
from fastdecode.cli.size import add_hardware_file, read_part_of_setup
from fastdecode.core.errors import ConfigError

if TYPE_CHECKING:
    from cost_model.goodput.answer import Answer, Question
    from cost_model.goodput.placements import PlacementPrices
    from cost_model.goodput.workload import Draw
    from cost_model.plans.question import Setup

NUM_REQUESTS = 300


def add_goodput(questions: Any) -> None:
    """Add the subcommand to those of ``plan``."""
    parser: argparse.ArgumentParser = questions.add_parser(
        "goodput",
        help="prefill and decode instances for a rate and an SLO",
        description="Which instances carry so many requests a second so that enough of them meet "
        "a TTFT and a TPOT: some for prefill and some for decode, or alike for both. Every "
        "candidate is simulated with the requests of a trace, or with drawn ones.",
    )
    parser.set_defaults(run=run_goodput, command="plan goodput")
    add_model(parser, 'a name such as "Llama-2 7B", a config.json, or a model directory')
    _add_workload(parser.add_argument_group("what comes"))
    _add_hardware(parser.add_argument_group("on what"))
    _add_goal(parser.add_argument_group("what to keep"))
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument("--explain", action="store_true", help="show what is behind it")
    parser.add_argument("--emit", type=Path, metavar="FILE", help="write the placement there")
    add_log_level_option(parser)


def _add_workload(group: Any) -> None:
    add = group.add_argument
    add(
        "--dtype",
        default="auto",
        help="weights and activations; auto is a measured --gpu's, else the checkpoint's",
    )
    add("--kv-dtype", default="auto", help="KV cache; auto is --dtype")
    add("--rate", type=float, metavar="R", help="requests a second; default: the trace's")
    add("--trace", type=Path, metavar="FILE", help="requests, JSON Lines, or a server's log")
    add("--replay", action="store_true", help="the trace's own gaps and order, not drawn ones")
    add("--prompt-len", metavar="N", help="without a trace: tokens, or lognormal:512,0.8")
    add("--output-len", metavar="N", help="without a trace: tokens, or lognormal:200,0.8")
    add("--cv", type=float, help="of the gaps; 1 is Poisson; default: the trace's, or 1")
    add("--requests", type=int, default=NUM_REQUESTS, metavar="N",
        help="to draw; long runs go through them again (default: %(default)s)")  # fmt: skip
    add("--seed", type=int, default=0, help="of what is drawn (default: 0)")


def _add_hardware(group: Any) -> None:
    add = group.add_argument
    add("--gpu", metavar="G", help="name, or profile.json of `calibrate s`")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="default: 8")
    add("--nodes", type=int, default=1, metavar="N", help="default: 1")
    add("--cpu", default="EPYC 7452", metavar="C", help="name, or profile.json of `calibrate r` "
        "(default: %(default)s)")  # fmt: skip
    add("--sockets-per-node", type=int, default=2, metavar="N", help="with low affinity, whose "
        "decode instances have R-workers on their own nodes only (default: 2)")  # fmt: skip
    add("--max-sockets", type=int, default=64, metavar="P", help="of a decode instance; 64")
    add_hardware_file(group)
    add("--dram-gb", type=float, metavar="GB", help="memory a socket; default: the data file's")
    add("--nic", default="100GbE", metavar="N", help="name, or profile.json (default: 100GbE)")
    add("--nics", type=int, default=1, metavar="N", help="ports of a GPU's host (default: 1)")


def _add_goal(group: Any) -> None:
    add = group.add_argument
    add("--slo", required=True, metavar="LIMITS", help="ttft=400ms,tpot=40ms; or chatbot, "
        "chatbot-66b, chatbot-175b, code-completion, summarisation: DistServe's")  # fmt: skip
    add("--attainment", type=float, default=0.9, metavar="X", help="part of them (default: 0.9)")
    add("--each", action="store_true", help="quantiles of TTFT and TPOT, each strictly below its "
        "limit, instead of the part of requests that keep both")  # fmt: skip
    add("--affinity", choices=("high", "low"), default="high", help="low: K and V stay on a node")
    add("--objective", choices=("gpu", "cost"), default="gpu", help="what is to be least")
    add("--prices", metavar="P", help="gpu=1,socket=0.05 (default)")


def run_goodput(args: argparse.Namespace) -> int:
    """Answer one question. Returns the exit code."""
    from cost_model.goodput.answer import answer
    from cost_model.goodput.report import as_json, as_text

    question = _question(args)
    found = answer(question, progress_teller())
    text = (
        json.dumps(as_json(found), indent=2) if args.json else as_text(found, explain=args.explain)
    )
    print(text)
    if args.emit is not None:
        _emit(args.emit, question, found)
    return 0 if found.best is not None else EXIT_INFEASIBLE


def _emit(path: Path, question: Question, found: Answer) -> None:
    """Write the placement. If ``fastdecode launch`` can't start it, report that, and write the
    best one that it starts."""
    from cost_model.goodput.report import placement_file
    from fastdecode.core.config.placement import placed_instances
    from fastdecode.core.json_file import write_whole

    if found.best is None:
        tell(f"--emit {path}: there is no placement to write")
        return
    placement, what = placement_file(found), "the placement"
    try:
        placed_instances(placement, ConfigError)
    except ConfigError as error:
        tell(f"--emit {path}: fastdecode launch can't start this placement: {error.message}")
        launchable = _launchable(question)
        if launchable is None:
            tell(f"--emit {path}: it starts none that keeps the SLO; nothing is written")
            return
        placement, what = launchable, "the best placement that launch starts"
    text = json.dumps(placement, indent=2) + "\n"
    write_whole(path, text, refuse=lambda why: ConfigError(f"--emit {path}: {why}"))
    tell(f"{what} is in {path}")


def _launchable(question: Question) -> dict[str, Any] | None:
    """The best placement that ``fastdecode launch`` starts; None: none keeps the SLO."""
    from cost_model.goodput.answer import answer
    from cost_model.goodput.report import placement_file
    from fastdecode.core.config.placement import is_launchable, placed_instances

    hardware = replace(question.hardware, can_run=is_launchable)
    try:
        found = answer(replace(question, hardware=hardware), progress_teller())
        if found.best is None:
            return None
        placement = placement_file(found)
        placed_instances(placement, ConfigError)
    except ConfigError:
        return None  # no such instance holds the model, or too many are needed
    return placement


def _question(args: argparse.Namespace) -> Question:
    from cost_model.goodput.answer import Question
    from cost_model.goodput.hardware import InstanceHardware
    from cost_model.numbers import whole_number

    if args.gpu is None:
        raise ConfigError("on which GPUs? Give --gpu: a name, or a profile of `calibrate s`")
    for name, most in (
        ("nodes", 1024),
        ("gpus_per_node", 64),
        ("max_sockets", 100_000),
        ("sockets_per_node", 100_000),
    ):
        whole_number(name, getattr(args, name), 1, most)
    load, rate, described = read_load(args)
    most = args.max_sockets
    if args.affinity == "low":
        most = min(most, args.nodes * args.sockets_per_node)
    setup = _setup(args, load.draw)
    hardware = InstanceHardware(setup, args.nodes, args.gpus_per_node, most, load.draw.mean_prompt)
    return Question(
        setup.spec.name, hardware, load, rate, args.affinity, args.sockets_per_node,
        args.objective, _prices(args.prices), described,
    )  # fmt: skip


def _setup(args: argparse.Namespace, draw: Draw) -> Setup:
    """One GPU's, with room for the longest request."""
    longest = max(prompt + output for prompt, output in draw.lengths)
    most_output = max(output for _, output in draw.lengths)
    return read_part_of_setup(args, longest - most_output, most_output)


def _prices(text: str | None) -> PlacementPrices:
    from cost_model.goodput.placements import PlacementPrices

    if text is None:
        return PlacementPrices()
    found = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
    if set(found) != {"gpu", "socket"} or not all(0 < each < 1e9 for each in found.values()):
        raise ConfigError(f"--prices {text}: give both, above 0, like gpu=1,socket=0.05")
    return PlacementPrices(found["gpu"], found["socket"])

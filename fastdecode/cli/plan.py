"""``fastdecode plan goodput`` and ``disaggregate``: which machines for what. No torch, no GPU."""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cost_model.disaggregate import Disaggregation, StageMemory, Streaming, Swapping
from cost_model.hardware import Hardware
from cost_model.plans.question import MAX_SOCKETS, Setup
from cost_model.workload import Workload
from fastdecode.cli.options import (
    EXIT_NO,
    add_log_level_option,
    add_options,
    given,
    progress_teller,
    read_options,
    tell,
)
from fastdecode.cli.parser import add_model
from fastdecode.cli.size import Parts, Sequences, read_setup
from fastdecode.core.config.options import REQUIRED, check_options, option, switch
from fastdecode.core.errors import ConfigError

if TYPE_CHECKING:
    from cost_model.goodput.answer import Answer
    from cost_model.goodput.search import Question
    from cost_model.goodput.workload import Draw

T = TypeVar("T")


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Which machines run prompts and which run tokens, and whether it pays to separate them. "
        "Needs no GPU and no torch."
    )
    questions = parser.add_subparsers(dest="question", required=True, metavar="QUESTION")
    add_goodput(questions)
    add_disaggregate(questions)


@dataclass(frozen=True)
class Arrivals:
    rate: float | None = option(
        None, "default: the trace's", low=1e-6, high=1e6, unit="requests a second", metavar="R"
    )
    trace: Path | None = option(None, "trace of requests (JSON Lines), or a server's log")
    replay: bool = switch("use the trace's own gaps and order")
    prompt_len: str | None = option(None, "without a trace: tokens, or lognormal:512,0.8")
    output_len: str | None = option(None, "without a trace: tokens, or lognormal:200,0.8")
    cv: float | None = option(
        None, "variation of the gaps; 1 is Poisson; default: the trace's, or 1", low=0, high=100
    )
    requests: int = option(300, "requests to draw; long runs repeat them", low=1, high=100_000)
    seed: int = option(0, "seed of the drawn requests", low=0, high=(1 << 63) - 1)


@dataclass(frozen=True, kw_only=True)
class Nodes:
    gpu: str = option(REQUIRED, "name, or profile.json of `calibrate s`", metavar="G")
    gpus_per_node: int = option(8, "GPUs of a node", low=1, high=64)
    nodes: int = option(1, "nodes", low=1, high=1024)
    cpu: str = option("EPYC 7452", "name, or profile.json of `calibrate r`", metavar="C")
    sockets_per_node: int = option(
        2, "sockets of a node; with low affinity decode instances use those of their nodes",
        low=1, high=MAX_SOCKETS,
    )  # fmt: skip
    max_sockets: int = option(64, "sockets of an instance", low=1, high=MAX_SOCKETS, metavar="P")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    slo: str = option(
        REQUIRED, "ttft=400ms,tpot=40ms; or chatbot, chatbot-66b, chatbot-175b, code-completion, "
        "summarisation: DistServe's", metavar="LIMITS",
    )  # fmt: skip
    attainment: float = option(0.9, "part of the requests that must keep the limits", metavar="X")
    each: bool = switch(
        "judge by the quantiles of TTFT and TPOT, each strictly below its limit, not by the part "
        "of requests that keep both"
    )
    affinity: str = option("high", "low: K and V stay on a node", choices=("high", "low"))
    objective: str = option("gpu", "what to minimise", choices=("gpu", "cost"))
    prices: str = option("gpu=1,socket=0.05", "prices of a GPU and of a socket", metavar="P")


def add_goodput(questions: Any) -> None:
    parser: argparse.ArgumentParser = questions.add_parser(
        "goodput",
        help="prefill and decode instances for a rate and an SLO",
        description="Which instances carry a rate of requests and keep a TTFT and a TPOT: some for "
        "prefill and some for decode, or all for both. Every candidate is simulated with the "
        "requests of a trace, or with drawn ones.",
    )
    parser.set_defaults(run=run_goodput, command="plan goodput")
    add_model(parser, 'a name such as "Llama-2 7B", a config.json, or a model directory')
    arrivals = parser.add_argument_group("what comes")
    add_options(arrivals, Sequences, leave_out=("weights", "seq_len", "prompt_len", "output_len"))
    add_options(arrivals, Arrivals)
    parts = parser.add_argument_group("on what")
    add_options(parts, Nodes)
    drawn = ("gpu", "cpu", "pp", "own", "transport", "io_threads", "prices")
    add_options(parts, Parts, leave_out=drawn)
    add_options(parts, Setup, leave_out=("num_gpus",))
    add_options(parser, Wanted, "what to keep")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument("--explain", action="store_true", help="show the times behind the answer")
    parser.add_argument("--emit", type=Path, metavar="FILE", help="write the placement there")
    add_log_level_option(parser)


def run_goodput(args: argparse.Namespace) -> int:
    from cost_model.goodput.answer import answer, as_json, as_text

    question = _question(args)
    found = answer(question, progress_teller())
    if args.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        print(as_text(found, explain=args.explain))
    if args.emit is not None:
        _emit(args.emit, question, found)
    return 0 if found.best is not None else EXIT_NO


def _emit(path: Path, question: Question, found: Answer) -> None:
    """Write the placement. If ``fastdecode launch`` can't start it, report that, and write the
    best one that it starts."""
    from cost_model.goodput.answer import answer, placement_file
    from fastdecode.core.config.placement import is_launchable, placed_instances
    from fastdecode.core.json_file import write_whole

    best, what = found.best, "the placement"
    if best is None:
        tell(f"--emit {path}: there is no placement to write")
        return
    try:
        placed_instances(placement_file(best), ConfigError)
    except ConfigError as error:
        tell(f"--emit {path}: fastdecode launch can't start this placement: {error.message}")
        best, what = None, "the best placement that launch starts"
        hardware = replace(question.hardware, can_run=is_launchable)
        # It may be that no such instance holds the model, or that too many are needed.
        with contextlib.suppress(ConfigError):
            other = answer(replace(question, hardware=hardware), progress_teller()).best
            if other is not None:
                placed_instances(placement_file(other), ConfigError)
                best = other
    if best is None:
        tell(f"--emit {path}: it starts none that keeps the SLO; nothing is written")
        return
    text = json.dumps(placement_file(best), indent=2) + "\n"
    write_whole(path, text, refuse=lambda why: ConfigError(f"--emit {path}: {why}"))
    tell(f"{what} is in {path}")


def _question(args: argparse.Namespace) -> Question:
    from cost_model.goodput.placements import InstanceHardware
    from cost_model.goodput.search import Question
    from cost_model.goodput.simulator import Load
    from cost_model.goodput.slo import Slo

    nodes, arrivals = read_options(args, Nodes), read_options(args, Arrivals)
    slo = Slo.parse(args.slo, args.attainment)
    draw, rate, described = _drawn(arrivals) if arrivals.trace is None else _traced(arrivals)
    if rate is None:
        raise ConfigError("--rate is missing: give the request rate, in requests per second")
    most = nodes.max_sockets
    if args.affinity == "low":
        most = min(most, nodes.nodes * nodes.sockets_per_node)
    # The setup of one GPU, with room for the longest request.
    longest = max(prompt + output for prompt, output in draw.lengths)
    most_output = max(output for _, output in draw.lengths)
    parts = Parts(gpu=nodes.gpu, cpu=nodes.cpu, nic=args.nic, hardware=args.hardware)
    workload = Workload(longest - most_output, most_output)
    args.weights, args.num_gpus = "decoded", 1
    setup = read_setup(args, parts, Hardware.load(args.hardware), workload)
    instances = InstanceHardware(setup, nodes.nodes, nodes.gpus_per_node, most, draw.mean_prompt)
    load = Load(draw, slo, "each" if args.each else "both")
    asked = (args.affinity, nodes.sockets_per_node, args.objective, _prices(args.prices))
    return Question(setup.spec.name, instances, load, rate, *asked, described)


def _drawn(asked: Arrivals) -> tuple[Draw, float | None, str]:
    """Return requests, their rate, and both in words."""
    from cost_model.goodput.workload import GENERATOR, Lengths, drawn

    if asked.prompt_len is None or asked.output_len is None:
        raise ConfigError(
            "the requests are missing. Give --trace, or --prompt-len and --output-len"
        )
    if asked.replay:
        raise ConfigError("--replay needs a --trace to replay")
    cv = 1.0 if asked.cv is None else asked.cv
    prompts = Lengths.parse("prompt_len", asked.prompt_len)
    outputs = Lengths.parse("output_len", asked.output_len)
    described = (
        f"drawn: prompts {asked.prompt_len}, outputs {asked.output_len}, cv {cv:g}, "
        f"{asked.requests} requests, {GENERATOR}, seed {asked.seed}"
    )
    return drawn(prompts, outputs, cv, asked.requests, asked.seed), asked.rate, described


def _traced(asked: Arrivals) -> tuple[Draw, float | None, str]:
    from cost_model.goodput.workload import GENERATOR, drawn_from, fit_trace, lengths_of, replayed
    from cost_model.traces import read_any_trace

    if asked.prompt_len is not None or asked.output_len is not None:
        raise ConfigError("give --trace, or --prompt-len and --output-len, not both")
    assert asked.trace is not None
    read = read_any_trace(asked.trace)
    fit = fit_trace(read.trace)
    for warning in fit.warnings:
        tell(f"--trace {asked.trace}: {warning}")
    cv = fit.cv if asked.cv is None else asked.cv
    rate = fit.rate if asked.rate is None else asked.rate
    check_options(replace(asked, rate=rate))
    described = (
        f"trace ({read.form}): {fit.num_requests} requests, {read.num_left_out} left out, cv "
        f"{fit.cv:.3g}, mean prompt {fit.mean_prompt:.4g} and output {fit.mean_output:.4g} tokens"
    )
    if asked.replay:
        return replayed(read.trace), rate, f"{described}; replayed"
    described += f"; resampled with cv {cv:.3g}, {GENERATOR}, seed {asked.seed}"
    return drawn_from(lengths_of(read.trace), cv, asked.requests, asked.seed), rate, described


def _prices(text: str) -> tuple[float, float]:
    found = dict(part.strip().partition("=")[::2] for part in text.split(","))
    try:
        gpu, socket = float(found.pop("gpu", "")), float(found.pop("socket", ""))
    except ValueError:
        gpu = socket = -1.0
    if found or not (0 < gpu < 1e9 and 0 < socket < 1e9):
        raise ConfigError(f"--prices {text}: give both, above 0, like gpu=1,socket=0.05")
    return gpu, socket


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
    from cost_model.disaggregate import as_json, as_text
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
        asked = replace(read_options(args, Disaggregation), memory=memory)
    if args.kv_kb is not None or args.bandwidth_gb is not None or asked is None:
        _need(args, *given(args, Swapping))
        swap = read_options(args, Swapping)
    print(json_text(as_json(asked, swap)) if args.json else as_text(asked, swap))
    return EXIT_NO if asked and asked.machines > 1 and not asked.best else 0


def _fill(args: argparse.Namespace) -> None:
    """Take what is not given from a model's times on a machine, of which a stage has its part."""
    from cost_model.predict import machine_times

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
        either = "Give times and sizes, or --model, --gpu, --batch and --prompt-tokens"
        raise ConfigError(f"{' and '.join(missing)} missing. {either}")


def _all_or_none(args: argparse.Namespace, group: type[T]) -> T | None:
    options = given(args, group)
    if set(options.values()) == {None}:
        return None
    _need(args, *options)
    return read_options(args, group)

"""``fastdecode bench-serve`` puts a load on a server of OpenAI's API. ``fastdecode bench`` runs a
plan, or its twin on this machine, and compares what was predicted with what it takes.

Exit codes of ``bench``: 0 every quantity is within the tolerance; 1 one is not; 2 usage.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.cli.options import (
    EXIT_SOME_FAILED,
    add_options,
    add_status_option,
    measuring,
    read_options,
    tell,
)
from fastdecode.core.config.options import REQUIRED, option, switch
from fastdecode.core.errors import ConfigError, imports_for
from fastdecode.core.files import write_json
from fastdecode.core.measurement import Profile, RProfile, SProfile, read_profile
from fastdecode.measure.serving import KEY_VARIABLE, TIMEOUT_S

if TYPE_CHECKING:
    from cost_model.goodput.slo import Slo
    from cost_model.steady import Quantity, SteadyBatch
    from fastdecode.core.config.engine import EngineConfig
    from fastdecode.core.model.spec import ModelSpec
    from fastdecode.measure.serving.client import Endpoint
    from fastdecode.measure.serving.load import Load, Planned

EXIT_OFF = 1
# The twin's cached tokens, so that it is filled in seconds, and its sequences.
MAX_TWIN_TOKENS = 65_536
MAX_TWIN_BATCH = 64


@dataclass(frozen=True)
class Server:
    """The server that is measured, and what is kept of it."""

    base_url: str = option(REQUIRED, "http://HOST:PORT", metavar="URL")
    model: str | None = option(None, "default: the first that is served", metavar="NAME")
    timeout_s: float = option(
        TIMEOUT_S, "a request that takes longer is given up, an error", low=0.1, high=1e6, unit="s"
    )
    json: Path | None = option(None, "write the figures there")


@dataclass(frozen=True)
class Goodput:
    """What requests must keep to."""

    slo: str | None = option(None, "such as ttft=400ms,tpot=40ms", metavar="LIMITS")
    attainment: float = option(
        0.9, "part of the requests that is to keep the SLO", low=0, high=1, metavar="A"
    )
    find_goodput: bool = switch("look for the greatest rate at which it does, beginning at --rate")


def add_bench_serve(parser: argparse.ArgumentParser) -> None:
    from fastdecode.measure.serving.load import Load  # here: NumPy is slow to load

    parser.description = (
        "Send requests to any server of OpenAI's API, as they would arrive or from a "
        f"number of clients, and measure the streams. A key is read from {KEY_VARIABLE}."
    )
    parser.set_defaults(run=run_bench_serve)
    add_options(parser, Server)
    add_options(parser, Load, "load")
    add_options(parser, Goodput, "goodput")


def run_bench_serve(args: argparse.Namespace) -> int:
    """Run the load. Return the exit code."""
    import asyncio

    with imports_for("fastdecode bench-serve"):
        from fastdecode.measure.serving.client import Endpoint
    from cost_model.goodput.slo import Slo
    from fastdecode.measure.serving.load import Load
    from fastdecode.measure.serving.report import told

    server, load = read_options(args, Server), read_options(args, Load)
    goodput = read_options(args, Goodput)
    if goodput.find_goodput and (load.rate is None or goodput.slo is None):
        raise ConfigError("--find-goodput needs --rate, to begin at, and --slo")
    slo = None if goodput.slo is None else Slo.parse(goodput.slo, needs_both=False)
    endpoint = Endpoint(server.base_url, os.environ.get(KEY_VARIABLE), server.timeout_s)
    model = asyncio.run(endpoint.model(server.model))
    figures = _measured(load, goodput, endpoint, model, slo)
    print(told(figures), flush=True)
    if server.json is not None:
        write_json(server.json, figures, "figures")
    return EXIT_SOME_FAILED if figures["errors"] else 0


def _measured(
    load: Load, goodput: Goodput, endpoint: Endpoint, model: str, slo: Slo | None
) -> dict[str, Any]:
    import asyncio

    from fastdecode.measure.serving.client import run_closed, run_open
    from fastdecode.measure.serving.load import closed
    from fastdecode.measure.serving.report import find_goodput, report

    def one_by_one(planned: list[Planned], num_clients: int) -> dict[str, Any]:
        return report(asyncio.run(run_closed(endpoint, model, planned, num_clients)), slo)

    def measure(rate: float | None) -> dict[str, Any]:
        return report(asyncio.run(run_open(endpoint, model, load.planned(rate))), slo)

    if not goodput.find_goodput:
        if load.rate is None and load.trace is None:
            return one_by_one(load.planned(), load.concurrency or 1)
        return measure(load.rate)
    first, wanted = load.rate or 1.0, goodput.attainment
    rate, figures = find_goodput(measure, lambda: one_by_one(closed(load), 1), first, wanted, tell)
    return {**(figures or measure(first)), "greatest_rate": rate, "wanted_attainment": wanted}


@dataclass(frozen=True)
class Comparison:
    plan: Path = option(REQUIRED, "of `size --json` or `size --emit`")
    model: str = option(REQUIRED, "Hugging Face model directory to run", metavar="DIR")
    device: str = option("cpu", "cpu, cuda, cuda:1, ..., auto", metavar="DEVICE")
    gpu: Path | None = option(None, "profile of `calibrate s`; default: measured now")
    cpu: Path | None = option(None, "profile of `calibrate r`; default: measured now")
    steps: int = option(20, "decode steps to time", low=1, high=100_000)
    tolerance: float = option(0.15, "relative", low=1e-12, high=1e6, metavar="X")
    json: bool = switch("print the comparison as JSON")


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a plan's batch here, scaled down to this machine, with R-workers as "
        "threads. Compare what is measured with what this machine's profiles predict."
    )
    parser.set_defaults(run=run_bench)
    add_options(parser, Comparison)
    add_status_option(parser)


def run_bench(args: argparse.Namespace) -> int:
    """Compare one plan. Returns the exit code."""
    from cost_model.steady import read_plan

    read_options(args, Comparison)
    planned = read_plan(args.plan)
    with imports_for("fastdecode bench (an S-worker)"):
        from fastdecode.measure.calibrate import SEffort, calibrate_s
    asked = planned.question
    spec, config, twin = _twin(args, asked.dtype, asked.kv_dtype, planned.steady)
    if twin != planned.steady or spec.name != asked.model:
        tell(f"the plan is for {_describe(asked.model, planned.steady)}")
    tell(f"here runs {_describe(spec.name, twin)}")
    s_profile = _read(args.gpu, SProfile, "--gpu", "s")
    r_profile = _read(args.cpu, RProfile, "--cpu", "r")
    with measuring(args, "bench") as say:
        if s_profile is None:
            sizes = sorted({1, max(1, twin.batch // 4), max(1, twin.batch // 2), twin.batch})
            s_profile = calibrate_s(config, SEffort(tuple(sizes), (16, 64), 9), say)
        if r_profile is None:
            say("R-part: sizes around the batch")
            r_profile = _calibrate_r(spec, config, twin)
        say(f"running {args.steps} steps")
        quantities = _compare(spec, config, twin, s_profile, r_profile, args.steps)
    return _report(args, twin, quantities)


def _twin(
    args: argparse.Namespace, dtype: str, kv_dtype: str, planned: SteadyBatch
) -> tuple[ModelSpec, EngineConfig, SteadyBatch]:
    """Return what runs here instead of the plan."""
    from cost_model.shapes import read_model
    from cost_model.steady import scale_down
    from fastdecode.core.config.engine import EngineConfig
    from fastdecode.core.dtype import DType
    from fastdecode.core.host.cpus import available_cores
    from fastdecode.core.host.machine import default_kv_bytes
    from fastdecode.engine.setup.devices import choose_device

    spec, cores = read_model(args.model), available_cores()
    kv_bytes = default_kv_bytes(2)  # weights, and what steps need, have as much as the cache
    token_bytes = spec.kv_spec(DType.parse(kv_dtype, option="kv_dtype", of_kv=True)).token_bytes
    kv_tokens = min(MAX_TWIN_TOKENS, kv_bytes // token_bytes)
    longest = replace(planned, context_tokens=min(planned.context_tokens, spec.max_model_len // 2))
    on_cpu = choose_device(args.device).type == "cpu"
    twin = scale_down(
        longest, cores=cores, kv_tokens=kv_tokens, max_batch=MAX_TWIN_BATCH, one_lane=on_cpu
    )
    config = EngineConfig.of(
        args.model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=args.device,
        r_workers=twin.r_workers,
        r_threads=max(1, cores // twin.r_workers),
        kv_memory_gb=kv_bytes / twin.r_workers / 1e9,
        max_num_sequences=max(twin.batch, 2),
        lanes=twin.lanes,
        schedule="greedy",
        prefix_cache="off",
    )
    return spec, config, twin


def _calibrate_r(spec: ModelSpec, config: EngineConfig, twin: SteadyBatch) -> RProfile:
    from fastdecode.core.dtype import DType
    from rworker.measure import Effort, Host, measure_r_part

    share = max(1, twin.batch // twin.r_workers)
    effort = Effort(
        sequences=tuple(sorted({1, max(1, share // 4), share})),
        contexts=tuple(sorted({16, max(16, twin.context_tokens // 4), twin.context_tokens})),
    )
    kv = spec.kv_spec(
        DType.parse(config.r_part.kv_dtype, option="kv_dtype", of_kv=True), config.r_part.block_size
    )
    host = Host(twin.r_workers, config.r_part.r_threads or 1)
    memory_bytes = int((config.r_part.kv_memory_gb or 1.0) * 1e9)
    return measure_r_part(
        host, kv, spec.attention, DType.parse(config.s_part.dtype), memory_bytes, effort
    )


def _compare(
    spec: ModelSpec,
    config: EngineConfig,
    twin: SteadyBatch,
    s_profile: SProfile,
    r_profile: RProfile,
    num_steps: int,
) -> list[Quantity]:
    from cost_model.predict import System
    from cost_model.stages import LinkModel, RPartModel, SPartModel
    from cost_model.steady import Quantity, predict_steady
    from cost_model.workload import TokenCosts, Workload
    from fastdecode.core.dtype import DType
    from fastdecode.engine.setup.launch import RunningEngine
    from fastdecode.measure.steady import time_steady_steps

    costs = TokenCosts(spec, DType.parse(config.s_part.dtype), config.r_part.kv_dtype)
    system = System(
        s=SPartModel.from_profile(s_profile, costs),
        r=RPartModel.from_profile(r_profile, costs),
        link=LinkModel.within_process(),
        num_nics=1,
        costs=costs,
        workload=Workload(0, 1),
    )
    running = RunningEngine(config)
    try:
        steps = time_steady_steps(running, twin.batch, twin.context_tokens, num_steps)
    finally:
        running.close()
    ran = replace(twin, context_tokens=round(steps.mean_context_tokens))
    predicted = predict_steady(system, ran)
    step_s, r_part_s = statistics.median(steps.step_s), statistics.median(steps.r_compute_s)
    measured = {"step_s": step_s, "tokens_per_s": twin.batch / step_s, "r_part_s": r_part_s}
    if twin.lanes == 1:
        measured["s_part_s"] = statistics.median(steps.without_r_s)
    return [Quantity(name, predicted[name], value) for name, value in measured.items()]


def _report(args: argparse.Namespace, twin: SteadyBatch, quantities: list[Quantity]) -> int:
    good = all(quantity.within(args.tolerance) for quantity in quantities)
    if args.json:
        rows = [{**asdict(each), "relative_error": each.relative_error} for each in quantities]
        tree = {
            "ran": asdict(twin),
            "tolerance": args.tolerance,
            "within": good,
            "quantities": rows,
        }
        print(json.dumps(tree, indent=2))
    else:
        print(f"{'':<14} {'predicted':>12} {'measured':>12}   off by")
        for each in quantities:
            mark = "" if each.within(args.tolerance) else "   beyond the tolerance"
            print(f"{_row(each)}   {each.relative_error:+.1%}{mark}")
    return 0 if good else EXIT_OFF


def _row(each: Quantity) -> str:
    """Return name, prediction and measurement. Times are in ms, from 1 s on in s."""
    name, factor = each.name, 1.0
    if not name.endswith("_per_s") and max(each.predicted, each.measured) < 1.0:
        name, factor = name.removesuffix("_s") + "_ms", 1e3
    return f"{name:<14} {each.predicted * factor:>12.3f} {each.measured * factor:>12.3f}"


def _read(path: Path | None, kind: type[Any], option: str, letter: str) -> Any:
    if path is None:
        return None
    profile: Profile = read_profile(path)
    if not isinstance(profile, kind):
        raise ConfigError(
            f"{option} {path} is a profile of another kind: it needs `fastdecode calibrate "
            f"{letter}`'s"
        )
    return profile


def _describe(model: str, steady: SteadyBatch) -> str:
    return (
        f"{model}: {steady.batch} sequences of {steady.context_tokens} tokens in {steady.lanes} "
        f"lane(s), {steady.r_workers} R-worker(s)"
    )

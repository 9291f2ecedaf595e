"""``fastdecode bench-serve`` puts a load on a server of OpenAI's API. ``fastdecode bench`` runs a
plan's twin on this machine, and compares what was predicted with what it takes."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cost_model.numbers import at_most
from fastdecode.cli.options import (
    EXIT_NO,
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
from fastdecode.core.measurement import RProfile, SProfile
from fastdecode.measure.serving import KEY_VARIABLE, TIMEOUT_S


@dataclass(frozen=True)
class Server:
    base_url: str = option(REQUIRED, "http://HOST:PORT", metavar="URL")
    model: str | None = option(None, "default: the first that the server names", metavar="NAME")
    timeout_s: float = option(
        TIMEOUT_S, "a request that takes longer counts as an error", low=0.1, high=1e6, unit="s"
    )
    json: Path | None = option(None, "write the figures there")


@dataclass(frozen=True)
class Goodput:
    slo: str | None = option(None, "limits such as ttft=400ms,tpot=40ms", metavar="LIMITS")
    attainment: float = option(
        0.9, "part of the requests that must keep the SLO", low=0, high=1, metavar="A"
    )
    find_goodput: bool = switch("search for the greatest rate at which it does, from --rate")


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
    import asyncio

    with imports_for("fastdecode bench-serve"):
        from fastdecode.measure.serving.client import Endpoint, run_closed, run_open
    from cost_model.goodput.slo import Slo
    from fastdecode.measure.serving.load import Load, Planned, closed
    from fastdecode.measure.serving.report import as_text, find_goodput, report

    server, load = read_options(args, Server), read_options(args, Load)
    goodput = read_options(args, Goodput)
    if goodput.find_goodput and (load.rate is None or goodput.slo is None):
        raise ConfigError("--find-goodput needs --rate, to begin at, and --slo")
    slo = None if goodput.slo is None else Slo.parse(goodput.slo, needs_both=False)
    endpoint = Endpoint(server.base_url, os.environ.get(KEY_VARIABLE), server.timeout_s)
    model = asyncio.run(endpoint.model(server.model))

    def one_by_one(planned: list[Planned], num_clients: int) -> dict[str, Any]:
        return report(asyncio.run(run_closed(endpoint, model, planned, num_clients)), slo)

    def measure(rate: float | None) -> dict[str, Any]:
        return report(asyncio.run(run_open(endpoint, model, load.planned(rate))), slo)

    if goodput.find_goodput:
        first, wanted = load.rate or 1.0, goodput.attainment
        alone = partial(one_by_one, closed(load), 1)
        rate, found = find_goodput(measure, alone, first, wanted, tell)
        figures = {**(found or measure(first)), "greatest_rate": rate, "wanted_attainment": wanted}
    elif load.rate is None and load.trace is None:
        figures = one_by_one(load.planned(), load.concurrency or 1)
    else:
        figures = measure(load.rate)
    print(as_text(figures), flush=True)
    if server.json is not None:
        write_json(server.json, figures, "figures")
    return EXIT_SOME_FAILED if figures["errors"] else 0


@dataclass(frozen=True)
class Comparison:
    plan: Path = option(REQUIRED, "plan of `size --json` or `size --emit`")
    model: str = option(REQUIRED, "Hugging Face model directory to run", metavar="DIR")
    device: str = option("cpu", "cpu, cuda, cuda:1, ..., auto", metavar="DEVICE")
    gpu: Path | None = option(None, "profile of `calibrate s`; default: measured now")
    cpu: Path | None = option(None, "profile of `calibrate r`; default: measured now")
    steps: int = option(20, "decode steps to time", low=1, high=100_000)
    tolerance: float = option(0.15, "accepted relative error", low=1e-12, high=1e6, metavar="X")
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
    from cost_model.steady import read_plan
    from fastdecode.cli.size import profile_at

    asked = read_options(args, Comparison)
    planned = read_plan(asked.plan)
    with imports_for("fastdecode bench (an S-worker)"):
        from fastdecode.measure.twin import Twin, describe
    twin = Twin(asked.model, asked.device, planned)
    if twin.batch != planned.steady or twin.spec.name != planned.question.model:
        tell(f"the plan is for {describe(planned.question.model, planned.steady)}")
    tell(f"here runs {describe(twin.spec.name, twin.batch)}")
    s_profile = None if asked.gpu is None else profile_at(asked.gpu, "gpu", SProfile, "s")
    r_profile = None if asked.cpu is None else profile_at(asked.cpu, "cpu", RProfile, "r")
    with measuring(args, "bench") as say:
        s_profile = s_profile or twin.calibrate_s(say)
        if r_profile is None:
            say("R-part: sizes around the batch")
            r_profile = twin.calibrate_r()
        say(f"running {asked.steps} steps")
        found = twin.run(s_profile, r_profile, asked.steps)
    return _report(asked, asdict(twin.batch), found)


def _report(asked: Comparison, ran: dict[str, int], found: dict[str, tuple[float, float]]) -> int:
    errors = {name: predicted / measured - 1 for name, (predicted, measured) in found.items()}
    good = all(at_most(abs(error), asked.tolerance) for error in errors.values())
    if asked.json:
        rows = [
            {
                "name": name,
                "predicted": predicted,
                "measured": measured,
                "relative_error": errors[name],
            }
            for name, (predicted, measured) in found.items()
        ]
        tree = {"ran": ran, "tolerance": asked.tolerance, "within": good, "quantities": rows}
        print(json.dumps(tree, indent=2))
    else:
        print(f"{'':<14} {'predicted':>12} {'measured':>12}   off by")
        for name, (predicted, measured) in found.items():
            shown, factor = name, 1.0
            if not name.endswith("_per_s") and max(predicted, measured) < 1.0:
                shown, factor = name.removesuffix("_s") + "_ms", 1e3
            values = f"{predicted * factor:>12.3f} {measured * factor:>12.3f}"
            mark = "" if at_most(abs(errors[name]), asked.tolerance) else "   beyond the tolerance"
            print(f"{shown:<14} {values}   {errors[name]:+.1%}{mark}")
    return 0 if good else EXIT_NO

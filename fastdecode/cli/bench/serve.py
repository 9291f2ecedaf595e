"""``fastdecode bench-serve``: put a load on any server of OpenAI's API."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.cli.options import (
    EXIT_SOME_FAILED,
    add_options,
    add_status_option,
    measuring,
    read_options,
)
from fastdecode.core.config.options import REQUIRED, check_options, option, switch
from fastdecode.core.errors import ConfigError, Given, imports_for
from fastdecode.core.files import write_json
from fastdecode.measure.serving import KEY_VARIABLE, TIMEOUT_S

if TYPE_CHECKING:
    from cost_model.goodput.slo import Slo
    from fastdecode.measure.serving.client import Endpoint
    from fastdecode.measure.serving.load import LoadShape, Planned
MAX_REQUESTS = 10_000_000


@dataclass(frozen=True)
class Load:
    """Requests, and when they are sent. None of an option that others replace: it would
    change nothing, and is refused."""

    rate: float | None = option(
        None,
        "requests a second, that don't wait",
        low=1e-6,
        high=1e6,
        metavar="R",
        is_alternative=True,
    )
    concurrency: int | None = option(
        None, "clients, each with one request at a time", low=1, high=65536, is_alternative=True
    )
    trace: Path | None = option(None, "a server's request log", is_alternative=True)
    cv: float | None = option(
        None,
        "variation of the gaps, with --rate: 1 (default) is Poisson, 0 a clock",
        low=0,
        high=100,
        metavar="C",
    )
    speed: float | None = option(
        None, "with --trace: replay it this much faster", low=1e-3, high=1e6, metavar="X"
    )
    requests: int | None = option(
        None, "how many (default: 100; of a trace: all)", low=1, high=MAX_REQUESTS
    )
    prompt_tokens: int | None = option(
        None, "of each, on average (default: 128)", low=1, high=1 << 24
    )
    output_tokens: int | None = option(
        None, "of each, on average (default: 64)", low=1, high=1 << 24
    )
    vocab_size: int = option(
        1000, "prompts are random tokens from 10 to this", low=11, high=1 << 24
    )
    seed: int = option(0, "of lengths, gaps and prompts", low=0, high=1 << 62)
    spread: float | None = option(
        None,
        "lengths are log-normal with this sigma; 0 (default): all alike",
        low=0,
        high=5,
        metavar="S",
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name, needed in (("cv", "rate"), ("speed", "trace")):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise ConfigError(Given(name), " changes nothing without ", Given(needed))
        for name in ("prompt_tokens", "output_tokens", "spread"):
            if self.trace is not None and getattr(self, name) is not None:
                raise ConfigError(Given(name), " changes nothing with ", Given("trace"))

    @property
    def shape(self) -> LoadShape:
        """What the load is drawn from."""
        from fastdecode.measure.serving.load import LoadShape

        num_requests = self.requests or (100 if self.trace is None else MAX_REQUESTS)
        return LoadShape(
            num_requests,
            self.prompt_tokens or 128,
            self.output_tokens or 64,
            self.spread or 0.0,
            self.vocab_size,
            self.seed,
        )

    def planned(self, rate: float | None = None) -> list[Planned]:
        """Return the requests, at another rate if one is given."""
        from fastdecode.measure.serving.load import arriving, closed, traced

        rate = rate or self.rate
        if self.trace is not None:
            return traced(self.trace, self.shape, self.speed or 1.0)
        if rate is None:
            return closed(self.shape)
        return arriving(self.shape, rate, 1.0 if self.cv is None else self.cv)


@dataclass(frozen=True)
class Server:
    """The server that is measured, and what is kept of it."""

    base_url: str = option(REQUIRED, "http://HOST:PORT", metavar="URL")
    model: str | None = option(None, "default: the first that is served", metavar="NAME")
    timeout_s: float = option(
        TIMEOUT_S, "a request that takes longer is given up, an error", low=0.1, high=1e6, unit="s"
    )
    json: Path | None = option(None, "write the figures there")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Goodput:
    """What requests must keep to."""

    slo: str | None = option(None, "such as ttft=400ms,tpot=40ms", metavar="LIMITS")
    attainment: float = option(
        0.9, "part of the requests that is to keep the SLO", low=0, high=1, metavar="A"
    )
    find_goodput: bool = switch("look for the greatest rate at which it does, beginning at --rate")

    def __post_init__(self) -> None:
        check_options(self)


def add_bench_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Send requests to any server of OpenAI's API, as they would arrive or from a "
        f"number of clients, and measure the streams. A key is read from {KEY_VARIABLE}."
    )
    parser.set_defaults(run=run_bench_serve)
    add_options(parser, Server)
    add_options(parser, Load, "load")
    add_options(parser, Goodput, "goodput")
    add_status_option(parser)


def run_bench_serve(args: argparse.Namespace) -> int:
    """Run the load. Return the exit code."""
    import asyncio

    with imports_for("fastdecode bench-serve"):
        from fastdecode.measure.serving.client import Endpoint
    from cost_model.goodput.slo import Slo
    from fastdecode.measure.serving.report import told

    server, load = read_options(args, Server), read_options(args, Load)
    goodput = read_options(args, Goodput)
    if goodput.find_goodput and (load.rate is None or goodput.slo is None):
        raise ConfigError("--find-goodput needs --rate, to begin at, and --slo")
    slo = None if goodput.slo is None else Slo.parse(goodput.slo, needs_both=False)
    endpoint = Endpoint(server.base_url, os.environ.get(KEY_VARIABLE), server.timeout_s)
    if server.model is not None:
        asyncio.run(endpoint.reach())
    model = server.model or asyncio.run(endpoint.model())
    is_known = not goodput.find_goodput and load.trace is None

    def progress() -> dict[str, Any]:
        return {
            "unit": "requests",
            "done": endpoint.num_done,
            "total": load.shape.num_requests if is_known else None,
            "num_failed": endpoint.num_failed,
            "eta_s": None,
        }

    with measuring(args, "bench-serve", progress, json=server.json) as say:
        figures = _measured(load, goodput, endpoint, model, slo, say)
    print(told(figures), flush=True)
    if server.json is not None:
        write_json(server.json, figures, "figures")
    return EXIT_SOME_FAILED if figures["errors"] else 0


def _measured(
    load: Load,
    goodput: Goodput,
    endpoint: Endpoint,
    model: str,
    slo: Slo | None,
    say: Callable[[str], None],
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
    rate, figures = find_goodput(
        measure, lambda: one_by_one(closed(load.shape), 1), first, wanted, say
    )
    return {**(figures or measure(first)), "greatest_rate": rate, "wanted_attainment": wanted}

"""Requests of a load and their times, drawn from a seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

from cost_model.goodput.workload import Lengths, drawn
from cost_model.traces import LoggedLine, decoded, located
from fastdecode.core.config.options import check_options, option
from fastdecode.core.errors import ConfigError, Given

FIRST_TOKEN = 10  # lower ids are often special
MAX_REQUESTS = 10_000_000
_MAX_CHOICES = 1 << 16  # of one line of a request log


@dataclass(frozen=True)
class Planned:
    due_s: float
    """Seconds after the start. 0 if clients send one after the other."""
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True)
class LoadShape:
    num_requests: int | None = option(
        None, "default: 100, or all of a trace", low=1, high=MAX_REQUESTS, flag="--requests"
    )
    prompt_tokens: int = option(128, "mean tokens of a prompt", low=1, high=1 << 24)
    output_tokens: int = option(64, "mean tokens of an answer", low=1, high=1 << 24)
    spread: float = option(
        0.0, "lengths are log-normal with this sigma; 0 makes all equal", low=0, high=5, metavar="S"
    )
    vocab_size: int = option(
        1000, "prompts are random tokens from 10 to this", low=11, high=1 << 24
    )
    seed: int = option(0, "seed of lengths, gaps and prompts", low=0, high=1 << 62)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Load(LoadShape):
    rate: float | None = option(
        None, "requests a second", low=1e-6, high=1e6, metavar="R", is_alternative=True
    )
    concurrency: int | None = option(
        None, "clients, each with one request at a time", low=1, high=65536, is_alternative=True
    )
    trace: Path | None = option(None, "a server's request log", is_alternative=True)
    cv: float | None = option(
        None, "variation of the gaps: 1 (default) is Poisson, 0 a clock", low=0, high=100
    )
    speed: float | None = option(
        None, "with --trace: replay it this much faster", low=1e-3, high=1e6, metavar="X"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, needed in (("cv", "rate"), ("speed", "trace")):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise ConfigError(Given(name), " changes nothing without ", Given(needed))
        for name in ("prompt_tokens", "output_tokens", "spread"):
            if self.trace is not None and getattr(self, name) != getattr(LoadShape, name):
                raise ConfigError(Given(name), " changes nothing with ", Given("trace"))

    def planned(self, rate: float | None = None) -> list[Planned]:
        """Return the requests, at another rate if one is given."""
        rate = rate or self.rate
        if self.trace is not None:
            return traced(self.trace, self, self.speed or 1.0)
        return arriving(self, rate or math.inf, 1.0 if self.cv is None else self.cv)


def closed(shape: LoadShape) -> list[Planned]:
    """Return requests for clients that send one after the other."""
    return arriving(shape, math.inf)


def arriving(shape: LoadShape, rate: float, cv: float = 1.0) -> list[Planned]:
    """Return requests that don't wait for answers. Other rates have the same pattern. ``cv`` is the
    coefficient of variation of the gaps, which are gamma: 1 is Poisson, 0 is a clock."""
    prompts = Lengths(shape.prompt_tokens, shape.spread)
    outputs = Lengths(shape.output_tokens, shape.spread)
    draw = drawn(prompts, outputs, cv, shape.num_requests or 100, shape.seed)
    return [_planned(*each, shape, i) for i, each in enumerate(draw.at(rate))]


def traced(path: Path, shape: LoadShape, speed: float = 1.0) -> list[Planned]:
    """Return the answered requests of a request log, ``speed`` times as fast. A request of several
    prompts or choices counts as several: they were answered side by side."""
    name, found = f"--trace {path}", []
    for line in decoded(located(path, name), LoggedLine):
        if line.prompt_tokens and line.output_tokens:
            num_choices = line.prompts * line.n
            if num_choices > _MAX_CHOICES:
                raise ConfigError(f"{name}: a line with {num_choices} choices is not one request's")
            num_output = max(1, round(line.output_tokens / num_choices))
            entry = line.time, round(line.prompt_tokens / line.prompts), num_output
            found += [entry] * num_choices
    if not found:
        raise ConfigError(f"{name} has no request with time, prompt and output tokens")
    found.sort()
    start_s = found[0][0]
    return [
        _planned((time_s - start_s) / speed, num_prompt, num_output, shape, i)
        for i, (time_s, num_prompt, num_output) in enumerate(found[: shape.num_requests])
    ]


def _planned(due_s: float, num_prompt: int, num_output: int, shape: LoadShape, i: int) -> Planned:
    random_ = random.Random(f"{shape.seed} {i}")
    prompt = random_.choices(range(FIRST_TOKEN, shape.vocab_size), k=max(1, num_prompt))
    return Planned(due_s, tuple(prompt), num_output)

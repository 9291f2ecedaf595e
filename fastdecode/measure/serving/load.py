"""Requests of a load and their times, drawn from a seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

from cost_model.goodput.workload import Lengths, drawn
from cost_model.traces import LoggedLine, decoded, located
from fastdecode.core.errors import ConfigError

FIRST_TOKEN = 10  # lower ids are often special
_MAX_CHOICES = 1 << 16  # of one line of a request log


@dataclass(frozen=True)
class Planned:
    """A request to send."""

    due_s: float
    """Seconds after the start. 0 if clients send one after the other."""
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True)
class LoadShape:
    """Distribution of a load."""

    num_requests: int
    prompt_tokens: int
    """Mean, as of ``output_tokens``."""
    output_tokens: int
    spread: float = 0.0
    """Standard deviation of the lengths' logarithms. 0 makes all lengths equal."""
    vocab_size: int = 1000
    seed: int = 0


def closed(shape: LoadShape) -> list[Planned]:
    """Return requests for clients that send one after the other."""
    return arriving(shape, math.inf)


def arriving(shape: LoadShape, rate: float, cv: float = 1.0) -> list[Planned]:
    """Return requests that don't wait for answers.

    Args:
        rate: Requests per second, on average. Other rates have the same pattern.
        cv: Coefficient of variation of the gaps, which are gamma: 1 is Poisson, 0 is a clock.
    """
    prompts = Lengths(shape.prompt_tokens, shape.spread)
    outputs = Lengths(shape.output_tokens, shape.spread)
    draw = drawn(prompts, outputs, cv, shape.num_requests, shape.seed)
    return [_planned(*each, shape, i) for i, each in enumerate(draw.at(rate))]


def traced(path: Path, shape: LoadShape, speed: float = 1.0) -> list[Planned]:
    """Return the answered requests of a request log.

    A request of several prompts or choices counts as several: they were answered side by side.

    Args:
        speed: Factor by which they are sent faster.

    Raises:
        ConfigError: If the file has none.
    """
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

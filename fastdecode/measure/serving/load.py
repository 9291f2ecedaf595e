"""Requests of a load and their times, drawn from a seed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdecode.core.errors import ConfigError
from fastdecode.core.os_errors import explained

FIRST_TOKEN = 10
"""Lower ids are often special."""
_MAX_CHOICES = 1 << 16
"""Most choices in one line of a request log."""


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
        rate: Requests per second, on average.
        cv: Coefficient of variation of the gaps, which are gamma: 1 is Poisson, 0 is a clock.
    """
    random_ = random.Random(shape.seed * 2 + 1)
    due_s, planned = 0.0, []
    for i, size in enumerate(_sizes(shape)):
        planned.append(_planned(due_s, *size, shape, i))
        # Unit gaps over the rate: other rates have the same pattern.
        gap = random_.gammavariate(1 / cv**2, cv**2) if cv > 0 else 1.0
        due_s += gap / rate
    return planned


def traced(path: Path, shape: LoadShape, speed: float = 1.0) -> list[Planned]:
    """Return the answered requests of a request log.

    A request of several prompts or choices counts as several: they were answered side by side.

    Args:
        speed: Factor by which they are sent faster.

    Raises:
        ConfigError: If the file has none.
    """
    found = []
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {explained(error)}") from None
    for number, line in enumerate(lines, 1):
        found += _entries(line, f"--trace {path}, line {number}")
    if not found:
        raise ConfigError(f"--trace {path} has no request with time, prompt and output tokens")
    found.sort()
    start_s = found[0][0]
    return [
        _planned((time_s - start_s) / speed, num_prompt, num_output, shape, i)
        for i, (time_s, num_prompt, num_output) in enumerate(found[: shape.num_requests])
    ]


def _entries(line: str, where: str) -> list[tuple[float, int, int]]:
    """Return time, prompt tokens and output tokens for each choice of each prompt of a line.

    Raises:
        ConfigError: If the line is not one of a request log.
    """
    try:
        said: Mapping[str, Any] = json.loads(line)
        if not said.get("output_tokens"):
            return []
        num_prompts = int(said.get("prompts", 1))
        num_choices = num_prompts * int(said.get("n", 1))
        if not 1 <= num_prompts <= num_choices <= _MAX_CHOICES:
            raise ValueError
        num_prompt = round(int(said["prompt_tokens"]) / num_prompts)
        num_output = max(1, round(int(said["output_tokens"]) / num_choices))
        return [(float(said["time"]), num_prompt, num_output)] * num_choices
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise ConfigError(f"{where} is no line of a request log") from None


def _sizes(shape: LoadShape) -> list[tuple[int, int]]:
    random_ = random.Random(shape.seed * 2)

    def drawn(mean: int) -> int:
        if not shape.spread:
            return mean
        # Log-normal, with this mean.
        sigma = shape.spread
        factor = random_.lognormvariate(-(sigma**2) / 2, sigma)
        return max(1, round(mean * factor))

    return [
        (drawn(shape.prompt_tokens), drawn(shape.output_tokens)) for _ in range(shape.num_requests)
    ]


def _planned(due_s: float, num_prompt: int, num_output: int, shape: LoadShape, i: int) -> Planned:
    random_ = random.Random(f"{shape.seed} {i}")
    prompt = random_.choices(range(FIRST_TOKEN, shape.vocab_size), k=max(1, num_prompt))
    return Planned(due_s, tuple(prompt), num_output)

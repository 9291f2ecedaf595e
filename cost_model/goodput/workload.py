"""Requests of a plan: arrivals and lengths, fitted to a trace and drawn again, or given.

Arrivals are a rate and a coefficient of variation of the gaps (gamma; 1 is Poisson). Lengths are
drawn jointly, a request's prompt with its answer: long prompts often have short answers, and KV is
taken by their sum. Gaps and lengths are drawn once, for gaps of mean 1, and divided by each
rate: a plan is judged at every rate by the same requests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fastdecode.core.errors import ConfigError, Given
from fastdecode.schedule.simulation.trace import RequestTrace

GENERATOR = "NumPy PCG64"
"""The same seed gives the same numbers on every machine."""

MAX_CV = 100.0
MAX_LOG_SPREAD = 5.0
MIN_REQUESTS = 300
TimedRequests: TypeAlias = Sequence[tuple[float, int, int]]
"""Seconds of arrival, prompt and output tokens, by arrival."""


def unit_gaps(num_gaps: int, cv: float, seed: int) -> np.ndarray:
    """Draw gamma gaps of mean 1. A coefficient of variation of 1 is Poisson, 0 is a clock."""
    if cv == 0.0:
        return np.ones(num_gaps)
    shape = 1.0 / (cv * cv)
    return np.random.Generator(np.random.PCG64(seed)).gamma(shape, 1.0 / shape, num_gaps)


@dataclass(frozen=True)
class Draw:
    gaps: tuple[float, ...]
    """Before each request. Divided by a rate, they are seconds."""
    lengths: tuple[tuple[int, int], ...]

    def at(self, rate: float, num_requests: int | None = None) -> list[tuple[float, int, int]]:
        """Return ``TimedRequests``. More requests than were drawn repeat the draw."""
        num = len(self.gaps) if num_requests is None else num_requests
        # Where the draw begins again, there is a gap, too.
        gaps = np.resize(np.array((*self.gaps[1:], 1.0)), max(0, num - 1))
        times = np.concatenate([[0.0], np.cumsum(gaps) / rate])[:num].tolist()
        lengths = itertools.islice(itertools.cycle(self.lengths), num)
        return [(at_s, *pair) for at_s, pair in zip(times, lengths, strict=True)]

    @property
    def mean_prompt(self) -> float:
        return sum(prompt for prompt, _ in self.lengths) / len(self.lengths)

    @property
    def mean_output(self) -> float:
        return sum(output for _, output in self.lengths) / len(self.lengths)


@dataclass(frozen=True)
class Fit:
    num_requests: int
    rate: float | None
    """Requests per second. None if all arrive at once."""
    cv: float
    mean_prompt: float
    mean_output: float
    warnings: tuple[str, ...]


def fit_trace(trace: RequestTrace) -> Fit:
    num, warnings = len(trace.requests), []
    gaps = np.diff([request.arrival for request in trace.requests])
    mean_s = float(gaps.mean()) if len(gaps) else 0.0
    rate, cv = None, 1.0
    if num < MIN_REQUESTS:
        warnings.append(f"only {num} requests: a plan wants {MIN_REQUESTS} or more")
    if mean_s > 0:
        rate, cv = 1 / mean_s, min(MAX_CV, float(gaps.std() / mean_s))
    else:
        warnings.append("all requests arrive at once: give --rate")
    prompt, output = np.mean(lengths_of(trace), axis=0).tolist()
    return Fit(num, rate, cv, prompt, output, tuple(warnings))


def drawn_from(pairs: Sequence[tuple[int, int]], cv: float, num_requests: int, seed: int) -> Draw:
    picked = _lengths_generator(seed).integers(0, len(pairs), num_requests)
    return _with_gaps(tuple(pairs[index] for index in picked), cv, seed)


def replayed(trace: RequestTrace) -> Draw:
    gaps = np.diff([request.arrival for request in trace.requests])
    if not len(gaps) or gaps.mean() <= 0:
        raise ConfigError(Given("replay"), ": all requests of the trace arrive at once. Remove it")
    return Draw((0.0, *(gaps / gaps.mean()).tolist()), tuple(lengths_of(trace)))


def lengths_of(trace: RequestTrace) -> list[tuple[int, int]]:
    return [(each.num_prompt_tokens, each.num_output_tokens) for each in trace.requests]


@dataclass(frozen=True)
class Lengths:
    """Given lengths: all alike, or log-normal with this mean."""

    mean: float
    log_spread: float = 0.0

    @classmethod
    def parse(cls, option: str, text: str) -> Lengths:
        """Read ``512`` or ``lognormal:512,0.8``."""
        kind, colon, rest = text.partition(":")
        try:
            parts = [float(part) for part in (rest if colon else text).split(",")]
        except ValueError:
            parts = []
        known = len(parts) == (2 if colon else 1) and (not colon or kind == "lognormal")
        if not known or not 1 <= parts[0] <= 1e7 or not 0 <= parts[-1] * bool(colon) <= 5:
            raise ConfigError(
                Given(option, text),
                " is not a length: give tokens like 512, or lognormal:512,0.8 (mean, and standard "
                f"deviation of the logarithms up to {MAX_LOG_SPREAD:g})",
            )
        return cls(parts[0], parts[1] if colon else 0.0)

    def draw(self, num: int, generator: np.random.Generator) -> list[int]:
        logs = generator.standard_normal(num) * self.log_spread - self.log_spread**2 / 2
        return [max(1, min(1 << 24, round(self.mean * math.exp(each)))) for each in logs]


def drawn(prompts: Lengths, outputs: Lengths, cv: float, num_requests: int, seed: int) -> Draw:
    """Draw gaps, and lengths of prompts and outputs that are independent of each other."""
    generator = _lengths_generator(seed)
    columns = (lengths.draw(num_requests, generator) for lengths in (prompts, outputs))
    return _with_gaps(tuple(zip(*columns, strict=True)), cv, seed)


def _with_gaps(lengths: tuple[tuple[int, int], ...], cv: float, seed: int) -> Draw:
    return Draw((0.0, *unit_gaps(len(lengths), cv, seed)[1:].tolist()), lengths)


def _lengths_generator(seed: int) -> np.random.Generator:
    # Gaps have the generator of the plain seed.
    return np.random.Generator(np.random.PCG64([seed, 1]))

"""What a plan is made for: arrivals and lengths, fitted to a trace and drawn again, or given.

Arrivals are a rate and a coefficient of variation of the gaps (gamma; 1 is Poisson). Lengths are
drawn jointly, a request's prompt with its answer: long prompts often have short answers, and KV is
taken by their sum. Gaps and lengths are drawn once, for gaps of mean 1, and divided by whatever
rate is looked at: a plan is judged at every rate by the same requests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cost_model.arrivals import MAX_CV, unit_gaps
from fastdecode.core.errors import ConfigError, Given
from fastdecode.schedule.simulation.trace import RequestTrace

MAX_LOG_SPREAD = 5.0
MIN_REQUESTS = 300
BAD_DISTANCE = 0.1
_KS_POINTS = 20_001
_SHORTEST_GAP = 1e-6
"""Of the mean: shorter ones are alike, as to clocks."""


@dataclass(frozen=True)
class Draw:
    """Requests whose gaps have mean 1."""

    gaps: tuple[float, ...]
    """Before each request; divided by a rate, seconds."""
    lengths: tuple[tuple[int, int], ...]
    """Prompt and output tokens."""

    def at(self, rate: float, num_requests: int | None = None) -> list[tuple[float, int, int]]:
        """Seconds of arrival, prompt and output tokens, by arrival.

        Args:
            num_requests: so many; the draw is gone through again if it has
                fewer. None: as many as it has.
        """
        num = len(self.gaps) if num_requests is None else num_requests
        # Where the draw begins again, there is a gap, too.
        gaps = np.resize(np.array((*self.gaps[1:], 1.0)), max(0, num - 1))
        times = np.concatenate([[0.0], np.cumsum(gaps) / rate])[:num]
        lengths = itertools.islice(itertools.cycle(self.lengths), num)
        return [
            (float(at_s), prompt, output)
            for at_s, (prompt, output) in zip(times, lengths, strict=True)
        ]

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
    """Requests a second. None: all arrive at once, so the trace doesn't say."""
    cv: float
    mean_prompt: float
    mean_output: float
    warnings: tuple[str, ...]


def fit_trace(trace: RequestTrace) -> Fit:
    """By moments."""
    requests = trace.requests
    gaps = np.diff([request.arrival for request in requests])
    mean_s = float(gaps.mean()) if len(gaps) else 0.0
    rate = 1 / mean_s if mean_s > 0 else None
    cv = min(MAX_CV, float(gaps.std() / mean_s)) if mean_s > 0 else 1.0
    distance = _gamma_distance(gaps / mean_s, cv) if mean_s > 0 else 0.0
    prompt, output = np.mean(_lengths(trace), axis=0).tolist()
    warnings = tuple(_warnings(len(requests), rate, distance))
    return Fit(len(requests), rate, cv, prompt, output, warnings)


def _warnings(num_requests: int, rate: float | None, distance: float) -> list[str]:
    found = []
    if num_requests < MIN_REQUESTS:
        found.append(f"only {num_requests} requests: a plan wants {MIN_REQUESTS} or more")
    if rate is None:
        found.append("the requests arrive all at once: give --rate")
    if distance > BAD_DISTANCE:
        found.append(
            f"gamma gaps fit badly (distance {distance:.2f}): --replay keeps the trace's own"
        )
    return found


def _gamma_distance(gaps: np.ndarray, cv: float) -> float:
    """Kolmogorov and Smirnov's, of the gaps and the gamma fitted to them: the greatest
    difference between what part of either is below a value."""
    drawn = np.sort(np.maximum(unit_gaps(_KS_POINTS, cv, 0), _SHORTEST_GAP))
    ordered = np.sort(np.maximum(gaps, _SHORTEST_GAP))
    values = np.concatenate([ordered, drawn])
    ours = np.searchsorted(ordered, values, side="right") / len(ordered)
    theirs = np.searchsorted(drawn, values, side="right") / len(drawn)
    return float(np.abs(ours - theirs).max())


def resampled(trace: RequestTrace, cv: float, num_requests: int, seed: int) -> Draw:
    """Gaps from the fit, lengths of requests of the trace, drawn at random, pair by pair."""
    return drawn_from(_lengths(trace), cv, num_requests, seed)


def drawn_from(pairs: Sequence[tuple[int, int]], cv: float, num_requests: int, seed: int) -> Draw:
    """Gamma gaps, and pairs of lengths picked at random."""
    gaps = unit_gaps(num_requests, cv, seed)
    picked = _generator(seed).integers(0, len(pairs), num_requests)
    lengths = tuple(pairs[index] for index in picked)
    return Draw((0.0, *(float(gap) for gap in gaps[1:])), lengths)


def replayed(trace: RequestTrace) -> Draw:
    """The trace's own gaps and lengths, in its order."""
    gaps = np.diff([request.arrival for request in trace.requests])
    if not len(gaps) or gaps.mean() <= 0:
        raise ConfigError("--replay: the trace's requests arrive all at once; leave it out")
    return Draw((0.0, *(float(gap) for gap in gaps / gaps.mean())), tuple(_lengths(trace)))


def _lengths(trace: RequestTrace) -> list[tuple[int, int]]:
    return [(each.num_prompt_tokens, each.num_output_tokens) for each in trace.requests]


@dataclass(frozen=True)
class Lengths:
    """Lengths that are given: all alike, or log-normal with this mean."""

    mean: float
    log_spread: float = 0.0
    """Standard deviation of the logarithms."""

    @classmethod
    def parse(cls, option: str, text: str) -> Lengths:
        """``512`` or ``lognormal:512,0.8``."""
        kind, colon, rest = text.partition(":")
        try:
            parts = [float(part) for part in (rest if colon else text).split(",")]
        except ValueError:
            parts = []
        known = len(parts) == (2 if colon else 1) and (not colon or kind == "lognormal")
        if not known or not 1 <= parts[0] <= 1e7 or not 0 <= parts[-1] * bool(colon) <= 5:
            raise ConfigError(
                Given(option, text),
                " is no length: give tokens like 512, or lognormal:512,0.8 (mean, and standard "
                f"deviation of the logarithms up to {MAX_LOG_SPREAD:g})",
            )
        return cls(parts[0], parts[1] if colon else 0.0)

    def draw(self, num: int, generator: np.random.Generator) -> list[int]:
        """At least one token each."""
        logs = generator.standard_normal(num) * self.log_spread - self.log_spread**2 / 2
        return [max(1, min(1 << 24, round(self.mean * math.exp(each)))) for each in logs]


def drawn(prompts: Lengths, outputs: Lengths, cv: float, num_requests: int, seed: int) -> Draw:
    """Without a trace. Lengths of prompts and outputs know nothing of each other."""
    gaps: Sequence[float] = [float(gap) for gap in unit_gaps(num_requests, cv, seed)]
    generator = _generator(seed)
    pairs = zip(
        prompts.draw(num_requests, generator), outputs.draw(num_requests, generator), strict=True
    )
    return Draw((0.0, *gaps[1:]), tuple(pairs))


def _generator(seed: int) -> np.random.Generator:
    """Of lengths; that of gaps has the plain seed."""
    return np.random.Generator(np.random.PCG64([seed, 1]))

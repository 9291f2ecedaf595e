"""States of sequences whose next token is drawn; and how often a row's tokens are drawn,
against how often they should be."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from examples import examples
from fastdecode.core.sequence import SamplingParams
from sworker.sampling.sampler import SamplingState, sample

V = 61
EOS = (3, 60)


def make_state(
    params: SamplingParams,
    seed: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    vocab: int = V,
) -> SamplingState:
    return SamplingState(params, seed, prompt, EOS, vocab, 0, output)


NUM_DRAWS = examples(8000)
LEAST_EXPECTED = 5.0  # draws of a cell of the chi-square test; rarer tokens are one cell
NORMAL_QUANTILE = 3.719
"""The quantile for a probability of 0.9999: a right sampler misses it once in 10,000 tests."""


def draw_row(row: NDArray[np.float32], state: SamplingState, count: int = NUM_DRAWS) -> list[int]:
    """Draw tokens from one row of logits, each with a seed of its own."""
    states = []
    for seed in range(count):
        one = copy(state)
        one.stream = make_state(state.params, seed=seed).stream
        states.append(one)
    rows = torch.from_numpy(np.tile(row, (count, 1)))
    return [drawn.token_id for drawn in sample(rows, states)]


def draws_of(row: NDArray[np.float32], params: SamplingParams, **state: Any) -> list[int]:
    return draw_row(row, make_state(params, vocab=len(row), **state))


def assert_drawn_as(tokens: list[int], probabilities: NDArray[np.float64]) -> None:
    """A chi-square test; and no token is drawn whose probability is 0."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    expected = probabilities * len(tokens)
    is_cell = expected >= LEAST_EXPECTED
    observed = np.append(counts[is_cell], counts[~is_cell].sum())
    expected = np.append(expected[is_cell], expected[~is_cell].sum())
    if expected[-1] < LEAST_EXPECTED:
        assert observed[-1] <= 5 * LEAST_EXPECTED
        observed, expected = observed[:-1], expected[:-1]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert statistic <= chi_square_quantile(len(observed) - 1), (counts, probabilities)


def chi_square_quantile(degrees: int) -> float:
    """The quantile for ``NORMAL_QUANTILE``'s probability (Wilson and Hilferty, 1931)."""
    if degrees == 0:
        return 1e-9
    part = 2 / (9 * degrees)
    return float(degrees * (1 - part + NORMAL_QUANTILE * part**0.5) ** 3)

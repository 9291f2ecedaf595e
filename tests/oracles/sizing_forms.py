"""The paper's sizing in closed form (FastDecode, arXiv 2403.11421, section
4.3), in any one unit of time.

B is the batch that passes the GPU at once, S the sequence length, R the time of
one cached token's R-part on one CPU, T(B) the time of one layer's S-part, C the
tokens that one CPU can hold. Load-stabilised, a batch holds ½·B·S tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from cost_model.numbers import at_most, whole
from fastdecode.core.errors import ConfigError


class RequiredCpus(NamedTuple):
    """How many CPUs a batch needs."""

    compute_bound: float
    """P = B·S·R / (2·T(B)): the R-part of a batch takes as long as its S-part."""
    memory_bound: float
    """P = B·S / (2·C): the cached tokens fit."""
    needed: int
    """The larger one, as whole CPUs."""


def required_cpus(
    batch: int,
    seq_len: int,
    r_per_token: float,
    t_of_b: float | Callable[[int], float],
    capacity_tokens: float,
) -> RequiredCpus:
    """CPUs that keep the GPU busy and hold the KV cache.

    Args:
        batch: B, sequences.
        seq_len: S, tokens.
        r_per_token: R, of one cached token and layer on one CPU.
        t_of_b: T(B) of one layer, in the unit of R; or the function T.
        capacity_tokens: C, tokens that one CPU's memory holds.

    Raises:
        ConfigError: a quantity isn't positive and finite.
    """
    t = t_of_b(batch) if callable(t_of_b) else t_of_b
    _check_positive(
        batch=batch, seq_len=seq_len, r_per_token=r_per_token, t_of_b=t,
        capacity_tokens=capacity_tokens
    )  # fmt: skip
    compute_bound = batch * seq_len * r_per_token / (2 * t)
    memory_bound = batch * seq_len / (2 * capacity_tokens)
    return RequiredCpus(compute_bound, memory_bound, whole(max(compute_bound, memory_bound)))


def max_batch_within_latency(
    num_layers: int, seq_len: int, latency: float, t_of_b_table: Mapping[int, float]
) -> int | None:
    """The largest batch of the table with 2·N·S·T(B) <= L: two lanes, each T(B)
    a layer, for every token.

    Args:
        num_layers: N.
        seq_len: S, tokens.
        latency: L, for a whole sequence, in the unit of the table.
        t_of_b_table: batch → T(B).

    Returns:
        the batch, or None if not even the smallest one is fast enough.

    Raises:
        ConfigError: a quantity isn't positive and finite.
    """
    _check_positive(num_layers=num_layers, seq_len=seq_len, latency=latency)
    fitting = []
    for batch, t in t_of_b_table.items():
        _check_positive(batch=batch, t_of_b=t)
        if at_most(2 * num_layers * seq_len * t, latency):
            fitting.append(batch)
    return max(fitting, default=None)


def _check_positive(**quantities: float) -> None:
    for name, value in quantities.items():
        if isinstance(value, bool) or not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name}={value!r} must be a finite number above 0")

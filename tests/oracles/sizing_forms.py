"""The paper's sizing in closed form (FastDecode, arXiv 2403.11421, section 4.3), in any one unit
of time.

B is the batch that passes the GPU at once, S the sequence length, R the time of one cached token's
R-part on one CPU, T(B) the time of one layer's S-part, C the tokens that one CPU can hold.
Load-stabilised, a batch holds ½·B·S tokens."""

from __future__ import annotations

from typing import NamedTuple

from cost_model.numbers import whole


class RequiredCpus(NamedTuple):
    """How many CPUs a batch needs."""

    compute_bound: float
    """P = B·S·R / (2·T(B)): the R-part of a batch takes as long as its S-part."""
    memory_bound: float  # P = B·S / (2·C): the cached tokens fit
    needed: int  # the larger one, as whole CPUs


def required_cpus(
    batch: int,
    seq_len: int,
    r_per_token: float,
    t_of_b: float,
    capacity_tokens: float,
) -> RequiredCpus:
    """CPUs that keep the GPU busy and hold the KV cache.

    Args:
        batch: B, sequences.
        seq_len: S, tokens.
        r_per_token: R, of one cached token and layer on one CPU.
        t_of_b: T(B) of one layer, in the unit of R.
        capacity_tokens: C, tokens that one CPU's memory holds.
    """
    compute_bound = batch * seq_len * r_per_token / (2 * t_of_b)
    memory_bound = batch * seq_len / (2 * capacity_tokens)
    return RequiredCpus(compute_bound, memory_bound, whole(max(compute_bound, memory_bound)))

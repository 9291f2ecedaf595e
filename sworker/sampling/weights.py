"""Drawing by fixed-point weights: what top-k, top-p and min-p leave of a row, and
the inverse CDF over it. See ``sworker.sampling.sampler``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sworker.sampling.penalties import to_device
from sworker.sampling.sampling_state import SamplingState, uniforms

_MIN_TEMPERATURE = 1e-30
"""Keeps (logit - max) / temperature away from 0 / 0; it is greedy but for exact
ties long before."""


@dataclass(frozen=True)
class Controls:
    """What the rows of one block are drawn with, on the device; each [n, 1]."""

    u: Tensor  # float64, in [0, 1)
    temperature: Tensor  # float32
    top_k: Tensor  # int64, 0 for all
    top_p: Tensor  # float64
    min_weight: Tensor  # int64: min_p as a fixed-point weight
    has_min_p: bool
    has_full_rows: bool
    """Some row has no top_k, so that its top_p is of the whole row's mass."""


def controls_of(
    states: Sequence[SamplingState], rows: NDArray[np.int64], logits: Tensor
) -> Controls:
    """Of these rows of logits [B, V]."""
    chosen = [states[row] for row in rows]
    params = [state.params for state in chosen]
    table = np.stack(
        [
            uniforms(chosen),
            np.array([max(p.temperature, _MIN_TEMPERATURE) for p in params]),
            np.array([float(p.top_k) for p in params]),
            np.array([p.top_p for p in params]),
            np.ceil(np.array([p.min_p for p in params]) * scale_of(logits.shape[1])),
        ]
    )
    # each [n, 1]
    u, temperature, top_k, top_p, min_weight = to_device(table, logits.device)[:, :, None]
    return Controls(
        u=u,
        temperature=temperature.float(),
        top_k=top_k.long(),
        top_p=top_p,
        min_weight=min_weight.long(),
        has_min_p=any(p.min_p > 0 for p in params),
        has_full_rows=any(p.top_k == 0 for p in params),
    )


def draw_whole(logits: Tensor, greatest: Tensor, controls: Controls) -> Tensor:
    """Inverse CDF over all tokens in order of id. logits [n, V] → [n]."""
    weights = weights_of(logits, greatest, controls.temperature, logits.shape[1])
    if controls.has_min_p:
        weights.masked_fill_(weights < controls.min_weight, 0)
    return _draw_in_order(weights, controls.u)


def draw_truncated(
    logits: Tensor, greatest: Tensor, controls: Controls, num_columns: int
) -> tuple[Tensor, Tensor]:
    """Inverse CDF over the tokens that top_k, top_p and min_p leave, in order
    of id.

    logits [n, V] → token ids [n], and whether ``num_columns`` tokens were
    enough to know them [n].
    """
    vocab_size = logits.shape[1]
    ids = _likeliest(logits, num_columns)  # [n, C]
    weighed = logits if controls.has_full_rows else logits.gather(1, ids)
    weights = weights_of(weighed, greatest, controls.temperature, vocab_size)  # [n, V or C]
    all_mass = weights.sum(dim=-1, keepdim=True)
    if controls.has_full_rows:
        weights = weights.gather(1, ids)  # [n, C], descending
    has_top_k = controls.top_k > 0
    columns = torch.arange(num_columns, device=logits.device)
    weights.masked_fill_(has_top_k & (columns >= controls.top_k), 0)
    running = weights.cumsum(dim=-1)  # [n, C]
    mass = torch.where(has_top_k, running[:, -1:], all_mass)
    needed = (controls.top_p * mass).ceil().long()
    num_by_top_p = (running < needed).sum(dim=-1, keepdim=True) + 1
    num_by_min_p = (weights >= controls.min_weight).sum(dim=-1, keepdim=True)
    decided = (
        (has_top_k & (controls.top_k <= num_columns))
        | (~has_top_k & (num_by_top_p <= num_columns))
        | (~has_top_k & (num_by_min_p < num_columns))
        | torch.full_like(has_top_k, num_columns == vocab_size)
    )
    kept = torch.minimum(num_by_top_p, num_by_min_p).clamp_(1, num_columns)
    weights.masked_fill_(columns >= kept, 0)
    return _draw_listed(ids, weights, controls.u, vocab_size), decided[:, 0]


def _draw_listed(ids: Tensor, weights: Tensor, u: Tensor, vocab_size: int) -> Tensor:
    """Inverse CDF over listed tokens in order of id. ids [n, C], their weights
    [n, C], u [n, 1] → [n]."""
    if ids.shape[1] == vocab_size:
        return _draw_in_order(torch.empty_like(weights).scatter_(1, ids, weights), u)
    ids, order = ids.sort(dim=-1)
    place = _draw_in_order(weights.gather(1, order), u)
    return ids.gather(1, place[:, None])[:, 0]


def _draw_in_order(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF over columns: the first at which the running sum exceeds u of
    the whole. [n, C], [n, 1] → [n].

    The weights become running sums in place.
    """
    running = weights.cumsum_(dim=-1)
    place = torch.searchsorted(running, (u * running[:, -1:]).long(), right=True)
    return place.clamp_(max=weights.shape[1] - 1)[:, 0]  # rows of NaNs must stay in bounds too


def scale_of(vocab_size: int) -> float:
    """The weight of the likeliest token: as great as keeps any row's total
    below 2^52, exact in a float64."""
    return 2.0 ** (52 - (vocab_size - 1).bit_length())


def weights_of(
    logits: Tensor, greatest: Tensor, temperature: Tensor | float, vocab_size: int
) -> Tensor:
    """exp((logits - greatest) / temperature) as fixed-point weights. [n, C],
    [n, 1] → int64 [n, C]."""
    scaled = (logits - greatest).div_(temperature)
    return scaled.exp_().mul_(scale_of(vocab_size)).round_().long()


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """Ids of the greatest logits, descending, equals by ascending id. [n, V] →
    int64 [n, count].

    Order and id are packed into one integer key, so no two keys are equal and
    every algorithm gives the same answer.
    """
    vocab_size = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
    bits ^= (bits >> 31).bitwise_and_(0x7FFF_FFFF)
    keys = bits.long()
    keys <<= 32
    keys |= torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    return vocab_size - 1 - (torch.topk(keys, count, dim=-1).values & 0xFFFF_FFFF)


def logprobs_of(logits: Tensor, greatest: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Log-probabilities of the drawn and of the likeliest tokens.

    logits [m, V], greatest and tokens [m, 1] → float64 [m, 1 + 2 · count]: the
    token's logprob, ids, their logprobs.
    """
    vocab_size = logits.shape[1]
    total = weights_of(logits, greatest, 1.0, vocab_size).sum(dim=-1, keepdim=True)
    log_mass = greatest.double() + (total.double() / scale_of(vocab_size)).log()  # [m, 1]
    ids = _likeliest(logits, count)  # [m, count]
    picked = logits.gather(1, torch.cat([tokens, ids], dim=1)).double() - log_mass
    return torch.cat([picked[:, :1], ids.double(), picked[:, 1:]], dim=1)

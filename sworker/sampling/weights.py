"""Drawing by fixed-point weights: what top-k, top-p and min-p leave of a row, and
a race between what is left. See ``sworker.sampling.sampler``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sworker.sampling.penalties import to_device
from sworker.sampling.random_numbers import exponentials, exponentials_in_numpy
from sworker.sampling.sampling_state import SamplingState, draw_keys

_MIN_TEMPERATURE = 1e-30
"""Keeps (logit - max) / temperature away from 0 / 0; it is greedy but for exact
ties long before."""


GROUP = 256
"""Tokens of a group, by id; the last one may have fewer. What is asked of a row of a
vocabulary's width is asked of groups first, then of the members of few of them."""

FEW_ELEMENTS = 1 << 16  # up to this number, groups don't speed up the search of the greatest


TIE = 2.0**-12
"""Logits that differ by no more than this count as tied where truncation ends: either both tokens
are kept or neither. Ten times the float32 noise between two ways of running a model, so that
tokens which were never trained, and have all the same logit but for that noise, stay together."""


@dataclass(frozen=True)
class Controls:
    """What the rows of one block are drawn with, on the device; each [n, 1]."""

    keys: Tensor  # int64, of ``random_numbers``
    rate: Tensor  # float32: 1 / temperature
    top_k: Tensor  # int64, 0 for all
    top_p: Tensor  # float64
    min_p_gap: Tensor  # float32: how far below the greatest logit min_p ends, -inf for nowhere
    has_min_p: bool
    has_top_p: bool
    has_full_rows: bool  # some row has no top_k, so that its top_p is of the whole row's mass


def controls_of(
    states: Sequence[SamplingState], rows: NDArray[np.int64], device: torch.device
) -> Controls:
    """Controls of these rows of a batch."""
    chosen = [states[row] for row in rows]
    params = [state.params for state in chosen]
    temperatures = [max(p.temperature, _MIN_TEMPERATURE) for p in params]
    gaps = [
        t * math.log(p.min_p) if p.min_p else -math.inf
        for p, t in zip(params, temperatures, strict=True)
    ]
    table = np.stack(
        [
            draw_keys(chosen).view(np.float64),  # the bits, so that one copy takes them all
            1 / np.array(temperatures),
            np.array([float(p.top_k) for p in params]),
            np.array([p.top_p for p in params]),
            np.array(gaps),
        ]
    )
    # each [n, 1]
    keys, rate, top_k, top_p, min_p_gap = to_device(table, device)[:, :, None]
    return Controls(
        keys=keys.view(torch.int64),
        rate=rate.float(),
        top_k=top_k.long(),
        top_p=top_p,
        min_p_gap=min_p_gap.float(),
        has_min_p=any(p.min_p > 0 for p in params),
        has_top_p=any(p.top_p < 1 for p in params),
        has_full_rows=any(p.top_k == 0 for p in params),
    )


def draw_whole(logits: Tensor, greatest: Tensor, controls: Controls) -> Tensor:
    """Draw from all tokens, or from those that min_p leaves. [n, V] → [n]."""
    weights = weights_of(logits, greatest, controls.rate, logits.shape[1])
    if controls.has_min_p:
        _keep(weights, logits, greatest + controls.min_p_gap)
    return _race(weights, controls.keys)


def draw_few(logits: Tensor, greatest: Tensor, chosen: Sequence[SamplingState]) -> Tensor:
    """``draw_whole`` of few rows on a CPU, without ``min_p``: the same tokens, with a
    third of the operations. [n, V], [n, 1], n states → [n]."""
    temperatures = [max(state.params.temperature, _MIN_TEMPERATURE) for state in chosen]
    rate = torch.tensor([[1 / each] for each in temperatures])
    weights = weights_of(logits, greatest, rate, logits.shape[1])
    return _race_in_numpy(weights.numpy(), draw_keys(chosen)[:, None])


def draw_truncated(
    logits: Tensor, greatest: Tensor, controls: Controls, num_columns: int
) -> Tensor:
    """Draw from the tokens that top_k, top_p and min_p leave.

    Each keeps the tokens down to an edge, a logit; so all three keep those down to the highest
    edge.

    logits [n, V] → token ids [n]; -1 where the ``num_columns`` likeliest tokens weren't enough to
    find the edge."""
    vocab_size = logits.shape[1]
    weights = weights_of(logits, greatest, controls.rate, vocab_size)
    values = greatest_values(logits, num_columns)  # [n, C], descending
    has_top_k = controls.top_k > 0
    edge = greatest + controls.min_p_gap
    decided = has_top_k & (controls.top_k <= num_columns)
    if controls.has_full_rows:
        decided |= ~has_top_k & (edge > values[:, -1:])  # min_p alone ends within the list
    by_top_k = values.gather(1, (controls.top_k - 1).clamp_(0, num_columns - 1))
    edge = torch.where(has_top_k, torch.maximum(edge, by_top_k), edge)
    if controls.has_top_p:
        by_top_p, is_found = _top_p_edge(values, weights, greatest, controls)
        edge = torch.maximum(edge, by_top_p)
        decided |= ~has_top_k & is_found
    _keep(weights, logits, edge)
    tokens = _race(weights, controls.keys)
    if num_columns == vocab_size:
        return tokens
    return torch.where(decided[:, 0], tokens, -1)


def _top_p_edge(
    values: Tensor, weights: Tensor, greatest: Tensor, controls: Controls
) -> tuple[Tensor, Tensor]:
    """The logit of the token with which the likeliest reach top_p of the mass that top_k leaves:
    of the k likeliest, or of all.

    values [n, C], descending; weights [n, V] → float32 [n, 1], and whether it is among the values,
    bool [n, 1]."""
    num_columns = values.shape[1]
    listed = weights_of(values, greatest, controls.rate, weights.shape[1]).double()  # [n, C]
    has_top_k = controls.top_k > 0
    columns = torch.arange(num_columns, device=values.device)
    listed.masked_fill_(has_top_k & (columns >= controls.top_k), 0)
    running = listed.cumsum_(dim=-1)  # exact, as all sums of whole numbers below 2^53
    mass = running[:, -1:]
    if controls.has_full_rows:
        mass = torch.where(has_top_k, mass, group_sums(weights).sum(dim=-1, keepdim=True))
    needed = (controls.top_p * mass).ceil_()
    column = torch.searchsorted(running, needed)  # the first at which it is reached
    is_found = column < num_columns
    return values.gather(1, column.clamp_(max=num_columns - 1)), is_found


def _keep(weights: Tensor, logits: Tensor, edge: Tensor) -> None:
    """Leave no weight to tokens below the edge [n, 1], but to those tied with it."""
    is_kept = torch.empty_like(weights)  # 1 or 0: a product costs a tenth of a masked fill
    weights.mul_(torch.ge(logits, edge - TIE, out=is_kept))


def _race(weights: Tensor, keys: Tensor) -> Tensor:
    """Draw a token with a probability in proportion to its weight.

    Of all groups the one is taken whose mass divided by an exponentially distributed number is
    greatest, and then one of its tokens likewise: the arg max of log weight + Gumbel noise,
    without the logarithms.

    float32 [n, V], keys int64 [n, 1] → int64 [n]. Of a row without any weight, or of NaNs, any
    token."""
    vocab_size = weights.shape[1]
    num = num_groups(vocab_size)
    noise = exponentials(keys, num + GROUP)
    group = (group_sums(weights) / noise[:, :num]).argmax(dim=-1, keepdim=True)
    member = (members(weights, group, 0.0) / noise[:, num:]).argmax(dim=-1)
    return group[:, 0].mul(GROUP).add_(member).clamp_(max=vocab_size - 1)


def _race_in_numpy(weights: NDArray[np.float32], keys: NDArray[np.int64]) -> Tensor:
    """``_race``, without copies of the rows' groups."""
    vocab_size = weights.shape[1]
    num = num_groups(vocab_size)
    noise = exponentials_in_numpy(keys, num + GROUP)
    sums = np.add.reduceat(weights, range(0, vocab_size, GROUP), axis=1, dtype=np.float64)
    groups = (sums / noise[:, :num]).argmax(axis=1)
    firsts = (groups * GROUP).tolist()
    tokens = [
        first + int((row[first : first + GROUP] / of_row[: vocab_size - first]).argmax())
        for row, of_row, first in zip(weights, noise[:, num:], firsts, strict=True)
    ]
    return torch.tensor(tokens)


def scale_of(vocab_size: int) -> float:
    """The weight of the likeliest token: as great as keeps any row's total
    below 2^52, exact in a float64."""
    return 2.0 ** (52 - (vocab_size - 1).bit_length())


def weights_of(logits: Tensor, greatest: Tensor, rate: Tensor | float, vocab_size: int) -> Tensor:
    """exp((logits - greatest) · rate) as fixed-point weights: whole numbers. [n, C], [n, 1] →
    float32 [n, C].

    Not exp2, though it takes a quarter of the time on a CPU: its last bit depends on where in
    memory a number is."""
    scaled = (logits - greatest).mul_(rate)
    return scaled.exp_().mul_(scale_of(vocab_size)).round_()


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """Ids of the greatest logits, descending, equals by ascending id. [n, V] → int64 [n, count].

    Order and id are packed into one integer key, so no two keys are equal and every algorithm
    gives the same answer."""
    vocab_size = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
    bits ^= (bits >> 31).bitwise_and_(0x7FFF_FFFF)
    keys = bits.long()
    keys <<= 32
    keys |= torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    return vocab_size - 1 - (torch.topk(keys, count, dim=-1).values & 0xFFFF_FFFF)


def logprobs_of(logits: Tensor, greatest: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Log-probabilities of the drawn and of the likeliest tokens.

    logits [m, V], greatest and tokens [m, 1] → float64 [m, 2 + 2 · count]: the token's logprob and
    rank (1 for the likeliest), ids, their logprobs."""
    vocab_size = logits.shape[1]
    weights = weights_of(logits, greatest, 1.0, vocab_size)
    total = group_sums(weights).sum(dim=-1, keepdim=True)
    log_mass = greatest.double() + (total / scale_of(vocab_size)).log()  # [m, 1]
    ids = _likeliest(logits, count)  # [m, count]
    picked = logits.gather(1, torch.cat([tokens, ids], dim=1)).double() - log_mass
    rank = (logits > logits.gather(1, tokens)).sum(dim=-1, keepdim=True).add_(1)
    return torch.cat([picked[:, :1], rank.double(), ids.double(), picked[:, 1:]], dim=1)


def num_groups(vocab_size: int) -> int:
    return -(-vocab_size // GROUP)


def group_maxima(rows: Tensor) -> Tensor:
    """[n, V] → [n, G]; NaN where a group holds one."""
    whole, rest = _parts(rows)
    maxima = whole.amax(dim=-1)
    return maxima if rest is None else torch.cat([maxima, rest.amax(dim=-1, keepdim=True)], dim=1)


def group_sums(rows: Tensor) -> Tensor:
    """float32 [n, V] → float64 [n, G]; exact for whole numbers while a sum is below 2^53."""
    whole, rest = _parts(rows)
    sums = whole.sum(dim=-1, dtype=torch.float64)
    if rest is None:
        return sums
    return torch.cat([sums, rest.sum(dim=-1, keepdim=True, dtype=torch.float64)], dim=1)


def members(rows: Tensor, groups: Tensor, fill: float) -> Tensor:
    """The values of these groups' tokens, in order of id.

    rows [n, V], groups int64 [n, m] → [n, m · GROUP]; ``fill`` in place of tokens beyond the last.
    """
    vocab_size = rows.shape[1]
    ids = groups[:, :, None] * GROUP + torch.arange(GROUP, device=rows.device)
    ids = ids.view(len(rows), -1)
    if vocab_size % GROUP == 0:
        return rows.gather(1, ids)
    is_beyond = ids >= vocab_size
    return rows.gather(1, ids.clamp_(max=vocab_size - 1)).masked_fill_(is_beyond, fill)


def greatest_of(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest value of each row [n], and where it is [n]: the first of
    equals, and NaN if there is one."""
    greatest, group = group_maxima(rows).max(dim=-1)
    member = members(rows, group[:, None], -torch.inf).argmax(dim=-1)
    return greatest, group.mul_(GROUP).add_(member)


def greatest_values(rows: Tensor, count: int) -> Tensor:
    """The greatest values of each row, descending. [n, V] → [n, count]."""
    if count == rows.shape[1]:
        return rows.sort(dim=-1, descending=True).values
    if 4 * count < num_groups(rows.shape[1]):
        # All are in the groups with the greatest maxima, of which each holds one.
        groups = group_maxima(rows).topk(count, dim=-1, sorted=False).indices
        rows = members(rows, groups, -torch.inf)
    return rows.topk(count, dim=-1).values


def _parts(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Views: whole groups [n, G, GROUP], and the tokens of the last if they are fewer."""
    vocab_size = rows.shape[1]
    num_whole = vocab_size // GROUP
    end = num_whole * GROUP
    whole = rows[:, :end].unflatten(1, (num_whole, GROUP))
    return whole, None if end == vocab_size else rows[:, end:]

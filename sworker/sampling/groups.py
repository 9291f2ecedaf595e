"""Rows of a vocabulary's width, in groups of tokens by id.

What is asked of a whole row (its greatest values, a draw) is asked of groups
first, and then of the members of few of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 256
"""Tokens of a group; the last one may have fewer."""

FEW_ELEMENTS = 1 << 16
"""Of so few, the greatest are found at once as quickly."""


def num_groups(vocab_size: int) -> int:
    return -(-vocab_size // GROUP)


def group_maxima(rows: Tensor) -> Tensor:
    """[n, V] → [n, G]; NaN where a group holds one."""
    whole, rest = _parts(rows)
    maxima = whole.amax(dim=-1)
    return maxima if rest is None else torch.cat([maxima, rest.amax(dim=-1, keepdim=True)], dim=1)


def group_sums(rows: Tensor) -> Tensor:
    """float32 [n, V] → float64 [n, G]; exact for whole numbers while a sum is
    below 2^53."""
    whole, rest = _parts(rows)
    sums = whole.sum(dim=-1, dtype=torch.float64)
    if rest is None:
        return sums
    return torch.cat([sums, rest.sum(dim=-1, keepdim=True, dtype=torch.float64)], dim=1)


def members(rows: Tensor, groups: Tensor, fill: float) -> Tensor:
    """The values of these groups' tokens, in order of id.

    rows [n, V], groups int64 [n, m] → [n, m · GROUP]; ``fill`` in place of
    tokens beyond the last.
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
    if rows.numel() <= FEW_ELEMENTS:
        return rows.max(dim=-1)
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

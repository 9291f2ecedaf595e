"""Conversations in a tier, of which a policy chooses one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdecode.schedule.cache.retention import TierPolicy


@dataclass(eq=False)
class Holding:
    """What a tier has of a conversation."""

    name: str
    blocks: list[int]
    last_s: float


def victim_of(
    policy: TierPolicy, holdings: Sequence[Holding], now_s: float, block_size: int
) -> tuple[Holding, int] | None:
    """Return the conversation that evicts, and which block. None if no block is left."""
    filled = [each for each in holdings if each.blocks]
    if not filled:
        return None
    scores = [
        policy.score(policy.cost_of((each.blocks[0] + 1) * block_size), each.last_s, now_s)
        for each in filled
    ]
    holding = filled[scores.index(min(scores))]
    return holding, policy.leaving(holding.blocks)

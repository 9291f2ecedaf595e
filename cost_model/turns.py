"""Conversations over tiers of a KV cache, each turn done as it arrives: what a policy keeps, moves
down, drops, and recomputes.

A turn has all tokens of its conversation in the upper tier: those that were moved down are
restored, those that were dropped recomputed. Then, while fewer slots are free than the threshold,
the policy moves blocks down; what was moved down counts as free at once. A full lower tier drops
by the same policy before it takes more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from cost_model.printing import table
from cost_model.traces import Count, Seconds, decoded, located
from fastdecode.core.errors import ConfigError, Given
from fastdecode.schedule.cache.retention import CostTable, TierPolicy, is_short


class TracedTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    conversation: Annotated[str, msgspec.Meta(min_length=1)]
    num_prompt_tokens: Count
    """New tokens."""
    num_output_tokens: Count
    arrival_s: Seconds = 0.0


@dataclass
class TurnTotals:
    """Tokens of all turns, unless the name says otherwise."""

    num_turns: int = 0
    num_history: int = 0
    """Tokens before each turn, in any tier or dropped."""
    num_restored: int = 0
    num_recomputed: int = 0
    num_moved_down: int = 0
    num_dropped: int = 0
    recompute_cost: float = 0.0
    """Cost of the recomputed blocks, by the policies' cost table."""

    @property
    def hit_share(self) -> float:
        return 1.0 - self.num_recomputed / self.num_history if self.num_history else 1.0


@dataclass(eq=False)
class _Conversation:
    name: str
    number: int
    num_tokens: int = 0
    last_s: float = 0.0


class Tier:
    """Blocks of conversations in one tier. Conversations are numbered as they appear."""

    def __init__(self, policy: TierPolicy, block_size: int) -> None:
        self._policy = policy
        self.num_blocks = 0
        self._held: dict[int, list[int]] = {}
        self._cost = cache(lambda block: policy.cost_of((block + 1) * block_size))
        self._rows = np.zeros((3, 64))  # blocks, first block's cost, last_s, by conversation

    def blocks(self, conversation: int) -> list[int]:
        """Return a conversation's blocks in order. Not to be changed."""
        return self._held.get(conversation, [])

    def hold(self, conversation: int, blocks: list[int], last_s: float) -> None:
        while conversation >= self._rows.shape[1]:
            self._rows = np.pad(self._rows, ((0, 0), (0, self._rows.shape[1])))
        self._rows[2, conversation] = last_s
        self._set(conversation, blocks)

    def leave(self, now_s: float) -> tuple[int, int] | None:
        """Evict a block of the conversation with the lowest score, the first of equal ones. Return
        the conversation and the block. None if the tier is empty."""
        held = np.flatnonzero(self._rows[0])
        if not len(held):
            return None
        first_costs, last_s = self._rows[1:, held]
        scores = self._policy.score(first_costs, last_s, now_s)
        conversation = int(held[np.argmin(scores)])
        blocks = self._held[conversation]
        leaving = self._policy.leaving(blocks)
        self._set(conversation, blocks[1:] if leaving == blocks[0] else blocks[:-1])
        return conversation, leaving

    def _set(self, conversation: int, blocks: list[int]) -> None:
        self.num_blocks += len(blocks) - len(self.blocks(conversation))
        self._held[conversation] = blocks
        self._rows[0, conversation] = len(blocks)
        if blocks:
            self._rows[1, conversation] = self._cost(blocks[0])


class TierSimulator:
    """Two tiers with sizes in tokens, and the policy that chooses what leaves once less than a
    ``threshold`` share of the upper tier's slots is free."""

    def __init__(
        self, policy: TierPolicy, slots: int, lower_slots: int, block_size: int, threshold: float,
        cost: CostTable,
    ) -> None:  # fmt: skip
        self._upper, self._lower = Tier(policy, block_size), Tier(policy, block_size)
        self._slots, self._lower_slots = slots // block_size, lower_slots // block_size
        self._size = block_size
        self._threshold = threshold
        self._cost = cost
        self._conversations: dict[str, _Conversation] = {}
        self._by_number: dict[int, _Conversation] = {}
        self.rows: list[list[Any]] = []
        """``[t,"run",id,restored,recomputed,prompt,output]``,
        ``[t,"swap_out",id,n]``, ``[t,"drop",id,n]``, in tokens."""
        self.totals = TurnTotals()

    def run(self, turn: TracedTurn) -> None:
        now_s, name, conversations = turn.arrival_s, turn.conversation, self._conversations
        found = conversations.setdefault(name, _Conversation(name, len(conversations)))
        self._by_number[found.number] = found
        before, totals = found.num_tokens, self.totals
        upper, lower = (tier.blocks(found.number) for tier in (self._upper, self._lower))
        restored = self._tokens(found, lower)
        missing = sorted({*range(-(-before // self._size))}.difference(upper, lower))
        recomputed = self._tokens(found, missing)
        found.num_tokens += turn.num_prompt_tokens + turn.num_output_tokens
        num_blocks = -(-found.num_tokens // self._size)
        if num_blocks > self._slots:
            words = f"more than the {self._slots * self._size} of the upper tier: give it more ("
            has = f"conversation {found.name!r} has {found.num_tokens} tokens, "
            raise ConfigError(has, words, Given("kv_tokens"), ")")
        found.last_s = now_s
        self._upper.hold(found.number, list(range(num_blocks)), now_s)
        self._lower.hold(found.number, [], now_s)
        lengths = (turn.num_prompt_tokens, turn.num_output_tokens)
        self._add_row(now_s, "run", found.name, restored, recomputed, *lengths)
        totals.num_turns += 1
        totals.num_history += before
        totals.num_restored += restored
        totals.num_recomputed += recomputed
        totals.recompute_cost += sum(self._cost((block + 1) * self._size) for block in missing)
        while is_short(self._slots - self._upper.num_blocks, self._slots, self._threshold):
            leaving = self._upper.leave(now_s)
            if leaving is None:
                break
            self._move_down(self._by_number[leaving[0]], leaving[1], now_s)

    def tokens_of(self, name: str) -> tuple[int, int, int]:
        found = self._conversations[name]
        tiers = self._upper, self._lower
        upper, lower = (self._tokens(found, tier.blocks(found.number)) for tier in tiers)
        return upper, lower, found.num_tokens - upper - lower

    def _move_down(self, found: _Conversation, block: int, now_s: float) -> None:
        """Move a block to the lower tier, if there is one. Drop a block for it if that is full."""
        if not self._lower_slots:
            self._drop(found, block, now_s)
            return
        if self._lower.num_blocks == self._lower_slots:
            leaving = self._lower.leave(now_s)
            assert leaving is not None
            self._drop(self._by_number[leaving[0]], leaving[1], now_s)
        num_tokens = self._tokens(found, [block])
        held = sorted([*self._lower.blocks(found.number), block])
        self._lower.hold(found.number, held, found.last_s)
        self.totals.num_moved_down += num_tokens
        self._add_row(now_s, "swap_out", found.name, num_tokens)

    def _drop(self, found: _Conversation, block: int, now_s: float) -> None:
        num_tokens = self._tokens(found, [block])
        self.totals.num_dropped += num_tokens
        self._add_row(now_s, "drop", found.name, num_tokens)

    def _add_row(self, now_s: float, what: str, name: str, *counts: int) -> None:
        # Whole seconds have no point in JSON.
        self.rows.append([int(now_s) if now_s == int(now_s) else now_s, what, name, *counts])

    def _tokens(self, found: _Conversation, blocks: list[int]) -> int:
        # The last block of a conversation may not be full.
        if not blocks:
            return 0
        beyond = (blocks[-1] + 1) * self._size - found.num_tokens
        return len(blocks) * self._size - max(0, beyond)


def read_turns(path: Path) -> list[TracedTurn]:
    """Read turns in order of arrival, as JSON Lines: ``{"conversation": "A",
    "num_prompt_tokens": 24, "num_output_tokens": 8, "arrival_s": 0}``."""
    turns = list(decoded(located(path, str(path)), TracedTurn))
    if not turns:
        raise ConfigError(f"{path} holds no turns")
    return sorted(turns, key=lambda turn: turn.arrival_s)


def as_json(played: Mapping[str, TierSimulator]) -> dict[str, Any]:
    return {
        name: {"rows": tiers.rows, **asdict(tiers.totals), "hit_share": tiers.totals.hit_share}
        for name, tiers in played.items()
    }


def as_text(played: Mapping[str, TierSimulator]) -> str:
    header = ("policy", "hits", "restored", "recomputed", "moved down", "dropped", "recompute cost")
    rows = []
    for name, tiers in played.items():
        t = tiers.totals
        counts = (t.num_restored, t.num_recomputed, t.num_moved_down, t.num_dropped)
        rows.append((name, f"{t.hit_share:.3f}", *map(str, counts), f"{t.recompute_cost:.1f}"))
    return "\n".join(table(header, rows, indent=0))

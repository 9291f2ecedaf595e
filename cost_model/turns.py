"""Conversations over tiers of a KV cache, each turn done as it arrives: what a
policy keeps, moves down, drops, and has computed again.

A turn has all tokens of its conversation in the upper tier: those that were moved down are
restored, those that were dropped recomputed. Then, while fewer slots are free than the threshold,
the policy moves blocks down; what was moved down counts as free at once. A full lower tier drops
by the same policy before it takes more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from cost_model.numbers import count, number
from cost_model.printing import table
from cost_model.traces import bounded, read_file, records
from fastdecode.core.errors import ConfigError
from fastdecode.schedule.cache.costs import CostTable
from fastdecode.schedule.cache.retention import TierPolicy, is_short

Row: TypeAlias = "list[Any]"
_FIELDS = ("conversation", "num_prompt_tokens", "num_output_tokens", "arrival_s")


@dataclass(frozen=True)
class TracedTurn:
    conversation: str
    num_prompt_tokens: int
    """That are new."""
    num_output_tokens: int
    arrival_s: float = 0.0


@dataclass
class TurnTotals:
    """Of all turns. Tokens, unless something else is said."""

    num_turns: int = 0
    num_history: int = 0
    """That turns found before them, in all tiers or none."""
    num_restored: int = 0
    num_recomputed: int = 0
    num_moved_down: int = 0
    num_dropped: int = 0
    recompute_cost: float = 0.0
    """Of the blocks that were recomputed, by the policies' cost table."""

    @property
    def hit_share(self) -> float:
        """Of the history, what wasn't recomputed; 1.0: all."""
        return 1.0 - self.num_recomputed / self.num_history if self.num_history else 1.0


@dataclass(eq=False)
class _Conversation:
    name: str
    number: int
    """They are numbered as they appear."""
    num_tokens: int = 0
    last_s: float = 0.0


class Tier:
    """What one tier has of conversations, which are numbered as they appear.

    Args:
        policy: says whose blocks leave next, and which of them.
        block_size: tokens in a block.
    """

    def __init__(self, policy: TierPolicy, block_size: int) -> None:
        self._policy = policy
        self._size = block_size
        self.num_blocks = 0
        self._held: dict[int, list[int]] = {}
        self._costs: list[float] = []  # of blocks, by number
        # By conversation.
        self._first_costs, self._counts, self._last_s = np.ones(64), np.zeros(64), np.zeros(64)

    def blocks(self, conversation: int) -> list[int]:
        """What it has of a conversation, in order; not to be changed."""
        return self._held.get(conversation, [])

    def hold(self, conversation: int, blocks: list[int], last_s: float) -> None:
        """From now on it has these blocks, in order, and no other of a
        conversation that was active then."""
        while conversation >= len(self._counts):
            self._first_costs, self._counts, self._last_s = (
                np.pad(each, (0, len(each)))
                for each in (self._first_costs, self._counts, self._last_s)
            )
        self._last_s[conversation] = last_s
        self._set(conversation, blocks)

    def leave(self, now_s: float) -> tuple[int, list[int]] | None:
        """The conversation with the lowest score, of equal ones the first that appeared, gives
        up blocks; None: there are none."""
        held = np.flatnonzero(self._counts)
        if not len(held):
            return None
        rows = (self._first_costs[held], self._counts[held], self._last_s[held])
        conversation = int(held[np.argmin(self._policy.score(*rows, now_s))])
        blocks = self._held[conversation]
        leaving = self._policy.leaving(blocks)
        num = len(leaving)
        self._set(conversation, blocks[num:] if leaving[0] == blocks[0] else blocks[:-num])
        return conversation, leaving

    def _set(self, conversation: int, blocks: list[int]) -> None:
        self.num_blocks += len(blocks) - int(self._counts[conversation])
        self._counts[conversation] = len(blocks)
        self._held.pop(conversation, None)
        if blocks:
            self._held[conversation] = blocks
            self._first_costs[conversation] = self._cost(blocks[0])

    def _cost(self, block: int) -> float:
        while len(self._costs) <= block:
            self._costs.append(self._policy.cost_of((len(self._costs) + 1) * self._size))
        return self._costs[block]


class TierSimulator:
    """Two tiers, whose sizes are in tokens, and the policy that chooses what goes.

    Args:
        threshold: Share of the upper tier's slots below which free ones are too few.
        keeps_rows: True if every row is kept, and not only their totals.
    """

    def __init__(
        self,
        policy: TierPolicy,
        slots: int,
        lower_slots: int,
        block_size: int,
        threshold: float,
        cost: CostTable,
        *,
        keeps_rows: bool = True,
    ) -> None:
        self._keeps_rows = keeps_rows
        self._upper, self._lower = Tier(policy, block_size), Tier(policy, block_size)
        self._slots, self._lower_slots = slots // block_size, lower_slots // block_size
        self._size = block_size
        self._threshold = threshold
        self._cost = cost
        self._conversations: dict[str, _Conversation] = {}
        self._by_number: list[_Conversation] = []
        self.rows: list[Row] = []
        """``[t,"run",id,restored,recomputed,prompt,output]``,
        ``[t,"swap_out",id,n]``, ``[t,"drop",id,n]``, in tokens."""
        self.totals = TurnTotals()

    def run(self, turn: TracedTurn) -> None:
        found, now_s = self._find(turn.conversation), turn.arrival_s
        before = found.num_tokens
        upper, lower = (tier.blocks(found.number) for tier in (self._upper, self._lower))
        restored = self._tokens(found, lower)
        missing = sorted({*range(self._blocks(before))}.difference(upper, lower))
        recomputed = self._tokens(found, missing)
        found.num_tokens += turn.num_prompt_tokens + turn.num_output_tokens
        num_blocks = self._blocks(found.num_tokens)
        if num_blocks > self._slots:
            raise ConfigError(
                f"conversation {found.name!r} has {found.num_tokens} tokens, more than the "
                f"{self._slots * self._size} of the upper tier: give it more (--kv-tokens)"
            )
        found.last_s = now_s
        self._upper.hold(found.number, list(range(num_blocks)), now_s)
        self._lower.hold(found.number, [], now_s)
        told = [restored, recomputed, turn.num_prompt_tokens, turn.num_output_tokens]
        self._tell(now_s, "run", found.name, *told)
        self._count(before, restored, recomputed, missing)
        self._make_room(now_s)

    def tokens_of(self, name: str) -> tuple[int, int, int]:
        """Of a conversation: in the upper tier, in the lower one, dropped."""
        found = self._conversations[name]
        tiers = self._upper, self._lower
        upper, lower = (self._tokens(found, tier.blocks(found.number)) for tier in tiers)
        return upper, lower, found.num_tokens - upper - lower

    def _find(self, name: str) -> _Conversation:
        found = self._conversations.get(name)
        if found is None:
            found = self._conversations[name] = _Conversation(name, len(self._by_number))
            self._by_number.append(found)
        return found

    def _count(self, before: int, restored: int, recomputed: int, missing: list[int]) -> None:
        totals = self.totals
        totals.num_turns += 1
        totals.num_history += before
        totals.num_restored += restored
        totals.num_recomputed += recomputed
        totals.recompute_cost += sum(self._cost((block + 1) * self._size) for block in missing)

    def _make_room(self, now_s: float) -> None:
        while is_short(self._slots - self._upper.num_blocks, self._slots, self._threshold):
            gone = self._upper.leave(now_s)
            if gone is None:
                return
            self._take_down(self._by_number[gone[0]], gone[1], now_s)

    def _take_down(self, found: _Conversation, blocks: list[int], now_s: float) -> None:
        """The lower tier takes these blocks, as many as it ever can."""
        self._drop_until_it_fits(min(len(blocks), self._lower_slots), now_s)
        fitting, rest = blocks[: self._lower_slots], blocks[self._lower_slots :]
        if fitting:
            num_tokens = self._tokens(found, fitting)
            there = sorted([*self._lower.blocks(found.number), *fitting])
            self._lower.hold(found.number, there, found.last_s)
            self.totals.num_moved_down += num_tokens
            self._tell(now_s, "swap_out", found.name, num_tokens)
        if rest:
            self._tell_dropped(found, rest, now_s)

    def _drop_until_it_fits(self, num_blocks: int, now_s: float) -> None:
        while self._lower.num_blocks + num_blocks > self._lower_slots:
            gone = self._lower.leave(now_s)
            assert gone is not None, "an empty tier has room"
            self._tell_dropped(self._by_number[gone[0]], gone[1], now_s)

    def _tell_dropped(self, found: _Conversation, blocks: list[int], now_s: float) -> None:
        num_tokens = self._tokens(found, blocks)
        self.totals.num_dropped += num_tokens
        self._tell(now_s, "drop", found.name, num_tokens)

    def _tell(self, now_s: float, what: str, name: str, *counts: int) -> None:
        if self._keeps_rows:
            self.rows.append([_number(now_s), what, name, *counts])

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

    def _tokens(self, found: _Conversation, blocks: list[int]) -> int:
        """Tokens that blocks of a conversation hold, in order: its last one may not be full."""
        if not blocks:
            return 0
        beyond = (blocks[-1] + 1) * self._size - found.num_tokens
        return len(blocks) * self._size - max(0, beyond)


def read_turns(path: Path) -> list[TracedTurn]:
    """Turns in order of arrival, as JSON Lines: ``{"conversation": "A",
    "num_prompt_tokens": 24, "num_output_tokens": 8, "arrival_s": 0}``."""
    return read_file(path, parse_turns, str(path))


def parse_turns(lines: Iterable[bytes], name: str) -> list[TracedTurn]:
    turns = [_turn(fields, where) for where, fields in records(bounded(lines, name), _FIELDS)]
    if not turns:
        raise ConfigError(f"{name} holds no turns")
    return sorted(turns, key=lambda turn: turn.arrival_s)


def _turn(fields: Mapping[str, Any], where: str) -> TracedTurn:
    name = fields.get("conversation")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: conversation={name!r} is no name")
    num_prompt, num_output = (count(fields, each, where) for each in _FIELDS[1:3])
    arrival_s = number({"arrival_s": 0, **fields}, "arrival_s", where, may_be_0=True)
    return TracedTurn(name, num_prompt, num_output, arrival_s)


def _number(seconds: float) -> int | float:
    return int(seconds) if seconds == int(seconds) else seconds


def as_json(played: Mapping[str, TierSimulator]) -> dict[str, Any]:
    return {
        name: {"rows": tiers.rows, **asdict(tiers.totals), "hit_share": tiers.totals.hit_share}
        for name, tiers in played.items()
    }


def as_text(played: Mapping[str, TierSimulator]) -> str:
    header = ("policy", "hits", "restored", "recomputed", "moved down", "dropped", "recompute cost")
    rows = [(name, *_cells(tiers.totals)) for name, tiers in played.items()]
    return "\n".join(table(header, rows, indent=0))


def _cells(t: TurnTotals) -> list[str]:
    counts = (t.num_restored, t.num_recomputed, t.num_moved_down, t.num_dropped)
    return [f"{t.hit_share:.3f}", *map(str, counts), f"{t.recompute_cost:.1f}"]

"""Has an engine answer conversations as they come, and tells what became of them.

Nothing here is of any one engine, nor needs one: ``conversations.py`` has FastDecode answer.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any, Protocol

from conversation_traces import PlannedConversation, PlannedTurn


@dataclass(frozen=True)
class Asked:
    """A turn, as an engine is asked for it."""

    conversation: int
    turn: int
    prompt: tuple[int, ...]
    """All that was said before, and what is new."""
    num_drawn: int
    num_past: int
    """Of the prompt, tokens whose KV an engine has computed before."""


class Answering(Protocol):
    """An engine, as far as a trace goes."""

    def submit(self, asked: list[Asked]) -> None:
        """These turns have come."""

    def take(self, wait_s: float | None) -> Iterable[tuple[int, Sequence[int]]]:
        """Conversations whose turns are over, and what was drawn; none, if
        nothing ends for so long. None: something is under way."""


@dataclass
class Played:
    """What became of a trace."""

    latencies: list[float] = field(default_factory=list)
    """Seconds for a token drawn, of each turn."""
    ends_s: list[float] = field(default_factory=list)

    def told(self, began_s: float) -> dict[str, Any]:
        """Figures; seconds since the first turn arrived."""
        ends = sorted(end - began_s for end in self.ends_s)
        most = max(1, len(ends) * 9 // 10)
        percentiles = quantiles(self.latencies, n=100) if len(self.latencies) > 1 else []
        return {
            "turns": len(ends),
            "total_s": ends[-1],
            "requests_per_s": most / ends[most - 1],
            "latency_per_token_ms": {
                name: round(percentiles[place - 1] * 1e3, 3)
                for name, place in (("p50", 50), ("p90", 90), ("p99", 99))
                if percentiles
            },
        }


class Player:
    """Asks for turns when they are due.

    Args:
        engine: answers them.
        planned: what comes.
        speed: arrivals and think times are divided by it; 0: nobody waits.
        num_ids: new tokens are drawn from 3 up to this.
    """

    def __init__(
        self, engine: Answering, planned: list[PlannedConversation], speed: float, num_ids: int
    ) -> None:
        self._engine = engine
        self._speed = speed
        self._num_ids = num_ids
        self._rng = random.Random(3)
        self._due: list[tuple[float, int]] = []
        self._left: list[list[PlannedTurn]] = [list(each.turns) for each in planned]
        self._histories: list[list[int]] = [[] for _ in planned]
        self._arrived_s: dict[int, float] = {}
        self.played = Played()
        self.began_s = time.perf_counter()
        for number, each in enumerate(planned):
            heapq.heappush(self._due, (self._after(self.began_s, each.begins_s), number))

    def play(self) -> dict[str, Any]:
        """All of it: what became of it."""
        while self._due or self._arrived_s:
            self._submit_due()
            wait_s = self._due[0][0] - time.perf_counter() if self._due else None
            for number, token_ids in self._engine.take(wait_s and max(1e-4, wait_s)):
                self._end(number, token_ids)
        return self.played.told(self.began_s)

    def _after(self, now_s: float, planned_s: float) -> float:
        return now_s + (planned_s / self._speed if self._speed else 0.0)

    def _submit_due(self) -> None:
        now_s, asked = time.perf_counter(), []
        while self._due and self._due[0][0] <= now_s:
            due_s, number = heapq.heappop(self._due)
            turn, history = self._left[number][0], self._histories[number]
            num_past = max(0, len(history) - 1)
            history += [self._rng.randrange(3, self._num_ids) for _ in range(turn.num_new)]
            turns_left = len(self._left[number])
            asked.append(Asked(number, turns_left, tuple(history), turn.num_drawn, num_past))
            self._arrived_s[number] = due_s
        if asked:
            self._engine.submit(asked)

    def _end(self, number: int, token_ids: Sequence[int]) -> None:
        """A turn is answered."""
        now_s = time.perf_counter()
        turn = self._left[number].pop(0)
        assert len(token_ids) == turn.num_drawn
        self._histories[number] += token_ids
        self.played.latencies.append((now_s - self._arrived_s.pop(number)) / turn.num_drawn)
        self.played.ends_s.append(now_s)
        if self._left[number]:
            due_s = self._after(now_s, self._left[number][0].think_s)
            heapq.heappush(self._due, (due_s, number))

"""Conversations in the shape of published ones, seeded.

A conversation has a geometric number of turns; what is new in a turn, and what
is drawn, are log-normal numbers of tokens. Conversations begin as a Poisson
process does; the next turn comes a think time after an answer: exponential, or as
long as it takes to read the answer.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

SHAPES = {"sharegpt": (5.56, 37.77, 204.58), "ultrachat": (3.86, 51.78, 257.81)}
"""Means: turns of a conversation, tokens in and tokens out of a turn
(Pensieve, EuroSys 2025, table 2)."""
SIGMA_IN, SIGMA_OUT = 1.0, 0.9


@dataclass(frozen=True)
class PlannedTurn:
    num_new: int
    num_drawn: int
    think_s: float
    """From the answer before it; of the first one nothing."""


@dataclass(frozen=True)
class PlannedConversation:
    name: str
    begins_s: float
    turns: tuple[PlannedTurn, ...]


def conversations(
    shape: str,
    count: int,
    rate: float,
    think_s: float | None,
    max_context: int,
    rng: random.Random,
) -> list[PlannedConversation]:
    """So many, of which ``rate`` begin a second.

    Args:
        think_s: on average; None: what reading takes (``reading_s``).
        max_context: a conversation ends before it has more tokens.
    """
    mean_turns, mean_in, mean_out = SHAPES[shape]
    planned, begins_s = [], 0.0
    for number in range(count):
        begins_s += rng.expovariate(rate)
        turns: list[PlannedTurn] = []
        num_tokens = 0
        while True:
            new, drawn = length(mean_in, SIGMA_IN, rng), length(mean_out, SIGMA_OUT, rng)
            num_tokens += new + drawn
            if num_tokens > max_context:
                break
            thought_s = 0.0
            if turns:
                read_s = reading_s(turns[-1].num_drawn)
                thought_s = read_s if think_s is None else rng.expovariate(1 / think_s)
            turns.append(PlannedTurn(new, drawn, thought_s))
            if rng.random() < 1 / mean_turns:
                break
        if turns:
            planned.append(PlannedConversation(f"c{number}", begins_s, tuple(turns)))
    return planned


def reading_s(num_tokens: int) -> float:
    """Of an answer: max(5 s, 0.1 s a token), as Pensieve's first version has it."""
    return max(5.0, 0.1 * num_tokens)


def turn_lines(planned: list[PlannedConversation]) -> Iterator[str]:
    """The turns for ``fastdecode simulate --instant``, where answers take no time."""
    for each in planned:
        began_s = accumulate((turn.think_s for turn in each.turns), initial=each.begins_s)
        next(began_s)
        for turn, arrival_s in zip(each.turns, began_s, strict=True):
            yield json.dumps(
                {
                    "conversation": each.name,
                    "num_prompt_tokens": turn.num_new,
                    "num_output_tokens": turn.num_drawn,
                    "arrival_s": round(arrival_s, 3),
                }
            )


def length(mean: float, sigma: float, rng: random.Random) -> int:
    """Of a log-normal distribution with this mean."""
    return max(1, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))


def means(planned: list[PlannedConversation]) -> tuple[float, float, float]:
    """Turns of a conversation, tokens in and tokens out of a turn."""
    turns = [turn for each in planned for turn in each.turns]
    tokens = sum(turn.num_new for turn in turns), sum(turn.num_drawn for turn in turns)
    return len(turns) / len(planned), tokens[0] / len(turns), tokens[1] / len(turns)

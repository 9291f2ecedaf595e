"""Eviction policies on traces of conversations, simulated: what share of their
histories is still there, and what recomputing the rest costs.

    python benchmarks/eviction.py --out benchmarks/results/eviction.json

Traces are seeded, in the shape of ShareGPT (5.56 turns on average, 37.77 tokens
in and 204.58 out) or UltraChat (3.86, 51.78, 257.81): a geometric number of
turns, log-normal lengths, Poisson arrivals of conversations, exponential think
times after each answer, whose tokens take 20 ms each. Two tiers, 2:11 as
Pensieve's 40 and 220 GB, hold a share of what all conversations come to. Costs
are those of ``FLAT_TO_HALF``.

With ``--ends`` it is the engine's own index of kept blocks that is driven, one
tier of all the slots: of what belongs together only the end goes, and what lies
behind a missing block is of no use.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from conversation_traces import SHAPES, SIGMA_IN, SIGMA_OUT, length
from provenance import provenance

from cost_model.simulate.turns import Tiers, TracedTurn
from fastdecode.schedule.cache.costs import FLAT_TO_HALF
from fastdecode.schedule.cache.index import BlockIndex
from fastdecode.schedule.cache.retention import POLICIES, policy_of

MAX_CONTEXT = 4096
TOKEN_S = 0.02


def trace(
    shape: str, count: int, rate: float, think_s: float, rng: random.Random
) -> list[TracedTurn]:
    """Turns of so many conversations, of which ``rate`` begin a second."""
    mean_turns, mean_in, mean_out = SHAPES[shape]
    turns: list[TracedTurn] = []
    begins_s = 0.0
    for number in range(count):
        begins_s += rng.expovariate(rate)
        now_s, num_tokens = begins_s, 0
        while True:
            new, drawn = length(mean_in, SIGMA_IN, rng), length(mean_out, SIGMA_OUT, rng)
            num_tokens += new + drawn
            if num_tokens > MAX_CONTEXT:
                break
            turns.append(TracedTurn(str(number), new, drawn, now_s))
            if rng.random() < 1 / mean_turns:
                break
            now_s += drawn * TOKEN_S + rng.expovariate(1 / think_s)
    return sorted(turns, key=lambda turn: turn.arrival_s)


def measure(shape: str, think_s: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a policy."""
    turns = trace(shape, options.conversations, options.rate, think_s, random.Random(options.seed))
    rows = []
    for name in POLICIES:
        tiers = Tiers(
            policy_of(name, options.block_size),
            options.slots * 2 // 13,
            options.slots * 11 // 13,
            options.block_size,
            0.25,
            FLAT_TO_HALF,
        )
        for turn in turns:
            tiers.run(turn)
        t = tiers.totals
        rows.append(
            {
                "shape": shape,
                "think_s": think_s,
                "policy": name,
                "turns": t.num_turns,
                "hit_share": round(t.hit_share, 4),
                "recomputed_a_turn": round(t.num_recomputed / t.num_turns, 1),
                "restored_a_turn": round(t.num_restored / t.num_turns, 1),
                "recompute_cost": round(t.recompute_cost, 1),
            }
        )
        print(json.dumps(rows[-1]))
    return rows


class KeptOnEnds:
    """A tier that is the engine's index. Every turn is done as it arrives."""

    def __init__(self, policy: str, slots: int, block_size: int) -> None:
        self._index = BlockIndex(policy_of(policy, block_size))
        self._most, self._size = slots // block_size, block_size
        self._tokens: dict[str, int] = {}
        self.num_turns = self.num_history = self.num_recomputed = 0
        self.recompute_cost = 0.0

    def run(self, turn: TracedTurn) -> None:
        """A turn comes, and is over."""
        before = self._tokens.get(turn.conversation, 0) // self._size
        tokens = before * self._size + turn.num_prompt_tokens + turn.num_output_tokens
        self._tokens[turn.conversation] = tokens
        keys = [f"{turn.conversation}/{i}".encode() for i in range(tokens // self._size)]
        there = self._index.num_leading(keys[:before])
        self.num_turns += 1
        self.num_history += before
        self.num_recomputed += before - there
        for block in range(there, before):
            self.recompute_cost += FLAT_TO_HALF((block + 1) * self._size)
        self._index.use(keys[:there], as_hit=True)
        new = [key for key in keys[there:] if key not in self._index]
        lacking = len(self._index) + len(new) - self._most
        if lacking > 0:
            self._index.give_up(lacking, turn.arrival_s)
        for place in range(there, len(keys)):
            if keys[place] not in self._index:
                parent = keys[place - 1] if place else None
                self._index.add(keys[place], parent, (place + 1) * self._size)
            else:
                self._index.use([keys[place]], as_hit=False)
        if before:
            self._index.end_turn(keys[before - 1])
        if keys:
            self._index.lease(keys[-1])
            self._index.release(keys, turn.arrival_s)


def measure_ends(shape: str, think_s: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a policy."""
    turns = trace(shape, options.conversations, options.rate, think_s, random.Random(options.seed))
    rows = []
    for name in POLICIES:
        kept = KeptOnEnds(name, options.slots, options.block_size)
        for turn in turns:
            kept.run(turn)
        row = {"shape": shape, "think_s": think_s, "policy": name, "turns": kept.num_turns}
        row["hit_share"] = round(1 - kept.num_recomputed / kept.num_history, 4)
        row["recompute_cost"] = round(kept.recompute_cost, 1)
        print(json.dumps(row))
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=0.5, help="conversations a second")
    parser.add_argument("--slots", type=int, default=65_000, help="tokens of both tiers together")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--think", type=float, nargs="+", default=[30, 60, 300])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ends", action="store_true", help="the engine's own index, one tier")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    play = measure_ends if options.ends else measure
    rows = [
        row
        for shape in options.shapes
        for think_s in options.think
        for row in play(shape, think_s, options)
    ]
    if options.out is not None:
        told = {**provenance(), "slots": options.slots, "rate": options.rate, "rows": rows}
        options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

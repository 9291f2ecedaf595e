"""Eviction policies on traces of conversations, simulated: what share of their
histories is still there, and what recomputing the rest costs.

    python benchmarks/eviction.py --out benchmarks/results/eviction.json

Traces are seeded, in the shape of ShareGPT (5.56 turns on average, 37.77 tokens
in and 204.58 out) or UltraChat (3.86, 51.78, 257.81): a geometric number of
turns, log-normal lengths, Poisson arrivals of conversations, exponential think
times after each answer, whose tokens take 20 ms each. Two tiers, 2:11 as
Pensieve's 40 and 220 GB, hold a share of what all conversations come to. Costs
are those of ``FLAT_TO_HALF``.

With ``--models`` the tiers are 40 and 220 GB of a model's KV, at 2 bytes a
number, its own operations are the costs, and conversations begin at such a
rate that those alive at 120 s of think time have twice as many tokens. A run is
as long as conversations live, and at least as it takes to fill the tiers five
times. ``--share`` of the tiers and of the conversations takes as much less
time: thousands of conversations share a tier, so that what becomes of each
doesn't hang on how many there are.

With ``--index`` it is the engine's own index of kept blocks that is driven, one
tier of all the slots; of a turn's history its beginning and one stretch behind
it are reused. With ``--ends``, too, but as for split sequences: of what belongs
together only the end goes, and what lies behind a missing block is of no use.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conversation_traces import SHAPES, SIGMA_IN, SIGMA_OUT, length
from provenance import keep, provenance

from cost_model.shapes import known_models, model_named
from cost_model.simulate.turns import TierSimulator, TracedTurn
from fastdecode.core.model.families import read_model_spec
from fastdecode.core.model.spec import ModelSpec
from fastdecode.schedule.cache.costs import FLAT_TO_HALF, CostTable, costs_of
from fastdecode.schedule.cache.index import BlockIndex
from fastdecode.schedule.cache.retention import POLICIES, policy_of
from fastdecode.schedule.cache.reuse import leading_and_behind

MAX_CONTEXT = 4096
TOKEN_S = 0.02
UPPER_BYTES, LOWER_BYTES = 40_000_000_000, 220_000_000_000

_LLAMA_10 = {**known_models()["Llama-2 13B"].config, "num_key_value_heads": 10}
MODELS = {
    "opt-13b": model_named("OPT 13B"),
    "llama-2-13b-10-kv-heads": read_model_spec(_LLAMA_10, name="Llama-2 13B, 10 KV heads"),
}


@dataclass(frozen=True)
class Setting:
    """What two tiers hold, what tokens cost, and how often conversations begin."""

    upper: int
    lower: int
    cost: CostTable
    rate: float
    count: int


def of_model(spec: ModelSpec, shape: str, think_s: float, share: float) -> Setting:
    """See the module."""
    token_bytes = 2 * sum(2 * one.num_kv_heads * one.head_dim for one in spec.attention)
    upper, lower = (round(share * size / token_bytes) for size in (UPPER_BYTES, LOWER_BYTES))
    turns, new, drawn = SHAPES[shape]
    num_tokens = turns * (new + drawn)  # of a conversation that is over
    rate = 2 * (upper + lower) / (num_tokens / 2 * (turns * 120))
    fills_s = (upper + lower) / (rate * num_tokens)
    length_s = max(turns * think_s, 5 * fills_s)
    return Setting(upper, lower, costs_of(spec), rate, round(rate * length_s))


def of_slots(options: argparse.Namespace) -> Setting:
    """Without a model: two parts in 13 are the upper tier."""
    upper, lower = options.slots * 2 // 13, options.slots * 11 // 13
    return Setting(upper, lower, FLAT_TO_HALF, options.rate, options.conversations)


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


def measure(
    shape: str, think_s: float, setting: Setting, options: argparse.Namespace, seed: int
) -> list[dict[str, Any]]:
    """A row a policy."""
    turns = trace(shape, setting.count, setting.rate, think_s, random.Random(seed))
    rows = []
    for name in POLICIES:
        tiers = TierSimulator(
            policy_of(name, options.block_size, setting.cost),
            setting.upper,
            setting.lower,
            options.block_size,
            0.25,
            setting.cost,
            keeps_rows=False,
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
                "seed": seed,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


class Kept:
    """A tier that is the engine's index. Every turn is done as it arrives."""

    def __init__(self, policy: str, slots: int, block_size: int, *, only_ends: bool) -> None:
        self._policy = policy_of(policy, block_size)
        self._index = BlockIndex(self._policy, only_ends=only_ends)
        self._only_ends = only_ends
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
        used = self._reused(keys[:before])
        self.num_turns += 1
        self.num_history += before
        for block in set(range(before)).difference(used):
            self.num_recomputed += 1
            self.recompute_cost += FLAT_TO_HALF((block + 1) * self._size)
        self._index.use([keys[block] for block in used], as_hit=True)
        new = [key for key in keys if key not in self._index]
        lacking = len(self._index) + len(new) - self._most
        if lacking > 0:
            self._index.give_up(lacking, turn.arrival_s)
        for place in sorted(set(range(len(keys))).difference(used)):
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

    def _reused(self, keys: list[bytes]) -> list[int]:
        """Which blocks of a history."""

        def cost(block: int) -> float:
            return self._policy.cost_of((block + 1) * self._size)

        leading, behind = leading_and_behind(self._index, keys, cost)
        return [*leading] if self._only_ends else [*leading, *behind]


def measure_index(
    shape: str, think_s: float, options: argparse.Namespace, seed: int
) -> list[dict[str, Any]]:
    """A row a policy."""
    turns = trace(shape, options.conversations, options.rate, think_s, random.Random(seed))
    rows = []
    for name in POLICIES:
        kept = Kept(name, options.slots, options.block_size, only_ends=options.ends)
        for turn in turns:
            kept.run(turn)
        row = {"shape": shape, "think_s": think_s, "policy": name, "turns": kept.num_turns}
        row["hit_share"] = round(1 - kept.num_recomputed / kept.num_history, 4)
        row |= {"recompute_cost": round(kept.recompute_cost, 1), "seed": seed}
        print(json.dumps(row))
        rows.append(row)
    return rows


def to_lru(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What recomputing costs, all seeds together, to what it does under lru."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        cell = cells.setdefault((row.get("model"), row["shape"], row["think_s"]), {})
        cell[row["policy"]] = cell.get(row["policy"], 0.0) + row["recompute_cost"]
    return [
        {
            "model": model,
            "shape": shape,
            "think_s": think_s,
            **{name: round(cost / costs["lru"], 4) for name, cost in costs.items()},
        }
        for (model, shape, think_s), costs in cells.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=0.5, help="conversations a second")
    parser.add_argument("--slots", type=int, default=65_000, help="tokens of both tiers together")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--think", type=float, nargs="+", default=[30, 60, 300])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--index", action="store_true", help="the engine's own index, one tier")
    parser.add_argument("--ends", action="store_true", help="the same; only ends go")
    parser.add_argument("--models", nargs="*", default=[], choices=MODELS)
    parser.add_argument("--share", type=float, default=1.0, help="of a model's tiers and load")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape, think_s, seed in itertools.product(options.shapes, options.think, options.seeds):
        if options.index or options.ends:
            rows += measure_index(shape, think_s, options, seed)
        for name in options.models:
            setting = of_model(MODELS[name], shape, think_s, options.share)
            found = measure(shape, think_s, setting, options, seed)
            rows += [{"model": name, **row} for row in found]
        if not (options.index or options.ends or options.models):
            rows += measure(shape, think_s, of_slots(options), options, seed)
    keep(
        {
            **provenance(),
            "slots": options.slots,
            "rate": options.rate,
            "share": options.share,
            "to_lru": to_lru(rows),
            "rows": rows,
        },
        options.out,
    )


if __name__ == "__main__":
    main()

"""A conversation goes on whose KV blocks are on disk: how long until its first
token, if it steps while later layers are still read, and if all is read first.

    python benchmarks/restore.py --disk DIR --out benchmarks/results/restore.json
    python benchmarks/restore.py --disk DIR --history 512 --turns 4 --others 2   # small

A Llama-shaped random checkpoint of 100 M parameters (or ``--model DIR``) in
bfloat16, greedy, all cores. One process has two engines, ``pipelined`` and
``whole``, with memory for two conversations each and a
disk for all; their turns alternate, and which is first changes. A turn brings
as many new tokens as have a step take as long, beside the others, as its history
takes to be read (``--new-tokens 0``: found by a few turns before).

Told are, of each engine, the seconds until the first token (median and all of
them), what reading has taken of them, and the time per output token (TPOT) of
``--others`` sequences that decode meanwhile, at the 90th percentile: the time from
when a turn is asked for until ``--between`` seconds later, or its first token, if
that is later, over the tokens that came in it; and the ratios of pipelined to
whole. (The single gaps between the others' tokens are told, too, of the turn
alone: where a restore is over sooner fewer of them are those of steps beside
nothing.)
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

from end_to_end import MODELS, VOCAB, make_checkpoint
from provenance import keep, provenance

from fastdecode import LLM, SamplingParams
from fastdecode.core.delta import Delta, DeltaQueue
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.sequence import CacheUse, Request
from fastdecode.engine.setup import launch
from fastdecode.schedule.life.lifecycle import Lifecycle

MODES = ("pipelined", "whole")
OFF = CacheUse(is_off=True)
OTHERS_TOKENS = 300
NUM_CONVERSATIONS = 5
LEAST_NEW, MOST_NEW = 16, 512
GROWTH = 1024
"""Tokens by which a history may grow in all turns, lest others are suspended for it.
The random checkpoint has positions for 4,096."""
GOALS = {"ttft": 0.8, "others_p90_tpot": 1.1}
"""Of pipelined to whole."""


@dataclass
class Engine:
    """One of the two, and what was measured on it."""

    llm: LLM
    rng: random.Random
    queue: DeltaQueue = field(default_factory=DeltaQueue)
    histories: list[list[int]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    fetch_s: list[float] = field(default_factory=list)
    run_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """Between two tokens of one of the others, while a turn ran."""
    tpot_s: list[float] = field(default_factory=list)
    """Of each of the others, in a turn's time."""
    came_s: dict[str, list[float]] = field(default_factory=dict)
    """When tokens of the others came, since a turn was asked for."""
    asked_s: float = 0.0
    """When it was."""
    names: itertools.count[int] = field(default_factory=itertools.count)

    def turn(self, number: int, num_new: int) -> tuple[float, float, float]:
        """A conversation goes on: seconds to its first token, how long its
        blocks were read, and how long its step took."""
        history = self.histories[number]
        use = CacheUse(turn=max(0, len(history) - 1))
        history += [self.rng.randrange(3, VOCAB) for _ in range(num_new)]
        stats = self.llm.stats
        fetch_s, run_s = stats.tiers.fetch_s, stats.prefill_s
        self.asked_s = began_s = time.perf_counter()
        name = self._submit(tuple(history), 1, use)
        while True:
            for delta in self._take():
                if delta.request_id == name:
                    if delta.error is not None:
                        raise delta.error
                    history += delta.token_ids
                    ttft_s = time.perf_counter() - began_s
                    return ttft_s, stats.tiers.fetch_s - fetch_s, stats.prefill_s - run_s

    def begin_others(self, count: int, seconds: float) -> list[str]:
        """So many sequences begin to decode."""
        names = [
            self._submit(tuple(self.rng.randrange(3, VOCAB) for _ in range(8)), OTHERS_TOKENS)
            for _ in range(count)
        ]
        self.decode_on(count, seconds)
        self.came_s = {}
        return names

    def decode_on(self, count: int, seconds: float) -> None:
        """The others decode for so long, if there are any."""
        until_s = time.perf_counter() + (seconds if count else 0.0)
        while (left_s := until_s - time.perf_counter()) > 0:
            self._take(left_s)

    def count_gaps(self) -> None:
        """Of the others, since a turn was asked for."""
        for came_s in self.came_s.values():
            self.gaps_s += [after - before for before, after in itertools.pairwise(came_s)]

    def end_others(self, names: list[str]) -> None:
        """They are cancelled."""
        span_s = time.perf_counter() - self.asked_s
        self.tpot_s += [span_s / max(1, len(self.came_s.get(name, ()))) for name in names]
        left = set(names)
        for name in names:
            self.llm.service.cancel(name)
        while left:
            left -= {delta.request_id for delta in self._take() if delta.error}
        self.came_s = {}

    def _submit(self, prompt: tuple[int, ...], num_tokens: int, cache: CacheUse = OFF) -> str:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        name = str(next(self.names))
        request = Request(name, prompt, params, num_tokens, 0, cache=cache)
        self.llm.service.submit([request], self.queue)
        return name

    def _take(self, timeout_s: float | None = None) -> list[Delta]:
        deltas, now_s = self.llm.service.take(self.queue, timeout_s), time.perf_counter()
        for name in {delta.request_id for delta in deltas if delta.error is None}:
            self.came_s.setdefault(name, []).append(now_s)
        return deltas

    def told(self) -> dict[str, Any]:
        """Figures."""
        tiers = self.llm.stats.tiers
        return {
            "ttft_s": round(median(self.ttft_s), 4),
            "fetch_s": round(median(self.fetch_s), 4),
            "run_s": round(median(self.run_s), 4),
            "others_p90_tpot_s": round(_p90(self.tpot_s), 4) if self.tpot_s else None,
            "others_p90_gap_s": round(_p90(self.gaps_s), 4) if self.gaps_s else None,
            "joined": tiers.num_joined,
            "blocks_fetched": tiers.num_fetched,
            "blocks_failed": tiers.num_failed,
            "all_ttft_s": [round(each, 4) for each in self.ttft_s],
        }


def prepare(engine: Engine, options: argparse.Namespace) -> None:
    """All conversations have said as much as is asked for, and are on disk."""
    engine.histories = [[] for _ in range(NUM_CONVERSATIONS)]
    for number in range(NUM_CONVERSATIONS):
        engine.turn(number, options.history)
    for _ in range(2):
        for number in range(NUM_CONVERSATIONS):
            engine.turn(number, LEAST_NEW)


def balanced(engine: Engine, options: argparse.Namespace) -> int:
    """New tokens whose step takes as long as a history takes to be read."""
    run_s: dict[int, float] = {}
    fetched_s: list[float] = []
    for num_new in (LEAST_NEW, 8 * LEAST_NEW):
        turns = [beside_others(engine, i, num_new, options) for i in range(NUM_CONVERSATIONS)]
        fetched_s += [fetch_s for _, fetch_s, _ in turns]
        run_s[num_new] = median(step_s for _, _, step_s in turns)
    few, many = run_s
    token_s = max((run_s[many] - run_s[few]) / (many - few), 1e-6)
    return min(MOST_NEW, max(few, round(few + (median(fetched_s) - run_s[few]) / token_s)))


def beside_others(
    engine: Engine, number: int, num_new: int, options: argparse.Namespace
) -> tuple[float, float, float]:
    """A turn, while others decode; what it took (``Engine.turn``)."""
    others = engine.begin_others(options.others, options.between)
    told = engine.turn(number, num_new)
    engine.count_gaps()
    engine.decode_on(options.others, options.between - told[0])
    engine.end_others(others)
    return told


def measure(options: argparse.Namespace, engines: dict[str, Engine]) -> dict[str, Any]:
    """What both do in turns."""
    for engine in engines.values():
        prepare(engine, options)
    num_new = options.new_tokens or balanced(engines["whole"], options)
    for engine in engines.values():
        engine.tpot_s, engine.gaps_s = [], []
    turns = itertools.cycle(range(NUM_CONVERSATIONS))
    for number in range(options.turns):
        conversation = next(turns)
        for mode in MODES if number % 2 else MODES[::-1]:
            engine = engines[mode]
            ttft_s, fetch_s, run_s = beside_others(engine, conversation, num_new, options)
            engine.ttft_s.append(ttft_s)
            engine.fetch_s.append(fetch_s)
            engine.run_s.append(run_s)
            row = {"mode": mode, "ttft_s": round(ttft_s, 4), "fetch_s": round(fetch_s, 4)}
            row["run_s"] = round(run_s, 4)
            print(json.dumps(row), file=sys.stderr, flush=True)
    told = {mode: engine.told() for mode, engine in engines.items()}
    assert all(each["blocks_fetched"] for each in told.values()), "nothing came from disk"
    return {"new_tokens": num_new, **told, "ratios": _ratios(told)}


def _ratios(told: dict[str, Any]) -> dict[str, Any]:
    pipelined, whole = (told[mode] for mode in MODES)
    names = ("ttft_s", "others_p90_tpot_s", "others_p90_gap_s")
    ratios = {
        name.removesuffix("_s"): round(pipelined[name] / whole[name], 3) if whole[name] else None
        for name in names
    }
    return {**ratios, "goals": GOALS}


def _p90(values: list[float]) -> float:
    return quantiles(values, n=10)[8] if len(values) > 1 else values[0]


def lifecycle_of(mode: str) -> Callable[..., Lifecycle]:
    """``whole``: requests wait until all of their blocks are read."""
    if mode != "whole":
        return Lifecycle
    return lambda scheduler, joins_early: Lifecycle(scheduler, joins_early=False)


def open_engine(
    mode: str, model: str, directory: Path, options: argparse.Namespace, stack: ExitStack
) -> Engine:
    """With memory for two conversations, and a disk for all."""
    spec = open_checkpoint(model).spec()
    token_bytes = spec.kv_spec(spec.choose_dtype("auto")).token_bytes
    beside = options.others * (OTHERS_TOKENS + 100)
    (directory / mode).mkdir(mode=0o700)
    stack.enter_context(patch.object(launch, "Lifecycle", lifecycle_of(mode)))
    llm = LLM(
        model,
        kv_memory_gb=(2 * (options.history + GROWTH) + beside) * token_bytes / 1e9,
        max_num_sequences=max(4, options.others + 2),
        prefix_cache="on",
        swap_threshold=1.0,
        cache_disk=str(directory / mode),
        cache_disk_gb=3 * NUM_CONVERSATIONS * options.history * token_bytes / 1e9,
    )
    return Engine(stack.enter_context(llm), random.Random(7))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--disk", type=Path, required=True, help="a directory on the disk")
    parser.add_argument("--model", help="a checkpoint; default: a random one of 100 M parameters")
    parser.add_argument("--history", type=int, default=3072, help="tokens of a conversation")
    parser.add_argument("--new-tokens", type=int, default=0, help="of a turn; 0: as many as take "
                        "as long as reading")  # fmt: skip
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--others", type=int, default=4, help="sequences that decode meanwhile")
    parser.add_argument("--between", type=float, default=0.3, help="seconds before a turn, and "
                        "of it and after it")  # fmt: skip
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.others and not options.new_tokens:
        parser.error(
            "--others 0 wants --new-tokens: a step's time is told by itself only among others"
        )
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(dir=options.disk))
        model = options.model
        if model is None:
            model = str(Path(place) / "model")
            Path(model).mkdir()
            make_checkpoint(Path(model), MODELS["gqa100m"])
        engines = {mode: open_engine(mode, model, Path(place), options, stack) for mode in MODES}
        found = measure(options, engines)
    told = vars(options) | {"disk": str(options.disk), "out": None}
    keep({**provenance(), "options": told, **found}, options.out)


if __name__ == "__main__":
    main()

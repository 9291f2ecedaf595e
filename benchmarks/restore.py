"""A conversation goes on whose KV blocks are on disk: how long until its first
token, if it steps while later layers are still read, and if all is read first.

    python benchmarks/restore.py --disk DIR --out benchmarks/results/restore.json
    python benchmarks/restore.py --disk DIR --history 512 --turns 4 --others 2   # small

A Llama-shaped random checkpoint of 100 M parameters (or ``--model DIR``) in
bfloat16, greedy, all cores. One process has two engines, ``pipelined`` and
``whole`` (``--cache-restore``), with memory for two conversations each and a
disk for all; their turns alternate, and which is first changes. A turn brings
as many new tokens as take as long to run as its history takes to be read
(``--new-tokens 0``: found by a few turns before).

Told are, of each engine, the seconds until the first token (median and all of
them), what reading has taken of them, and what ``--others`` sequences that
decode meanwhile wait for a token, at the 90th percentile; and the ratios of
pipelined to whole.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from end_to_end import MODELS, VOCAB, make_checkpoint
from provenance import keep, provenance

from fastdecode import LLM, SamplingParams
from fastdecode.core.delta import Delta, DeltaQueue
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.sequence import CacheUse, Request

MODES = ("pipelined", "whole")
OFF = CacheUse(is_off=True)
OTHERS_TOKENS = 300
NUM_CONVERSATIONS = 5
LEAST_NEW, MOST_NEW = 16, 512
GOALS = {"ttft": 0.8, "others_p90": 1.1}
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
    gaps_s: list[float] = field(default_factory=list)
    """Between two tokens of one of the others, while a turn ran."""
    last_s: dict[str, float] = field(default_factory=dict)
    names: itertools.count[int] = field(default_factory=itertools.count)

    def turn(self, number: int, num_new: int) -> tuple[float, float]:
        """A conversation goes on: seconds to its first token, and what of them
        its blocks were read for."""
        history = self.histories[number]
        use = CacheUse(turn=max(0, len(history) - 1))
        history += [self.rng.randrange(3, VOCAB) for _ in range(num_new)]
        before_s, began_s = self.llm.stats.tiers.fetch_s, time.perf_counter()
        name = self._submit(tuple(history), 1, use)
        while True:
            for delta in self._take():
                if delta.request_id == name:
                    history += delta.token_ids
                    ttft_s = time.perf_counter() - began_s
                    return ttft_s, self.llm.stats.tiers.fetch_s - before_s

    def begin_others(self, count: int, seconds: float) -> list[str]:
        """So many sequences begin to decode."""
        names = [
            self._submit(tuple(self.rng.randrange(3, VOCAB) for _ in range(8)), OTHERS_TOKENS)
            for _ in range(count)
        ]
        until_s = time.perf_counter() + (seconds if count else 0.0)
        while (left_s := until_s - time.perf_counter()) > 0:
            self._take(left_s)
        self.last_s = {}
        return names

    def end_others(self, names: list[str]) -> None:
        """They are cancelled."""
        left = set(names)
        for name in names:
            self.llm.service.cancel(name)
        while left:
            left -= {delta.request_id for delta in self._take(is_timed=False) if delta.error}
        self.last_s = {}

    def _submit(self, prompt: tuple[int, ...], num_tokens: int, cache: CacheUse = OFF) -> str:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        name = str(next(self.names))
        request = Request(name, prompt, params, num_tokens, 0, cache=cache)
        self.llm.service.submit([request], self.queue)
        return name

    def _take(self, timeout_s: float | None = None, *, is_timed: bool = True) -> list[Delta]:
        deltas, now_s = self.llm.service.take(self.queue, timeout_s), time.perf_counter()
        for name in {delta.request_id for delta in deltas if delta.error is None and is_timed}:
            if name in self.last_s:
                self.gaps_s.append(now_s - self.last_s[name])
            self.last_s[name] = now_s
        return deltas

    def told(self) -> dict[str, Any]:
        """Figures."""
        tiers = self.llm.stats.tiers
        return {
            "ttft_s": round(median(self.ttft_s), 4),
            "fetch_s": round(median(self.fetch_s), 4),
            "others_p90_s": round(_p90(self.gaps_s), 4) if self.gaps_s else None,
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


def balanced(engine: Engine, rounds: int) -> int:
    """New tokens that take as long to run as a history takes to be read."""
    found = [engine.turn(i % NUM_CONVERSATIONS, 4 * LEAST_NEW) for i in range(rounds)]
    fetch_s = median(fetch_s for _, fetch_s in found)
    run_s = median(ttft_s - fetch_s for ttft_s, fetch_s in found)
    num_new = round(4 * LEAST_NEW * fetch_s / max(run_s, 1e-6))
    return min(MOST_NEW, max(LEAST_NEW, num_new))


def measure(options: argparse.Namespace, engines: dict[str, Engine]) -> dict[str, Any]:
    """What both do in turns."""
    for engine in engines.values():
        prepare(engine, options)
    num_new = options.new_tokens or balanced(engines["whole"], 2 * NUM_CONVERSATIONS)
    turns = itertools.cycle(range(NUM_CONVERSATIONS))
    for number in range(options.turns):
        conversation = next(turns)
        for mode in MODES if number % 2 else MODES[::-1]:
            engine = engines[mode]
            others = engine.begin_others(options.others, options.between)
            ttft_s, fetch_s = engine.turn(conversation, num_new)
            engine.end_others(others)
            engine.ttft_s.append(ttft_s)
            engine.fetch_s.append(fetch_s)
            row = {"mode": mode, "ttft_s": round(ttft_s, 4), "fetch_s": round(fetch_s, 4)}
            print(json.dumps(row), file=sys.stderr, flush=True)
    told = {mode: engine.told() for mode, engine in engines.items()}
    assert all(each["blocks_fetched"] for each in told.values()), "nothing came from disk"
    return {"new_tokens": num_new, **told, "ratios": _ratios(told)}


def _ratios(told: dict[str, Any]) -> dict[str, Any]:
    pipelined, whole = (told[mode] for mode in MODES)
    others = [each["others_p90_s"] for each in (pipelined, whole)]
    return {
        "ttft": round(pipelined["ttft_s"] / whole["ttft_s"], 3),
        "others_p90": round(others[0] / others[1], 3) if all(others) else None,
        "goals": GOALS,
    }


def _p90(values: list[float]) -> float:
    return quantiles(values, n=10)[8] if len(values) > 1 else values[0]


def open_engine(
    mode: str, model: str, directory: Path, options: argparse.Namespace, stack: ExitStack
) -> Engine:
    """With memory for two conversations, and a disk for all."""
    spec = open_checkpoint(model).spec()
    token_bytes = spec.kv_spec(spec.choose_dtype("auto")).token_bytes
    beside = options.others * (OTHERS_TOKENS + 100)
    (directory / mode).mkdir(mode=0o700)
    llm = LLM(
        model,
        kv_memory_gb=(2 * options.history + beside) * token_bytes / 1e9,
        max_num_sequences=max(4, options.others + 2),
        prefix_cache="on",
        swap_threshold=1.0,
        cache_disk=str(directory / mode),
        cache_disk_gb=3 * NUM_CONVERSATIONS * options.history * token_bytes / 1e9,
        cache_restore=mode,
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
    parser.add_argument("--between", type=float, default=0.3, help="seconds before a turn")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(dir=options.disk))
        model = options.model
        if model is None:
            model = str(Path(place) / "model")
            Path(model).mkdir()
            make_checkpoint(Path(model), MODELS["gqa100m"])
        engines = {mode: open_engine(mode, model, Path(place), options, stack) for mode in MODES}
        found = measure(options, engines)
    told = {name: str(value) for name, value in vars(options).items()}
    keep({**provenance(), "options": told, **found}, options.out)


if __name__ == "__main__":
    main()

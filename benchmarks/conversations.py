"""Conversations on a live engine: with kept KV blocks, and without.

    python benchmarks/conversations.py --disk DIR --out benchmarks/results/conversations.json
    python benchmarks/conversations.py --conversations 6 --shrink 16 --kv-memory-gb 0.2   # small

The first takes some six minutes on two threads of one core, if nobody else
does anything.

A Llama-shaped random checkpoint of 100 M parameters (or ``--model DIR``) in
bfloat16, greedy, EOS ignored, all cores. The trace is seeded, in ShareGPT's or
UltraChat's shape (``conversation_traces``): conversations arrive as a Poisson
process, a turn an exponential think time after the answer before it, and brings
its new tokens behind all that was said (``conversation_id``).

Every mode runs in a process of its own, on the same trace. First all arrives at
once, to find the requests a second that an engine can do (**peak**; the last
turns run alone, so it is counted until nine tenths of all are done). Then turns
of the first ``--paced`` conversations arrive at a share of what the engine
without a cache can do (**paced**), and latency per output token is told, as
Pensieve counts it: from a turn's arrival to its end, over the tokens drawn.
Modes: ``off``, ``on`` with all KV in DRAM, with ``--quarter`` ``on`` with a
quarter of the memory that all conversations need, and with ``--disk DIR`` the
same beside a disk that holds all of them; the latter two only at once.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from conversation_traces import SHAPES, PlannedConversation, PlannedTurn, conversations, means
from end_to_end import MODELS, VOCAB
from provenance import keep, provenance

MAX_CONTEXT = 16_384
MANY = 10_000
"""So many conversations have the shape's means within 2%."""


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
    """Has an engine answer conversations as they come.

    Args:
        llm: with room for all that come at once in its queue.
        planned: what comes.
        speed: arrivals and think times are divided by it; 0: nobody waits.
    """

    def __init__(self, llm: Any, planned: list[PlannedConversation], speed: float) -> None:
        from fastdecode.core.delta import DeltaQueue

        self._llm = llm
        self._speed = speed
        self._queue = DeltaQueue(every_step=False)
        self._rng = random.Random(3)
        self._due: list[tuple[float, int]] = []
        self._left: list[list[PlannedTurn]] = [list(each.turns) for each in planned]
        self._histories: list[list[int]] = [[] for _ in planned]
        self._arrived_s: dict[int, float] = {}
        self.played = Played()
        self.began_s = time.perf_counter()
        for number, each in enumerate(planned):
            heapq.heappush(self._due, (self._after(self.began_s, each.begins_s), number))

    def play(self) -> Played:
        """All of it."""
        while self._due or self._arrived_s:
            self._submit_due()
            wait_s = self._due[0][0] - time.perf_counter() if self._due else None
            for delta in self._llm.service.take(self._queue, wait_s and max(1e-4, wait_s)):
                if delta.error is not None:
                    raise delta.error
                self._end(int(delta.request_id.split(".")[0]), delta.token_ids)
        return self.played

    def _after(self, now_s: float, planned_s: float) -> float:
        return now_s + (planned_s / self._speed if self._speed else 0.0)

    def _submit_due(self) -> None:
        from fastdecode.core.sequence import CacheUse, Request, SamplingParams

        now_s, requests = time.perf_counter(), []
        while self._due and self._due[0][0] <= now_s:
            due_s, number = heapq.heappop(self._due)
            turn, history = self._left[number][0], self._histories[number]
            past = max(0, len(history) - 1)
            history += [self._rng.randrange(3, VOCAB) for _ in range(turn.num_new)]
            params = SamplingParams(temperature=0, max_tokens=turn.num_drawn, ignore_eos=True)
            name = f"{number}.{len(self._left[number])}"
            cache = CacheUse(turn=past)
            prompt = tuple(history)
            requests.append(Request(name, prompt, params, turn.num_drawn, 0, cache=cache))
            self._arrived_s[number] = due_s
        if requests:
            self._llm.service.submit(requests, self._queue)

    def _end(self, number: int, token_ids: tuple[int, ...]) -> None:
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


def plan(options: argparse.Namespace) -> list[PlannedConversation]:
    """The trace: lengths are divided by ``--shrink``."""
    shape = options.shape, options.conversations, options.rate, options.think, MAX_CONTEXT
    planned = conversations(*shape, random.Random(options.seed))
    return [
        PlannedConversation(
            each.name,
            each.begins_s,
            tuple(
                PlannedTurn(
                    max(1, turn.num_new // options.shrink),
                    max(1, turn.num_drawn // options.shrink),
                    turn.think_s,
                )
                for turn in each.turns
            ),
        )
        for each in planned
    ]


def run(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """One mode, in this process."""
    with tempfile.TemporaryDirectory(dir=options.disk) as directory:
        return _run(mode, options, directory)


def _disk(
    mode: str, options: argparse.Namespace, directory: str, num_tokens: int
) -> dict[str, Any]:
    """Options for a disk that has room for all; none, where there is to be none."""
    if mode != "disk":
        return {}
    gigabytes = 1.5 * num_tokens * _token_bytes(options) / 1e9 + 0.1
    return {"cache_disk": directory, "cache_disk_gb": gigabytes}


def _run(mode: str, options: argparse.Namespace, directory: str) -> dict[str, Any]:
    from fastdecode import LLM, SamplingParams

    planned = plan(options)[: options.paced if options.speed else None]
    num_tokens = sum(turn.num_new + turn.num_drawn for each in planned for turn in each.turns)
    with LLM(
        options.model,
        kv_memory_gb=options.kv_memory_gb,
        max_num_sequences=128,
        prefix_cache="off" if mode == "off" else "on",
        cache_policy=options.cache_policy,
        **_disk(mode, options, directory, num_tokens),
    ) as llm:
        warm = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.generate([[5] * 300, [7] * 20], warm)  # compilers do their work
        before = llm.stats.num_prompt_tokens, llm.stats.num_cached_prompt_tokens
        player = Player(llm, planned, options.speed)
        told = player.play().told(player.began_s)
        ran = llm.stats.num_prompt_tokens - before[0]
        cached = llm.stats.num_cached_prompt_tokens - before[1]
        tiers = asdict(llm.stats.tiers)
    return {
        **told,
        **({"tiers": tiers} if mode == "disk" else {}),
        "prompt_tokens_run": ran,
        "prompt_tokens_cached": cached,
        "cached_share": round(cached / max(1, ran + cached), 4),
        "tokens_of_all": num_tokens,
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a mode and pace."""
    spec_gb = _quarter_gb(options)
    rows: list[dict[str, Any]] = []

    def ask(mode: str, pace: str, speed: float, *more: str) -> dict[str, Any]:
        line = [sys.executable, __file__, *sys.argv[1:], "--model", options.model]
        line += ["--one", mode, "--speed", str(speed), *more]
        done = subprocess.run(line, check=True, stdout=subprocess.PIPE)
        row: dict[str, Any] = {"mode": mode, "pace": pace, **json.loads(done.stdout)}
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
        return row

    modes = ["off", "on"] + ["quarter"] * options.quarter + ["disk"] * bool(options.disk)
    quarter = ("--kv-memory-gb", str(spec_gb))
    more = {"quarter": quarter, "disk": quarter}
    for mode in modes:
        ask(mode, "peak", 0.0, *more.get(mode, ()))
    speed = options.share * rows[0]["requests_per_s"] / offered(plan(options)[: options.paced])
    for mode in ("off", "on"):
        ask(mode, "paced", speed)
    return rows


def offered(planned: list[PlannedConversation]) -> float:
    """Turns a second that come if every answer is there at once; the first and
    last tenth of them, while fewer conversations are under way, aside."""
    times: list[float] = []
    for each in planned:
        thoughts = itertools.accumulate(turn.think_s for turn in each.turns)
        times += [each.begins_s + thought_s for thought_s in thoughts]
    times.sort()
    tenth = len(times) // 10
    return (len(times) - 2 * tenth - 1) / (times[len(times) - 1 - tenth] - times[tenth])


def _quarter_gb(options: argparse.Namespace) -> float:
    """A quarter of what all conversations come to; of few short ones what the
    longest needs."""
    tokens = [sum(x.num_new + x.num_drawn for x in each.turns) for each in plan(options)]
    most = max(sum(tokens) / 4, 1.25 * max(tokens) + 256)
    return most * _token_bytes(options) / 1e9


def _token_bytes(options: argparse.Namespace) -> int:
    from fastdecode.core.model.checkpoint import open_checkpoint

    spec = open_checkpoint(options.model).spec()
    return spec.kv_spec(spec.choose_dtype("auto")).token_bytes


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """With the cache to without: requests a second, and p90 of the latency."""
    found = {(row["mode"], row["pace"]): row for row in rows}
    told = {}
    for mode in sorted({row["mode"] for row in rows} - {"off"}):
        peaks = [found[each, "peak"]["requests_per_s"] for each in (mode, "off")]
        told[mode] = {"requests_per_s": round(peaks[0] / peaks[1], 3)}
        if (mode, "paced") in found:
            paced = (found[each, "paced"]["latency_per_token_ms"] for each in (mode, "off"))
            slow = [each.get("p90") for each in paced]
            told[mode]["p90_latency"] = round(slow[0] / slow[1], 3) if all(slow) else None
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model directory; default: 100 M random parameters")
    parser.add_argument("--shape", default="sharegpt", choices=SHAPES)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--paced", type=int, default=24, help="of them, those that are paced")
    parser.add_argument("--rate", type=float, default=0.5, help="conversations a second")
    parser.add_argument("--think", type=float, default=10.0, help="seconds, on average")
    parser.add_argument("--share", type=float, default=0.9, help="of the peak without a cache")
    parser.add_argument("--shrink", type=int, default=1, help="lengths are divided by this")
    parser.add_argument("--kv-memory-gb", type=float, default=4.0)
    parser.add_argument("--quarter", action="store_true", help="also with a quarter of the memory")
    parser.add_argument("--disk", help="a directory: also with a quarter, and a disk for the rest")
    parser.add_argument("--cache-policy", default="retention")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--speed", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one, options)))
        return
    many = conversations(
        options.shape, MANY, 1.0, options.think, MAX_CONTEXT, random.Random(options.seed)
    )
    for mean, wanted in zip(means(many), SHAPES[options.shape], strict=True):
        assert abs(mean / wanted - 1) < 0.02, f"the trace's mean is {mean}, not {wanted}"
    with tempfile.TemporaryDirectory() as directory:
        if options.model is None:
            from random_llama import llama_config, write_checkpoint

            shape = {**MODELS["gqa100m"], "max_position_embeddings": MAX_CONTEXT + 1}
            write_checkpoint(Path(directory), llama_config(vocab_size=VOCAB, **shape), "gqa100m")
            options.model = directory
        rows = measure(options)
    told = {**provenance(), "options": vars(options) | {"out": None}, "verdict": verdict(rows)}
    print(json.dumps(told["verdict"]), file=sys.stderr)
    keep({**told, "rows": rows}, options.out)


if __name__ == "__main__":
    main()

"""Conversations on a live engine: with kept KV blocks, and without.

    python benchmarks/conversations.py --disk DIR --out benchmarks/results/conversations.json
    python benchmarks/conversations.py --conversations 6 --shrink 16 --kv-memory-gb 0.2   # small
    python benchmarks/conversations.py --think reading --kv-placement gpu   # Pensieve's
    python benchmarks/conversations.py --think reading --turns turns.jsonl  # for the simulator:
    fastdecode simulate --instant --trace turns.jsonl --kv-tokens 40000 --lower-kv-tokens 220000

The first takes some fifteen minutes on two cores, if nothing else runs.

A Llama-shaped random checkpoint of 100 M parameters (or ``--model DIR``) in
bfloat16, greedy, EOS ignored, all cores. The trace is seeded, in ShareGPT's or
UltraChat's shape (``conversation_traces``): conversations arrive as a Poisson
process, a turn an exponential think time after the answer before it (``--think
reading``: max(5 s, 0.1 s a token of that answer)), and brings its new tokens behind
all that was said (``conversation_id``).

Every mode runs in a process of its own, on the same trace. First all arrives at
once, to find the requests a second that an engine can do (**peak**; the last
turns run alone, so it is counted until nine tenths of all are done). A turn waits
for the one before it, so that takes many conversations: of 40 a step draws 14
tokens on average until then, of 120 it draws 39 (``drawn_per_step`` is that of the
whole run), and weights are read for each step. Then turns
of the first ``--paced`` conversations arrive at a share of what the engine
without a cache can do (**paced**), and latency per output token is told, as
Pensieve counts it: from a turn's arrival to its end, over the tokens drawn.
Modes: ``off``, ``on`` with all KV in DRAM, with ``--quarter`` ``on`` with a
quarter of the memory that all conversations need, and with ``--disk DIR`` the
same beside a disk that holds all of them; the latter two only at once. What is
paced comes at ``--share`` of what the slowest of the others could do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from conversation_player import Asked, Player
from conversation_traces import (
    SHAPES,
    PlannedConversation,
    PlannedTurn,
    conversations,
    means,
    turn_lines,
)
from end_to_end import MODELS, VOCAB
from provenance import keep, provenance

MAX_CONTEXT = 16_384
MAX_SEQUENCES = 128
MANY = 10_000
"""So many conversations have the shape's means within 2%."""


class OurEngine:
    """FastDecode, as the player asks it.

    Args:
        llm: with room for all that come at once in its queue.
    """

    def __init__(self, llm: Any) -> None:
        from fastdecode.core.delta import DeltaQueue

        self._llm = llm
        self._queue = DeltaQueue(every_step=False)

    def submit(self, asked: list[Asked]) -> None:
        from fastdecode.core.sequence import CacheUse, Request, SamplingParams

        requests = []
        for each in asked:
            params = SamplingParams(temperature=0, max_tokens=each.num_drawn, ignore_eos=True)
            name = f"{each.conversation}.{each.turn}"
            cache = CacheUse(turn=each.num_past)
            requests.append(Request(name, each.prompt, params, each.num_drawn, 0, cache=cache))
        self._llm.service.submit(requests, self._queue)

    def take(self, wait_s: float | None) -> Iterator[tuple[int, Sequence[int]]]:
        for delta in self._llm.service.take(self._queue, wait_s):
            if delta.error is not None:
                raise delta.error
            yield int(delta.request_id.split(".")[0]), delta.token_ids


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
    turns = [turn for each in planned for turn in each.turns]
    num_drawn = sum(turn.num_drawn for turn in turns)
    num_tokens = sum(turn.num_new for turn in turns) + num_drawn
    with LLM(
        options.model,
        kv_memory_gb=options.kv_memory_gb,
        max_num_sequences=MAX_SEQUENCES,
        prefix_cache="off" if mode == "off" else "on",
        kv_placement=options.kv_placement,
        **_disk(mode, options, directory, num_tokens),
    ) as llm:
        warm = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.generate([[5] * 300, [7] * 20], warm)  # compilers do their work
        before = llm.stats.num_prompt_tokens, llm.stats.num_cached_prompt_tokens
        num_steps = llm.stats.num_steps
        told = Player(OurEngine(llm), planned, options.speed, VOCAB).play()
        ran = llm.stats.num_prompt_tokens - before[0]
        cached = llm.stats.num_cached_prompt_tokens - before[1]
        tiers = asdict(llm.stats.tiers)
        drawn_per_step = num_drawn / (llm.stats.num_steps - num_steps)
    return {
        **told,
        "drawn_per_step": round(drawn_per_step, 1),
        **({"tiers": tiers} if mode == "disk" else {}),
        "prompt_tokens_run": ran,
        "prompt_tokens_cached": cached,
        "cached_share": round(cached / max(1, ran + cached), 4),
        "tokens_of_all": num_tokens,
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a mode, pace and round. All rounds' peaks come first, the modes in
    another order every time."""
    quarter = ("--kv-memory-gb", str(_quarter_gb(options)))
    more = {"quarter": quarter, "disk": quarter}
    modes = [*options.modes] + ["quarter"] * options.quarter + ["disk"] * bool(options.disk)
    rows: list[dict[str, Any]] = []

    def ask(mode: str, pace: str, number: int, speed: float, *others: str) -> None:
        line = [sys.executable, __file__, *sys.argv[1:], "--model", options.model]
        line += ["--one", mode, "--speed", str(speed), *others]
        told = json.loads(subprocess.run(line, check=True, stdout=subprocess.PIPE).stdout)
        rows.append({"mode": mode, "pace": pace, "round": number, **told})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)

    for number in range(options.rounds):
        for mode in modes if number % 2 == 0 else modes[::-1]:
            ask(mode, "peak", number, 0.0, *more.get(mode, ()))
    if not options.paced:
        return rows
    whole = [mode for mode in modes if mode not in more]
    slowest = min(_peaks(rows, mode) for mode in whole)
    speed = options.share * slowest / offered(plan(options)[: options.paced])
    for number in range(options.rounds):
        for mode in whole if number % 2 == 0 else whole[::-1]:
            ask(mode, "paced", number, speed)
    return rows


def _peaks(rows: list[dict[str, Any]], mode: str) -> float:
    """Requests a second of a mode, the median of its rounds."""
    found = [row for row in rows if (row["mode"], row["pace"]) == (mode, "peak")]
    return median(row["requests_per_s"] for row in found)


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
    """Of modes beside each other: requests a second, and p90 of the latency;
    medians of the rounds' ratios."""
    modes = {row["mode"] for row in rows}
    pairs = [(mode, "off") for mode in ("on", "quarter", "disk")]
    told = {}
    for mode, other in [pair for pair in pairs if modes.issuperset(pair)]:
        peaks = _ratios(rows, mode, other, "peak", lambda row: row["requests_per_s"])
        p90s = _ratios(rows, mode, other, "paced", lambda row: row["latency_per_token_ms"]["p90"])
        told[f"{mode} to {other}"] = {
            "requests_per_s": round(median(peaks), 3),
            **({"p90_latency": round(median(p90s), 3)} if p90s else {}),
        }
    return told


def _ratios(
    rows: list[dict[str, Any]], mode: str, other: str, pace: str, of: Callable[[Any], float]
) -> list[float]:
    """Of the same rounds."""
    found = {(row["mode"], row["round"]): row for row in rows if row["pace"] == pace}
    rounds = sorted(number for name, number in found if name == mode)
    pairs = [(found[mode, number], found.get((other, number))) for number in rounds]
    return [of(one) / of(two) for one, two in pairs if two is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model directory; default: 100 M random parameters")
    parser.add_argument("--shape", default="sharegpt", choices=SHAPES)
    parser.add_argument("--conversations", type=int, default=120)
    parser.add_argument("--paced", type=int, default=24, help="of them, those that are paced")
    parser.add_argument("--rate", type=float, default=0.5, help="conversations a second")
    parser.add_argument(
        "--think",
        type=lambda text: None if text == "reading" else float(text),
        default=10.0,
        help="seconds, on average; reading: as long as reading the answer takes",
    )
    parser.add_argument("--kv-placement", default="auto", help="of the engine; gpu: KV there alone")
    parser.add_argument("--turns", type=Path, help="write the trace there, and play nothing")
    parser.add_argument("--share", type=float, default=0.9, help="of the peak without a cache")
    parser.add_argument("--shrink", type=int, default=1, help="lengths are divided by this")
    parser.add_argument("--kv-memory-gb", type=float, default=4.0)
    parser.add_argument("--quarter", action="store_true", help="also with a quarter of the memory")
    parser.add_argument(
        "--modes", nargs="*", default=["off", "on"], choices=("off", "on"), help="beside the others"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--disk", help="a directory: also with a quarter, and a disk for the rest")
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
    if options.turns is not None:
        options.turns.write_text(
            "".join(f"{line}\n" for line in turn_lines(plan(options))), "utf-8"
        )
        return
    model = options.model
    with tempfile.TemporaryDirectory() as directory:
        if options.model is None:
            from random_llama import llama_config, write_checkpoint

            shape = {**MODELS["gqa100m"], "max_position_embeddings": MAX_CONTEXT + 1}
            write_checkpoint(Path(directory), llama_config(vocab_size=VOCAB, **shape), "gqa100m")
            options.model = directory
        rows = measure(options)
    asked = vars(options) | {"out": None, "model": model}
    told = {**provenance(), "options": asked, "verdict": verdict(rows)}
    print(json.dumps(told["verdict"]), file=sys.stderr)
    keep({**told, "rows": rows}, options.out)


if __name__ == "__main__":
    main()

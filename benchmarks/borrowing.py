"""How fast an instance borrows blocks that another keeps, against running their tokens again.

    python benchmarks/borrowing.py --out benchmarks/results/borrowing.json

A Llama-shaped random checkpoint of 32 M parameters (or ``--model DIR``), greedy. A prefill
and a decode instance, processes on a core each, share those with the controller and the
client (this process). The decode instance answers with ``--lengths`` tokens; then comes the
conversation's next turn, of ``--new`` tokens, whose prompt the prefill instance runs: it
**borrows** the blocks of the answer by their keys. In turns with that, prompts as long of
tokens that nobody keeps, which it **runs**. Each is alone.

``borrow_s``: from when the R-worker was asked to fetch the blocks until they were there, and
``bytes_per_s`` of K and V in it. ``first_s``: from the request's coming to its only token.
``ratio``: that of the turn that borrows over that of the prompt that is run. ``run``: tokens of
prompts that the prefill instance ran for a turn that borrows.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from end_to_end import VOCAB
from provenance import keep, provenance
from r_worker_processes import add_model_options, model_or_random, pinned_instances

from fastdecode import LLM, SamplingParams

TIMEOUT_S = 30.0
NUM_FIRST = 16
"""Tokens of a conversation's first prompt."""


class Client:
    """Asks one thing after another.

    Args:
        llm: with a prefill and a decode instance.
        seed: of prompts.
    """

    def __init__(self, llm: LLM, seed: int) -> None:
        self._llm = llm
        self._chance = random.Random(seed)

    def converse(self, name: str, length: int) -> None:
        """A first turn, whose answer has so many tokens."""
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        (output,) = self._llm.generate([self._tokens(NUM_FIRST)], params, conversation_id=[name])
        assert output.ok, output
        self._settle()

    def ask(self, num_tokens: int, **more: Any) -> dict[str, float]:
        """A prompt, and one token of its answer. What the prefill instance did for it."""
        before = self._settle()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        prompt, began_s = self._tokens(num_tokens), time.perf_counter()
        (output,) = self._llm.generate([prompt], params, **more)
        first_s = time.perf_counter() - began_s
        assert output.ok, output
        after = self._settle()
        return {"first_s": first_s, **{x: after[x] - before[x] for x in after}}

    def _tokens(self, number: int) -> list[int]:
        return [self._chance.randrange(5, VOCAB - 5) for _ in range(number)]

    def _settle(self) -> dict[str, float]:
        """The prefill instance's totals, once it reports the same ones again."""
        end_s, seen = time.monotonic() + TIMEOUT_S, None
        while time.monotonic() < end_s:
            stats = self._llm._running.engine.remote[0].stats
            totals = {
                "run": stats.num_prompt_tokens,
                "borrowed_bytes": stats.fetched_bytes,
                "borrow_s": stats.fetch_s,
            }
            if totals == seen:
                return totals
            seen = totals
            time.sleep(1.5)  # a report a second
        raise AssertionError("the prefill instance never comes to rest")


def row(length: int, turns: list[dict[str, float]], runs: list[dict[str, float]]) -> dict[str, Any]:
    of_turns = {name: median(each[name] for each in turns) for name in turns[0]}
    again_s = median(each["first_s"] for each in runs)
    return {
        "tokens": length,
        **of_turns,
        "bytes_per_s": median(each["borrowed_bytes"] / each["borrow_s"] for each in turns),
        "first_run_s": again_s,
        "ratio": of_turns["first_s"] / again_s,
    }


def measure(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    engine = ("--prefix-cache", "on", "--kv-memory-gb", "0.6")
    with (
        pinned_instances(model, ("prefill", "decode"), *engine) as processes,
        LLM(model, instances=list(processes)) as llm,
    ):
        client = Client(llm, options.seed)
        for length in options.lengths:
            turns, runs = [], []
            for number in range(options.rounds + 1):  # the first one compiles
                name = f"{length}-{number}"
                client.converse(name, length)
                turns.append(client.ask(options.new, conversation_id=[name]))
                runs.append(client.ask(NUM_FIRST + length + options.new))
                print(length, turns[-1], runs[-1], file=sys.stderr)
            rows.append(row(length, turns[1:], runs[1:]))
            print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = model_or_random(options.model, options.shape, directory)
        chosen = {name: value for name, value in vars(options).items() if name != "out"}
        result = {**provenance(), "options": chosen, "rows": measure(model, options)}
    keep(result, options.out)


if __name__ == "__main__":
    main()

"""How long sequences stand still when their R-worker is killed: with replicas,
in memory and on disk, and where they are recomputed; beside a run in which nothing happens.

    python benchmarks/failover.py --out benchmarks/results/failover.json

A Llama-shaped random checkpoint of 32 M parameters (or ``--model DIR``), float32,
greedy, three R-workers of one thread each at addresses of this host, one
sequence each. A prompt is run in one chunk, and so is what is recomputed, or the
first sequence would end before the last begins. When each has ``--at`` tokens,
an R-worker that the seed chooses is killed (SIGKILL), but for ``undisturbed``.
The ways take turns, and each round has a seed of its own: ``--seed``, and those behind it.

The **stall** is the longest time between two tokens of any sequence that comes
after the kill; ``usual_s`` is the median between two tokens. With replicas it is
split: until the loss was noticed (``notice_s``), until no step was in flight
(``drain_s``), until the neighbour had taken over (``resume_s``), and the rest:
the step that follows, in which what had not arrived is run again. ``timeline``
has the tokens of each tenth of a second, from the first token on, of the first
round's run; ``killed_at_s`` says when.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from end_to_end import VOCAB
from provenance import keep, provenance
from r_worker_processes import add_model_options, model_or_random, r_workers

NUM_WORKERS = 3
TENTHS = 10


@dataclass(frozen=True)
class Way:
    """How a run is made."""

    name: str
    replicas: int
    kills: bool
    store: str = "memory"


WAYS = (
    Way("recomputed", 0, True),
    Way("replicas", 1, True),
    Way("replicas on disk", 1, True, "disk"),
    Way("undisturbed", 0, False),
)


class Run:
    """One job, in this process, with one kill at most.

    Args:
        model: its directory.
        context: tokens of every prompt.
        way: how it is made.
        seed: of the prompts, and of who is killed.
        options: of this program.
    """

    def __init__(
        self, model: str, context: int, way: Way, seed: int, options: argparse.Namespace
    ) -> None:
        self._options = options
        chance = random.Random(seed)
        self._prompts = [
            [chance.randrange(3, VOCAB) for _ in range(context)] for _ in range(options.sequences)
        ]
        self._victim = chance.randrange(NUM_WORKERS)
        self._times: dict[str, list[float]] = {}
        self._at_s = 0.0
        self._way = way
        self._run(model)

    def _run(self, model: str) -> None:
        from fastdecode import LLM, SamplingParams
        from fastdecode.core.sequence import PromptRequest

        options = self._options
        params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
        asked = [PromptRequest(str(i), ids, params) for i, ids in enumerate(self._prompts)]
        self._times = {request.request_id: [] for request in asked}
        with (
            tempfile.TemporaryDirectory(dir=options.disk) as disk,
            r_workers(NUM_WORKERS, options.kv_memory_gb, *_disk(self._way, disk)) as workers,
            LLM(
                model,
                r_worker_addresses=workers.addresses,
                dtype="float32",
                lanes=1,
                prefill_chunk=len(self._prompts[0]) + options.tokens,
                replicas="disk" if self._way.store == "disk" else self._way.replicas,
                prefix_cache="off",
            ) as llm,
        ):
            for delta in llm.deltas(asked):
                self._times[delta.request_id] += [time.monotonic()] * len(delta.token_ids)
                if not self._at_s and min(map(len, self._times.values())) >= options.at:
                    if self._way.kills:
                        workers.processes[self._victim].send_signal(signal.SIGKILL)
                    self._at_s = time.monotonic()
            self._stats = llm.stats

    def found(self) -> dict[str, float]:
        """What came of it."""
        gaps = [
            (after - before, after > self._at_s)
            for each in self._times.values()
            for before, after in itertools.pairwise(each)
        ]
        stall_s = max(gap for gap, is_after in gaps if is_after)
        found = {
            "stall_s": stall_s,
            "usual_s": median(gap for gap, is_after in gaps if not is_after),
            "sequences_recomputed": float(self._stats.num_recomputed),
        }
        if self._stats.replicas is not None:
            (failover,) = self._stats.replicas.failovers
            notice_s = failover.noticed_s - self._at_s
            found |= {
                "notice_s": notice_s,
                "drain_s": failover.drain_s,
                "resume_s": failover.resume_s,
                "rest_s": stall_s - notice_s - failover.drain_s - failover.resume_s,
                "tokens_run_again": float(self._stats.resumed.num_tokens_lost),
            }
        return found

    def timeline(self) -> dict[str, Any]:
        """Tokens of each tenth of a second."""
        every = sorted(itertools.chain.from_iterable(self._times.values()))
        counts = Counter(int(TENTHS * (each - every[0])) for each in every)
        return {
            "killed_at_s": self._at_s - every[0] if self._way.kills else None,
            "tokens": [counts[tenth] for tenth in range(max(counts) + 1)],
        }


def _disk(way: Way, directory: str) -> list[str]:
    """What R-workers are given for replicas in files."""
    is_used = way.store == "disk"
    return ["--cache-disk", directory, "--cache-disk-gb", "0.1"] if is_used else []


def measure(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a context and way: medians over the rounds."""
    rows = []
    for context in options.contexts:
        found: dict[Way, list[dict[str, float]]] = {way: [] for way in WAYS}
        timelines = {}
        for number in range(options.rounds):
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                run = Run(model, context, way, options.seed + number, options)
                timelines.setdefault(way, run.timeline())
                found[way].append(run.found())
                print(context, way.name, json.dumps(found[way][-1]), file=sys.stderr)
        for way, runs in found.items():
            medians = {name: median(run[name] for run in runs) for name in runs[0]}
            row = {"context": context, "way": way.name, "replicas": way.replicas, **medians}
            rows.append({**row, "runs": runs, "timeline": timelines[way]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--sequences", type=int, default=3)
    parser.add_argument("--at", type=int, default=12, help="tokens of each, before the kill")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--kv-memory-gb", type=float, default=1.0)
    parser.add_argument("--disk", type=Path, help="directory for replicas in files")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = model_or_random(options.model, options.shape, directory)
        result = {**provenance(), "rows": measure(model, options)}
    keep(result, options.out)


if __name__ == "__main__":
    main()

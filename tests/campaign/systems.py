"""The papers' whole systems, whose R-workers are killed at random moments of
conversations.

    python tests/campaign/systems.py --each 40 --minutes 20 \\
        --out benchmarks/results/campaign_systems.json

Each system is one configuration. Its R-workers are processes at addresses. One of them
is killed (SIGKILL) a random while after a round of turns began, and another comes at
its address. Turns, greedy and sampled, must equal the turns of an undisturbed engine of
the same numbers without caches, stages or replicas. Hybrid KV is in float32 here: with
int8, devices and R-workers round differently, so tokens depend on the side. Counted are
turns that **failed** or were **changed**, rounds that **hung**, and KV blocks that are
**kept** afterwards though no request wants them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from inherited_signals import hear_interrupts  # noqa: E402
from mpi_launch import Running, running  # noqa: E402
from provenance import provenance  # noqa: E402
from random_llama import llama_config, write_checkpoint  # noqa: E402
from small_jobs import FASTDECODE, LIMIT_S, PATHS, SHAPE, address_of  # noqa: E402

from fastdecode import LLM, SamplingParams  # noqa: E402
from fastdecode.schedule.hybrid.forecast import Costs, Course, Known, Layout  # noqa: E402
from fastdecode.schedule.hybrid.rule import Margins  # noqa: E402
from fastdecode.schedule.times import MeasuredTimes  # noqa: E402

SILENCE_S = 2.0
BLOWS_AN_ENGINE = 4
"""R-workers that are lost again and again are asked back ever less often."""
NUM_CONVERSATIONS, NUM_TURNS, NUM_NEW, NUM_DRAWN = 6, 3, 20, 40
COMMON: dict[str, Any] = {"dtype": "float32", "block_size": 16, "max_num_sequences": 8}
SYSTEMS: dict[str, dict[str, Any]] = {
    "DejaVu": {"pp": 2, "prompt_pp": 1, "replicas": 1},
    "Pensieve + DejaVu": {"prefix_cache": "on", "replicas": 1},
    "hybrid, cache, replicas": {
        "kv_placement": "hybrid", "device_kv_gb": 0.001, "prefix_cache": "on", "replicas": 1,
    },
    "FastDecode's schedule on prompt stages": {
        "prompt_pp": 1, "schedule": "stabilized",
    },
}  # fmt: skip
ON_DISK = ("Pensieve + DejaVu",)
"""Their R-workers keep blocks on disk, and have memory for few."""
BAD = ("hung", "failed", "changed", "kept")
NUM_R_WORKERS = {"DejaVu": 4}
"""Two of each stage; else three."""


def talk(llm: LLM, name: str) -> list[tuple[int, ...] | None]:
    """Tokens of all turns of new conversations; None: the turn failed."""
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=NUM_DRAWN, ignore_eos=True)
        for i in range(NUM_CONVERSATIONS)
    ]
    names = [f"{name}-{i}" for i in range(NUM_CONVERSATIONS)]
    said: list[tuple[int, ...] | None] = []
    for turn in range(NUM_TURNS):
        prompts = [
            [(11 * i + 5 * turn + 3 * j) % 500 + 1 for j in range(NUM_NEW)]
            for i in range(NUM_CONVERSATIONS)
        ]
        outputs = llm.generate(prompts, params, conversation_id=names)
        said += [each.completions[0].token_ids if each.ok else None for each in outputs]
    return said


class Rack:
    """R-workers' processes, and others that come at the addresses of the killed.

    Args:
        number: of R-workers.
        more: options of each.
    """

    def __init__(self, number: int, more: list[str]) -> None:
        self._more = more
        self._stack = contextlib.ExitStack()
        self.workers = [self._start("tcp://127.0.0.1:*") for _ in range(number)]
        self.addresses = [address_of(worker) for worker in self.workers]

    def kill(self, place: int) -> None:
        """One, and have another at its address."""
        self.workers[place].process.kill()
        self.workers[place].wait(LIMIT_S)
        self.workers[place] = self._start(self.addresses[place])

    def close(self) -> None:
        self._stack.close()

    def _start(self, address: str) -> Running:
        words = [*FASTDECODE, "r-worker", "--threads", "1", "--bind", address, *self._more]
        words += ["--silence-s", str(SILENCE_S), "--return-s", "10"]
        return self._stack.enter_context(running(words, **PATHS))


class Systems:
    """Runs them.

    Args:
        directory: for the model, and what R-workers keep on disk.
        chance: the moments' seed.
    """

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self._directory = directory
        self._chance = chance
        self._model = directory / "model"
        self._model.mkdir()
        write_checkpoint(self._model, llama_config(**SHAPE, max_position_embeddings=2048), "random")
        with LLM(str(self._model), **COMMON, kv_memory_gb=0.02) as llm:
            self._undisturbed = talk(llm, "plain")

    def run(self, system: str, number: int) -> Counter[str]:
        """Of one system so many blows, with an engine for a few of them each."""
        counts: Counter[str] = Counter()
        while counts["blows"] < number and not counts["hung"]:
            most = min(BLOWS_AN_ENGINE, number - counts["blows"])
            self._run_engine(system, most, counts)
        return counts

    def _run_engine(self, system: str, number: int, counts: Counter[str]) -> None:
        with self._rack(system) as rack, self._engine(system, rack) as llm:
            began_s = time.monotonic()
            self._compare(talk(llm, "quiet"), counts)
            length_s = time.monotonic() - began_s
            for blow in range(number):
                self._strike(llm, rack, f"b{blow}", length_s, counts)
            self._compare(talk(llm, "after"), counts)
            counts["resumed"] += llm.stats.resumed.num_sequences
            counts["recomputed"] += llm.stats.num_recomputed
            counts["kept"] += _blocks_in_use(llm)

    def _strike(
        self, llm: LLM, rack: Rack, name: str, length_s: float, counts: Counter[str]
    ) -> None:
        """A round of turns, in the middle of which an R-worker is killed."""
        said: list[list[tuple[int, ...] | None]] = []
        thread = threading.Thread(target=lambda: said.append(talk(llm, name)), daemon=True)
        thread.start()
        thread.join(self._chance.uniform(0, length_s))
        was_under_way = thread.is_alive()
        rack.kill(self._chance.randrange(len(rack.workers)))
        thread.join(LIMIT_S)
        if not said:
            counts["hung"] += 1
            return
        counts["blows"] += was_under_way
        counts["late"] += not was_under_way
        self._compare(said[0], counts)

    @contextlib.contextmanager
    def _rack(self, system: str) -> Iterator[Rack]:
        with tempfile.TemporaryDirectory(dir=self._directory) as directory:
            more = ["--kv-memory-gb", "0.02"]
            if system in ON_DISK:
                more = ["--kv-memory-gb", "0.006", "--cache-disk", f"{directory}/kept"]
                more += ["--cache-disk-gb", "0.05"]
            rack = Rack(NUM_R_WORKERS.get(system, 3), more)
            try:
                yield rack
            finally:
                rack.close()

    def _engine(self, system: str, rack: Rack) -> LLM:
        options = {**COMMON, **SYSTEMS[system], "worker_silence_s": SILENCE_S}
        is_hybrid = options.get("kv_placement") == "hybrid"
        llm = LLM(
            str(self._model), transport="zmq", r_worker_addresses=tuple(rack.addresses),
            **({"times": MeasuredTimes(min_observed=1)} if is_hybrid else {}), **options,
        )  # fmt: skip
        if is_hybrid:
            _keep_away(llm)
        return llm

    def _compare(self, said: list[tuple[int, ...] | None], counts: Counter[str]) -> None:
        for one, other in zip(said, self._undisturbed, strict=True):
            counts["failed" if one is None else "right" if one == other else "changed"] += 1


def _keep_away(llm: LLM) -> None:
    """Have what waits go to R-workers, as with many sequences and a real device."""

    def rule(known: Known, now: Course, costs: Costs, margins: Margins) -> Course:
        return Course(Layout.SPLIT_1, len(known.waiting), True)

    control = llm._running.engine._lifecycle.scheduler.hybrid
    control._options = replace(control._options, rule=rule)


def _blocks_in_use(llm: LLM) -> int:
    """KV blocks that R-workers reserve for requests, when there are none."""
    found: list[int] = []
    has_looked = threading.Event()

    def look(running: Any) -> None:
        workers = asdict(running.engine.figures())["r_workers"]
        found.append(sum(each["kv_blocks_used"] for each in workers if each["lost"] is None))
        has_looked.set()

    llm.service.look(look)
    assert has_looked.wait(LIMIT_S), "the engine's thread hangs"
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--each", type=int, default=40, help="blows of each system (default: 40)")
    parser.add_argument("--of", default="", help="systems whose names begin so")
    parser.add_argument("--minutes", type=float, default=60, help="begin nothing after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the counts")
    options = parser.parse_args()
    hear_interrupts()
    sys.exit(0 if run(options) else 1)


def run(options: argparse.Namespace) -> bool:
    """All systems in turns, a few blows each, until the time is over. Whether all went well."""
    end_s = time.monotonic() + 60 * options.minutes
    chosen = [name for name in SYSTEMS if name.startswith(options.of)]
    counts: dict[str, Counter[str]] = {name: Counter() for name in chosen}
    with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as directory:
        systems = Systems(Path(directory), random.Random(options.seed))
        left = dict.fromkeys(chosen, options.each)
        while time.monotonic() < end_s and any(number > 0 for number in left.values()):
            for name in (name for name in chosen if left[name] > 0):
                counts[name] += systems.run(name, min(left[name], BLOWS_AN_ENGINE))
                left[name] = options.each - counts[name]["blows"]
                print(name, dict(counts[name]), flush=True)
                _write(options, counts)
    return not any(each[what] for each in counts.values() for what in BAD)


def _write(options: argparse.Namespace, counts: dict[str, Counter[str]]) -> None:
    if options.out is not None:
        none = dict.fromkeys(BAD, 0)
        systems = {name: {**none, **found} for name, found in counts.items()}
        found = {**provenance(), "seed": options.seed, "systems": systems}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""R-workers at addresses, each with a disk, that are killed while conversations
go on: whoever comes in their place offers what the disk has.

One engine talks all the while. What it says is held against what it says
without a cache.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mpi_launch import Running, running
from random_llama import llama_config, write_checkpoint
from small_jobs import FASTDECODE, LIMIT_S, PATHS, SHAPE, address_of

from fastdecode import LLM, SamplingParams

NUM_R_WORKERS = 2
NUM_CONVERSATIONS, NUM_TURNS, NUM_NEW, NUM_DRAWN = 5, 4, 24, 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_DRAWN, ignore_eos=True)
SILENCE_S = 3.0
OPTIONS = {"dtype": "float32", "block_size": 16, "max_num_sequences": 4}


def talk(llm: LLM, name: str) -> list[tuple[int, ...] | None]:
    """Turns of all conversations; None: one has failed."""
    said: list[tuple[int, ...] | None] = []
    for turn in range(NUM_TURNS):
        prompts = [
            [(11 * i + 5 * turn + 3 * j) % 500 + 1 for j in range(NUM_NEW)]
            for i in range(NUM_CONVERSATIONS)
        ]
        names = [f"{name}-{i}" for i in range(NUM_CONVERSATIONS)]
        for output in llm.generate(prompts, GREEDY, conversation_id=names):
            said.append(output.completions[0].token_ids if output.ok else None)
    return said


def killed(number: int, chance: random.Random) -> Counter[str]:
    """R-workers that are killed so often, at random moments, and others that
    come in their place."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as place:
        model = Path(place) / "model"
        model.mkdir()
        config = llama_config(**SHAPE, max_position_embeddings=2048)
        write_checkpoint(model, config, "random")
        with LLM(str(model), **OPTIONS, prefix_cache="off", kv_memory_gb=0.02) as llm:
            began_s = time.monotonic()
            expected = talk(llm, "plain")
            plain_s = time.monotonic() - began_s
        with Rack(Path(place)) as rack, rack.engine(model) as llm:
            for kill in range(number):
                timer = threading.Timer(chance.uniform(0, 2 * plain_s), rack.replace, [chance])
                timer.start()
                said = talk(llm, f"k{kill}")
                timer.join(LIMIT_S)
                counts["kills"] += 1
                _compare(said, expected, counts)
            tiers = llm.stats.tiers
            for name in ("num_stored", "num_fetched", "num_found", "num_joined", "num_failed"):
                counts[name.removeprefix("num_")] += getattr(tiers, name)
    return counts


def _compare(
    said: list[tuple[int, ...] | None], expected: list[tuple[int, ...] | None], counts: Counter[str]
) -> None:
    for one, other in zip(said, expected, strict=True):
        counts["failed" if one is None else "right" if one == other else "changed"] += 1


class Rack:
    """R-workers' processes.

    Args:
        directory: for their disks.
    """

    def __init__(self, directory: Path) -> None:
        self._disk = directory / "kept"
        self._stack = contextlib.ExitStack()
        self._workers: list[Running] = []
        self._addresses: list[str] = []

    def __enter__(self) -> Rack:
        for _ in range(NUM_R_WORKERS):
            worker = self._start("tcp://127.0.0.1:*")
            self._workers.append(worker)
            self._addresses.append(address_of(worker))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def engine(self, model: Path) -> Iterator[LLM]:
        """That talks to them."""
        with LLM(
            str(model),
            **OPTIONS,
            transport="zmq",
            r_worker_addresses=tuple(self._addresses),
            swap_threshold=0.9,
            worker_silence_s=SILENCE_S,
        ) as llm:
            yield llm

    def replace(self, chance: random.Random) -> None:
        """One is killed, and another comes."""
        number = chance.randrange(NUM_R_WORKERS)
        self._workers[number].process.kill()
        self._workers[number] = self._start(self._addresses[number])

    def _start(self, address: str) -> Running:
        """With memory for few of the conversations' blocks."""
        words = ["r-worker", "--threads", "1", "--bind", address, "--kv-memory-gb", "0.0016"]
        words += ["--cache-disk", str(self._disk), "--cache-disk-gb", "0.05"]
        words += ["--silence-s", str(SILENCE_S), "--return-s", "10"]
        return self._stack.enter_context(running([*FASTDECODE, *words], **PATHS))

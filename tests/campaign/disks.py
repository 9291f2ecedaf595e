"""R-workers at addresses, each with a disk, that are killed (SIGKILL) in the
middle of a write to it while conversations go on: whoever comes in their place
offers what the disk has.

Each ends in a write of its own choosing, by a seed and not by the clock (see
``dying``). One engine talks all the while. What it says is held against what it
says without a cache.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
from dying import WRITES_A_BLOCK
from jobs import LIMIT_S, PATHS, SHAPE, address_of
from mpi_launch import Running, running
from random_llama import llama_config, write_checkpoint

from fastdecode import LLM, SamplingParams
from fastdecode.core.sequence import CacheUse

NUM_R_WORKERS = 2
NUM_CONVERSATIONS, NUM_TURNS, NUM_NEW, NUM_DRAWN = 5, 4, 24, 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_DRAWN, ignore_eos=True)
MOST_WRITES = 40 * WRITES_A_BLOCK
"""Of one that is killed; each conversation has ten blocks."""
MOST_ROUNDS = 40
"""For each kill: if it takes more, nothing is stored."""
KILLS_A_RACK = 5
"""Of one engine: R-workers that are lost again and again are asked back ever
less often."""
SILENCE_S = 3.0
LEAVES_S = 60.0
"""Who is told to leave does within this time."""
OPTIONS = {"dtype": "float32", "block_size": 16, "max_num_sequences": 4}


def talk(llm: LLM, name: str, salt: str = "") -> list[tuple[int, ...] | None]:
    """Turns of all conversations; None: one has failed. ``salt``: who shares
    their blocks."""
    said: list[tuple[int, ...] | None] = []
    for turn in range(NUM_TURNS):
        prompts = [
            [(11 * i + 5 * turn + 3 * j) % 500 + 1 for j in range(NUM_NEW)]
            for i in range(NUM_CONVERSATIONS)
        ]
        names = [f"{name}-{i}" for i in range(NUM_CONVERSATIONS)]
        use = CacheUse(salt=salt)
        for output in llm.generate(prompts, GREEDY, conversation_id=names, cache=use):
            said.append(output.completions[0].token_ids if output.ok else None)
    return said


def killed(number: int, chance: random.Random) -> Counter[str]:
    """R-workers that are killed so often while they store, and others that come
    in their place. Of two rounds of talks the second begins with what the first
    has left."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as place:
        model = Path(place) / "model"
        model.mkdir()
        config = llama_config(**SHAPE, max_position_embeddings=2048)
        write_checkpoint(model, config, "random")
        with LLM(str(model), **OPTIONS, prefix_cache="off", kv_memory_gb=0.02) as llm:
            expected = talk(llm, "plain")
        while (left := number - counts["kills"]) > 0:
            with Rack(Path(place), min(left, KILLS_A_RACK), chance) as rack:
                _talk_while_they_die(rack, model, expected, counts)
                print(dict(counts), flush=True)
    return counts


def _talk_while_they_die(
    rack: Rack, model: Path, expected: list[tuple[int, ...] | None], counts: Counter[str]
) -> None:
    """Until all are killed that are to be."""
    with rack.engine(model) as llm:
        one, first = 0, counts["kills"]
        while rack.num_killed < rack.number:
            assert one < MOST_ROUNDS * rack.number, rack.words()
            _compare(talk(llm, f"k{one}", f"{first} {one // 2}"), expected, counts)
            one += 1
        _compare(talk(llm, "last", f"{first} {one // 2}"), expected, counts)
        tiers = llm.stats.tiers
    counts["kills"] += rack.num_killed
    counts["orphans"] += rack.end()
    for name in ("num_stored", "num_fetched", "num_found", "num_joined", "num_failed"):
        counts[name.removeprefix("num_").replace("failed", "unmoved")] += getattr(tiers, name)


def _compare(
    said: list[tuple[int, ...] | None], expected: list[tuple[int, ...] | None], counts: Counter[str]
) -> None:
    for one, other in zip(said, expected, strict=True):
        counts["failed" if one is None else "right" if one == other else "changed"] += 1


class Rack:
    """R-workers' processes, at addresses of their own: where one has been
    killed, another comes.

    Args:
        directory: for their disks.
        number: so many are killed.
        chance: says in which write.
    """

    def __init__(self, directory: Path, number: int, chance: random.Random) -> None:
        self._disk = directory / "kept"
        self.number = number
        self._chance = chance
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._workers: list[Running] = []
        self._all: list[Running] = []
        self._addresses: list[str] = []
        self._watches: list[threading.Thread] = []
        self._is_over = False
        self._num_mortal = 0
        self.num_killed = 0

    def __enter__(self) -> Rack:
        for _ in range(NUM_R_WORKERS):
            self._workers.append(self._start("tcp://127.0.0.1:*"))
            self._addresses.append(address_of(self._workers[-1]))
        for place in range(NUM_R_WORKERS):
            self._watches.append(threading.Thread(target=self._watch, args=(place,), daemon=True))
            self._watches[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._stack.close()

    @contextlib.contextmanager
    def engine(self, model: Path) -> Iterator[LLM]:
        """That talks to them."""
        with LLM(
            str(model),
            **OPTIONS,
            r_worker_addresses=tuple(self._addresses),
            swap_threshold=0.9,
            worker_silence_s=SILENCE_S,
        ) as llm:
            yield llm

    def words(self) -> str:
        """What R-workers have said last."""
        return "\n".join(worker.output()[-1000:] for worker in self._workers)

    def end(self) -> int:
        """R-workers that nobody talks to any more are told to leave. How many
        processes are left then, of all that there ever were."""
        self._is_over = True
        for worker in self._workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.process.terminate()
        ended = [worker.wait_for_end(LEAVES_S) is not None for worker in self._workers]
        for watch in self._watches:
            watch.join(LEAVES_S)
        left = sum(len(worker.processes()) for worker in self._all)
        return max(left, ended.count(False))

    def _watch(self, place: int) -> None:
        """Another comes for each one that is killed in a place."""
        while not self._is_over:
            exit_code = self._workers[place].wait_for_end(LIMIT_S)
            if exit_code == -signal.SIGKILL and not self._is_over:
                with self._lock:
                    self.num_killed += 1
                    self._workers[place] = self._start(self._addresses[place])
            elif exit_code is not None:
                return

    def _start(self, address: str) -> Running:
        """With memory for few of the conversations' blocks. As many are started
        that are going to die as are to be killed."""
        writes = self._chance.randint(1, MOST_WRITES) if self._num_mortal < self.number else 0
        self._num_mortal += writes > 0
        words = [sys.executable, str(Path(__file__).with_name("dying.py"))]
        words += [str(writes), str(self._chance.random())]
        words += ["--threads", "1", "--bind", address, "--kv-memory-gb", "0.0016"]
        words += ["--cache-disk", str(self._disk), "--cache-disk-gb", "0.05"]
        words += ["--silence-s", str(SILENCE_S), "--return-s", "10"]
        self._all.append(self._stack.enter_context(running(words, **PATHS)))
        return self._all[-1]

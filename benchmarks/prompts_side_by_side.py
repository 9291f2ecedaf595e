"""Prompts of equal length on a CPU: attended one after another, or laid side by
side and attended in one call?

    python benchmarks/prompts_side_by_side.py --out
    benchmarks/results/prompts_side_by_side.json

Both ways give the same bits. Ratios are of medians of runs that alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from provenance import provenance
from torch import Tensor

from fastdecode.core.host.machine import available_cores
from fastdecode.core.spec import AttentionSpec
from sworker.prefill import local_causal_attention

SHAPES = ((4, 3, 64), (8, 4, 128))  # KV heads, group, head dim
PROMPTS = ((64, 8), (64, 32), (16, 128), (4, 512))  # how many, and of how many tokens


def side_by_side(q: Tensor, k: Tensor, v: Tensor, num_prompts: int, spec: AttentionSpec) -> Tensor:
    """q [T, Hq, D], k and v [T, Hkv, D] → [T, Hq, D], in one call of torch's fused attention."""
    length, Hkv, G, D = q.shape[0] // num_prompts, spec.num_kv_heads, spec.group_size, spec.head_dim
    queries = (
        q.view(num_prompts, length, Hkv, G, D).permute(0, 2, 3, 1, 4).reshape(-1, G, length, D)
    )
    keys, values = (
        x.view(num_prompts, length, Hkv, D)
        .transpose(1, 2)
        .reshape(-1, 1, length, D)
        .expand(-1, G, -1, -1)
        for x in (k, v)
    )
    found = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=spec.scale)
    return found.view(num_prompts, Hkv, G, length, D).permute(0, 3, 1, 2, 4).reshape(q.shape)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(available_cores())
    rows: list[dict[str, Any]] = []
    for Hkv, G, D in SHAPES:
        spec = AttentionSpec(Hkv * G, Hkv, D, D**-0.5)
        for num_prompts, length in PROMPTS:
            q, k, v = (torch.randn(num_prompts * length, heads, D) for heads in (Hkv * G, Hkv, Hkv))
            starts = range(0, num_prompts * length, length)
            times: tuple[list[float], list[float]] = [], []
            for _ in range(options.repeats):
                started = time.perf_counter()
                apart, _ = local_causal_attention(q, k, v, starts, spec, want_lse=False)
                between = time.perf_counter()
                together = side_by_side(q, k, v, num_prompts, spec)
                times[0].append(between - started)
                times[1].append(time.perf_counter() - between)
                assert torch.equal(apart, together)
            apart_s, together_s = map(statistics.median, times)
            rows.append(
                {
                    "kv_heads": Hkv,
                    "group": G,
                    "head_dim": D,
                    "prompts": num_prompts,
                    "tokens": length,
                    "apart_ms": apart_s * 1e3,
                    "together_over_apart": together_s / apart_s,
                }
            )
            print(*(f"{key} {value:.3g}" for key, value in rows[-1].items()), sep="  ")
    if options.out is not None:
        options.out.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

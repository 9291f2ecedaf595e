"""What the design wants to know of a GPU beside the suite's goals: used by
gpu_suite.py --call more."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu_instant import instant_steps

from fastdecode.core.model.spec import ModelSpec
from sworker.device import gpu_of
from sworker.kernels.fused import fuse
from sworker.load.weights import random_model
from sworker.prefill import local_causal_attention

Rows = Iterator[dict[str, Any]]
Seconds = Callable[[Callable[[], object]], float]
_NUM_LENGTHS = 40
_STALL_S = 0.01
"""No prompt's attention takes so long, unless something is planned for its length."""


def copies(device: torch.device, sizes: tuple[int, ...], seconds: Seconds) -> Rows:
    """Between the device and the host: memory that was registered, as messages'
    buffers are, against memory that CUDA has allocated."""
    gpu = gpu_of(device)
    for num_bytes in sizes:
        on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        allocated = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=gpu is not None)
        registered = torch.zeros_like(allocated) if gpu is None else gpu.pinned(num_bytes)
        for memory, host in (("registered", registered), ("allocated", allocated)):
            out_s = seconds(partial(host.copy_, on_device, non_blocking=True))
            back_s = seconds(partial(on_device.copy_, host, non_blocking=True))
            yield {"memory": memory, "mb": num_bytes / 1e6, "out_us": out_s * 1e6,
                   "back_us": back_s * 1e6, "out_gbps": num_bytes / out_s / 1e9,
                   "back_gbps": num_bytes / back_s / 1e9}  # fmt: skip


def prompt_lengths(spec: ModelSpec, device: torch.device, dtype: torch.dtype, longest: int) -> Rows:
    """Attention of single prompts, each of a length that comes for the first
    time: a kernel that is planned by length shows as milliseconds."""
    found: dict[int, float] = {}
    for number in range(_NUM_LENGTHS + 2):
        length = max(1, longest - 7 * number)
        heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
        q, k, v = (torch.randn(length, h, spec.head_dim, device=device).to(dtype) for h in heads)
        _finish(device)
        started = time.perf_counter()
        local_causal_attention(q, k, v, (0,), spec.attention[0], want_lse=False)
        _finish(device)
        found[length] = time.perf_counter() - started
    new = list(found.items())[2:]  # the first ones load the kernel
    worst = max(new, key=lambda one: one[1])
    yield {"lengths": len(new), "median_ms": statistics.median(s for _, s in new) * 1e3,
           "worst_ms": worst[1] * 1e3, "worst_length": worst[0],
           "stalls": sum(s > _STALL_S for _, s in new)}  # fmt: skip


def host_turns(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, rows: int, num_steps: int
) -> Rows:
    """What the host takes a lane and layer, by the number of R-workers: of
    steps that are so small that the device waits for it."""
    model = random_model(spec, device=device, dtype=dtype)
    fuse(model, device)
    for num_r_workers in (1, 4, 16):
        step_s, s_part_s = instant_steps(
            model, device, 2, rows, num_steps, device.type == "cuda", num_r_workers
        )
        num_turns = 2 * (spec.num_layers + 1)
        yield {"r_workers": num_r_workers, "rows_a_lane": rows,
               "turn_us": step_s / num_turns * 1e6,
               "unit_us": s_part_s / num_turns * 1e6}  # fmt: skip


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

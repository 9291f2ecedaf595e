"""Lanes whose KV is swapped against lanes whose KV stays, in the same memory of
the device: used by gpu_suite.py --call more.

A stage of a few layers decodes three lanes in turns. Where KV stays, each lane
has a third of the memory; swapped, a half. So what is compared is sequences a
second, as in DéjàVu's figure of microbatches twice as large; beside it is what
the longer of a step's computing and its copies in would take, which is the best
that can be had.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gpu_whole import BLOCK_SIZE, decode_step

from fastdecode.core.dtype import DType
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.spec import KVSpec
from sworker.kernels.fused import fuse
from sworker.load.weights import random_model
from sworker.model.skeleton import Model, forward
from sworker.paged import PagedKV, PagedStep
from sworker.swap.swapped import SwappedKV

Rows = Iterator[dict[str, Any]]
NUM_LANES = 3
_FILLED = 0.01


def swap_steps(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    cases: tuple[tuple[int, int], ...],
    num_rounds: int,
) -> Rows:
    """``cases``: sequences of a lane that is swapped, and tokens of each."""
    model = random_model(spec, device=device, dtype=dtype)
    fuse(model, device)
    kv = KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, DType.BFLOAT16, BLOCK_SIZE)
    for num_sequences, context in cases:
        fewer = max(1, num_sequences * 2 // NUM_LANES)
        stays_s = _resident(model, kv, fewer, context, device, num_rounds)
        compute_s = _resident(model, kv, num_sequences, context, device, num_rounds, num_lanes=1)
        yield {"kv": "stays", "sequences": fewer, "context": context, "step_us": stays_s * 1e6,
               "tokens_per_s": fewer / stays_s}  # fmt: skip
        lanes = SwappedLanes(model, kv, num_sequences, context, device)
        step_s, num_late = lanes.seconds(num_rounds), lanes.swap.figures.num_late_blocks
        transfer_s = lanes.transfer_seconds(num_rounds)
        best_s = max(compute_s, transfer_s)
        lane_bytes = num_sequences * context * kv.token_bytes
        yield {"kv": "swapped", "sequences": num_sequences, "context": context,
               "step_us": step_s * 1e6, "tokens_per_s": num_sequences / step_s,
               "compute_us": compute_s * 1e6, "transfer_us": transfer_s * 1e6,
               "in_gbps": lane_bytes / step_s / 1e9, "of_the_longer": step_s / best_s,
               "gain": num_sequences / step_s / (fewer / stays_s),
               "late_blocks": num_late}  # fmt: skip
        del lanes


def _resident(
    model: Model,
    kv: KVSpec,
    num_sequences: int,
    context: int,
    device: torch.device,
    num_rounds: int,
    num_lanes: int = NUM_LANES,
) -> float:
    """Seconds of a lane's step where KV stays on the device."""
    step = decode_step(num_sequences, context, device)
    caches = [
        PagedKV(kv, model.spec.attention, step.tables.numel(), device) for _ in range(num_lanes)
    ]
    for cache in caches:
        cache.pool.fill_(_FILLED)
    turns = itertools.cycle(caches)

    def run() -> None:
        cache = next(turns)
        _forward(model, step, context, lambda *qkv: cache.attend(*qkv, step))

    return _seconds(run, num_rounds * NUM_LANES, device)


class SwappedLanes:
    """Three lanes, all blocks of which hold something."""

    def __init__(
        self,
        model: Model,
        kv: KVSpec,
        num_sequences: int,
        context: int,
        device: torch.device,
    ) -> None:
        self._model, self._context, self._device = model, context, device
        self._step = decode_step(num_sequences, context, device)
        num_blocks = self._step.tables.numel()
        self.swap = SwappedKV(
            kv, model.spec.attention, num_blocks, NUM_LANES, device, most_tokens=num_sequences
        )
        for host in self.swap.hosts:
            for part in host.parts:
                part.fill_(_FILLED)
        self._blocks = np.arange(num_blocks)
        self._tokens = self._step.slots.cpu().numpy()
        self._turns = itertools.cycle(range(NUM_LANES))

    def seconds(self, num_rounds: int) -> float:
        """Of a lane's step."""
        return _seconds(self._run, num_rounds * NUM_LANES, self._device)

    def transfer_seconds(self, num_rounds: int) -> float:
        """Of bringing a lane, with nothing beside."""

        def run() -> None:
            lane = next(self._turns)
            self.swap.enter(lane, self._blocks)
            self.swap.wait_for_all()

        return _seconds(run, num_rounds * NUM_LANES, self._device)

    def _run(self) -> None:
        lane, swap = next(self._turns), self.swap
        cache = swap.enter(lane, self._blocks)

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            swap.wait(layer)
            return cache.attend(layer, q, k, v, self._step)

        _forward(self._model, self._step, self._context, attend)
        swap.leave(self._tokens)
        swap.prefetch((lane + 1) % NUM_LANES, self._blocks)


def _forward(model: Model, step: PagedStep, context: int, attend: Callable[..., Any]) -> None:
    num_rows, device = len(step.slots), step.slots.device
    positions = torch.full((num_rows,), context - 1, device=device)
    forward(model, torch.arange(num_rows, device=device), positions, attend)


def _seconds(run: Callable[[], None], num_runs: int, device: torch.device) -> float:
    """Of one run, in the middle of others."""
    for _ in range(NUM_LANES):
        run()
    _finish(device)
    started = time.perf_counter()
    for _ in range(num_runs):
        run()
    _finish(device)
    return (time.perf_counter() - started) / num_runs


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

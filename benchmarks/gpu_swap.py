"""Lanes whose KV is swapped against lanes whose KV stays, in the same memory of
the device: a step of gpu_first.py --more.

A stage of a few layers decodes three lanes in turns. Where KV stays, each lane
has a third of the memory; swapped, a half. So what is compared is sequences a
second, as in DéjàVu's figure of microbatches twice as large; beside it is what
the longer of a step's computing and its copies in would take, which is the best
that can be had.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpu_paged import BLOCK_SIZE, decode_step
from gpu_setup import Found, Rows, Setup, distance, measured

from fastdecode.core.dtype import DType
from fastdecode.core.spec import KVSpec
from sworker.kernels.fused import fuse
from sworker.load.weights import random_model
from sworker.model.skeleton import Model, forward
from sworker.paged import PagedKV, PagedStep
from sworker.swap.swapped import SwappedKV

NUM_LANES = 3
_FILLED = 0.01
_BOUND = 0.05
"""Of a few layers in bfloat16."""


def swap(setup: Setup) -> Rows:
    """Of lanes of a few sizes."""
    model = random_model(setup.spec("8b"), device=setup.device, dtype=setup.dtype)
    fuse(model, setup.device)
    num_rounds = setup.pick(8, 1)
    for num_sequences, context in setup.pick(((24, 1024), (96, 1024), (24, 8192)), ((3, 40),)):
        yield from _swap(model, num_sequences, context, setup.device, num_rounds)


def _swap(
    model: Model, num_sequences: int, context: int, device: torch.device, num_rounds: int
) -> Rows:
    spec = model.spec
    kv = KVSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, DType.BFLOAT16, BLOCK_SIZE)
    fewer = max(1, num_sequences * 2 // NUM_LANES)
    stays_s, _ = _resident(model, kv, fewer, context, device, num_rounds)
    compute_s, expected = _resident(
        model, kv, num_sequences, context, device, num_rounds, num_lanes=1
    )
    yield {"kv": "stays", "sequences": fewer, "context": context, "step_us": stays_s * 1e6,
           "tokens_per_s": fewer / stays_s, "max_error": 0.0}  # fmt: skip
    lanes = SwappedLanes(model, kv, num_sequences, context, device)
    step_s, num_late = lanes.seconds(num_rounds), lanes.swap.figures.num_late_blocks
    error = distance(lanes.result, expected)
    transfer_s = lanes.transfer_seconds(num_rounds)
    lane_bytes = num_sequences * context * kv.token_bytes
    yield measured(
        {"kv": "swapped", "sequences": num_sequences, "context": context}, Found(error, _BOUND),
        step_us=step_s * 1e6, tokens_per_s=num_sequences / step_s, compute_us=compute_s * 1e6,
        transfer_us=transfer_s * 1e6, in_gbps=lane_bytes / step_s / 1e9,
        of_the_longer=step_s / max(compute_s, transfer_s),
        gain=num_sequences / step_s / (fewer / stays_s), late_blocks=num_late,
    )  # fmt: skip


def _resident(
    model: Model,
    kv: KVSpec,
    num_sequences: int,
    context: int,
    device: torch.device,
    num_rounds: int,
    num_lanes: int = NUM_LANES,
) -> tuple[float, torch.Tensor]:
    """Seconds of a lane's step where KV stays on the device, and its result."""
    step = decode_step([context] * num_sequences, device)
    caches = [
        PagedKV(kv, model.spec.attention, step.tables.numel(), device) for _ in range(num_lanes)
    ]
    for cache in caches:
        cache.pool.fill_(_FILLED)
    turns = itertools.cycle(caches)

    def run() -> torch.Tensor:
        cache = next(turns)
        return _forward(model, step, context, lambda *qkv: cache.attend(*qkv, step))

    return _seconds(run, num_rounds * NUM_LANES, device), run()


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
        self._step = decode_step([context] * num_sequences, device)
        self.result = torch.empty(0)
        """Of the last step: hidden states."""
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

        self.result = _forward(self._model, self._step, self._context, attend)
        swap.leave(self._tokens)
        swap.prefetch((lane + 1) % NUM_LANES, self._blocks)


def _forward(
    model: Model, step: PagedStep, context: int, attend: Callable[..., Any]
) -> torch.Tensor:
    num_rows, device = len(step.slots), step.slots.device
    positions = torch.full((num_rows,), context - 1, device=device)
    return forward(model, torch.arange(num_rows, device=device), positions, attend)


def _seconds(run: Callable[[], object], num_runs: int, device: torch.device) -> float:
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

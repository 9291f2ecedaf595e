"""The alternative: the same GPU with weights and KV cache in its own memory,
attention on the GPU, no R-workers."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from cost_model.numbers import at_most, largest
from cost_model.predict import System


@dataclass(frozen=True)
class GpuOnly:
    """The best that the GPU does alone, its KV cache paged without waste: a generous rival."""

    batch: int
    tpot_s: float
    tokens_per_s: float
    limit: str
    """What keeps the batch from growing: memory, latency, ``--batch``, or that nothing larger was
    measured."""
    kv_room_bytes: float
    """GPU memory left beside weights and activations."""


def gpu_only_step_s(system: System, batch: int) -> float:
    """One step: the S-part, its share of prompts, and attention that reads all
    K and V at the GPU's bandwidth."""
    return system.costs.num_layers * system.on_device().lane(batch, 1).chain_s


def gpu_only_memory_bytes(system: System, batch: int) -> float:
    """Weights, activations, and the cached tokens of the load: no reservation
    for tokens still to come."""
    kv_bytes = batch * system.workload.mean_context_tokens * system.costs.kv_bytes
    return system.costs.weight_bytes + batch * system.costs.peak_activation_bytes + kv_bytes


def best_gpu_only(
    system: System, step_limit_s: float, most_sequences: int | None = None
) -> GpuOnly | None:
    """The largest batch that fits and keeps the promise; None if not even one sequence does.

    Args:
        most_sequences: that are to run at once; None: as many as fit.
    """

    def fits(batch: int) -> bool:
        return gpu_only_memory_bytes(system, batch) <= system.s.usable_memory_bytes

    def fast(batch: int) -> bool:
        return at_most(gpu_only_step_s(system, batch), step_limit_s)

    measured, asked = system.s.max_batch or sys.maxsize, most_sequences or sys.maxsize
    batch = largest(lambda batch: fits(batch) and fast(batch), min(measured, asked))
    if not batch:
        return None
    step_s = gpu_only_step_s(system, batch)
    used = system.costs.weight_bytes + batch * system.costs.peak_activation_bytes
    limit = "--batch" if batch == asked else "what was measured"
    if not fits(batch + 1):
        limit = "memory"
    elif not fast(batch + 1):
        limit = "latency"
    room_bytes = system.s.usable_memory_bytes - used
    return GpuOnly(batch, step_s, batch / step_s, limit, room_bytes)

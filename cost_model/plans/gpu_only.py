"""The alternative: the same GPU with weights and KV cache in its own memory,
attention on the GPU, no R-workers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from cost_model.numbers import at_most, largest, smallest
from cost_model.predict import System


@dataclass(frozen=True)
class GpuOnly:
    """The best that the GPU does alone, its KV cache paged without waste: a generous rival."""

    batch: int
    tpot_s: float
    tokens_per_s: float
    limit: str
    """What keeps the batch from growing: memory, latency, ``--batch``, gain (more sequences add
    little), or that nothing larger was measured."""
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


def gpu_only_on(system: System, batch: int) -> GpuOnly:
    """Predict ``batch`` sequences on the GPU alone; whether they fit is not asked."""
    step_s = gpu_only_step_s(system, batch)
    used = system.costs.weight_bytes + batch * system.costs.peak_activation_bytes
    return GpuOnly(batch, step_s, batch / step_s, "", system.s.usable_memory_bytes - used)


def best_gpu_only(
    system: System, step_limit_s: float, most_sequences: int | None = None, least_gain: float = 0.0
) -> GpuOnly | None:
    """Find the largest batch that fits and keeps the promise. None if one sequence does not.

    Args:
        most_sequences: Sequences that may run at once. None if as many may as fit.
        least_gain: The batch ends where the largest gives no more than this part more tokens/s:
            for a CPU, whose memory holds far more sequences than its cores keep up with.
    """

    def fits(batch: int) -> bool:
        return gpu_only_memory_bytes(system, batch) <= system.s.usable_memory_bytes

    def fast(batch: int) -> bool:
        return at_most(gpu_only_step_s(system, batch), step_limit_s)

    measured, asked = system.s.max_batch or sys.maxsize, most_sequences or sys.maxsize
    batch = largest(lambda batch: fits(batch) and fast(batch), min(measured, asked))
    if not batch:
        return None
    enough = gpu_only_on(system, batch).tokens_per_s / (1.0 + least_gain)
    if least_gain and gpu_only_on(system, 1).tokens_per_s < enough:
        batch = smallest(lambda few: gpu_only_on(system, few).tokens_per_s >= enough, batch)
        return replace(gpu_only_on(system, batch), limit="gain")
    limit = "--batch" if batch == asked else "what was measured"
    if not fits(batch + 1):
        limit = "memory"
    elif not fast(batch + 1):
        limit = "latency"
    return replace(gpu_only_on(system, batch), limit=limit)

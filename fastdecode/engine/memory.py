"""What an engine will take of the host's and the device's memory, computed before anything is loaded.

A pure function of sizes: weights, what a step's rows need at once, pinned memory between device and host, and what is
left for the KV cache. Estimates err on the large side; what they leave out (a CUDA context, libraries' workspaces) has
a fixed share of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.errors import ConfigError
from fastdecode.core.model_spec import ModelSpec

HOST_KV_SHARE = 0.5
"""Of the host memory that the S-part leaves free, what KV caches in this process take unless the user says."""
CUDA_RESERVE_BYTES = 1 << 30
"""Workspaces, captured graphs, fragmentation."""
_STAGED_LAYERS = 6
"""q, k, v of the layers that may be lent out, and o: see ``sworker.buffers``."""
_SAMPLED_ELEMENTS = 1 << 24
"""Logits that the sampler works on at a time, with four 8-byte temporaries."""


@dataclass(frozen=True)
class FreeMemory:
    """What this process may still take."""

    host_bytes: int
    device_bytes: int | None = None
    """Of the S-worker's GPU; None: the S-part runs on the host."""
    device_total_bytes: int = 0


@dataclass(frozen=True)
class StepSizes:
    """What an engine's steps are made of."""

    num_lanes: int
    step_tokens: int
    """Most rows of a lane's step."""
    logit_rows: int
    """Most rows of a step that draw a token."""
    itemsize: int
    """Bytes of an activation."""
    num_shards: int = 1
    """S-workers that act as one, of which this is one."""


@dataclass(frozen=True)
class KVDemand:
    """The KV cache in this process."""

    on_device: bool
    """Beside the S-part; else on the host."""
    num_caches: int
    """R-workers in this process; 0: they are elsewhere, and decide for themselves."""
    cache_bytes: int | None
    """Of each; None: what is left."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that an engine will take."""

    weights_bytes: int
    activation_bytes: int
    staging_bytes: int
    """Pinned, on the host."""
    kv_bytes: int
    """Of each KV cache in this process."""

    def __str__(self) -> str:
        parts = (
            ("weights", self.weights_bytes),
            ("activations", self.activation_bytes),
            ("staging", self.staging_bytes),
            ("KV cache", self.kv_bytes),
        )
        return ", ".join(f"{name} {_gb(num)}" for name, num in parts if num)


def plan_memory(
    spec: ModelSpec, sizes: StepSizes, kv: KVDemand, free: FreeMemory, *, gpu_memory_fraction: float
) -> MemoryPlan:
    """Deal out the memory.

    Args:
        gpu_memory_fraction: of all of the GPU's memory, what this engine and whoever else is on it may use together.

    Raises:
        ConfigError: it doesn't fit (code ``out_of_memory``); the message has the numbers.
    """
    weights = _weights_bytes(spec, sizes)
    activations = _activation_bytes(spec, sizes)
    if free.device_bytes is None:
        staging, where, room = 0, "the host", free.host_bytes
    else:
        staging = 0 if kv.on_device else _staging_bytes(spec, sizes)
        where = f"the GPU (fraction {gpu_memory_fraction:g} of {_gb(free.device_total_bytes)})"
        used = free.device_total_bytes - free.device_bytes
        room = int(free.device_total_bytes * gpu_memory_fraction) - used - CUDA_RESERVE_BYTES
        _check("pinned staging memory", staging, free.host_bytes, "the host", "--max-step-tokens or --lanes")
    mend = "--max-step-tokens, --max-num-sequences or --lanes, choose a smaller dtype"
    if free.device_bytes is not None:
        mend += ", raise --gpu-memory-fraction"
    what = f"the S-part of {spec.name} (weights {_gb(weights)}, a step's activations {_gb(activations)})"
    _check(what, weights + activations, room, where, mend)
    if kv.on_device or free.device_bytes is None:
        kv_room = room - weights - activations
    else:
        where, kv_room = "the host", free.host_bytes - staging
    if not kv.num_caches:
        return MemoryPlan(weights, activations, staging, 0)
    if kv.cache_bytes is not None:
        what = f"{kv.num_caches} KV cache(s) of {_gb(kv.cache_bytes)} beside weights and activations"
        _check(what, kv.cache_bytes * kv.num_caches, kv_room, where, "--kv-memory-gb or --r-workers")
        return MemoryPlan(weights, activations, staging, kv.cache_bytes)
    share = 1.0 if kv.on_device and free.device_bytes is not None else HOST_KV_SHARE
    return MemoryPlan(weights, activations, staging, int(kv_room * share) // kv.num_caches)


def _weights_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    parameters = spec.num_parameters * sizes.itemsize // sizes.num_shards
    rotary = spec.max_model_len * spec.rope.dim * 4 if spec.rope is not None else 0
    return parameters + rotary


def _activation_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    """What lanes keep between their S-steps, and what the largest S-step needs while it runs."""
    q, k, v = (size // sizes.num_shards for size in spec.qkv_sizes)
    inner = spec.intermediate_size // sizes.num_shards
    kept = spec.hidden_size + 2 * q + k + v  # x, q, k, v, o
    ups = 2 if spec.gated_mlp else 1
    in_mlp = 2 * spec.hidden_size + (ups + 2) * inner
    in_attention = 2 * (q + k + v) * sizes.itemsize + (q + k + v) * 4 * 2  # rotated, and raised to float32
    rows = sizes.step_tokens * (kept * sizes.num_lanes + in_mlp) * sizes.itemsize + sizes.step_tokens * in_attention
    num_logits = sizes.logit_rows * spec.vocab_size
    return rows + num_logits * (sizes.itemsize + 4) + min(num_logits, _SAMPLED_ELEMENTS) * 32


def _staging_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    return sizes.num_lanes * _STAGED_LAYERS * sizes.step_tokens * sum(spec.qkv_sizes) * sizes.itemsize


def _check(what: str, num_bytes: int, room: int, where: str, mend: str) -> None:
    if num_bytes > room:
        raise ConfigError(
            f"{what} takes {_gb(num_bytes)}, but {where} has {_gb(max(0, room))} for it: lower {mend}",
            code="out_of_memory",
        )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"

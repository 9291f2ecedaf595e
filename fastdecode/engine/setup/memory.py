"""What an engine will take of the host's and the device's memory, computed before anything is
loaded.

A pure function of sizes: weights, what a step's rows need, pinned memory between device
and host, and what is left for the KV cache. Estimates err on the large side; what they leave out
(a CUDA context, libraries' workspaces) has a fixed share of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.host.machine import default_kv_bytes
from fastdecode.core.model.spec import ModelSpec
from sworker.buffers import LENT_LAYERS
from sworker.sampling.sampler import MAX_BLOCK_ELEMENTS

Mend: TypeAlias = "tuple[str | Given, ...]"
"""Options to lower or change, in the words of an error."""
CUDA_RESERVE_BYTES = 1 << 30  # workspaces, fragmentation
GRAPH_BYTES = 256 << 10
"""What a captured graph of a dozen kernels takes of the device's memory,
estimated on the large side."""
UNIT_KERNELS = 12  # of such a graph
OLD_NODE_BYTES, NODE_BYTES = 64 << 10, 8 << 10
"""What a kernel of a graph takes with drivers before and from R550 on; the second
is an estimate."""
_HELD_SHARE = 8
"""Prompts under way may take one part in eight of what the S-part leaves."""


@dataclass(frozen=True)
class FreeMemory:
    """What this process may still take."""

    host_bytes: int
    device_bytes: int | None = None
    """Of the S-worker's GPU; None: the S-part runs on the host."""
    device_total_bytes: int = 0
    graph_node_bytes: int = 0
    """What a kernel in a CUDA graph takes of the GPU, by its driver; 0: not known."""
    device_name: str = ""  # the GPU's, by its driver

    def share(self, number: int) -> FreeMemory:
        """Of one of so many that take as much."""
        device = None if self.device_bytes is None else self.device_bytes // number
        host, total = self.host_bytes // number, self.device_total_bytes // number
        return replace(self, host_bytes=host, device_bytes=device, device_total_bytes=total)


@dataclass(frozen=True)
class StepSizes:
    """What an engine's steps are made of."""

    num_lanes: int  # most that there may be
    step_tokens: int  # most rows of a lane's step
    logit_rows: int
    """Most rows of a step that draw a token, where lanes are fewest."""
    itemsize: int  # bytes of an activation
    weight_itemsize: int | None = None
    """Bytes of a weight. None if it has as many as an activation."""
    num_shards: int = 1  # S-workers that act as one, of which this is one
    num_graphs: int = 0  # CUDA graphs that may be captured
    num_kernels: int = 0  # in all of these
    graph_rows: int = 0
    """Most rows of a step that runs as graphs; 0: none does."""
    held_bytes: int = 0
    """Of use for K and V of prompts under way that go to R-workers; 0: none are
    held on the device."""


@dataclass(frozen=True)
class KVDemand:
    """The KV cache in this process."""

    on_device: bool  # beside the S-part; else on the host
    num_caches: int
    """R-workers in this process; 0: they are elsewhere, and decide for themselves."""
    cache_bytes: int | None  # of each, or None for what is left
    is_on_both: bool = False  # a cache on the device beside those
    swapped_lanes: int = 0
    """Lanes whose KV is in the host's memory, and two lanes' of it in each
    cache; 0: nothing is swapped."""
    num_stages: int = 1  # that keep their lanes' KV on this host
    stored_bytes: int = 0
    """Of KV that a step stores, where that is copied to the host."""
    device_cache_bytes: int | None = None
    """Of that one; None: what is left there, or as much as the others on a host."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that an engine will take."""

    weights_bytes: int
    activation_bytes: int
    staging_bytes: int  # pinned, on the host
    kv_bytes: int  # of each KV cache in this process
    graph_bytes: int = 0
    """CUDA graphs, and the lanes' memory that they work on."""
    device_kv_bytes: int = 0
    """Of the cache on the device, where others are on R-workers."""
    held_bytes: int = 0  # for prompts under way, on the device
    swapped_bytes: int = 0  # of all lanes' KV on the host, of a stage

    def __str__(self) -> str:
        parts = (
            ("weights", self.weights_bytes),
            ("activations", self.activation_bytes),
            ("CUDA graphs", self.graph_bytes),
            ("staging", self.staging_bytes),
            ("prompts under way", self.held_bytes),
            ("KV cache on the device", self.device_kv_bytes),
            ("KV cache", self.kv_bytes),
            ("all lanes' KV on the host", self.swapped_bytes),
        )
        return ", ".join(f"{name} {_gb(num)}" for name, num in parts if num)


def plan_memory(
    spec: ModelSpec, sizes: StepSizes, kv: KVDemand, free: FreeMemory, *, gpu_memory_fraction: float
) -> MemoryPlan:
    """Deal out the memory.

    Args:
        gpu_memory_fraction: Of all of the GPU's memory, what this engine and all other processes
            may use together.

    Raises:
        ConfigError: If it doesn't fit (code ``out_of_memory``); the message has the numbers.
    """
    weights = spec.num_parameters * (sizes.weight_itemsize or sizes.itemsize) // sizes.num_shards
    weights += sum(rope.dim for rope in set(spec.ropes) if rope) * spec.max_model_len * 4
    activations = _activation_bytes(spec, sizes)
    graphs = _graph_bytes(spec, sizes, free.graph_node_bytes)
    s_part = weights + activations + graphs
    staging, where, room = 0, "the host", free.host_bytes
    lower = (Given("max_step_tokens"), ", ", Given("max_num_sequences"), " or ", Given("lanes"))
    mend: Mend = (*lower, ", choose a smaller dtype")
    if graphs:
        mend = (*mend, ", set ", Given("cuda_graphs", "off"))
    if free.device_bytes is not None:
        mend = (*mend, ", raise ", Given("gpu_memory_fraction"))
        if not kv.on_device:  # q, k, v of the layers that may be lent out, and o
            rows = sizes.num_lanes * (LENT_LAYERS + 1) * sizes.step_tokens
            staging = rows * sum(spec.qkv_sizes) * sizes.itemsize
            less: Mend = (Given("max_step_tokens"), " or ", Given("lanes"))
            _check("pinned staging memory", staging, free.host_bytes, "the host", less)
        where = f"the GPU (fraction {gpu_memory_fraction:g} of {_gb(free.device_total_bytes)})"
        used = free.device_total_bytes - free.device_bytes
        room = int(free.device_total_bytes * gpu_memory_fraction) - used - CUDA_RESERVE_BYTES
    more = f", CUDA graphs {_gb(graphs)}" if graphs else ""
    parts = f"weights {_gb(weights)}, a step's activations {_gb(activations)}{more}"
    _check(f"the S-part of {spec.name} ({parts})", s_part, room, where, mend)
    held = min(sizes.held_bytes, (room - s_part) // _HELD_SHARE)
    s_part += held
    device_kv = 0
    if kv.is_on_both:
        device_kv = _device_kv_bytes(kv, room - s_part, where, on_gpu=free.device_bytes is not None)
    if kv.on_device or free.device_bytes is None:
        left = room - s_part - device_kv - kv.stored_bytes * kv.num_caches
    else:
        where, left = "the host", free.host_bytes - staging
    is_all_theirs = kv.on_device and free.device_bytes is not None
    swapped = 0
    if kv.swapped_lanes:
        # On the host what two steps have stored waits for its place.
        stored = 2 * kv.stored_bytes * kv.num_stages
        on_host = free.host_bytes - stored if is_all_theirs else None
        kv_bytes, swapped = _swapped_bytes(kv, left, where, on_host)
    else:
        kv_bytes = _kv_bytes(kv, left, where, is_all_theirs=is_all_theirs)
    return MemoryPlan(weights, activations, staging, kv_bytes, graphs, device_kv, held, swapped)


def _swapped_bytes(kv: KVDemand, room: int, where: str, host_room: int | None) -> tuple[int, int]:
    """Return bytes of each cache, which has two lanes' KV, and of all lanes' on the host.
    ``host_room``: beside ``room`` on the device; None: it is the same."""
    at_a_time = 2
    mend: Mend = (Given("kv_memory_gb"), " or ", Given("lanes"))
    if host_room is None:
        share = _kv_bytes(replace(kv, cache_bytes=None), room, where, is_all_theirs=False)
        most = share * at_a_time // (at_a_time + kv.swapped_lanes)
    else:
        share = default_kv_bytes(kv.num_stages, host_room)
        on_device = _kv_bytes(kv, room, where, is_all_theirs=True)
        most = min(on_device, share * at_a_time // kv.swapped_lanes)
    kv_bytes = most if kv.cache_bytes is None else kv.cache_bytes
    swapped = kv_bytes // at_a_time * kv.swapped_lanes
    what = (
        f"KV of {kv.swapped_lanes} lanes in each of {kv.num_stages} stages, of {_gb(swapped)} a "
        "stage,"
    )
    if host_room is None:
        _check(what, (swapped + kv_bytes) * kv.num_caches, room, where, mend)
    else:
        _check(what, swapped * kv.num_stages, host_room, "the host", mend)
    return kv_bytes, swapped


def _device_kv_bytes(kv: KVDemand, room: int, where: str, *, on_gpu: bool) -> int:
    """Return bytes of the cache on the device beside R-workers'."""
    asked = kv.device_cache_bytes if on_gpu else kv.device_cache_bytes or kv.cache_bytes
    if asked is None:
        return room if on_gpu else default_kv_bytes(kv.num_caches + 1, room)
    what = f"a KV cache of {_gb(asked)} on the device beside weights and activations"
    _check(what, asked, room, where, (Given("device_kv_gb"),))
    return asked


def _kv_bytes(kv: KVDemand, room: int, where: str, *, is_all_theirs: bool) -> int:
    """Return bytes of each cache in this process. ``is_all_theirs``: nothing else needs what is
    left."""
    if not kv.num_caches:
        return 0
    if kv.cache_bytes is None:
        return room // kv.num_caches if is_all_theirs else default_kv_bytes(kv.num_caches, room)
    what = f"{kv.num_caches} KV cache(s) of {_gb(kv.cache_bytes)} beside weights and activations"
    mend: Mend = (Given("kv_memory_gb"), " or ", Given("r_workers"))
    _check(what, kv.cache_bytes * kv.num_caches, room, where, mend)
    return kv.cache_bytes


def _activation_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    """Return what lanes keep between their S-steps, and what the largest S-step needs while it
    runs."""
    q, k, v = _qkv_sizes(spec, sizes)
    kept = (spec.hidden_size + 3 * q + 2 * (k + v)) * sizes.itemsize  # x, q, k, v, packed too, o
    num_logits = sizes.logit_rows * spec.vocab_size
    logits = num_logits * (sizes.itemsize + 4) + min(num_logits, MAX_BLOCK_ELEMENTS) * 4 * 8
    return sizes.step_tokens * (kept * sizes.num_lanes + _unit_row_bytes(spec, sizes)) + logits


def _unit_row_bytes(spec: ModelSpec, sizes: StepSizes) -> int:
    """Return what an S-step needs for a row while it runs, and no longer."""
    in_mlp = max(_mlp_row_elements(spec, sizes, layer) for layer in range(spec.num_layers))
    # Rotated, and raised to float32.
    in_attention = sum(_qkv_sizes(spec, sizes)) * (2 * sizes.itemsize + 2 * 4)
    return in_mlp * sizes.itemsize + in_attention


def _mlp_row_elements(spec: ModelSpec, sizes: StepSizes, layer: int) -> int:
    """Return what one layer's MLP needs for a row, in elements of the activations' dtype."""
    moe = spec.moe
    if moe is None or not spec.has_experts(layer):
        ups = 2 if spec.gated_mlp else 1
        return 2 * spec.hidden_size + (ups + 2) * (spec.intermediate_size // sizes.num_shards)
    # Sorted rows in and out, and put back in order; scores and the sum in float32.
    routed = moe.top_k * (3 * spec.hidden_size + 4 * moe.inner)
    scores = 3 * moe.num_experts * 4 // sizes.itemsize
    wide = spec.hidden_size * 4 // sizes.itemsize
    return 3 * spec.hidden_size + routed + scores + wide + 4 * moe.shared_inner


def _graph_bytes(spec: ModelSpec, sizes: StepSizes, node_bytes: int) -> int:
    """Return bytes of graphs, the pool that they share for what a unit needs while it runs, and
    the lanes' fixed memory."""
    q, k, v = _qkv_sizes(spec, sizes)
    fixed = (spec.hidden_size + 2 * q + k + v) * sizes.itemsize * sizes.num_lanes
    graphs = max(sizes.num_graphs * GRAPH_BYTES, sizes.num_kernels * node_bytes)
    return graphs + sizes.graph_rows * (_unit_row_bytes(spec, sizes) + fixed)


def _qkv_sizes(spec: ModelSpec, sizes: StepSizes) -> tuple[int, int, int]:
    q, k, v = (size // sizes.num_shards for size in spec.qkv_sizes)
    return q, k, v


def _check(what: str, num_bytes: int, room: int, where: str, mend: Mend) -> None:
    """``mend``: what to lower, in the words of an error."""
    if num_bytes > room:
        raise ConfigError(
            f"{what} takes {_gb(num_bytes)}, but {where} has {_gb(max(0, room))} for it: lower ",
            *mend,
            code="out_of_memory",
        )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"

"""From what a user chose to a configuration with nothing left open: the one place where "auto"
means something. Where the KV cache goes then, the rule of ``fastdecode size`` decides."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from cost_model.hardware import Hardware
from cost_model.plans.placement import assumed_r_worker, gpu_like, placement_rates, ranking
from cost_model.plans.question import Setup
from cost_model.printing import rate_text
from cost_model.workload import Workload
from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError
from fastdecode.core.host.cpus import available_cores
from fastdecode.core.model.identity import Identity, identify
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.model.stages import layers_of_stages, stage_spec
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.engine.fleet.colocation import Colocation
from fastdecode.engine.setup.devices import choose_device, free_memory, uses_graphs
from fastdecode.engine.setup.memory import CUDA_RESERVE_BYTES, FreeMemory, MemoryPlan
from fastdecode.engine.setup.scheduling import LaneLimits, Steps
from fastdecode.engine.setup.transport import has_one_worker, transport_of
from fastdecode.schedule.options import ScheduleOptions
from fastdecode.wire.ranks import StageRanks, launched_size, local_size
from sworker.dtypes import torch_dtype
from sworker.kernels.packing import activation_dtype, stays_narrow
from sworker.ranks.sharding import Shard, shard_kv

_USUAL_TOKENS = 1024
"""Tokens of a prompt, and of an answer, unless the model or the user decides."""
_NAMES = {"r": "R-workers", "gpu": "the GPU alone", "hybrid": "both sides"}


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration with nothing left open."""

    config: EngineConfig
    identity: Identity
    layers: tuple[range, ...]  # layers of each stage
    device: torch.device  # this rank's own
    free: FreeMemory  # before anything is loaded
    r_threads: int
    memory: MemoryPlan
    schedule: ScheduleOptions  # with the number of lanes to start with
    prompts_on_r: bool  # whether R-workers attend prompts
    lanes: LaneLimits
    """Numbers of lanes that there may ever be; there is memory for the most."""
    max_graphs: int  # CUDA graphs at most; 0: S-steps run as they are
    transport: str
    """inproc (R-workers as threads), inline (one in the S-worker's own thread),
    mpi, zmq, or local (the KV cache is on ``device``)."""
    why_placed: str = ""
    """Where the KV cache is and why, for people; empty: it was asked for."""
    instance_ranks: StageRanks | None = None
    """Of an instance that is ranks of an MPI job among others; None: this job's ranks are
    this engine's."""

    @property
    def ranks(self) -> StageRanks:
        """Which ranks of an MPI job are what."""
        s_part = self.config.s_part
        return self.instance_ranks or StageRanks(s_part.pp, s_part.tp)

    @property
    def dtype(self) -> DType:
        """Dtype of weights in memory, and of activations where the device multiplies them so."""
        return self.identity.dtype

    @property
    def activation_dtype(self) -> DType:
        """float32 where the device has no products of ``dtype``."""
        return computed_in(self.dtype, self.device)

    @property
    def about_products(self) -> str:
        """How weights are multiplied that the device has no products of. Empty if it has."""
        if self.activation_dtype is self.dtype:
            return ""
        stays = stays_narrow(torch_dtype(self.dtype), self.device)
        way = f"stay {self.dtype} in memory" if stays else "are widened once, to twice the memory"
        return f"this CPU has no {self.dtype} products: weights {way} and are multiplied in float32"

    @property
    def kv_dtype(self) -> DType:
        return self.identity.kv_dtype

    def slot_bytes(self, spec: ModelSpec) -> int:
        """Most that a layer's q, k and v of a lane's step take."""
        row = sum(spec.qkv_sizes) * self.activation_dtype.size_bytes
        return self.schedule.batching.step_tokens * row

    @property
    def stored_tokens(self) -> int:
        """Most that a step stores, with copies of blocks."""
        return self.schedule.stored_tokens(self.config.r_part.block_size)

    @property
    def stages_at_once(self) -> int:
        """That compute at a time."""
        return min(len(self.layers), self.schedule.num_lanes)

    @property
    def max_model_len(self) -> int:
        return self.identity.max_model_len


def resolve_for_this_host(
    config: EngineConfig, spec: ModelSpec, *, rank: int = 0, beside: Colocation | None = None
) -> ResolvedConfig:
    """Resolve with what this host has.

    Args:
        rank: Which of the S-workers that act as one this is.
        beside: One of several engines that share the host. None if there are no others.
    """
    num_engines = 1
    if beside is not None:
        rank, num_engines = beside.place, beside.num_engines
    free = free_memory(choose_device(config.s_part.device, rank)).share(num_engines)
    resolved = resolve(config, spec, num_cores=available_cores(), free=free, rank=rank)
    if beside is None:
        return resolved
    schedule = replace(resolved.schedule, whole_prompts=beside.role is InstanceRole.PREFILL)
    # R-workers of other engines can't reach into a thread.
    transport = "inproc" if resolved.transport == "inline" else resolved.transport
    return replace(resolved, transport=transport, schedule=schedule, instance_ranks=beside.ranks)


def resolve(
    config: EngineConfig, spec: ModelSpec, *, num_cores: int, free: FreeMemory, rank: int = 0
) -> ResolvedConfig:
    """Decide everything that the user left open.

    Raises:
        ConfigError: the device doesn't exist, max_model_len exceeds the
            model's, or the memory doesn't suffice.
    """
    identity = identify(config, spec)
    config, why_placed = place(config, spec, identity, _machine(config, identity, free))
    placement = config.r_part.kv_placement
    device, transport = choose_device(config.s_part.device, rank), transport_of(config)
    # Where S-part and R-part share their hardware, lanes get into each other's way, and a sole
    # R-worker needs no thread. With KV on both sides one lane begins, the home lane.
    shares_cores = transport == "inproc" and device.type == "cpu"
    if shares_cores and placement == "r" and has_one_worker(config):
        transport = "inline"
    prompts_on_r = not config.r_part.is_on_device and (
        config.r_part.prompt_attention == "r"
        or (config.r_part.prompt_attention == "auto" and device.type == "cpu")
    )
    layers = layers_of_stages(spec, config.s_part.pp, config.s_part.layer_counts)
    here = _layers_here(layers, device, transport)
    on_device = spec if len(here) > 1 else stage_spec(spec, here[0])
    on_host = len(layers)
    if stages_are_ranks(transport):
        on_host = min(len(layers) * config.s_part.tp, local_size())
    weights = torch_dtype(identity.dtype)
    # Later stages know of no sequence that it is a prompt's.
    is_held = identity.kv_dtype is not DType.INT4 and config.s_part.pp == 1
    is_held = is_held and not prompts_on_r and transport != "local"
    steps = Steps(
        config,
        on_device,
        computed_in(identity.dtype, device),
        transport,
        free,
        uses_graphs(config.s_part, device),
        kv_spec(config, spec, identity.kv_dtype).token_bytes if is_held else 0,
        kv_token_bytes=kv_spec(config, on_device, identity.kv_dtype).token_bytes,
        num_stages_here=on_host if device.type == "cpu" else len(here),
        num_stages_on_host=on_host,
        usual_lanes=len(layers) if transport == "local" and len(here) == 1 else 1,
        weight_dtype=identity.dtype if stays_narrow(weights, device) else None,
    )
    lanes, schedule, memory = steps.plan(may_overlap=placement == "r" and not shares_cores)
    return ResolvedConfig(
        config=config,
        identity=identity,
        layers=layers,
        device=device,
        free=free,
        r_threads=_r_threads(config, num_cores, device, shares_cores=shares_cores),
        memory=memory,
        schedule=schedule,
        prompts_on_r=prompts_on_r,
        lanes=lanes,
        max_graphs=steps.max_graphs,
        transport=transport,
        why_placed=why_placed,
    )


def computed_in(dtype: DType, device: torch.device) -> DType:
    """Return the dtype of activations on a device whose weights have ``dtype``."""
    is_kept = activation_dtype(torch_dtype(dtype), device) == torch_dtype(dtype)
    return dtype if is_kept else DType.FLOAT32


def _layers_here(
    layers: tuple[range, ...], device: torch.device, transport: str
) -> tuple[range, ...]:
    """What a device has of the model: the layers of all stages, or of the one
    that has most, where each has a GPU or a process of its own."""
    on_several = device.type == "cuda" and torch.cuda.device_count() >= len(layers)
    return (max(layers, key=len),) if on_several or stages_are_ranks(transport) else layers


def stages_are_ranks(transport: str) -> bool:
    """Whether stages would be ranks of an MPI job; else they are threads."""
    return transport in ("mpi", "zmq", "local") and launched_size() is not None


def kv_spec(config: EngineConfig, spec: ModelSpec, dtype: DType) -> KVSpec:
    return KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        block_size=config.r_part.block_size,
    )


def kept_by_rank(
    spec: ModelSpec, resolved: ResolvedConfig, rank: int
) -> tuple[KVSpec, tuple[AttentionSpec, ...]]:
    """What holders keep, and how they attend: all heads; or, of S-workers that act as
    one and each have a cache on their device, a rank's share."""
    kv = kv_spec(resolved.config, spec, resolved.kv_dtype)
    s_part = resolved.config.s_part
    if resolved.transport != "local" or s_part.tp == 1:
        return kv, spec.attention
    return shard_kv(kv, spec.attention, Shard(rank, s_part.tp))


def _machine(config: EngineConfig, identity: Identity, free: FreeMemory) -> PlacementHost | None:
    """Return what placements of the KV cache are compared on. None if R-workers keep it."""
    on_gpu = choose_device(config.s_part.device).type == "cuda"
    if not on_gpu or free.device_bytes is None:
        return None
    if config.r_part.replicas or config.s_part.pp > 1 or config.s_part.tp > 1:
        return None
    if identity.kv_dtype is DType.INT4:
        return None  # devices read it in plain torch, which is slow
    transport = transport_of(config)
    num_r_workers = {
        "zmq": len(config.cluster.r_worker_addresses),
        "mpi": max(0, (launched_size() or 1) - config.s_part.tp),
    }.get(transport, config.r_part.r_workers if config.r_part.r_workers > 1 else 0)
    return PlacementHost(free, num_r_workers, is_here=transport in ("inproc", "inline"))


def _r_threads(
    config: EngineConfig, num_cores: int, device: torch.device, *, shares_cores: bool
) -> int:
    """Return the threads of each R-worker in this process. A GPU is fed at all times, which
    takes one core. Stages on shared cores take turns where there are fewer lanes than stages."""
    r_part, num_stages = config.r_part, config.s_part.pp
    if shares_cores:
        num_stages = min(num_stages, config.batching.lanes or 1)
    spare = 1 if device.type == "cuda" and num_cores > 2 else 0
    return r_part.r_threads or max(1, (num_cores - spare) // r_part.r_workers // num_stages)


@dataclass(frozen=True)
class PlacementHost:
    """What placements are compared on."""

    free: FreeMemory
    num_r_workers: int  # that the user asks for
    is_here: bool  # True if they are threads of this process


def place(
    config: EngineConfig, spec: ModelSpec, identity: Identity, machine: PlacementHost | None
) -> tuple[EngineConfig, str]:
    """Settle ``kv_placement``. Return the options, and why, for people (empty if it was asked for).

    Args:
        machine: None if the S-part is on a CPU, or other options are for R-workers alone.
    """
    if config.r_part.kv_placement != "auto":
        return config, ""
    if machine is None:
        return _with(config, "r"), ""
    rates = _rates(config, spec, identity, machine)
    for placement in ranking(rates):
        if placement == "gpu" and machine.num_r_workers:
            continue  # with nothing to add, both sides are the GPU alone
        try:
            placed = _with(config, placement)
        except ConfigError:  # an option that was given is not for this placement
            continue
        listed = ", ".join(f"{_NAMES[x]} {rate_text(rates[x])} tokens/s" for x in rates)
        by = "" if machine.free.device_name else ", of a GPU that is not known"
        why = f"--kv-placement auto; estimated{by}: {listed}"
        return placed, f"KV cache on {_NAMES[placement]} ({why})"
    return _with(config, "r"), ""


def _with(config: EngineConfig, placement: str) -> EngineConfig:
    """Return the options with a placement. Raises ConfigError: If another option opposes it."""
    return replace(config, r_part=replace(config.r_part, kv_placement=placement))


def _rates(
    config: EngineConfig, spec: ModelSpec, identity: Identity, machine: PlacementHost
) -> dict[str, float]:
    hardware, free = Hardware.load(), machine.free
    assert free.device_bytes is not None
    used = free.device_total_bytes - free.device_bytes + CUDA_RESERVE_BYTES
    usable = config.s_part.gpu_memory_fraction - used / free.device_total_bytes
    gpu, _ = gpu_like(free.device_name, free.device_total_bytes, usable, hardware)
    cpu, nic = assumed_r_worker(hardware, is_here=machine.is_here)
    # The data file has 16-bit rates only; memory is what float32 needs most of.
    is_wide = identity.dtype is DType.FLOAT32 or gpu.bf16_flops_per_s is None
    dtype = DType.FLOAT16 if is_wide else identity.dtype
    expected = config.batching.expected_output_tokens or _USUAL_TOKENS
    output = min(expected, max(1, identity.max_model_len // 2))
    workload = Workload(min(_USUAL_TOKENS, identity.max_model_len - output), output)
    setup = Setup(spec, dtype, identity.kv_dtype.value, gpu, cpu, nic, workload)
    # Threads of this process share its sockets: count them as one.
    sockets = min(1, machine.num_r_workers) if machine.is_here else machine.num_r_workers
    return placement_rates(setup.system(), sockets, config.batching.max_num_sequences)

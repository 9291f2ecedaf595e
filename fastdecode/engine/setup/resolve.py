"""From what a user chose to a configuration with nothing left open: the one
place where "auto" means something."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.groups import Batching
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.host.machine import available_cores, free_memory_bytes
from fastdecode.core.model.identity import Identity, identify
from fastdecode.core.model.spec import ModelSpec
from fastdecode.engine.setup.memory import (
    GRAPH_BYTES,
    FreeMemory,
    KVDemand,
    MemoryPlan,
    StepSizes,
    plan_memory,
)
from fastdecode.schedule.hybrid.control import MAX_LANES as MAX_HYBRID_LANES
from fastdecode.schedule.lanes import MAX_AUTO_LANES
from fastdecode.schedule.options import ScheduleOptions
from fastdecode.wire.arrays import MAX_BODY_BYTES
from fastdecode.wire.mpi.launcher import launched_size
from sworker.graphs import MAX_GRAPH_ROWS, MAX_GRAPHS, Buckets

_GRAPHS_SHARE = 32
"""CUDA graphs may take one part in so many of the device's memory."""
_CLOSED_BYTES = MAX_BODY_BYTES // (2 * MAX_AUTO_LANES)
"""Of a layer's queries that go to closed parts of split sequences: of a lane's
prompts, and as many of all decoding sequences. So they fit into one message
even where lanes have become one whose prompts were booked apart."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration with nothing left open."""

    config: EngineConfig
    identity: Identity
    device: torch.device
    """This rank's own."""
    free: FreeMemory
    """Before anything is loaded."""
    r_threads: int
    kv_bytes: int
    """Of each R-worker in this process."""
    memory: MemoryPlan
    schedule: ScheduleOptions
    """With the number of lanes to start with."""
    prompts_on_r: bool
    """Whether R-workers attend prompts."""
    adapts_lanes: bool
    """Whether the number of lanes follows what steps turn out to take."""
    most_lanes: int
    """That there may ever be; there is memory for so many."""
    max_graphs: int
    """CUDA graphs at most; 0: S-steps run as they are."""
    device_kv_bytes: int
    """Of the cache on the device beside R-workers'; 0: there is none."""
    transport: str
    """inproc (R-workers as threads), inline (one in the S-worker's own thread),
    mpi, zmq, or local (the KV cache is on ``device``)."""

    @property
    def dtype(self) -> DType:
        """Of weights and activations."""
        return self.identity.dtype

    @property
    def kv_dtype(self) -> DType:
        return self.identity.kv_dtype

    def slot_bytes(self, spec: ModelSpec) -> int:
        """Most that a layer's q, k and v of a lane's step take."""
        return self.schedule.batching.step_tokens * sum(spec.qkv_sizes) * self.dtype.size_bytes

    @property
    def max_model_len(self) -> int:
        return self.identity.max_model_len


def resolve_for_this_host(
    config: EngineConfig, spec: ModelSpec, *, rank: int = 0
) -> ResolvedConfig:
    """``resolve`` with what this host has, for one of the S-workers that act as one."""
    free = free_memory(choose_device(config.s_part.device, rank))
    return resolve(config, spec, num_cores=available_cores(), free=free, rank=rank)


def free_memory(device: torch.device) -> FreeMemory:
    """What this process may still take of this host and of a device."""
    if device.type != "cuda":
        return FreeMemory(free_memory_bytes())
    free, total = torch.cuda.mem_get_info(device)
    # What an engine before this one has given back, torch keeps for the next.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return FreeMemory(free_memory_bytes(), free + kept, total)


def describe_device(resolved: ResolvedConfig) -> str:
    """Where the S-part runs and the memory that was free there, for people."""
    device, free = resolved.device, resolved.free
    if device.type != "cuda" or free.device_bytes is None:
        return f"the CPU ({free.host_bytes / 1e9:.1f} GB of memory free)"
    of_total = f"{free.device_bytes / 1e9:.1f} of {free.device_total_bytes / 1e9:.1f} GB free"
    return f"{torch.cuda.get_device_name(device)} ({device}, {of_total})"


def resolve(
    config: EngineConfig, spec: ModelSpec, *, num_cores: int, free: FreeMemory, rank: int = 0
) -> ResolvedConfig:
    """Decide everything that the user left open.

    Args:
        rank: which of the S-workers that act as one this is, counted from 0.

    Raises:
        ConfigError: the device doesn't exist, max_model_len exceeds the
            model's, or the memory doesn't suffice.
    """
    identity = identify(config, spec)
    config = _placed(config)
    is_hybrid = config.r_part.kv_placement == "hybrid"
    is_local = config.r_part.kv_placement == "gpu"
    _check_kv_dtype(identity.kv_dtype, config.r_part.kv_placement)
    device = choose_device(config.s_part.device, rank)
    transport = _transport(config)
    # Where S-part and R-part share their hardware, lanes would only get into
    # each other's way, and a single R-worker needs no thread of its own.
    shares_cores = transport == "inproc" and device.type == "cpu"
    # With KV on both sides there is one to begin with, the home lane.
    may_overlap = not is_local and not shares_cores and not is_hybrid
    if (
        shares_cores
        and not is_hybrid
        and config.r_part.r_workers == 1
        and config.batching.lanes in (None, 1)
    ):
        transport = "inline"
    steps = _Steps(
        config, spec, identity.dtype, transport, free, uses_graphs=_uses_graphs(config, device)
    )
    plan = steps.plan(may_overlap=may_overlap)
    return ResolvedConfig(
        config=config,
        identity=identity,
        device=device,
        free=free,
        r_threads=config.r_part.r_threads
        or max(1, _r_cores(num_cores, device) // config.r_part.r_workers),
        kv_bytes=plan.memory.kv_bytes,
        memory=plan.memory,
        schedule=plan.schedule,
        prompts_on_r=_prompts_on_r(config, device),
        adapts_lanes=plan.lanes.adapt,
        most_lanes=plan.lanes.most,
        max_graphs=steps.max_graphs,
        device_kv_bytes=plan.memory.device_kv_bytes,
        transport=transport,
    )


def _check_kv_dtype(kv_dtype: DType, placement: str) -> None:
    """Raises ConfigError: the device doesn't know it."""
    if placement == "gpu":
        is_known = kv_dtype is not DType.INT4
    else:
        is_known = placement != "hybrid" or kv_dtype.is_float
    if not is_known:
        raise ConfigError(
            Given("kv_dtype", kv_dtype.value),
            " needs R-workers: with ",
            Given("kv_placement", placement),
            f" choose {'int8, ' if placement == 'gpu' else ''}float32, bfloat16 or float16",
        )


@dataclass(frozen=True)
class _Lanes:
    """Numbers of lanes that there may be."""

    first: int
    fewest: int
    most: int

    @classmethod
    def fixed(cls, num_lanes: int) -> _Lanes:
        return cls(num_lanes, num_lanes, num_lanes)

    @property
    def adapt(self) -> bool:
        return self.fewest < self.most


@dataclass(frozen=True)
class _StepPlan:
    lanes: _Lanes
    schedule: ScheduleOptions
    memory: MemoryPlan


@dataclass(frozen=True)
class _Steps:
    """What steps will be like: how many lanes, which graphs, and the memory of both."""

    config: EngineConfig
    spec: ModelSpec
    dtype: DType
    transport: str
    free: FreeMemory
    uses_graphs: bool

    def plan(self, *, may_overlap: bool) -> _StepPlan:
        """As many lanes as may be of use and there is memory for.

        Raises:
            ConfigError: there isn't even enough for the fewest.
        """
        refusal: ConfigError | None = None
        for lanes in self._choices(may_overlap):
            try:
                return self._planned(lanes)
            except ConfigError as error:
                refusal = error
        assert refusal is not None
        raise refusal

    def _choices(self, may_overlap: bool) -> Iterator[_Lanes]:
        asked = self.config.batching.lanes
        if self.config.r_part.kv_placement == "hybrid":
            yield _Lanes(1, 1, MAX_HYBRID_LANES)
            return
        if asked is not None or not may_overlap:
            yield _Lanes.fixed(asked or 1)
            return
        # Fixed intervals are computed for so many lanes, and no others.
        if self.config.batching.schedule != "fixed-f":
            for most in range(MAX_AUTO_LANES, 1, -1):
                yield _Lanes(2, 1, most)
        yield _Lanes.fixed(2)
        yield _Lanes.fixed(1)

    def _planned(self, lanes: _Lanes) -> _StepPlan:
        config = self.config
        on_gpu = self.free.device_bytes is not None
        batching = _batching(config.batching, lanes.first, on_gpu=on_gpu)
        schedule = ScheduleOptions(batching, config.r_part.split_tokens, self._max_closed_rows)
        sizes = StepSizes(
            num_lanes=lanes.most,
            step_tokens=batching.step_tokens,
            logit_rows=-(-batching.max_num_sequences // lanes.fewest),
            itemsize=self.dtype.size_bytes,
            num_shards=config.s_part.tp,
            num_graphs=self._num_graphs(lanes.most),
            graph_rows=MAX_GRAPH_ROWS if self.max_graphs else 0,
        )
        kv = KVDemand(
            on_device=self.transport == "local",
            num_caches={"local": 1, "inline": 1, "inproc": config.r_part.r_workers}.get(
                self.transport, 0
            ),
            cache_bytes=None
            if config.r_part.kv_memory_gb is None
            else int(config.r_part.kv_memory_gb * 1e9),
            is_on_both=config.r_part.kv_placement == "hybrid",
            device_cache_bytes=None
            if config.r_part.device_kv_gb is None
            else int(config.r_part.device_kv_gb * 1e9),
        )
        memory = plan_memory(
            self.spec, sizes, kv, self.free, gpu_memory_fraction=config.s_part.gpu_memory_fraction
        )
        return _StepPlan(lanes, schedule, memory)

    @property
    def _max_closed_rows(self) -> int:
        row_bytes = (
            max(spec.num_q_heads * spec.head_dim for spec in self.spec.attention)
            * self.dtype.size_bytes
        )
        return max(1, min(_CLOSED_BYTES // row_bytes, ScheduleOptions.max_closed_rows))

    @property
    def max_graphs(self) -> int:
        if not self.uses_graphs:
            return 0
        total = self.free.device_total_bytes
        return min(MAX_GRAPHS, total // _GRAPHS_SHARE // GRAPH_BYTES) if total else MAX_GRAPHS

    def _num_graphs(self, num_lanes: int) -> int:
        num_units = self.spec.num_layers + 1
        return min(
            self.max_graphs,
            Buckets.choose(num_lanes, num_units, self.max_graphs).num_graphs(num_lanes, num_units),
        )


def _placed(config: EngineConfig) -> EngineConfig:
    """With the KV cache somewhere: on both sides where there are two, each with
    hardware of its own."""
    if config.r_part.kv_placement != "auto":
        return config
    on_gpu = choose_device(config.s_part.device).type == "cuda"
    elsewhere = _transport(config) in ("mpi", "zmq")
    placement = "r" if not on_gpu or config.s_part.tp > 1 else "hybrid" if elsewhere else "gpu"
    if placement == "gpu" and config.r_part.r_workers > 1:
        placement = "hybrid"  # somebody asks for them
    return replace(config, r_part=replace(config.r_part, kv_placement=placement))


def _transport(config: EngineConfig) -> str:
    if config.r_part.kv_placement == "gpu":
        return "local"
    if config.cluster.transport != "auto":
        return config.cluster.transport
    return (
        "zmq"
        if config.cluster.r_worker_addresses
        else "inproc"
        if launched_size() is None
        else "mpi"
    )


def _r_cores(num_cores: int, device: torch.device) -> int:
    """Cores for R-workers in this process: a GPU needs somebody to feed it at
    all times, which takes one."""
    return num_cores - 1 if device.type == "cuda" and num_cores > 2 else num_cores


def _prompts_on_r(config: EngineConfig, device: torch.device) -> bool:
    if config.r_part.kv_placement == "gpu":
        return False
    return config.r_part.prompt_attention == "r" or (
        config.r_part.prompt_attention == "auto" and device.type == "cpu"
    )


def _batching(asked: Batching, num_lanes: int, *, on_gpu: bool) -> Batching:
    """With a schedule, a chunk, and so many lanes."""
    schedule = asked.schedule
    if schedule == "auto":
        is_limited = num_lanes > 1 or asked.load_limit is not None
        schedule = "stabilized" if is_limited else "greedy"
    chunk = asked.chunk_tokens(on_gpu=on_gpu)
    return replace(asked, schedule=schedule, lanes=num_lanes, prefill_chunk=chunk)


def choose_device(name: str, rank: int = 0) -> torch.device:
    """The device of one of the S-workers that act as one: GPUs are counted from
    the one that is named.

    Args:
        name: cpu, cuda, cuda:N, or auto: cuda if torch sees a GPU here, else
            cpu.
        rank: which S-worker.

    Raises:
        ConfigError: it is none of these, or isn't there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            Given("device", name), " is not a torch device: use cpu, cuda, cuda:N or auto"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(Given("device", name), ": the S-part runs on cpu or cuda")
    if device.type == "cpu":
        return device
    index = (device.index or 0) + rank
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if rank and count == 1:
        index = device.index or 0  # the launcher shows every rank a GPU of its own
    if index >= count:
        of_rank = f" of S-worker {rank}" if rank else ""
        raise ConfigError(
            Given("device", name),
            f": GPU {index}{of_rank} isn't there, torch sees {count} CUDA devices here; use ",
            Given("device", "cpu"),
            ", or check the driver and that torch was built for CUDA",
        )
    return torch.device("cuda", index)


def _uses_graphs(config: EngineConfig, device: torch.device) -> bool:
    if config.s_part.cuda_graphs == "on" and device.type != "cuda":
        raise ConfigError(
            Given("cuda_graphs", "on"),
            " needs a CUDA device, not ",
            Given("device", device.type),
            ": use auto",
        )
    # Between GPUs a graph holds collectives too, which has been run on no GPU
    # yet: only if it is asked for.
    return device.type == "cuda" and (
        config.s_part.cuda_graphs == "on"
        or (config.s_part.cuda_graphs == "auto" and config.s_part.tp == 1)
    )

"""From a configuration to a running engine: resolve what was left open, load the model, start and greet R-workers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastdecode.core.config import EngineConfig
from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import available_cores, free_memory_bytes
from fastdecode.core.model_spec import ModelSpec
from fastdecode.core.spec import KVSpec
from fastdecode.core.trace import Trace
from fastdecode.engine.attend import Attention, AttentionPlan
from fastdecode.engine.engine import Engine
from fastdecode.engine.fleet import Fleet
from fastdecode.engine.heads import HeadsWorkers
from fastdecode.engine.local import LocalAttention, LocalWorkers
from fastdecode.engine.memory import FreeMemory, KVDemand, MemoryPlan, StepSizes, plan_memory
from fastdecode.engine.pipeline import Pipeline
from fastdecode.engine.ranks import meet_ranks
from fastdecode.engine.text import TextCodec
from fastdecode.engine.workers import MpiWorkers, ThreadWorkers, Workers, ZmqWorkers
from fastdecode.schedule.lanes import LaneControl
from fastdecode.schedule.modes import ScheduleOptions, make_scheduler
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.wire.messages import PROTOCOL_VERSION, Hello
from fastdecode.wire.mpi_job import launched_size
from fastdecode.wire.transport import TIMEOUT
from sworker.dtypes import torch_dtype
from sworker.graphs import StepGraphs
from sworker.model.skeleton import Model
from sworker.parallel import ParallelSWorker, Ranks
from sworker.sharding import parallelize
from sworker.weights import load_model, load_spec, model_hash
from sworker.worker import SWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration with nothing left open."""

    config: EngineConfig
    dtype: DType
    kv_dtype: DType
    device: torch.device
    r_threads: int
    kv_bytes: int
    """Of each R-worker in this process."""
    memory: MemoryPlan
    max_model_len: int
    schedule: ScheduleOptions
    cuda_graphs: bool
    adapts_lanes: bool
    """Whether the number of lanes follows what steps turn out to take."""
    transport: str
    """inproc, mpi or zmq."""


def resolve(config: EngineConfig, spec: ModelSpec, *, num_cores: int, free: FreeMemory) -> ResolvedConfig:
    """Decide everything that the user left open: the one place where "auto" means something.

    Raises:
        ConfigError: the device doesn't exist, max_model_len exceeds the model's, or the memory doesn't suffice.
    """
    dtype = spec.dtype if config.dtype == "auto" else DType.parse(config.dtype)
    kv_dtype = dtype if config.kv_dtype == "auto" else DType.parse(config.kv_dtype, option="kv_dtype", of_kv=True)
    max_model_len = config.max_model_len or spec.max_model_len
    if max_model_len > spec.max_model_len:
        raise ConfigError(
            f"max_model_len={max_model_len} exceeds the {spec.max_model_len} tokens that {config.model} was made for"
        )
    is_local = config.kv_placement == "gpu"
    if is_local and not kv_dtype.is_float:
        raise ConfigError(f"kv_dtype={kv_dtype.value!r} needs R-workers: with kv_placement='gpu' choose a 16-bit type")
    device = _device(config.device)
    transport = "local" if is_local else config.transport
    if transport == "auto":
        transport = "zmq" if config.r_worker_addresses else "inproc" if launched_size() is None else "mpi"
    # Where S-part and R-part share their hardware, lanes would only get into each other's way.
    num_lanes = config.lanes or (1 if is_local or (transport == "inproc" and device.type == "cpu") else 2)
    schedule = _schedule(config, num_lanes)
    memory = _memory(config, spec, schedule, dtype, transport, free)
    return ResolvedConfig(
        config=config,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        r_threads=config.r_threads or max(1, num_cores // config.r_workers),
        kv_bytes=memory.kv_bytes,
        memory=memory,
        max_model_len=max_model_len,
        schedule=schedule,
        # Fixed intervals were computed for so many lanes, and no others.
        adapts_lanes=config.lanes is None and num_lanes > 1 and "fixed-f" not in (schedule.mode, schedule.cold_start),
        cuda_graphs=_uses_graphs(config, device),
        transport=transport,
    )


def _schedule(config: EngineConfig, num_lanes: int) -> ScheduleOptions:
    mode = ("stabilized" if num_lanes > 1 else "greedy") if config.schedule == "auto" else config.schedule
    return ScheduleOptions(
        mode=mode,  # type: ignore[arg-type]  # checked there, as is cold_start
        max_num_sequences=config.max_num_sequences,
        prefill_chunk=config.prefill_chunk,
        max_step_tokens=config.step_tokens,
        num_lanes=num_lanes,
        load_limit=config.load_limit,
        target_length=config.target_length,
        interval=config.interval,
        cold_start=config.cold_start,  # type: ignore[arg-type]
        learn_lengths=config.learn_lengths,
        length_quantile=config.length_quantile,
    )


def _memory(
    config: EngineConfig, spec: ModelSpec, schedule: ScheduleOptions, dtype: DType, transport: str, free: FreeMemory
) -> MemoryPlan:
    sizes = StepSizes(
        num_lanes=schedule.num_lanes,
        step_tokens=schedule.max_step_tokens,
        logit_rows=schedule.lane_size,
        itemsize=dtype.size_bytes,
        num_shards=config.tp,
    )
    kv = KVDemand(
        on_device=transport == "local",
        num_caches={"local": 1, "inproc": config.r_workers}.get(transport, 0),
        cache_bytes=None if config.kv_memory_gb is None else int(config.kv_memory_gb * 1e9),
    )
    return plan_memory(spec, sizes, kv, free, gpu_memory_fraction=config.gpu_memory_fraction)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r} is not a torch device: use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(
            f"device={name!r}: torch sees {torch.cuda.device_count()} CUDA devices here; use --device cpu, or check "
            "the driver and that torch was built for CUDA"
        )
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r}: the S-part runs on cpu or cuda")
    return device


class RunningEngine:
    """An engine, the model that it runs and the R-workers that serve it. Close it when done.

    Args:
        config: what the user chose.
        progress: told what is being done, one line at a time.
        trace: told what every step did.
        times: what is known of step times before the first one, and told how long each took; None: all is learnt.

    Raises:
        ConfigError, ModelError: an option or the model directory is bad.
        WorkerError: an R-worker failed to start, or refused to serve.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[str], None] | None = None,
        trace: Trace | None = None,
        times: MeasuredTimes | None = None,
    ) -> None:
        tell = progress or logger.info
        started = time.perf_counter()
        self.spec = load_spec(config.model)
        resolved = self.resolved = resolve_for_this_host(config, self.spec)
        self.codec = TextCodec.load(config.model)
        # R-workers first: that one of them can't be reached is better known before than after a large model is loaded.
        self._ranks: Ranks | None = None
        workers = _reach_workers(resolved)
        self._workers: Workers | None = workers
        self._fleet = Fleet(workers.hub, config.worker_timeout_s, config.worker_silence_s)
        # The R-workers that are lost, and why.
        self._lost = workers.hub.dead if isinstance(workers, HeadsWorkers) else self._fleet.lost
        self.num_r_workers = workers.num_r_workers if isinstance(workers, HeadsWorkers) else len(self._fleet)
        try:
            tell(
                f"loading {config.model} ({self.spec.num_parameters / 1e6:.1f} M parameters, {resolved.dtype}): "
                f"{resolved.memory}"
            )
            if config.tp > 1:
                self._ranks = meet_ranks(config.tp, resolved.device)
            device, shard = (self._ranks.device, self._ranks.shard) if self._ranks else (resolved.device, None)
            _, model = load_model(config.model, device=device, dtype=torch_dtype(resolved.dtype), shard=shard)
            tell(
                f"greeting {len(self._fleet)} R-worker(s): {', '.join(map(self._fleet.peer, range(len(self._fleet))))}"
            )
            hello = _hello(self.spec, resolved)
            self.welcomes = self._fleet.greet(hello)
            times = MeasuredTimes() if times is None else times
            blocks = tuple(welcome.num_blocks for welcome in self.welcomes)
            scheduler = make_scheduler(resolved.schedule, blocks, config.block_size, times)
            s_worker = make_s_worker(self.spec, model, resolved, self._ranks)
            attention = _attention(workers, self._fleet, self.spec, resolved, s_worker)
            pipeline = Pipeline(s_worker, attention, resolved.schedule.num_lanes, trace)
            self.engine = Engine(
                s_worker,
                pipeline,
                self._fleet,
                scheduler,
                self.codec,
                self.spec.eos_token_ids,
                trace,
                times,
                LaneControl(times, resolved.schedule.num_lanes) if resolved.adapts_lanes else None,
                workers.replacements(hello),
            )
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - started

    @property
    def has_hung_r_workers(self) -> bool:
        return any(error.code == TIMEOUT for error in self._lost.values())

    @property
    def num_live_r_workers(self) -> int:
        return self.num_r_workers - len(self._lost)

    def close(self) -> None:
        """Stop the R-workers, and S-workers beside this one. Safe to call twice."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close(self._fleet.lost, self.resolved.config.worker_timeout_s)


def resolve_for_this_host(config: EngineConfig, spec: ModelSpec | None = None) -> ResolvedConfig:
    """``resolve`` with what this host has."""
    spec = spec or load_spec(config.model)
    free = free_memory(_device(config.device))
    return resolve(config, spec, num_cores=available_cores(), free=free)


def free_memory(device: torch.device) -> FreeMemory:
    """What this process may still take of this host and of a device."""
    if device.type != "cuda":
        return FreeMemory(free_memory_bytes())
    return FreeMemory(free_memory_bytes(), *torch.cuda.mem_get_info(device))


def make_s_worker(spec: ModelSpec, model: Model, resolved: ResolvedConfig, ranks: Ranks | None = None) -> SWorker:
    """The S-worker as it was configured."""
    if ranks is not None:
        parallelize(model, ranks.shard, ranks.data)
        return ParallelSWorker(spec, model, ranks)
    graphs = StepGraphs(model, resolved.device, capture=True) if resolved.cuda_graphs else None
    return SWorker(spec, model, resolved.device, graphs)


def _uses_graphs(config: EngineConfig, device: torch.device) -> bool:
    possible = device.type == "cuda" and config.tp == 1
    if config.cuda_graphs == "on" and not possible:
        raise ConfigError(
            f"cuda_graphs='on' needs a CUDA device and tp=1, not device={config.device!r} and tp={config.tp}: use auto"
        )
    return possible and config.cuda_graphs != "off"


def _attention(
    workers: Workers, fleet: Fleet, spec: ModelSpec, resolved: ResolvedConfig, s_worker: SWorker
) -> Attention:
    if isinstance(workers, LocalWorkers):
        return LocalAttention(workers, fleet)
    return AttentionPlan(spec.attention, resolved.kv_dtype, fleet, s_worker.device)


def _reach_workers(resolved: ResolvedConfig) -> Workers:
    if resolved.transport == "local":
        return LocalWorkers(resolved.device, resolved.kv_bytes)
    workers = _reach_r_workers(resolved)
    return HeadsWorkers(workers) if resolved.config.r_partition == "heads" else workers


def _reach_r_workers(resolved: ResolvedConfig) -> Workers:
    config = resolved.config
    if resolved.transport == "mpi":
        return MpiWorkers(config.tp)
    if resolved.transport == "zmq":
        return ZmqWorkers(config.r_worker_addresses, key_file=config.key, silence_s=config.worker_silence_s)
    return ThreadWorkers(config.r_workers, kv_bytes=resolved.kv_bytes, num_threads=resolved.r_threads)


def _hello(spec: ModelSpec, resolved: ResolvedConfig) -> Hello:
    kv = KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=resolved.kv_dtype,
        block_size=resolved.config.block_size,
    )
    return Hello(PROTOCOL_VERSION, model_hash(resolved.config.model), kv, spec.attention, resolved.dtype)

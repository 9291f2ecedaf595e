"""Reaching holders, and attending on them, as it was configured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from msgspec import structs

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.holders import Holder, HolderKind
from fastdecode.core.host.machine import default_kv_bytes
from fastdecode.core.model.checkpoint import Checkpoint
from fastdecode.core.model.spec import ModelSpec
from fastdecode.engine.fleet.colocation import Colocation
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.fleet.replicas import new_session
from fastdecode.engine.kv_exchange import ExportAddresses
from fastdecode.engine.setup.device_caches import (
    ReplicaKeeper,
    device_worker,
    reach_device,
    reach_swapped,
)
from fastdecode.engine.setup.ranks import agree_on_kv
from fastdecode.engine.setup.resolve import (
    ResolvedConfig,
    kept_by_rank,
    kv_spec,
    resolve_for_this_host,
    stages_are_ranks,
)
from fastdecode.engine.setup.tiers import host_tier_bytes
from fastdecode.engine.setup.workers import (
    REACH_TIMEOUT_S,
    Reached,
    reach_addresses,
    reach_inline,
    reach_stage_ranks,
    reach_threads,
    with_spares,
)
from fastdecode.engine.step.device import DeviceWorker, whole_steps
from fastdecode.engine.step.lane_step import Attention
from fastdecode.engine.step.mixed_step import DEVICE_LANE, DeviceLane, MixedAttention
from fastdecode.engine.step.prompts import DevicePrefill
from fastdecode.engine.step.remote import AttentionPlan
from fastdecode.engine.step.torch_executor import TorchExecutor
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import PROTOCOL_VERSION, FromRWorker, Hello, ToRWorker
from rworker.tiers.disk import Disk, disk_of
from sworker.dtypes import torch_dtype
from sworker.kernels.threads import openmp_library
from sworker.paged import PagedKV
from sworker.ranks.group import Ranks
from sworker.swap.swapped import NUM_SLOTS
from sworker.worker import SWorker

_GBIT_BYTES = 1e9 / 8


def device_beside(
    resolved: ResolvedConfig, beside: Colocation | None = None
) -> DeviceWorker | None:
    """The cache on the device beside R-workers', if there is one. ``beside``: other
    engines, which read from it."""
    if resolved.config.r_part.kv_placement != "hybrid":
        return None
    neighbours = None if beside is None else beside.neighbours
    executor = TorchExecutor(resolved.device)
    return device_worker(executor, resolved.device_kv_bytes, beside, neighbours=neighbours)


def make_attention(
    workers: Reached,
    fleet: HolderPool,
    spec: ModelSpec,
    resolved: ResolvedConfig,
    s_worker: SWorker,
    device: DeviceWorker | None,
) -> Attention:
    token_bytes = kept_by_rank(spec, resolved, 0)[0].token_bytes
    holder = Holder(workers.kind, resolved.prompts_on_r, workers.answers_at_once, token_bytes)
    if workers.attention is not None:
        local = workers.attention(fleet, holder, s_worker)
        if workers.keepers:
            local.plan = _plan(fleet, spec, resolved, s_worker, local.holders)
        return local
    holders = (holder,) * len(fleet)
    if device is not None:
        on_device = replace(
            holder, kind=HolderKind.DEVICE, attends_prompts=False, answers_at_once=True
        )
        holders = (*holders[:-1], on_device)
    held = _held_prompts(spec, resolved, s_worker)
    plan = _plan(fleet, spec, resolved, s_worker, holders, held)
    plan.prepare(resolved.most_lanes)
    if device is None:
        return plan
    whole = whole_steps(s_worker, device)
    if whole is not None:
        whole.prepare(only_lane=DEVICE_LANE)
    return MixedAttention(plan, device, home=DeviceLane(whole))


def _plan(
    fleet: HolderPool,
    spec: ModelSpec,
    resolved: ResolvedConfig,
    s_worker: SWorker,
    holders: Sequence[Holder],
    prompts: DevicePrefill | None = None,
) -> AttentionPlan:
    """Attention at R-workers."""
    return AttentionPlan(
        spec.attention,
        resolved.kv_dtype,
        fleet,
        s_worker.device,
        holders,
        slot_bytes=resolved.slot_bytes(spec),
        sinks=s_worker.model.sinks,
        prompts=prompts,
    )


def reach_workers(
    resolved: ResolvedConfig,
    hub: InprocHub[ToRWorker, FromRWorker] | None = None,
    colocation: Colocation | None = None,
) -> Reached:
    """The R-workers of the first stage, or what is in their place.

    Args:
        hub: gets the connections to those that are threads; None: one of theirs
            alone.
        beside: other engines' R-workers in this process.
    """
    if resolved.transport == "local":
        if has_stage_ranks(resolved):
            return reach_stage(resolved, 0, colocation)
        return reach_own_device(resolved, colocation)
    workers = _reach_r_workers(resolved, hub, colocation)
    return with_spares(workers, resolved.config.cluster.spare_r_workers)


def _reach_r_workers(
    resolved: ResolvedConfig,
    hub: InprocHub[ToRWorker, FromRWorker] | None,
    colocation: Colocation | None,
) -> Reached:
    config, cluster = resolved.config, resolved.config.cluster
    if has_stage_ranks(resolved):
        return reach_stage(resolved, 0)
    if resolved.transport == "mpi":
        return reach_stage_ranks(0, resolved.ranks)
    if resolved.transport == "zmq":
        return reach_stage_addresses(resolved, 0)
    kv_bytes, num_threads = resolved.kv_bytes, resolved.r_threads
    disk = own_disk(config, 1 if colocation is None else colocation.num_engines)
    if resolved.transport == "inline":
        # A runtime's threads serve both parts only where both want as many.
        library = openmp_of(resolved, torch.get_num_threads() // resolved.stages_at_once)
        return reach_inline(
            kv_bytes=kv_bytes,
            num_threads=num_threads,
            openmp_library=library,
            disk=disk,
        )
    num_workers = config.r_part.r_workers + cluster.spare_r_workers
    return reach_threads(
        num_workers,
        kv_bytes=kv_bytes,
        num_threads=num_threads,
        disk=disk,
        hub=hub,
        beside=colocation,
    )


def own_disk(config: EngineConfig, num_engines: int = 1) -> Disk | None:
    """Where the R-workers of this process may keep blocks: those of all stages, and
    standby R-workers.

    Args:
        num_engines: engines in this process, which have one configuration; or their lanes,
            where each has a cache.

    Raises:
        ConfigError: the directory can't be used, or is too small for all of them.
    """
    num_workers = config.r_part.r_workers + config.cluster.spare_r_workers
    return disk_of(
        config.cache.cache_disk,
        config.cache.cache_disk_gb,
        num_workers * config.s_part.pp * num_engines,
    )


def has_stage_ranks(resolved: ResolvedConfig) -> bool:
    """Whether stages, if there are several, are ranks of an MPI job; else they
    are threads."""
    return resolved.config.s_part.pp > 1 and stages_are_ranks(resolved.transport)


def reach_own_device(
    resolved: ResolvedConfig, beside: Colocation | None = None, stage: int = 0
) -> Reached:
    """The cache on this S-worker's device; or its lanes' caches, which are swapped.
    ``beside``: other engines, which read from it. ``stage``: whose it is."""
    num_here = 1 if has_stage_ranks(resolved) else resolved.config.s_part.pp
    num_here *= resolved.config.s_part.tp
    keeper = _replica_keeper(resolved, num_here)
    num_engines = 1 if beside is None else beside.num_engines
    if resolved.config.r_part.swaps:
        num_lanes = resolved.schedule.num_lanes
        return reach_swapped(
            resolved.device,
            resolved.kv_bytes,
            num_lanes,
            most_tokens=resolved.stored_tokens,
            disk=own_disk(resolved.config, num_engines * num_lanes),
            beside=beside,
            stage=stage,
            keeper=keeper,
        )
    host_bytes = host_tier_bytes(resolved.config.cache, num_here * num_engines)
    disk = own_disk(resolved.config, num_engines)
    return reach_device(
        resolved.device,
        resolved.kv_bytes,
        host_bytes=host_bytes,
        disk=disk,
        beside=beside,
        stage=stage,
        keeper=keeper,
    )


def _replica_keeper(resolved: ResolvedConfig, num_here: int) -> ReplicaKeeper | None:
    """What keeps a replica of a KV cache on the device; None: there is to be none.
    ``num_here``: S-workers whose devices' replicas share this host's memory."""
    if not resolved.config.r_part.replicas:
        return None
    kv_bytes, num_caches = resolved.kv_bytes, num_here
    if resolved.config.r_part.swaps:
        kv_bytes, num_caches = kv_bytes // NUM_SLOTS, num_caches * resolved.schedule.num_lanes
    if resolved.free.device_bytes is not None:
        left = resolved.free.host_bytes - resolved.memory.swapped_bytes * num_here
        kv_bytes = min(kv_bytes, default_kv_bytes(num_caches, left))
    return ReplicaKeeper(kv_bytes, resolved.r_threads)


def reach_stage(resolved: ResolvedConfig, stage: int, beside: Colocation | None = None) -> Reached:
    """A stage's R-workers, or what is in their place, and the other stages,
    which are ranks of this job. ``beside``: see ``reach_own_device``."""
    workers = None
    if resolved.transport == "zmq":
        workers = reach_stage_addresses(resolved, stage)
    elif resolved.transport == "local":
        workers = reach_own_device(resolved, beside)
    try:
        return reach_stage_ranks(
            stage,
            resolved.ranks,
            elsewhere=workers,
        )
    except BaseException:
        if workers is not None:
            workers.close((), 0.0)
        raise


def reach_stage_addresses(resolved: ResolvedConfig, stage: int) -> Reached:
    """The R-workers at addresses that are a stage's: as many for each, in their order."""
    cluster = resolved.config.cluster
    each = len(cluster.r_worker_addresses) // resolved.config.s_part.pp
    return reach_addresses(
        cluster.r_worker_addresses[stage * each : (stage + 1) * each],
        key_file=cluster.key,
        silence_s=cluster.worker_silence_s,
        reach_timeout_s=min(REACH_TIMEOUT_S, cluster.worker_timeout_s),
    )


def openmp_of(resolved: ResolvedConfig, num_threads: int) -> str | None:
    """The runtime whose threads serve both parts of a stage, where the S-part
    has so many; None: each has its own."""
    return openmp_library() if resolved.r_threads == max(1, num_threads) else None


def resolve_beside(
    config: EngineConfig, spec: ModelSpec, colocation: Colocation | None
) -> ResolvedConfig:
    """``resolve_for_this_host``, for one of several engines that share it."""
    if colocation is None:
        return resolve_for_this_host(config, spec)
    resolved = resolve_for_this_host(
        config,
        spec,
        rank=colocation.place,
        num_engines=colocation.num_engines,
        is_reached=True,
        instance_ranks=colocation.ranks,
    )
    schedule = replace(resolved.schedule, whole_prompts=colocation.role is InstanceRole.PREFILL)
    return replace(resolved, schedule=schedule)


def exports_of(
    address_of: Callable[[int], str], spec: ModelSpec, resolved: ResolvedConfig
) -> ExportAddresses:
    """How other instances' R-workers reach these, of which each has an address."""
    config = resolved.config
    gbps, timeout_s = config.instances.fetch_gbps or 0.0, config.cluster.worker_timeout_s
    bytes_per_s = gbps * _GBIT_BYTES
    return ExportAddresses(address_of, spec.num_kv_heads, bytes_per_s, timeout_s)


def make_hello(checkpoint: Checkpoint, spec: ModelSpec, resolved: ResolvedConfig) -> Hello:
    """In a session of its own, where its caches are to outlive their R-workers."""
    config = resolved.config
    kv, attention = kept_by_rank(spec, resolved, 0)
    return Hello(
        PROTOCOL_VERSION,
        checkpoint.model_hash,
        kv,
        attention,
        resolved.activation_dtype,
        session=new_session() if config.r_part.replicas else 0,
    )


def agreed_hello(hello: Hello, resolved: ResolvedConfig, ranks: Ranks | None) -> Hello:
    """The hello of S-workers that act as one, each with KV on its own device: as many
    blocks as all of them have room for. Every rank takes part (``agree_on_kv``)."""
    if ranks is None or resolved.transport != "local":
        return hello
    num_bytes = agree_on_kv(resolved, ranks)
    if resolved.config.r_part.swaps:
        num_bytes //= NUM_SLOTS  # a lane's
    return structs.replace(hello, max_blocks=max(1, num_bytes // hello.kv.block_bytes))


def _held_prompts(
    spec: ModelSpec, resolved: ResolvedConfig, s_worker: SWorker
) -> DevicePrefill | None:
    """The device's room for prompts under way, if there is any."""
    kv = kv_spec(resolved.config, spec, resolved.kv_dtype)
    num_blocks = resolved.memory.held_bytes // kv.block_bytes
    if not num_blocks:
        return None
    dtype = torch_dtype(resolved.activation_dtype)
    cache = PagedKV(kv, spec.attention, num_blocks, s_worker.device, dtype=dtype)
    cache.sinks = s_worker.model.sinks
    return DevicePrefill(cache)

"""Reaching holders as it was configured: R-workers, or caches on the S-worker's device; and
attending on them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import torch

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.holders import Holder, HolderId, HolderKind
from fastdecode.core.host.machine import default_kv_bytes, free_memory_bytes
from fastdecode.core.model.spec import ModelSpec
from fastdecode.engine.fleet.colocation import Colocation
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.fleet.pool import RHub
from fastdecode.engine.setup.resolve import ResolvedConfig, kept_by_rank, kv_spec, stages_are_ranks
from fastdecode.engine.setup.workers import (
    REACH_TIMEOUT_S,
    Close,
    Reached,
    name_prefix,
    reach_addresses,
    reach_stage_ranks,
    reach_threads,
    start_threads,
    with_spares,
)
from fastdecode.engine.step.device import DeviceAttention, DeviceWorker, whole_steps
from fastdecode.engine.step.mixed_step import DEVICE_LANE, DeviceLane, MixedAttention
from fastdecode.engine.step.prompts import DevicePrefill
from fastdecode.engine.step.reached_device import ReachedDevice
from fastdecode.engine.step.remote import Attention, AttentionPlan
from fastdecode.engine.step.swapped import LaneExecutor, SwappedLanes
from fastdecode.engine.step.torch_executor import TorchExecutor
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import FromRWorker, ToRWorker
from fastdecode.wire.transport import JoinedHub, PolledHub
from rworker.inline import make_inline_worker
from rworker.tiers.disk import Disk, disk_of
from rworker.transfers.neighbours import Neighbourhood, ThreadNeighbours
from sworker.dtypes import torch_dtype
from sworker.kernels.threads import openmp_library
from sworker.paged import PagedKV
from sworker.swap.swapped import NUM_SLOTS
from sworker.worker import SWorker


def reach_workers(
    resolved: ResolvedConfig,
    hub: InprocHub[ToRWorker, FromRWorker] | None = None,
    beside: Colocation | None = None,
    stage: int = 0,
    s_threads: int | None = None,
) -> Reached:
    """Reach a stage's R-workers, or what is in their place. Where stages are ranks of this job,
    the others are reached, too.

    Args:
        hub: Gets the connections to those that are threads. None for a hub of theirs alone.
        beside: Other engines' R-workers in this process.
        s_threads: CPU threads of the S-part. None for its share of torch's.
    """
    config, are_ranks = resolved.config, has_stage_ranks(resolved)
    num_engines = 1 if beside is None else beside.num_engines
    workers = None
    if resolved.transport == "local":
        workers = reach_own_device(resolved, beside, 0 if are_ranks else stage)
    elif resolved.transport == "zmq":
        cluster = config.cluster
        each = len(cluster.r_worker_addresses) // config.s_part.pp  # in their order
        workers = reach_addresses(
            cluster.r_worker_addresses[stage * each : (stage + 1) * each],
            key_file=cluster.key,
            silence_s=cluster.worker_silence_s,
            reach_timeout_s=min(REACH_TIMEOUT_S, cluster.worker_timeout_s),
        )
    elif resolved.transport == "inline":
        # A runtime's threads serve both parts only where both want as many.
        threads = s_threads or torch.get_num_threads() // resolved.stages_at_once
        inline = make_inline_worker(
            f"{name_prefix(None, stage)}r0",
            kv_bytes=resolved.memory.kv_bytes,
            num_threads=resolved.r_threads,
            openmp_library=openmp_library() if resolved.r_threads == max(1, threads) else None,
            disk=own_disk(config, num_engines),
        )
        polled: RHub = PolledHub([inline])
        workers = Reached(polled, lambda lost, timeout_s: inline.close(), answers_at_once=True)
    elif resolved.transport == "inproc":
        workers = reach_threads(
            config.r_part.r_workers + config.cluster.spare_r_workers,
            kv_bytes=resolved.memory.kv_bytes,
            num_threads=resolved.r_threads,
            disk=own_disk(config, num_engines),
            hub=hub,
            stage=stage,
            beside=beside,
        )
    if workers is None or are_ranks:
        try:
            workers = reach_stage_ranks(stage, resolved.ranks, elsewhere=workers)
        except BaseException:
            if workers is not None:
                workers.close((), 0.0)
            raise
    return with_spares(workers, config.cluster.spare_r_workers)


def has_stage_ranks(resolved: ResolvedConfig) -> bool:
    """Return True if stages, if there are several, are ranks of an MPI job and no threads."""
    return resolved.config.s_part.pp > 1 and stages_are_ranks(resolved.transport)


def own_disk(config: EngineConfig, num_engines: int = 1) -> Disk | None:
    """Return where the R-workers of this process may keep blocks: those of all stages, and
    standby R-workers.

    Args:
        num_engines: Engines in this process, which have one configuration; or their lanes,
            where each has a cache.

    Raises:
        ConfigError: If the directory can't be used, or is too small for all of them.
    """
    num_workers = config.r_part.r_workers + config.cluster.spare_r_workers
    return disk_of(
        config.cache.cache_disk,
        config.cache.cache_disk_gb,
        num_workers * config.s_part.pp * num_engines,
    )


def reach_own_device(
    resolved: ResolvedConfig, beside: Colocation | None = None, stage: int = 0
) -> Reached:
    """Reach the cache on this S-worker's device; or its lanes' caches, which are swapped."""
    config, device, kv_bytes = resolved.config, resolved.device, resolved.memory.kv_bytes
    num_here = 1 if has_stage_ranks(resolved) else config.s_part.pp
    num_here *= config.s_part.tp
    num_engines = 1 if beside is None else beside.num_engines
    executors: list[TorchExecutor]
    swap = None
    if config.r_part.swaps:
        num_lanes = resolved.schedule.num_lanes
        disk = own_disk(config, num_engines * num_lanes)
        swap = SwappedLanes(device, num_lanes, most_tokens=resolved.stored_tokens)
        executors = [LaneExecutor(swap, disk) for _ in range(num_lanes)]
        kv_bytes //= NUM_SLOTS
    else:
        kept_gb, num_s_workers = config.cache.cache_memory_gb, num_here * num_engines
        host_bytes, free_bytes = int((kept_gb or 0) * 1e9), free_memory_bytes()
        if host_bytes * num_s_workers > free_bytes:
            raise ConfigError(
                Given("cache_memory_gb", kept_gb),
                f" for {num_s_workers} S-worker(s) is more than the {free_bytes} bytes that are "
                "free here: lower it",
            )
        disk = own_disk(config, num_engines)
        executors = [TorchExecutor(device, host_bytes=host_bytes, disk=disk)]
    replica_bytes = None
    if config.r_part.replicas:
        replica_bytes = kv_bytes
        if resolved.free.device_bytes is not None:
            left = resolved.free.host_bytes - resolved.memory.swapped_bytes * num_here
            replica_bytes = min(kv_bytes, default_kv_bytes(num_here * len(executors), left))
    return reach_device(
        executors, kv_bytes, swap, beside, stage,
        replica_bytes=replica_bytes, replica_threads=resolved.r_threads,
    )  # fmt: skip


def reach_device(
    executors: Sequence[TorchExecutor],
    kv_bytes: int,
    swap: SwappedLanes | None = None,
    beside: Colocation | None = None,
    stage: int = 0,
    *,
    replica_bytes: int | None = None,
    replica_threads: int = 1,
) -> Reached:
    """Reach the device in the place of R-workers.

    Args:
        executors: One for all lanes, or one for each lane that is swapped.
        kv_bytes: Memory for the K and V of each. All blocks that fit in it are offered.
        swap: The lanes' memory, if they are swapped.
        beside: Other engines, which read from these caches. None if there are none.
        replica_bytes: Memory of an R-worker in this process that keeps the replica of a cache.
            None if none does.
        replica_threads: CPU threads that it attends with once it has taken over.
    """
    neighbours: Neighbourhood | None = None if beside is None else beside.neighbours
    if neighbours is None and replica_bytes is not None:
        neighbours = ThreadNeighbours()
    workers = [
        device_worker(
            executor, kv_bytes, beside, stage, None if swap is None else lane, neighbours=neighbours
        )
        for lane, executor in enumerate(executors)
    ]
    devices = [worker for worker in workers if isinstance(worker, ReachedDevice)]
    addresses = [device.address for device in devices]
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    close_keepers: Close | None = None
    if replica_bytes is not None and neighbours is not None:
        prefix = name_prefix(beside, stage)
        names = [f"{prefix}replica{number or ''}" for number in range(len(workers))]
        close_keepers = start_threads(
            names, replica_bytes, replica_threads, hub, neighbours, first=len(workers)
        )
        addresses += map(neighbours.address_of, names)

    def close(lost: Collection[int], timeout_s: float) -> None:
        try:
            for worker in workers:
                worker.close()
            if close_keepers is not None:
                close_keepers(lost, timeout_s)
        finally:
            if swap is not None:
                swap.close()

    own: RHub = PolledHub(workers)
    places = range(len(workers) if close_keepers is not None else 0)
    return Reached(
        own if close_keepers is None else JoinedHub(own, hub),
        close,
        kind=HolderKind.DEVICE,
        answers_at_once=True,
        addresses=addresses,
        attention=partial(DeviceAttention, workers, swap=swap),
        keepers={HolderId(i): HolderId(len(workers) + i) for i in places},
    )


def device_worker(
    executor: TorchExecutor,
    kv_bytes: int,
    beside: Colocation | None = None,
    stage: int = 0,
    lane: int | None = None,
    *,
    neighbours: Neighbourhood | None = None,
) -> DeviceWorker:
    """Return what has the cache, or a lane's.

    Args:
        beside, stage: See ``reach_device``.
        lane: The lane whose cache it is. None for all lanes'.
        neighbours: Where others reach it. None if they don't.
    """
    peer = None if lane is None else f"lane {lane}'s KV cache on {executor.device}"
    if neighbours is None:
        return DeviceWorker(executor, kv_bytes, peer)
    name = f"{name_prefix(beside, stage)}{'device' if lane is None else f'lane{lane}'}"
    return ReachedDevice(executor, kv_bytes, name, neighbours, peer)


def device_beside(
    resolved: ResolvedConfig, beside: Colocation | None = None
) -> DeviceWorker | None:
    """Return the cache on the device beside R-workers', if there is one. ``beside``: other
    engines, which read from it."""
    if resolved.config.r_part.kv_placement != "hybrid":
        return None
    neighbours = None if beside is None else beside.neighbours
    executor = TorchExecutor(resolved.device)
    return device_worker(executor, resolved.memory.device_kv_bytes, beside, neighbours=neighbours)


def make_attention(
    workers: Reached,
    fleet: HolderPool,
    spec: ModelSpec,
    resolved: ResolvedConfig,
    s_worker: SWorker,
    device: DeviceWorker | None,
) -> Attention:
    """Return what attends on holders. ``device``: with a cache beside R-workers'."""
    token_bytes = kept_by_rank(spec, resolved, 0)[0].token_bytes
    holder = Holder(workers.kind, resolved.prompts_on_r, workers.answers_at_once, token_bytes)
    plan = partial(
        AttentionPlan,
        spec.attention,
        resolved.kv_dtype,
        fleet,
        s_worker.device,
        slot_bytes=resolved.slot_bytes(spec),
        sinks=s_worker.model.sinks,
    )
    if workers.attention is not None:
        local = workers.attention(fleet, holder, s_worker)
        if workers.keepers:
            local.plan = plan(local.holders)
        return local
    holders = (holder,) * len(fleet)
    if device is not None:
        on_device = replace(
            holder, kind=HolderKind.DEVICE, attends_prompts=False, answers_at_once=True
        )
        holders = (*holders[:-1], on_device)
    remote = plan(holders, prompts=_held_prompts(spec, resolved, s_worker))
    remote.prepare(resolved.lanes.most)
    if device is None:
        return remote
    whole = whole_steps(s_worker, device)
    if whole is not None:
        whole.prepare(only_lane=DEVICE_LANE)
    return MixedAttention(remote, device, home=DeviceLane(whole))


def _held_prompts(
    spec: ModelSpec, resolved: ResolvedConfig, s_worker: SWorker
) -> DevicePrefill | None:
    """Return the device's room for prompts under way, if there is any."""
    kv = kv_spec(resolved.config, spec, resolved.kv_dtype)
    num_blocks = resolved.memory.held_bytes // kv.block_bytes
    if not num_blocks:
        return None
    dtype = torch_dtype(resolved.activation_dtype)
    cache = PagedKV(kv, spec.attention, num_blocks, s_worker.device, dtype=dtype)
    cache.sinks = s_worker.model.sinks
    return DevicePrefill(cache)

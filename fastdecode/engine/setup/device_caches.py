"""The device's KV cache in place of R-workers: of all lanes, or with lanes that are
swapped to the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from fastdecode.core.holders import Holder, HolderId, HolderKind
from fastdecode.engine.fleet.colocation import Colocation
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.setup.workers import Reached
from fastdecode.engine.step.device import DeviceAttention, DeviceWorker
from fastdecode.engine.step.reached_device import ReachedDevice
from fastdecode.engine.step.swapped import LaneExecutor, SwappedLanes
from fastdecode.engine.step.torch_executor import TorchExecutor
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import FromRWorker, ToRWorker
from fastdecode.wire.transport import JoinedHub, PolledHub
from rworker.tiers.disk import Disk
from rworker.transfers.neighbours import Neighbourhood, ThreadNeighbours
from rworker.worker import start_worker_thread
from sworker.device import Gpu
from sworker.paged import BlockKernels
from sworker.swap.swapped import NUM_SLOTS
from sworker.worker import SWorker


def reach_device(
    device: torch.device,
    kv_bytes: int,
    gpu: Gpu | None = None,
    kernels: BlockKernels | None = None,
    host_bytes: int = 0,
    disk: Disk | None = None,
    beside: Colocation | None = None,
    stage: int = 0,
    *,
    keeper: ReplicaKeeper | None = None,
) -> Reached:
    """The device in the place of R-workers.

    Args:
        device: where K and V are kept.
        kv_bytes: memory for them; as many blocks as fit in it are offered.
        gpu: the device's driver, in place of the one that torch has.
        kernels: see ``PagedKV``.
        host_bytes, disk: where kept blocks are offloaded to; see ``TorchExecutor``.
        beside: other engines, which read from this cache; None: there are none.
        stage: whose it is.
        keeper: keeps a replica; None: there is none.
    """
    executor = TorchExecutor(device, gpu, kernels, host_bytes, disk)
    neighbours = _neighbours(beside, is_reached=keeper is not None)
    worker = device_worker(executor, kv_bytes, beside, stage, neighbours=neighbours)
    attention = partial(DeviceAttention, [worker])
    return _reached([worker], attention, keeper, _prefix(beside, stage))


@dataclass(frozen=True)
class ReplicaKeeper:
    """An R-worker of this process that keeps the replica of a cache on the device."""

    kv_bytes: int
    """Memory for it."""
    num_threads: int
    """CPU threads that it attends with once it has taken over."""


def _reached(
    workers: Sequence[DeviceWorker],
    attention: Callable[[HolderPool, Holder, SWorker], DeviceAttention],
    keeper: ReplicaKeeper | None,
    prefix: str,
) -> Reached:
    """A device's caches, and an R-worker for each that keeps its replica, if any does."""
    devices = [worker for worker in workers if isinstance(worker, ReachedDevice)]
    if keeper is not None:
        return _with_keepers(devices, attention, keeper, prefix)
    return Reached(
        PolledHub(workers),
        lambda lost, timeout_s: _close_all(workers),
        kind=HolderKind.DEVICE,
        answers_at_once=True,
        addresses=[device.address for device in devices],
        attention=attention,
    )


def _with_keepers(
    devices: Sequence[ReachedDevice],
    attention: Callable[[HolderPool, Holder, SWorker], DeviceAttention],
    keeper: ReplicaKeeper,
    prefix: str,
) -> Reached:
    neighbours = devices[0].neighbours
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    names = [f"{prefix}replica{number or ''}" for number in range(len(devices))]
    threads = [
        start_worker_thread(
            name,
            kv_bytes=keeper.kv_bytes,
            num_threads=keeper.num_threads,
            hub=hub,
            neighbours=neighbours,
        )
        for name in names
    ]

    def close(lost: Collection[int], timeout_s: float) -> None:
        _close_all(devices)
        for thread in threads:
            thread.stop()
        for index, thread in enumerate(threads, len(devices)):
            if index in lost:
                thread.connection.close()
            else:
                thread.join(timeout_s)

    places = range(len(devices))
    return Reached(
        JoinedHub(PolledHub(devices), hub),
        close,
        kind=HolderKind.DEVICE,
        answers_at_once=True,
        addresses=(*(x.address for x in devices), *map(neighbours.address_of, names)),
        attention=attention,
        keepers={HolderId(i): HolderId(len(devices) + i) for i in places},
    )


def _prefix(beside: Colocation | None, stage: int) -> str:
    """What names of an engine's R-workers begin with, of a later stage's too."""
    engine = "" if beside is None else f"{beside.name}-"
    return f"{engine}s{stage}-" if stage else engine


def _neighbours(beside: Colocation | None, *, is_reached: bool) -> Neighbourhood | None:
    """Where all caches of a device are reached by others; None: they are not."""
    if beside is not None:
        return beside.neighbours
    return ThreadNeighbours() if is_reached else None


def device_worker(
    executor: TorchExecutor,
    kv_bytes: int,
    beside: Colocation | None = None,
    stage: int = 0,
    lane: int | None = None,
    *,
    neighbours: Neighbourhood | None = None,
) -> DeviceWorker:
    """What has the cache, or a lane's.

    Args:
        beside, stage: see ``reach_device``.
        lane: whose it is; None: all lanes'.
        neighbours: where others reach it; None: they don't.
    """
    peer = None if lane is None else f"lane {lane}'s KV cache on {executor.device}"
    if neighbours is None:
        return DeviceWorker(executor, kv_bytes, peer)
    name = f"{_prefix(beside, stage)}{'device' if lane is None else f'lane{lane}'}"
    return ReachedDevice(executor, kv_bytes, name, neighbours, peer)


def reach_swapped(
    device: torch.device,
    kv_bytes: int,
    num_lanes: int,
    gpu: Gpu | None = None,
    kernels: BlockKernels | None = None,
    most_tokens: int = 0,
    disk: Disk | None = None,
    beside: Colocation | None = None,
    stage: int = 0,
    *,
    keeper: ReplicaKeeper | None = None,
) -> Reached:
    """Lanes' KV in the place of R-workers, each lane's with as many blocks as one of the
    device's slots has.

    Args:
        device: where two lanes' K and V are.
        kv_bytes: memory there, for both.
        num_lanes: how many lanes there are.
        most_tokens: that a step stores.
        disk: where kept blocks go, a file a lane; None: nowhere.
        gpu, kernels, beside, stage: see ``reach_device``.
        keeper: keeps a lane's replica; None: there are none.
    """
    swap = SwappedLanes(device, num_lanes, gpu, kernels, most_tokens)
    neighbours = _neighbours(beside, is_reached=keeper is not None)
    executors = [LaneExecutor(swap, disk) for _ in range(num_lanes)]
    workers = [
        device_worker(executor, kv_bytes // NUM_SLOTS, beside, stage, lane, neighbours=neighbours)
        for lane, executor in enumerate(executors)
    ]
    attention = partial(DeviceAttention, workers, swap=swap)
    reached = _reached(workers, attention, keeper, _prefix(beside, stage))

    def close(lost: Collection[int], timeout_s: float) -> None:
        try:
            reached.close(lost, timeout_s)
        finally:
            swap.close()

    return replace(reached, close=close)


def _close_all(workers: Sequence[DeviceWorker]) -> None:
    for worker in workers:
        worker.close()

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
from fastdecode.engine.step.local import DeviceWorker, LocalAttention
from fastdecode.engine.step.protected import DeviceAttention
from fastdecode.engine.step.reached_device import ReachedDevice
from fastdecode.engine.step.swapped import SwapExecutor, SwappedAttention
from fastdecode.engine.step.torch_executor import TorchExecutor
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.joined import HubBehind
from fastdecode.wire.messages import FromRWorker, ToRWorker
from fastdecode.wire.transport import SoleHub
from rworker.tiers.disk import Disk
from rworker.transfers.neighbours import ThreadNeighbours
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
    is_written: bool = False,
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
        is_written: prompt stages write to it.
        keeper: keeps a replica; None: there is none.
    """
    executor = TorchExecutor(device, gpu, kernels, host_bytes, disk)
    if keeper is not None:
        neighbours = ThreadNeighbours()
        protected = ReachedDevice(executor, kv_bytes, f"{_of_stage(stage)}device", neighbours)
        attention = partial(LocalAttention, protected)
        return _with_keepers([protected], attention, keeper, neighbours, stage)
    connection = device_worker(executor, kv_bytes, beside, stage, is_written=is_written)
    reached = [connection] if isinstance(connection, ReachedDevice) else []
    return Reached(
        SoleHub(connection),
        lambda lost, timeout_s: connection.close(),
        kind=HolderKind.DEVICE,
        answers_at_once=True,
        addresses=[device.address for device in reached],
        doors=[device.door for device in reached],
        attention=partial(LocalAttention, connection),
    )


@dataclass(frozen=True)
class ReplicaKeeper:
    """An R-worker of this process that keeps the replica of a cache on the device."""

    kv_bytes: int
    """Memory for it."""
    num_threads: int
    """CPU threads that it attends with once it has taken over."""


def _with_keepers(
    devices: Sequence[ReachedDevice],
    attention: Callable[[HolderPool, Holder, SWorker], DeviceAttention],
    keeper: ReplicaKeeper,
    neighbours: ThreadNeighbours,
    stage: int,
) -> Reached:
    """A device's caches, and an R-worker for each that keeps its replica."""
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    names = [f"{_of_stage(stage)}replica{number or ''}" for number in range(len(devices))]
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
        HubBehind(devices, hub),
        close,
        kind=HolderKind.DEVICE,
        answers_at_once=True,
        addresses=(*(x.address for x in devices), *map(neighbours.address_of, names)),
        attention=attention,
        keepers={HolderId(i): HolderId(len(devices) + i) for i in places},
    )


def _of_stage(stage: int) -> str:
    """What names of a later stage's R-workers begin with."""
    return f"s{stage}-" if stage else ""


def device_worker(
    executor: TorchExecutor,
    kv_bytes: int,
    beside: Colocation | None = None,
    stage: int = 0,
    *,
    is_written: bool = False,
) -> DeviceWorker:
    """What has the cache. ``beside``, ``stage``, ``is_written``: see ``reach_device``."""
    neighbours = None if beside is None else beside.neighbours
    if neighbours is None and is_written:
        neighbours = ThreadNeighbours()
    if neighbours is None:
        return DeviceWorker(executor, kv_bytes)
    engine = "" if beside is None else f"{beside.name}-"
    return ReachedDevice(executor, kv_bytes, f"{engine}{_of_stage(stage)}device", neighbours)


def reach_swapped(
    device: torch.device,
    kv_bytes: int,
    num_lanes: int,
    gpu: Gpu | None = None,
    kernels: BlockKernels | None = None,
    most_tokens: int = 0,
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
        gpu: the device's driver, in place of the one that torch has.
        kernels: see ``PagedKV``.
        most_tokens: that a step stores.
        stage: whose it is.
        keeper: keeps a lane's replica; None: there are none.
    """
    swap = SwapExecutor(device, num_lanes, gpu, kernels, most_tokens)
    lane_bytes, lanes = kv_bytes // NUM_SLOTS, range(num_lanes)
    peers = [f"lane {lane}'s KV cache on {device}" for lane in lanes]
    if keeper is None:
        workers = [DeviceWorker(swap, lane_bytes, peer) for peer in peers]
        reached = Reached(
            HubBehind(workers),
            lambda lost, timeout_s: _close_all(workers),
            kind=HolderKind.DEVICE,
            answers_at_once=True,
            attention=partial(SwappedAttention, swap, workers),
        )
    else:
        neighbours = ThreadNeighbours()
        names = [f"{_of_stage(stage)}lane{lane}" for lane in lanes]
        devices = [
            ReachedDevice(swap, lane_bytes, name, neighbours, peer)
            for name, peer in zip(names, peers, strict=True)
        ]
        attention = partial(SwappedAttention, swap, devices)
        reached = _with_keepers(devices, attention, keeper, neighbours, stage)

    def close(lost: Collection[int], timeout_s: float) -> None:
        try:
            reached.close(lost, timeout_s)
        finally:
            swap.close()

    return replace(reached, close=close)


def _close_all(workers: Sequence[DeviceWorker]) -> None:
    for worker in workers:
        worker.close()

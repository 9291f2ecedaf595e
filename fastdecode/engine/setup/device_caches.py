"""The device's KV cache in place of R-workers: of all lanes, or with lanes that are
swapped to the host's memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from fastdecode.core.holders import HolderId, HolderKind
from fastdecode.engine.fleet.colocation import Colocation
from fastdecode.engine.setup.workers import Reached
from fastdecode.engine.step.local import DeviceWorker, LocalAttention
from fastdecode.engine.step.reached_device import ReachedDevice
from fastdecode.engine.step.swapped import SwapExecutor, SwappedAttention, lane_workers
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

KEEPER: Final = 1
"""The index of the R-worker that keeps a device's replica."""


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
        return _reach_protected(executor, kv_bytes, keeper)
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
    """An R-worker of this process that keeps a device's replica."""

    kv_bytes: int
    """Memory for it."""
    num_threads: int
    """CPU threads that it attends with once it has taken over."""


def _reach_protected(executor: TorchExecutor, kv_bytes: int, keeper: ReplicaKeeper) -> Reached:
    """The device, and an R-worker that keeps its replica."""
    neighbours = ThreadNeighbours()
    connection = ReachedDevice(executor, kv_bytes, "device", neighbours)
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    thread = start_worker_thread(
        "replica",
        kv_bytes=keeper.kv_bytes,
        num_threads=keeper.num_threads,
        hub=hub,
        neighbours=neighbours,
    )

    def close(lost: Collection[int], timeout_s: float) -> None:
        connection.close()
        thread.stop()
        if KEEPER in lost:
            thread.connection.close()
        else:
            thread.join(timeout_s)

    return Reached(
        HubBehind((connection,), hub),
        close,
        kind=HolderKind.DEVICE,
        answers_at_once=True,
        addresses=(connection.address, neighbours.address_of(thread.name)),
        attention=partial(LocalAttention, connection),
        keepers={HolderId(0): HolderId(KEEPER)},
    )


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
    name = f"{engine}{f's{stage}-' if stage else ''}device"
    return ReachedDevice(executor, kv_bytes, name, neighbours)


def reach_swapped(
    device: torch.device,
    kv_bytes: int,
    num_lanes: int,
    gpu: Gpu | None = None,
    kernels: BlockKernels | None = None,
    most_tokens: int = 0,
) -> Reached:
    """Lanes' KV in the place of R-workers.

    Args:
        device: where two lanes' K and V are.
        kv_bytes: memory there, for both.
        num_lanes: how many lanes there are.
        gpu: the device's driver, in place of the one that torch has.
        kernels: see ``PagedKV``.
        most_tokens: that a step stores.
    """
    swap = SwapExecutor(device, num_lanes, gpu, kernels, most_tokens)
    workers = lane_workers(swap, kv_bytes)

    def close(lost: Collection[int], timeout_s: float) -> None:
        swap.close()
        for worker in workers:
            worker.close()

    return Reached(
        HubBehind(workers),
        close,
        kind=HolderKind.DEVICE,
        answers_at_once=True,
        attention=partial(SwappedAttention, swap, workers),
    )

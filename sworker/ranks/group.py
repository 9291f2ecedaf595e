"""The S-workers that act as one: how they meet, what they exchange, how they part.

What is announced travels over gloo on the host, what is computed over the device's own collectives
(NCCL on CUDA)."""

from __future__ import annotations

import contextlib
import datetime
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastdecode.core.errors import WorkerError
from sworker.ranks.peers import Peers
from sworker.ranks.sharding import Shard

STOP, BEGIN, ADVANCE, LOGITS, COME_HOME, KEEP_KV, RUN = range(7)
KEEP_ON_HOST, STORE_BLOCKS, FETCH_BLOCKS = range(7, 10)
SWAP_LANES, ENTER_LANE, LEAVE_LANE, PREFETCH_LANE = range(10, 14)
"""Operations that rank 0 may order."""
JOINING_TIMEOUT_S = 600.0  # until all ranks have connected
PATIENCE_S = 300.0  # how long a rank may keep another one waiting in the middle of a step
_PARTING_TIMEOUT = datetime.timedelta(seconds=10)
_FOREVER = datetime.timedelta(days=365)
"""The time between two steps has no limit."""


class Order(NamedTuple):
    """An operation that rank 0 orders the other ranks to do."""

    operation: int
    lane: int
    number: int  # number of rows or blocks
    ints: Tensor  # int64 [n], on the host
    x: Tensor | None  # [rows, hidden], on the host

    @property
    def rows(self) -> Tensor:
        """Token ids and positions of ``number`` rows, int64 [2, T]: the last of ``ints``."""
        return self.ints[-2 * self.number :].view(2, -1)


@dataclass
class Ranks:
    """The S-workers that act as one, and the connections between them."""

    shard: Shard
    device: torch.device
    data: dist.ProcessGroup
    control: dist.ProcessGroup
    peers: Peers

    @classmethod
    def meet(
        cls, place: Path, shard: Shard, device: torch.device, *, patience_s: float = PATIENCE_S
    ) -> Ranks:
        """Connect to the other ranks of this host. Waits for all of them.

        Args:
            place: a file that doesn't exist yet, in a directory that is this user's alone; the
                same for all ranks.
            patience_s: how long another rank may keep this one waiting in the middle of a step.

        Raises:
            WorkerError: If they can't connect, or not all do within ``JOINING_TIMEOUT_S``.
        """
        # All are on this host: nothing listens beyond loopback.
        if device.type == "cuda":
            torch.cuda.set_device(device)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        joining, patience = (datetime.timedelta(seconds=s) for s in (JOINING_TIMEOUT_S, patience_s))
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            store = dist.FileStore(  # type: ignore[attr-defined]
                str(place), shard.size
            )
            store.set_timeout(joining)
            dist.init_process_group(
                "gloo", store=store, rank=shard.rank, world_size=shard.size, timeout=joining
            )
            control = dist.new_group(backend="gloo", timeout=_FOREVER)
            data = dist.new_group(backend=backend, timeout=patience)
            assert control is not None and data is not None
            ranks = cls(shard, device, data, control, Peers(shard, device, data, patience_s))
            # No rank continues before all have come: the meeting place may be removed then.
            processes = ranks._processes()
            # Connections between GPUs are made by the first collective, and not
            # while a graph is captured.
            dist.all_reduce(torch.zeros(1, device=device), group=data)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise WorkerError(
                f"S-worker {shard.rank} of {shard.size} can't connect to the others: {error}",
                code="tp_connect_failed",
            ) from None
        ranks.peers.watch(processes)
        return ranks

    def _processes(self) -> dict[int, int]:
        """The others' process ids, where they mean the same as here."""
        space = Path("/proc/self/ns/pid")
        own = torch.tensor(
            [os.getpid(), space.stat().st_ino if space.exists() else 0], dtype=torch.int64
        )
        found = [torch.empty_like(own) for _ in range(self.shard.size)]
        dist.all_gather(found, own, group=self.control)
        others = {
            rank: values.tolist() for rank, values in enumerate(found) if rank != self.shard.rank
        }
        return {rank: process for rank, (process, space_id) in others.items() if space_id == own[1]}

    def order(
        self,
        operation: int,
        lane: int = 0,
        number: int = 0,
        ints: Tensor | None = None,
        x: Tensor | None = None,
    ) -> None:
        """Send an ``Order`` to the other ranks. Only rank 0 does."""
        sizes = 0 if ints is None else ints.numel(), -1 if x is None else len(x)
        self._share(torch.tensor((operation, lane, number, *sizes), dtype=torch.int64))
        for part in (ints, x):
            if part is not None:
                self._share(part.contiguous())

    def next_order(self, like: Tensor) -> Order:
        """Wait for rank 0's next order, without a time limit. ``like``: [0, hidden] of the dtype
        that ``Order.x`` has."""
        header = torch.empty(5, dtype=torch.int64)
        with self.peers.waiting():
            dist.broadcast(header, 0, group=self.control)
        operation, lane, number, num_ints, num_x = header.tolist()
        ints = self._share(torch.empty(num_ints, dtype=torch.int64))
        x = None if num_x < 0 else self._share(like.new_empty((num_x, like.shape[1])))
        return Order(operation, lane, number, ints, x)

    def _share(self, part: Tensor) -> Tensor:
        """Copy rank 0's tensor to the others', of the same shape and dtype, all on the host."""
        if part.numel():
            with self.peers.waiting():
                # As bytes: not every version of gloo knows every dtype.
                data = part.view(torch.uint8)
                sharing = dist.broadcast(data, 0, group=self.control, async_op=True)
                assert sharing is not None
                sharing.wait(datetime.timedelta(seconds=self.peers.patience_s))
        return part

    def agree(self, *numbers: int) -> list[int]:
        """The least of what all ranks say, number by number; every rank calls it."""
        least = torch.tensor(numbers, dtype=torch.int64)
        with self.peers.waiting():
            dist.all_reduce(least, dist.ReduceOp.MIN, group=self.control)
        agreed: list[int] = least.tolist()
        return agreed

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, all of one shape, on rank 0; elsewhere nothing."""
        x = x.contiguous()
        parts = (
            [torch.empty_like(x) for _ in range(self.shard.size)] if self.shard.rank == 0 else None
        )
        if x.numel():
            with self.peers.waiting():
                dist.gather(x, parts, dst=0, group=self.data)
        return parts or []

    def scatter_heads(self, o: Tensor | None, like: Tensor) -> Tensor:
        """Rank 0's o [T, Hq, D] → each rank's heads, of the shape of ``like``
        [T, Hq / ranks, D]."""
        part = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        parts = None if o is None else [x.contiguous() for x in o.chunk(self.shard.size, dim=1)]
        with self.peers.waiting():
            dist.scatter(part, parts, src=0, group=self.data)
        return part

    def add_up(self, x: Tensor) -> None:
        """All ranks' x, of one shape, are summed in place."""
        with self.peers.waiting():
            dist.all_reduce(x, group=self.data)

    def close(self) -> None:
        """Rank 0: let the others go, if they are still there; everyone: leave."""
        if self.peers.close():
            with contextlib.suppress(RuntimeError, WorkerError):
                self._part()
        if self.peers.is_in_step:  # else this would wait for it, without end
            dist.destroy_process_group()

    def _part(self) -> None:
        if self.shard.rank == 0:
            self.order(STOP)
        # Who closes first must not cut off what the others have still to read.
        parting = dist.barrier(group=self.control, async_op=True)
        if parting is not None:
            parting.wait(_PARTING_TIMEOUT)

"""Several S-workers that act as one: rank 0 decides, the others mirror its S-steps.

Every pass of rank 0 is announced to the others, unit by unit, and all compute their share of it::

    rank 0      tell BEGIN, ids, positions | S-step | gather q, k, v | R-workers … | tell ADVANCE | scatter o | S-step …
    ranks 1 …   hear                       | S-step | gather q, k, v |             | hear         | scatter o | S-step …

Only rank 0 schedules, samples, and talks to R-workers, in whole heads. So R-workers, transports, failures and
placement know nothing of ranks. The price: all q, k, v and o pass rank 0's host link; between GPUs they take the GPUs'
own links. Each S-worker with its own R-workers would use every host link, and would need to agree on every loss.

What is announced travels over gloo on the host, what is computed over the device's own collectives (NCCL on CUDA).
"""

from __future__ import annotations

import contextlib
import datetime
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import WorkerError
from fastdecode.core.model_spec import ModelSpec
from sworker.model.skeleton import Model
from sworker.sharding import Shard
from sworker.worker import Pass, SWorker

_STOP, _BEGIN, _ADVANCE, _LOGITS = range(4)
JOINING_TIMEOUT_S = 600.0
"""Until all ranks have come to the meeting place."""
_PARTING_TIMEOUT = datetime.timedelta(seconds=10)
_FOREVER = datetime.timedelta(days=365)
"""Between two steps nobody knows how long it takes; a rank that ends breaks its connections, which all notice."""


@dataclass(frozen=True)
class Ranks:
    """The S-workers that act as one, and the connections between them."""

    shard: Shard
    device: torch.device
    data: dist.ProcessGroup
    control: dist.ProcessGroup

    @classmethod
    def meet(cls, place: Path, shard: Shard, device: torch.device) -> Ranks:
        """Connect to the other ranks of this host. Waits for all of them.

        Args:
            place: a file that doesn't exist yet, in a directory that is this user's alone; the same for all ranks.

        Raises:
            WorkerError: not all came in ``JOINING_TIMEOUT_S``, or they can't connect.
        """
        # All are on this host: nothing listens beyond loopback.
        if device.type == "cuda":
            torch.cuda.set_device(device)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        try:
            store = dist.FileStore(  # type: ignore[attr-defined]
                str(place), shard.size
            )
            store.set_timeout(datetime.timedelta(seconds=JOINING_TIMEOUT_S))
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=shard.rank, world_size=shard.size, timeout=_FOREVER)
            data = dist.group.WORLD
            assert data is not None
            control = data if backend == "gloo" else dist.new_group(backend="gloo", timeout=_FOREVER)
            # Nobody leaves before all have come: the meeting place may be gone then.
            dist.barrier(group=control)
        except RuntimeError as error:
            raise WorkerError(
                f"S-worker {shard.rank} of {shard.size} can't connect to the others: {error}", code="tp_connect_failed"
            ) from None
        return cls(shard, device, data, control)

    def tell(self, *numbers: int) -> None:
        """Rank 0: announce an operation."""
        dist.broadcast(torch.tensor(numbers, dtype=torch.int64), 0, group=self.control)

    def hear(self) -> list[int]:
        """The others: operation, lane, and how many rows."""
        numbers = torch.empty(3, dtype=torch.int64)
        dist.broadcast(numbers, 0, group=self.control)
        heard: list[int] = numbers.tolist()
        return heard

    def share(self, rows: Tensor) -> Tensor:
        """Rank 0's int64 rows, on the host; the others give room for them."""
        if rows.numel():
            dist.broadcast(rows, 0, group=self.control)
        return rows

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, all of one shape, on rank 0; elsewhere nothing."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.shard.size)] if self.shard.rank == 0 else None
        if x.numel():
            dist.gather(x, parts, dst=0, group=self.data)
        return parts or []

    def scatter_heads(self, o: Tensor | None, like: Tensor) -> Tensor:
        """Rank 0's o [T, Hq, D] → each rank's heads, of the shape of ``like`` [T, Hq / ranks, D]."""
        part = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        parts = None if o is None else [x.contiguous() for x in o.chunk(self.shard.size, dim=1)]
        dist.scatter(part, parts, src=0, group=self.data)
        return part

    def close(self) -> None:
        """Rank 0: let the others go, if they are still there; everyone: leave."""
        with contextlib.suppress(RuntimeError):
            if self.shard.rank == 0:
                self.tell(_STOP, 0, 0)
            # Who closes first must not cut off what the others have still to read.
            parting = dist.barrier(group=self.control, async_op=True)
            if parting is not None:
                parting.wait(_PARTING_TIMEOUT)
        dist.destroy_process_group()


class ParallelPass(Pass):
    """A pass of rank 0, mirrored by the others: q, k, v and o are whole here, shares there."""

    def __init__(
        self, worker: ParallelSWorker, lane: int, token_ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> None:
        self._ranks, self._lane = worker.ranks, lane
        self._vocab_size = worker.spec.vocab_size
        self._ranks.tell(_BEGIN, lane, len(token_ids))
        super().__init__(worker, self._ranks.share(torch.from_numpy(np.stack((token_ids, positions)))))
        self._gather()

    def advance(self, o: Tensor) -> bool:
        self._ranks.tell(_ADVANCE, self._lane, 0)
        goes_on = super().advance(self._ranks.scatter_heads(o, self._own_q))
        if goes_on:
            self._gather()
        return goes_on

    @torch.inference_mode()
    def logits(self, rows: NDArray[np.int64]) -> Tensor:
        self._ranks.tell(_LOGITS, self._lane, len(rows))
        self._ranks.share(torch.from_numpy(rows))
        parts = self._ranks.gather(super().logits(rows))  # of [R, vocab / ranks]
        return torch.cat(parts, dim=1)[:, : self._vocab_size]

    @torch.inference_mode()
    def _gather(self) -> None:
        self._own_q = self.q
        parts = self._ranks.gather(torch.cat((self.q, self.k, self.v), dim=1))
        num_q, num_kv = self.q.shape[1], self.k.shape[1]
        kinds = zip(*(part.tensor_split((num_q, num_q + num_kv), dim=1) for part in parts), strict=True)
        self.q, self.k, self.v = (torch.cat(kind, dim=1) for kind in kinds)


class ParallelSWorker(SWorker):
    """Rank 0's S-worker. ``spec`` is the whole model's; ``model`` this rank's part of it."""

    def __init__(self, spec: ModelSpec, model: Model, ranks: Ranks) -> None:
        super().__init__(spec, model, ranks.device)
        self.ranks = ranks

    def begin(self, token_ids: NDArray[np.int64], positions: NDArray[np.int64], lane: int = 0) -> Pass:
        return ParallelPass(self, lane, token_ids, positions)


@torch.inference_mode()
def mirror(spec: ModelSpec, model: Model, ranks: Ranks) -> None:
    """Ranks 1 and up: do as rank 0 says, until it says stop.

    Raises:
        WorkerError: rank 0 is gone.
    """
    worker = SWorker(spec, model, ranks.device)
    passes: dict[int, Pass] = {}  # by lane
    try:
        while True:
            operation, lane, num_rows = ranks.hear()
            if operation == _STOP:
                return
            if operation == _BEGIN:
                rows = ranks.share(torch.empty((2, num_rows), dtype=torch.int64))
                passes[lane] = step = Pass(worker, rows)
                ranks.gather(torch.cat((step.q, step.k, step.v), dim=1))
            elif operation == _ADVANCE:
                step = passes[lane]
                if step.advance(ranks.scatter_heads(None, step.q)):
                    ranks.gather(torch.cat((step.q, step.k, step.v), dim=1))
            else:
                chosen = ranks.share(torch.empty(num_rows, dtype=torch.int64))
                ranks.gather(passes.pop(lane).logits(chosen.numpy()))
    except RuntimeError as error:
        raise WorkerError(f"S-worker {ranks.shard.rank} lost rank 0: {error}", code="tp_rank_lost") from None

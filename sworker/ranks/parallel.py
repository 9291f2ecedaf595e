"""Several S-workers that act as one: rank 0 decides, the others mirror its
S-steps.

Every pass of rank 0 is announced to the others, unit by unit, and all compute
their share of it::

    rank 0                        ranks 1 …
    tell BEGIN, ids, positions    hear
    S-step                        S-step
    gather q, k, v                gather q, k, v
    R-workers …
    tell ADVANCE                  hear
    scatter o                     scatter o
    S-step …                      S-step …

Only rank 0 schedules, samples, and talks to R-workers, in whole heads. So
R-workers, transports, failures and placement know nothing of ranks. The price:
all q, k, v and o pass rank 0's host link; between GPUs they take the GPUs' own
links. Each S-worker with its own R-workers would use every host link, and would
need to agree on every loss.

What is announced travels over gloo on the host, what is computed over the
device's own collectives (NCCL on CUDA).
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import WorkerError
from fastdecode.core.model.spec import ModelSpec
from sworker.failures import DEVICE_ERRORS
from sworker.graphs import StepGraphs
from sworker.model.skeleton import Model
from sworker.ranks.peers import PeerWatch
from sworker.ranks.sharding import Shard
from sworker.sampler import SampledToken, SamplingState
from sworker.worker import Pass, SWorker

logger = logging.getLogger(__name__)

_STOP, _BEGIN, _ADVANCE, _LOGITS, _REGROUP = range(5)
JOINING_TIMEOUT_S = 600.0
"""Until all ranks have come to the meeting place."""
PATIENCE_S = 300.0
"""How long a rank may keep another one waiting in the middle of a step."""
_PARTING_TIMEOUT = datetime.timedelta(seconds=10)
_FOREVER = datetime.timedelta(days=365)
"""Between two steps nobody knows how long it takes."""
_LAST_WORDS_S = 2.0
"""A connection may break some time before its process has ended."""
_STUCK_S = 30.0
"""How long collectives on a GPU may take to notice that they were aborted."""


@dataclass
class Ranks:
    """The S-workers that act as one, and the connections between them."""

    shard: Shard
    device: torch.device
    data: dist.ProcessGroup
    control: dist.ProcessGroup
    patience_s: float = PATIENCE_S
    _watch: PeerWatch | None = None
    _out_of_step: bool = False
    """A step broke off in the middle: some rank waits for what will never come, or hangs itself."""
    _stuck: threading.Timer | None = None
    """Ends this process if it doesn't ``close`` in time."""

    @classmethod
    def meet(
        cls, place: Path, shard: Shard, device: torch.device, *, patience_s: float = PATIENCE_S
    ) -> Ranks:
        """Connect to the other ranks of this host. Waits for all of them.

        Args:
            place: a file that doesn't exist yet, in a directory that is this
                user's alone; the same for all ranks.
            patience_s: how long another rank may keep this one waiting in the
                middle of a step.

        Raises:
            WorkerError: not all came in ``JOINING_TIMEOUT_S``, or they can't
                connect.
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
            ranks = cls(shard, device, data, control, patience_s)
            # Nobody leaves before all have come: the meeting place may be gone then.
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
        ranks._watch = PeerWatch(processes, ranks._on_end)
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

    def _on_end(self, ended: list[int]) -> None:
        """In a thread of its own: another rank has ended. Connections of gloo
        break by themselves; collectives on a GPU would wait for ever."""
        if self.device.type != "cuda":
            return
        logger.critical("%s", self._lost(ended))
        self._stuck = threading.Timer(_STUCK_S, os._exit, (WorkerError.exit_code,))
        self._stuck.daemon = True
        self._stuck.start()
        backend = self.data._get_backend(self.device)
        abort = getattr(backend, "abort", None) or getattr(backend, "_abort", None)
        if abort is not None:
            abort()

    def check(self) -> None:
        """See that all ranks are still there.

        Raises:
            WorkerError: one has ended, so that nothing that was exchanged
                lately can be trusted.
        """
        if ended := self._ended():
            raise self._lost(ended)

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Within, ranks compute together. What goes wrong here stays what it
        is, unless a rank has ended: then nothing that is left of it can be
        relied on.

        Raises:
            WorkerError: a rank has ended, or keeps this one waiting for too
                long; or a step broke off before, and the others are still in
                the middle of it.
        """
        self.check()
        if self._out_of_step:
            raise WorkerError(
                f"S-worker {self.shard.rank} of {self.shard.size} broke off a step before, in "
                "which the others wait for it: see what was told then, and start the job again",
                code="tp_out_of_step",
            )
        try:
            yield
        except BaseException as error:
            ended = self._ended(_LAST_WORDS_S if isinstance(error, RuntimeError) else 0)
            self._out_of_step |= not ended
            if (
                ended
                and isinstance(error, RuntimeError)
                and not isinstance(error, torch.OutOfMemoryError)
            ):
                raise self._lost(ended, error) from error
            raise

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Within is nothing but a collective: if it fails, it is another rank's
        doing; but not while a CUDA graph is captured, when nothing runs."""
        captures = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        try:
            yield
        except DEVICE_ERRORS:
            raise  # not of who is waited for: what a GPU computed before may fail only now
        except RuntimeError as error:
            if captures:
                raise
            raise self._lost(self._ended(_LAST_WORDS_S), error) from error

    def _ended(self, wait_s: float = 0.0) -> list[int]:
        return self._watch.ended(wait_s) if self._watch is not None else []

    def _lost(self, ended: list[int], error: RuntimeError | None = None) -> WorkerError:
        others = [rank for rank in range(self.shard.size) if rank != self.shard.rank]
        names = f"S-worker {' and '.join(map(str, ended or others))} of {self.shard.size}"
        what = (
            "has ended"
            if ended
            else f"doesn't go on, or not within {self.patience_s:g} s (--worker-timeout-s)"
        )
        if error is not None and not ended:
            what += f": {_brief(error)}"
        return WorkerError(
            f"{names} {what}. Without its part of every layer the job can't go on: see that rank's "
            "own output, and start the job again (fastdecode run-batch --resume keeps what is "
            "done)",
            code="tp_rank_lost",
        )

    def tell(self, *numbers: int) -> None:
        """Rank 0: announce an operation."""
        self.share(torch.tensor(numbers, dtype=torch.int64))

    def hear(self) -> list[int]:
        """The others: operation, lane, and how many rows. Waits as long as it takes."""
        numbers = torch.empty(3, dtype=torch.int64)
        with self._waiting():
            dist.broadcast(numbers, 0, group=self.control)
        heard: list[int] = numbers.tolist()
        return heard

    def share(self, rows: Tensor) -> Tensor:
        """Rank 0's int64 rows, on the host; the others give room for them."""
        if rows.numel():
            with self._waiting():
                sharing = dist.broadcast(rows, 0, group=self.control, async_op=True)
                assert sharing is not None
                sharing.wait(datetime.timedelta(seconds=self.patience_s))
        return rows

    def agree(self, *numbers: int) -> list[int]:
        """The least of what all ranks say, number by number; every rank calls it."""
        least = torch.tensor(numbers, dtype=torch.int64)
        with self._waiting():
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
            with self._waiting():
                dist.gather(x, parts, dst=0, group=self.data)
        return parts or []

    def scatter_heads(self, o: Tensor | None, like: Tensor) -> Tensor:
        """Rank 0's o [T, Hq, D] → each rank's heads, of the shape of ``like``
        [T, Hq / ranks, D]."""
        part = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        parts = None if o is None else [x.contiguous() for x in o.chunk(self.shard.size, dim=1)]
        with self._waiting():
            dist.scatter(part, parts, src=0, group=self.data)
        return part

    def add_up(self, x: Tensor) -> None:
        """All ranks' x, of one shape, are summed in place."""
        with self._waiting():
            dist.all_reduce(x, group=self.data)

    def close(self) -> None:
        """Rank 0: let the others go, if they are still there; everyone: leave."""
        is_whole = not self._out_of_step and not self._ended()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._stuck is not None:
            self._stuck.cancel()
        if is_whole:
            with contextlib.suppress(RuntimeError, WorkerError):
                self._part()
        if not self._out_of_step:  # else this would wait for it, without end
            dist.destroy_process_group()

    def _part(self) -> None:
        if self.shard.rank == 0:
            self.tell(_STOP, 0, 0)
        # Who closes first must not cut off what the others have still to read.
        parting = dist.barrier(group=self.control, async_op=True)
        if parting is not None:
            parting.wait(_PARTING_TIMEOUT)


def _brief(error: RuntimeError) -> str:
    """Without what gloo and NCCL say of their source code, and what they think of it."""
    return re.sub(r"^\[[^]]*\] *", "", str(error).splitlines()[0]).split(". ")[0]


class ParallelPass(Pass):
    """A pass of rank 0, mirrored by the others: q, k, v and o are whole here, shares there."""

    def __init__(
        self,
        worker: ParallelSWorker,
        lane: int,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> None:
        self._ranks, self._lane = worker.ranks, lane
        self._vocab_size = worker.spec.vocab_size
        with self._ranks.exchanging():
            self._ranks.tell(_BEGIN, lane, len(token_ids))
            rows = self._ranks.share(torch.from_numpy(np.stack((token_ids, positions))))
            self._own = worker.begin_rows(rows, lane)
            self._gather()

    def advance(self, o: Tensor) -> bool:
        with self._ranks.exchanging():
            self._ranks.tell(_ADVANCE, self._lane, 0)
            goes_on = self._own.advance(self._ranks.scatter_heads(o, self._own.q))
            if goes_on:
                self._gather()
        return goes_on

    @torch.inference_mode()
    def logits(self, rows: NDArray[np.int64]) -> Tensor:
        with self._ranks.exchanging():
            self._ranks.tell(_LOGITS, self._lane, len(rows))
            self._ranks.share(torch.from_numpy(rows))
            parts = self._ranks.gather(self._own.logits(rows))  # of [R, vocab / ranks]
        return torch.cat(parts, dim=1)[:, : self._vocab_size]

    def device_s(self) -> float:
        return self._own.device_s()

    @torch.inference_mode()
    def _gather(self) -> None:
        own = self._own
        self.layer = own.layer
        parts = self._ranks.gather(torch.cat((own.q, own.k, own.v), dim=1))
        num_q, num_kv = own.q.shape[1], own.k.shape[1]
        kinds = zip(
            *(part.tensor_split((num_q, num_q + num_kv), dim=1) for part in parts), strict=True
        )
        self.q, self.k, self.v = (torch.cat(kind, dim=1) for kind in kinds)


class ParallelSWorker(SWorker):
    """Rank 0's S-worker. ``spec`` is the whole model's; ``model`` this rank's
    part of it.

    Every method raises WorkerError if another rank is lost.
    """

    def __init__(
        self, spec: ModelSpec, model: Model, ranks: Ranks, graphs: StepGraphs | None = None
    ) -> None:
        super().__init__(spec, model, ranks.device, graphs)
        self.ranks = ranks

    def begin(
        self, token_ids: NDArray[np.int64], positions: NDArray[np.int64], lane: int = 0
    ) -> Pass:
        return ParallelPass(self, lane, token_ids, positions)

    def set_num_lanes(self, num_lanes: int) -> None:
        with self.ranks.exchanging():
            self.ranks.tell(_REGROUP, num_lanes, 0)
        super().set_num_lanes(num_lanes)

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
        drawn = super().sample(logits, states)
        # A GPU has only now computed what it was told; had a rank ended
        # meanwhile, that would be nonsense.
        self.ranks.check()
        return drawn


@torch.inference_mode()
def mirror(spec: ModelSpec, model: Model, ranks: Ranks, graphs: StepGraphs | None = None) -> None:
    """Ranks 1 and up: do as rank 0 says, until it says stop.

    Raises:
        WorkerError: another rank is gone.
    """
    worker = SWorker(spec, model, ranks.device, graphs)
    passes: dict[int, Pass] = {}  # by lane
    while True:
        with ranks.exchanging():
            operation, lane, num_rows = ranks.hear()
            if operation == _STOP:
                return
            if operation == _BEGIN:
                rows = ranks.share(torch.empty((2, num_rows), dtype=torch.int64))
                passes[lane] = step = worker.begin_rows(rows, lane)
                ranks.gather(torch.cat((step.q, step.k, step.v), dim=1))
            elif operation == _ADVANCE:
                step = passes[lane]
                if step.advance(ranks.scatter_heads(None, step.q)):
                    ranks.gather(torch.cat((step.q, step.k, step.v), dim=1))
            elif operation == _LOGITS:
                chosen = ranks.share(torch.empty(num_rows, dtype=torch.int64))
                ranks.gather(passes.pop(lane).logits(chosen.numpy()))
            else:
                worker.set_num_lanes(lane)

"""Several S-workers that act as one: rank 0 decides, the others mirror its
S-steps.

Every pass of rank 0 is announced to the others, unit by unit, and all compute
their share of it::

    rank 0                        ranks 1 …
    order BEGIN, ids, positions   receive
    S-step                        S-step
    gather q, k, v                gather q, k, v
    R-workers …
    order ADVANCE                 receive
    scatter o                     scatter o
    S-step …                      S-step …

Only rank 0 schedules, samples, and talks to R-workers, in whole heads. So
R-workers, transports, failures and placement know nothing of ranks. The price:
all q, k, v and o pass rank 0's host link; between GPUs they take the GPUs' own
links. Each S-worker with its own R-workers would use every host link, and would
need to agree on every loss.

In a pipeline of stages every stage is such a group, with a rank 0 of its own. A
step begins behind the first stage with the rows of the stage before, in place of token
ids; in the first one it ends with COME_HOME and what the stages behind have made of the
rows whose logits are wanted.

With KV on the devices (``--kv-placement gpu``) every rank keeps the KV heads that its
query heads read, and attends by itself: nothing is gathered or scattered. Rank 0's
R-worker has the block tables of all: its blocks lie at the same places on every rank.
KEEP_KV has the others make their caches, and RUN says where a step's rows go, once.
What else rank 0 does with its cache's memory, ``sworker.ranks.kv`` announces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.model.spec import ModelSpec
from sworker.buffers import Feed
from sworker.graphs import StepGraphs
from sworker.host_blocks import BlockMemory
from sworker.model.skeleton import Model
from sworker.paged import PagedKV
from sworker.ranks.group import (
    ADVANCE,
    BEGIN,
    COME_HOME,
    KEEP_KV,
    LOGITS,
    RUN,
    STOP,
    Order,
    Ranks,
)
from sworker.ranks.kv import FollowingKV, KVMaker, LeadingBlocks, LeadingLanes
from sworker.ranks.sharding import shard_sinks
from sworker.sampling.sampler import Drawing, SampledToken
from sworker.step_tables import StepInputs, StepTables
from sworker.swap.swapped import LaneMover, SwappedKV
from sworker.whole import WholeSteps, run_step
from sworker.worker import Pass, SWorker


class ParallelPass(Pass):
    """A pass of rank 0, mirrored by the others.

    Args:
        own: this rank's share of it.
    """

    def __init__(self, worker: ParallelSWorker, lane: int, own: Pass) -> None:
        self._ranks, self._lane, self._own = worker.ranks, lane, own
        self._vocab_size = worker.spec.vocab_size
        self.layer = own.layer

    @torch.inference_mode()
    def logits(self, rows: NDArray[np.int64]) -> Tensor:
        with self._ranks.peers.exchanging():
            self._ranks.order(LOGITS, self._lane, ints=torch.from_numpy(rows))
            parts = self._ranks.gather(self._own.logits(rows))  # of [R, vocab / ranks]
        return torch.cat(parts, dim=1)[:, : self._vocab_size]

    @property
    def output(self) -> Tensor:
        return self._own.output

    @torch.inference_mode()
    def come_home(self, x: Tensor) -> None:
        with self._ranks.peers.exchanging():
            self._ranks.order(COME_HOME, self._lane, x=x)
            self._own.come_home(x)

    def device_s(self) -> float:
        return self._own.device_s()


class GatheredPass(ParallelPass):
    """One that R-workers attend for: q, k, v and o are whole here, shares at the others."""

    def __init__(
        self,
        worker: ParallelSWorker,
        lane: int,
        rows: Tensor,
        x: Tensor | None = None,
    ) -> None:
        """rows, x: see ``SWorker.begin``."""
        ranks = worker.ranks
        with ranks.peers.exchanging():
            ranks.order(BEGIN, lane, rows.shape[1], rows, x)
            super().__init__(worker, lane, SWorker.begin(worker, rows, lane, x=x))
            self._gather()

    def advance(self, o: Tensor) -> bool:
        with self._ranks.peers.exchanging():
            self._ranks.order(ADVANCE, self._lane)
            goes_on = self._own.advance(self._ranks.scatter_heads(o, self._own.q))
            if goes_on:
                self._gather()
        return goes_on

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
    """Rank 0's S-worker. ``spec`` is the whole model's; ``model`` this rank's part of it.

    Every method raises WorkerError if another rank is lost."""

    def __init__(
        self,
        spec: ModelSpec,
        model: Model,
        ranks: Ranks,
        graphs: StepGraphs | None = None,
        num_lanes: int = 0,
    ) -> None:
        super().__init__(spec, model, ranks.device, graphs, num_lanes=num_lanes)
        self.ranks = ranks

    feeds = False  # other ranks receive a step's tokens from the host

    def begin(
        self, rows: Tensor, lane: int = 0, feed: Feed | None = None, x: Tensor | None = None
    ) -> Pass:
        assert feed is None
        return GatheredPass(self, lane, rows, x)

    def run_through(self, run: Callable[[], Tensor], inputs: StepInputs | None = None) -> Pass:
        """See ``SWorker``; the other ranks do the same."""
        assert inputs is not None
        with self.ranks.peers.exchanging():
            rows, packed = inputs.rows, torch.from_numpy(inputs.tables.pack())
            ints = torch.cat((packed, rows.flatten()))
            self.ranks.order(RUN, inputs.lane, rows.shape[1], ints, inputs.x)
            return ParallelPass(self, inputs.lane, super().run_through(run))

    @property
    def sinks(self) -> tuple[Tensor, ...] | None:
        return shard_sinks(self.model.sinks, self.ranks.shard)

    def attend_in(self, cache: PagedKV) -> bool:
        """See ``SWorker``: every rank makes such a cache for its own heads."""
        with self.ranks.peers.exchanging():
            self.ranks.order(KEEP_KV, number=cache.num_slots // cache.kv.block_size)
            return bool(self.ranks.agree(super().attend_in(cache))[0])

    def keep_on_host(self, memory: BlockMemory) -> BlockMemory:
        """See ``SWorker``: every rank keeps the same blocks' own heads."""
        return LeadingBlocks(memory, self.ranks)

    def swap(self, lanes: SwappedKV) -> LaneMover:
        """See ``SWorker``: every rank keeps its own heads of all lanes."""
        super().swap(lanes)
        return LeadingLanes(lanes, self.ranks)

    def together(self) -> AbstractContextManager[object]:
        return self.ranks.peers.exchanging()

    def drawn(self, drawing: Drawing) -> list[SampledToken]:
        tokens = super().drawn(drawing)
        # A GPU has only now computed what it was told; had a rank ended
        # meanwhile, that would be nonsense.
        self.check()
        return tokens

    def check(self) -> None:
        self.ranks.peers.check()


@torch.inference_mode()
def mirror(
    spec: ModelSpec,
    model: Model,
    ranks: Ranks,
    graphs: StepGraphs | None = None,
    make_kv: KVMaker | None = None,
) -> None:
    """Ranks 1 and up: do as rank 0 says, until it says stop.

    Args:
        make_kv: makes what this rank keeps; None: R-workers keep K and V.

    Raises:
        WorkerError: another rank is gone.
    """
    worker = SWorker(spec, model, ranks.device, graphs)
    kv = FollowingKV(model, ranks, make_kv)
    follower = _Follower(worker, ranks, kv)
    like = torch.empty((0, spec.hidden_size), dtype=model.dtype)
    with contextlib.closing(kv):
        while True:
            with ranks.peers.exchanging():
                order = ranks.next_order(like)
                if order.operation == STOP:
                    return
                if not kv.obeys(order):
                    follower.do(order)


class _Follower:
    """A rank behind the first, between two of that one's orders."""

    def __init__(self, worker: SWorker, ranks: Ranks, kv: FollowingKV) -> None:
        self._worker, self._ranks, self._kv = worker, ranks, kv
        self._passes: dict[int, Pass] = {}  # by lane
        self._whole: WholeSteps | None = None

    def do(self, order: Order) -> None:
        """Do this rank's part of what rank 0 does."""
        ranks, passes, lane, x = self._ranks, self._passes, order.lane, order.x
        if order.operation == BEGIN:
            passes[lane] = step = self._worker.begin(order.rows, lane, x=x)
            ranks.gather(torch.cat((step.q, step.k, step.v), dim=1))
        elif order.operation == COME_HOME:
            assert x is not None
            passes[lane].come_home(x)
        elif order.operation == ADVANCE:
            step = passes[lane]
            if step.advance(ranks.scatter_heads(None, step.q)):
                ranks.gather(torch.cat((step.q, step.k, step.v), dim=1))
        elif order.operation == KEEP_KV:
            self._keep_kv(order.number)
        elif order.operation == RUN:
            passes[lane] = self._run(order)
        else:
            ranks.gather(passes[lane].logits(order.ints.numpy()))

    def _keep_kv(self, num_blocks: int) -> None:
        worker, cache = self._worker, self._kv.keep(num_blocks)
        (has_kernels,) = self._ranks.agree(cache.kernels is not None)
        if has_kernels and worker.graphs is not None:
            self._whole = WholeSteps(worker.graphs, cache, worker.spec.max_model_len)
            self._whole.prepare()

    def _run(self, order: Order) -> Pass:
        worker, cache, lanes, rows = self._worker, self._kv.cache, self._kv.lanes, order.rows
        tables = StepTables.unpack(order.ints[: -rows.numel()].numpy())
        if tables.copy_sources.size:
            if lanes is not None:
                lanes.wait_for_all()
            cache.copy_blocks(tables.copy_sources, tables.copy_targets)
        step = tables.upload(worker.device, worker.gpu)

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None = None
        ) -> Tensor:
            if lanes is not None:
                lanes.wait(layer)  # for its copies
            return cache.attend(layer, q, k, v, step, place)

        inputs = StepInputs(order.lane, rows, tables, order.x)
        return worker.run_through(partial(run_step, worker, self._whole, inputs, step, attend))

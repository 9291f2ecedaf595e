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
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.model.spec import ModelSpec
from sworker.feed import Feed
from sworker.graphs import StepGraphs
from sworker.model.skeleton import Model
from sworker.ranks.group import ADVANCE, BEGIN, LOGITS, STOP, Ranks
from sworker.sampler import Drawing, SampledToken
from sworker.worker import Pass, SWorker


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
        with self._ranks.peers.exchanging():
            self._ranks.tell(BEGIN, lane, len(token_ids))
            rows = self._ranks.share(torch.from_numpy(np.stack((token_ids, positions))))
            self._own = worker.begin_rows(rows, lane)
            self._gather()

    def advance(self, o: Tensor) -> bool:
        with self._ranks.peers.exchanging():
            self._ranks.tell(ADVANCE, self._lane, 0)
            goes_on = self._own.advance(self._ranks.scatter_heads(o, self._own.q))
            if goes_on:
                self._gather()
        return goes_on

    @torch.inference_mode()
    def logits(self, rows: NDArray[np.int64]) -> Tensor:
        with self._ranks.peers.exchanging():
            self._ranks.tell(LOGITS, self._lane, len(rows))
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
        self,
        spec: ModelSpec,
        model: Model,
        ranks: Ranks,
        graphs: StepGraphs | None = None,
        num_lanes: int = 0,
    ) -> None:
        super().__init__(spec, model, ranks.device, graphs, num_lanes=num_lanes)
        self.ranks = ranks

    feeds = False
    """Other ranks are told a step's tokens by the host."""

    def begin(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        lane: int = 0,
        feed: Feed | None = None,
    ) -> Pass:
        assert feed is None
        return ParallelPass(self, lane, token_ids, positions)

    def drawn(self, drawing: Drawing) -> list[SampledToken]:
        tokens = super().drawn(drawing)
        # A GPU has only now computed what it was told; had a rank ended
        # meanwhile, that would be nonsense.
        self.ranks.peers.check()
        return tokens


@torch.inference_mode()
def mirror(spec: ModelSpec, model: Model, ranks: Ranks, graphs: StepGraphs | None = None) -> None:
    """Ranks 1 and up: do as rank 0 says, until it says stop.

    Raises:
        WorkerError: another rank is gone.
    """
    worker = SWorker(spec, model, ranks.device, graphs)
    passes: dict[int, Pass] = {}  # by lane
    while True:
        with ranks.peers.exchanging():
            operation, lane, num_rows = ranks.hear()
            if operation == STOP:
                return
            if operation == BEGIN:
                rows = ranks.share(torch.empty((2, num_rows), dtype=torch.int64))
                passes[lane] = step = worker.begin_rows(rows, lane)
                ranks.gather(torch.cat((step.q, step.k, step.v), dim=1))
            elif operation == ADVANCE:
                step = passes[lane]
                if step.advance(ranks.scatter_heads(None, step.q)):
                    ranks.gather(torch.cat((step.q, step.k, step.v), dim=1))
            else:
                chosen = ranks.share(torch.empty(num_rows, dtype=torch.int64))
                ranks.gather(passes.pop(lane).logits(chosen.numpy()))

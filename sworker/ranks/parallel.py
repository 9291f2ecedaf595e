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

In a pipeline of stages every stage is such a group, with a rank 0 of its own. A
step begins behind the first stage with GO_ON and the rows of the stage before,
in place of BEGIN and token ids; in the first one it ends with COME_HOME and what
the stages behind have made of the rows whose logits are wanted.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.model.spec import ModelSpec
from sworker.feed import Feed
from sworker.graphs import StepGraphs
from sworker.kernels.spinning import IdleThreads
from sworker.model.skeleton import Model
from sworker.ranks.group import ADVANCE, BEGIN, COME_HOME, GO_ON, LOGITS, STOP, Ranks
from sworker.sampling.sampler import Drawing, SampledToken
from sworker.worker import Pass, SWorker, without_tokens


class ParallelPass(Pass):
    """A pass of rank 0, mirrored by the others: q, k, v and o are whole here, shares there."""

    def __init__(
        self,
        worker: ParallelSWorker,
        lane: int,
        rows: Tensor,
        x: Tensor | None = None,
    ) -> None:
        """rows, x: see ``SWorker.begin_rows``."""
        self._ranks, self._lane = worker.ranks, lane
        self._vocab_size = worker.spec.vocab_size
        with self._ranks.peers.exchanging():
            self._ranks.tell(BEGIN if x is None else GO_ON, lane, rows.shape[1])
            self._ranks.share(rows)
            if x is not None:
                self._ranks.share(x)
            self._own = worker.begin_rows(rows, lane, x=x)
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

    @property
    def output(self) -> Tensor:
        return self._own.output

    @torch.inference_mode()
    def come_home(self, x: Tensor) -> None:
        with self._ranks.peers.exchanging():
            self._ranks.tell(COME_HOME, self._lane, len(x))
            self._own.come_home(self._ranks.share(x))

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
        idle_threads: IdleThreads | None = None,
    ) -> None:
        super().__init__(
            spec, model, ranks.device, graphs, num_lanes=num_lanes, idle_threads=idle_threads
        )
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
        self.look_at_cores()
        return ParallelPass(self, lane, torch.from_numpy(np.stack((token_ids, positions))))

    def go_on(self, x: Tensor, positions: NDArray[np.int64], lane: int = 0) -> Pass:
        self.look_at_cores()
        return ParallelPass(self, lane, without_tokens(positions), x.contiguous())

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
    idle_threads: IdleThreads | None = None,
) -> None:
    """Ranks 1 and up: do as rank 0 says, until it says stop.

    Raises:
        WorkerError: another rank is gone.
    """
    worker = SWorker(spec, model, ranks.device, graphs, idle_threads=idle_threads)
    passes: dict[int, Pass] = {}  # by lane

    def hidden(num_rows: int) -> Tensor:
        return ranks.share(torch.empty((num_rows, spec.hidden_size), dtype=model.dtype))

    while True:
        with ranks.peers.exchanging():
            operation, lane, num_rows = ranks.hear()
            if operation == STOP:
                return
            if operation in (BEGIN, GO_ON):
                rows = ranks.share(torch.empty((2, num_rows), dtype=torch.int64))
                x = hidden(num_rows) if operation == GO_ON else None
                passes[lane] = step = worker.begin_rows(rows, lane, x=x)
                ranks.gather(torch.cat((step.q, step.k, step.v), dim=1))
            elif operation == COME_HOME:
                passes[lane].come_home(hidden(num_rows))
            elif operation == ADVANCE:
                step = passes[lane]
                if step.advance(ranks.scatter_heads(None, step.q)):
                    ranks.gather(torch.cat((step.q, step.k, step.v), dim=1))
            else:
                chosen = ranks.share(torch.empty(num_rows, dtype=torch.int64))
                ranks.gather(passes.pop(lane).logits(chosen.numpy()))

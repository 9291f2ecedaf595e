"""The stages of a pipeline as ranks of an MPI job: the first ranks, one a stage,
or as many for each as act as one (``--tp``), of whom the first leads: it is the
one that others speak to. All behind them are R-workers, as many for each stage,
in the order of stages. Stages that run prompts only stand between the two, and
speak to R-workers over links.

An R-worker isn't told whose it is. It expects rank 0, and whatever other rank
speaks to it first is its stage's S-worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, get_args

from fastdecode.core.errors import WorkerError
from fastdecode.wire.blocks import FEEDING_LINE
from fastdecode.wire.messages import Failed, FromRWorker, ToRWorker
from fastdecode.wire.mpi.connection import MpiConnection
from fastdecode.wire.mpi.hub import PULSE_S, MpiHub
from fastdecode.wire.mpi.job import DEFAULT_TAG, S_RANK, MpiJob
from fastdecode.wire.mpi.neighbours import link_tag
from fastdecode.wire.mpi.roles import StageRanks
from fastdecode.wire.stages import FromStage, StageMessage, stage_name
from fastdecode.wire.transport import TIMEOUT

_LOOK_EVERY_S: Final = 0.05
"""Whether another rank than 0 speaks."""

_BETWEEN_STAGES: Final = frozenset(
    (*get_args(StageMessage), *get_args(FromStage), *get_args(ToRWorker), Failed)
)


def connect_stage(
    job: MpiJob,
    ranks: StageRanks,
    stage: int,
    *,
    stuck_after_s: float,
    with_r_workers: bool = True,
    fed: Sequence[int] | None = None,
) -> tuple[MpiHub[Any, Any], dict[int, MpiConnection[Any, Any]]]:
    """A stage's side: connections to its R-workers, and behind them those to
    other stages, which are given by stage, too. Never waits.

    Args:
        stuck_after_s: see ``MpiHub``.
        with_r_workers: ranks behind those of stages are R-workers; else there
            are none.
        fed: of a stage that runs prompts only: the stages to whose R-workers it
            brings them, over links; one after the other.

    Raises:
        ConfigError: R-workers can't be shared out, or ranks are left over.
    """
    if fed is not None:
        r_ranks = [rank for each in fed for rank in ranks.r_workers(job, each)]
    else:
        r_ranks = [*(ranks.r_workers(job, stage) if with_r_workers else ranks.none_left(job))]
    peers = [(rank, f"R-worker rank {rank}") for rank in r_ranks]
    hub: MpiHub[Any, Any] = MpiHub(
        job,
        peers,
        frozenset(get_args(FromRWorker)),
        tag=DEFAULT_TAG if fed is None else link_tag(FEEDING_LINE),
        peers_give_signs=True,
        pulse_s=PULSE_S if stage else 0.0,
        stuck_after_s=stuck_after_s,
    )
    others = ranks.others(stage)
    for other in others:
        rank = ranks.leader(other)
        name = f"{stage_name(other, ranks.num_stages)} (rank {rank})"
        # Over the tag on which ranks say goodbye that never get as far as this.
        hub.add(rank, name, tag=DEFAULT_TAG, receives=_BETWEEN_STAGES, gives_signs=not stage)
    return hub, dict(zip(others, hub.connections[len(peers) :], strict=True))


class OpenMpiHub(MpiHub[FromRWorker, ToRWorker]):
    """An R-worker's, until somebody has spoken: rank 0, or the S-worker of
    another stage."""

    _has_met = False

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ToRWorker]:
        while not self._has_met:
            try:
                received = super().receive_any(_LOOK_EVERY_S)
            except WorkerError as error:
                if error.code != TIMEOUT:
                    raise
            else:
                self._has_met = True
                return received
            rank = self._who_speaks()
            if rank is not None:
                self.add(rank, f"the S-worker of its stage (rank {rank})", tag=DEFAULT_TAG)
                self._has_met = True
        return super().receive_any(timeout_s)

    def _who_speaks(self) -> int | None:
        """Another rank than 0, from which a message has come."""
        from fastdecode.wire.mpi.library import MPI

        status = MPI.Status()
        with self._job.lock:
            try:
                if not self._job.comm.Iprobe(MPI.ANY_SOURCE, DEFAULT_TAG, status):
                    return None
            except MPI.Exception:  # a rank has died, which others will tell
                return None
        rank: int = status.Get_source()
        return rank if rank != S_RANK and rank < self._job.rank else None

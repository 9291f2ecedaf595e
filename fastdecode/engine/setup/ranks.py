"""S-workers that act as one (``--tp``): how the ranks of an MPI job find each
other, and what ranks 1 and up do.

Ranks 0 to tp - 1 of the job are the S-workers, the others R-workers. S-workers
share a host: they exchange partial sums twice a layer.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, Given
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.engine.setup.resolve import resolve_for_this_host
from fastdecode.engine.setup.s_worker import prepare
from fastdecode.wire.mpi import job as mpi_job
from fastdecode.wire.mpi import joining, launcher
from sworker.dtypes import torch_dtype
from sworker.failures import typed_start
from sworker.load.weights import load_model
from sworker.ranks.group import JOINING_TIMEOUT_S, Ranks
from sworker.ranks.parallel import mirror
from sworker.ranks.sharding import Shard

if TYPE_CHECKING:
    from fastdecode.wire.mpi.job import MpiJob


def meet_ranks(num_ranks: int, device: torch.device, patience_s: float) -> Ranks:
    """This rank's part of ``num_ranks`` S-workers, connected with the others.

    Args:
        device: this rank's own.
        patience_s: how long another rank may keep this one waiting in the
            middle of a step.

    Raises:
        ConfigError: not started by an MPI launcher, with too few ranks, or on
            several hosts.
        WorkerError: the others didn't come, or have ended.
    """
    if launcher.launched_size() is None:
        raise ConfigError(
            Given("tp", num_ranks),
            f" needs an MPI launcher: mpirun -n {num_ranks} fastdecode generate --tp {num_ranks} "
            "... : "
            "-n 2 fastdecode r-worker",
            code="no_mpi_launcher",
        )
    job = joining.join(min_ranks=num_ranks)
    if job.size < num_ranks:
        raise ConfigError(
            Given("tp", num_ranks),
            f" needs as many MPI ranks, and R-workers beside: {job.size} were started",
        )
    with _meeting_place(job, num_ranks) as place:
        return Ranks.meet(place, Shard(job.rank, num_ranks), device, patience_s=patience_s)


def mirror_rank_0(config: EngineConfig) -> None:
    """What ranks 1 to tp - 1 do, from loading their part of the model until
    rank 0 lets them go.

    Raises:
        ConfigError, ModelError: as on rank 0.
        WorkerError: another rank is gone.
    """
    checkpoint = open_checkpoint(config.model)
    max_model_len = config.s_part.max_model_len
    planned = checkpoint.spec(max_model_len=max_model_len)
    resolved = resolve_for_this_host(config, planned, rank=joining.join().rank)
    ranks = meet_ranks(config.s_part.tp, resolved.device, config.cluster.worker_timeout_s)
    dtype = torch_dtype(resolved.dtype)
    with typed_start():
        spec, model = load_model(
            checkpoint,
            device=ranks.device,
            dtype=dtype,
            max_model_len=max_model_len,
            shard=ranks.shard,
        )
        step_graphs = prepare(model, resolved, ranks)
    mirror(spec, model, ranks, step_graphs)
    ranks.close()


@contextlib.contextmanager
def _meeting_place(job: MpiJob, num_ranks: int) -> Iterator[Path]:
    """A path that all ranks know, in a directory of this user's alone; gone when they have met."""
    if job.rank != mpi_job.S_RANK:
        mpi_job.send_text(job, mpi_job.S_RANK, job.host)
        place = mpi_job.receive_text(job, mpi_job.S_RANK, JOINING_TIMEOUT_S)
        if not place:
            raise ConfigError(_SEVERAL_HOSTS.format(tp=num_ranks))
        yield Path(place)
        return
    others = range(1, num_ranks)
    hosts = [mpi_job.receive_text(job, rank, JOINING_TIMEOUT_S) for rank in others]
    if any(host != job.host for host in hosts):
        for rank in others:
            mpi_job.send_text(job, rank, "")
        raise ConfigError(_SEVERAL_HOSTS.format(tp=num_ranks))
    directory = tempfile.mkdtemp(prefix="fastdecode-")
    try:
        for rank in others:
            mpi_job.send_text(job, rank, f"{directory}/ranks")
        yield Path(directory, "ranks")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


_SEVERAL_HOSTS = (
    "the {tp} S-workers of tp={tp} are on several hosts: place ranks 0 to tp - 1 on one host"
)

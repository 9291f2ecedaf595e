"""Roles of the ranks of an MPI job. Imports no torch: ranks of R-workers need none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, Given, WorkerError, imports_for
from fastdecode.wire.mpi import job as mpi_job
from fastdecode.wire.ranks import (
    S_RANK,
    InstanceRanks,
    RankRole,
    StageRanks,
    launched_size,
    let_rank_0_stop,
)

logger = logging.getLogger(__name__)


def serve_other_rank(config: EngineConfig, tell: Callable[[str], None]) -> EngineConfig:
    """Serve, and don't return, if this process is a rank of an MPI job that has another role
    than to run the program (``fastdecode.wire.ranks``).

    Returns:
        The options, in an MPI job with instances for prompt stages.

    Raises:
        ConfigError: If there are ranks without a role.
    """
    if (size := launched_size()) is not None:
        config = config.in_job(size)
    if config.instances.placed:
        job, instances = mpi_job.join(), InstanceRanks(config.instances.placed)
        role = instances.role(job.rank)
        if role is RankRole.R_WORKER:
            _serve_r_worker(config, instances=instances, silence_s=config.cluster.worker_silence_s)
        elif role is not RankRole.CONTROLLER:
            with imports_for("an S-worker"):
                from fastdecode.engine.instances.processes import serve_instance_rank

            let_rank_0_stop()
            _leave("the controller", is_alive=serve_instance_rank(config, tell))
        return config  # rank 0 controls the instances, which the others are
    s_part = config.s_part
    ranks = StageRanks(s_part.pp, s_part.tp)
    num_ranks = size or 1
    if config.r_part.is_on_device and num_ranks > 1 and num_ranks != ranks.num_s_ranks:
        raise ConfigError(
            Given("kv_placement", config.r_part.kv_placement),
            " has no R-workers for the other ranks to be: start it without a launcher, or one "
            "rank for each S-worker (",
            Given("pp"),
            ", ",
            Given("tp"),
            ")",
        )
    if ranks.num_s_ranks > 1 and size is not None:
        role = ranks.role(mpi_job.join().rank)
        if role in (RankRole.MIRROR, RankRole.STAGE):
            from fastdecode.engine.setup.ranks import mirror_leader, resolve_rank
            from fastdecode.engine.setup.stages import serve_stage

            let_rank_0_stop()
            if role is RankRole.MIRROR:
                mirror_leader(config, resolve_rank)
                mpi_job.leave(0)
            _leave("the first stage", is_alive=serve_stage(config, resolve_rank))
    has_ranks = size is not None and not config.cluster.r_worker_addresses
    if has_ranks and mpi_job.join().rank != S_RANK:
        _serve_r_worker(config)
    return config


def _serve_r_worker(config: EngineConfig, **more: Any) -> None:
    from rworker.host import serve_rank

    serve_rank(
        mpi_job.join(),
        kv_memory_gb=config.r_part.kv_memory_gb,
        num_threads=config.r_part.r_threads,
        cache_disk=config.cache.cache_disk,
        cache_disk_gb=config.cache.cache_disk_gb,
        **more,
    )


def _leave(who: str, *, is_alive: bool) -> NoReturn:
    """End this rank: if rank 0 is alive, it decides how the job ends."""
    if not is_alive:
        code = WorkerError.exit_code
        logger.critical("%s has died: the job ends, with exit code %d", who, code)
        mpi_job.leave(code)
    mpi_job.leave(0)

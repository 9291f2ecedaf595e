"""What the ranks of an MPI job are. Imports no torch: ranks of R-workers need none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, Given, WorkerError, imports_for
from fastdecode.wire.mpi import job as mpi_job
from fastdecode.wire.mpi.ranks import (
    S_RANK,
    InstanceRanks,
    RankRole,
    StageRanks,
    launched_size,
    let_rank_0_stop,
)

logger = logging.getLogger(__name__)


def serve_other_rank(config: EngineConfig, tell: Callable[[str], None]) -> EngineConfig:
    """Serve, if this process is a rank of an MPI job that has another role than
    to run the program; then it doesn't return.

    What each rank is: see ``fastdecode.wire.mpi.ranks``.

    Returns:
        The options, in an MPI job with instances for prompt stages.

    Raises:
        ConfigError: there are ranks for which there is no role.
    """
    if (size := launched_size()) is not None:
        config = config.in_job(size)
    if config.instances.placed:
        _serve_if_placed(config, tell)
        return config
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
        if role is RankRole.MIRROR:
            _mirror_leader(config)
        elif role is RankRole.STAGE:
            _serve_stage(config)
    if size is not None and not config.cluster.r_worker_addresses:
        _serve_if_r_worker(config)
    return config


def _serve_if_r_worker(config: EngineConfig) -> None:
    job = mpi_job.join()
    if job.rank == S_RANK:
        return
    from rworker.host import serve_rank

    serve_rank(
        job,
        kv_memory_gb=config.r_part.kv_memory_gb,
        num_threads=config.r_part.r_threads,
        cache_disk=config.cache.cache_disk,
        cache_disk_gb=config.cache.cache_disk_gb,
    )


def _serve_if_placed(config: EngineConfig, tell: Callable[[str], None]) -> None:
    """Rank 0 controls the instances, which the others are: it alone returns."""
    job, instances = mpi_job.join(), InstanceRanks(config.instances.placed)
    role = instances.role(job.rank)
    if role is RankRole.CONTROLLER:
        return
    if role is not RankRole.R_WORKER:
        _serve_instance(config, tell)
    from rworker.host import serve_rank

    serve_rank(
        job,
        kv_memory_gb=config.r_part.kv_memory_gb,
        num_threads=config.r_part.r_threads,
        cache_disk=config.cache.cache_disk,
        cache_disk_gb=config.cache.cache_disk_gb,
        instances=instances,
        silence_s=config.cluster.worker_silence_s,
    )


def _serve_instance(config: EngineConfig, tell: Callable[[str], None]) -> NoReturn:
    with imports_for("an S-worker"):
        from fastdecode.engine.instances.processes import serve_instance_rank

    let_rank_0_stop()
    if serve_instance_rank(config, tell):
        mpi_job.leave(0)  # rank 0 decides how the job ends
    _end_job("the controller has died")


def _mirror_leader(config: EngineConfig) -> NoReturn:
    from fastdecode.engine.setup.ranks import mirror_leader, resolve_rank

    let_rank_0_stop()
    mirror_leader(config, resolve_rank)
    mpi_job.leave(0)


def _serve_stage(config: EngineConfig) -> NoReturn:
    from fastdecode.engine.setup.ranks import resolve_rank
    from fastdecode.engine.setup.stage_ranks import serve_stage

    let_rank_0_stop()
    if serve_stage(config, resolve_rank):
        mpi_job.leave(0)  # rank 0 decides how the job ends
    _end_job("the first stage has died")


def _end_job(why: str) -> NoReturn:
    code = WorkerError.exit_code
    logger.critical("%s: the job ends, with exit code %d", why, code)
    mpi_job.leave(code)

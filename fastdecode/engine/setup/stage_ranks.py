"""Stages behind the first as ranks of an MPI job."""

from __future__ import annotations

import logging
from collections.abc import Callable

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.core.model.spec import ModelSpec
from fastdecode.engine.fleet.colocation import Colocation
from fastdecode.engine.setup.reach import reach_stage
from fastdecode.engine.setup.resolve import ResolvedConfig
from fastdecode.engine.setup.stages import StageSetup
from fastdecode.engine.setup.workers import with_spares
from fastdecode.wire.mpi.job import join

logger = logging.getLogger(__name__)


def serve_stage(
    config: EngineConfig,
    resolve: Callable[[EngineConfig, ModelSpec], ResolvedConfig],
    beside: Colocation | None = None,
) -> bool:
    """What those ranks of an MPI job do that lead the stages behind the first,
    until that one lets them go.

    Args:
        resolve: decides what the user left open, for this rank.
        beside: other engines, which read from this stage; None: there are none.

    Returns:
        Whether the first stage is alive, which reports how the job ends.

    Raises:
        ConfigError, ModelError: it can't even reach the others.
    """
    job = join()
    checkpoint = open_checkpoint(config.model, config.s_part.load_format)
    spec = checkpoint.spec(max_model_len=config.s_part.max_model_len)
    resolved = resolve(config, spec)
    ranks = resolved.ranks
    number = ranks.stage(job.rank)
    setup = StageSetup(checkpoint, spec, resolved, number)
    reached = reach_stage(resolved, number, beside)
    workers = with_spares(reached, config.cluster.spare_r_workers)
    assert workers.stages is not None
    try:
        setup.run(workers, workers.stages)
    except FastDecodeError as error:
        logger.error("%s ends: %s", setup.name, error)
    return ranks.first not in job.dead

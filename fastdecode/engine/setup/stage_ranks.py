"""Stages behind the first as ranks of an MPI job."""

from __future__ import annotations

import logging

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.model.checkpoint import open_checkpoint
from fastdecode.engine.setup.prompt_stages import PromptStageSetup
from fastdecode.engine.setup.ranks import device_number, stage_ranks
from fastdecode.engine.setup.reach import reach_stage
from fastdecode.engine.setup.resolve import resolve_for_this_host
from fastdecode.engine.setup.stages import StageSetup
from fastdecode.engine.setup.workers import with_spares
from fastdecode.wire.mpi import joining

logger = logging.getLogger(__name__)

_FIRST = 0


def serve_stage(config: EngineConfig) -> bool:
    """What those ranks of an MPI job do that lead the stages behind the first,
    until rank 0 lets them go.

    Returns:
        Whether rank 0 can say what becomes of the job; False: it has died.

    Raises:
        ConfigError, ModelError: it can't even reach the others.
    """
    job = joining.join()
    checkpoint = open_checkpoint(config.model, config.s_part.load_format)
    spec = checkpoint.spec(max_model_len=config.s_part.max_model_len)
    resolved = resolve_for_this_host(config, spec, rank=device_number(config.s_part))
    ranks = stage_ranks(config.s_part)
    number = ranks.stage(job.rank)
    setup: StageSetup
    if number in ranks.prompt_stages:
        setup = PromptStageSetup(checkpoint, spec, resolved, number)
        workers = setup.reach_ranks()
    else:
        setup = StageSetup(checkpoint, spec, resolved, number)
        workers = with_spares(reach_stage(resolved, number), config.cluster.spare_r_workers)
    assert workers.stages is not None
    try:
        setup.run(workers, workers.stages)
    except FastDecodeError as error:
        logger.error("%s ends: %s", setup.name, error)
    return _FIRST not in job.dead

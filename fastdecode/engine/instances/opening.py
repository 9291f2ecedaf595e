"""From a configuration to the service that runs it: one engine, or instances, for which
no torch is needed here where they are elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from fastdecode.core.config.engine import EngineConfig
from fastdecode.core.errors import ConfigError, Given, imports_for
from fastdecode.core.host.openmp import is_spinning_chosen, spin_longer
from fastdecode.core.resuming import Session
from fastdecode.core.trace import Trace
from fastdecode.engine.service import EngineService
from fastdecode.engine.setup.transport import shares_thread
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.wire.mpi import job as mpi_job


def make_service(
    config: EngineConfig,
    progress: Callable[[str], None] | None,
    trace: Trace | None,
    times: MeasuredTimes | None,
    session: Session | None,
) -> EngineService[Any]:
    """What runs requests as it was configured; it isn't open yet. For the
    arguments see ``fastdecode.engine.llm.LLM``.

    Raises:
        ConfigError: some of them are of one engine only.
        MissingExtraError: a package is missing.
    """
    if config.instances.replan_slo is not None:
        from fastdecode.engine.replanning.starting import slo_of

        slo_of(config.instances)
    if config.instances.instances and trace is not None:
        raise ConfigError(Given("trace"), " is of one engine: leave out the instances")
    if config.instances.instances:
        with imports_for("instances"):
            from fastdecode.engine.instances.cluster import service_of_cluster
        return service_of_cluster(config, progress, times)
    computes_alone = shares_thread(config)
    if computes_alone:
        spin_longer(os.environ, sys.modules)
    with imports_for("an S-worker"):
        from fastdecode.engine.setup.launch import RunningEngine
        from sworker.kernels.threads import end_own_threads

    # An engine may have no thread of its own where MPI takes calls of the thread
    # alone that joined.
    own_thread = not mpi_job.takes_calls_of_one_thread()
    make = partial(RunningEngine, config, progress, trace, times, session)
    if computes_alone and own_thread and not is_spinning_chosen(os.environ):
        return EngineService(make, in_callers_thread=end_own_threads)
    return EngineService(make, own_thread=own_thread)

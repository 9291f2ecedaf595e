"""Instances that are ranks of one MPI job: the controller's end."""

from __future__ import annotations

from typing import get_args

from fastdecode.core.config.instances import Instances
from fastdecode.core.errors import ConfigError, Given, WorkerError
from fastdecode.engine.instances.connections import FromInstance, greet_together
from fastdecode.engine.stages.links import LOADING_TIMEOUT_S
from fastdecode.wire.instances import (
    InstanceHello,
    InstanceSays,
    InstanceWelcome,
    ToInstance,
)
from fastdecode.wire.messages import Failed
from fastdecode.wire.mpi.control import ControlHub
from fastdecode.wire.mpi.job import MpiJob
from fastdecode.wire.mpi.roles import InstanceRanks
from fastdecode.wire.mpi.siblings import end_ranks


def check_job(instances: Instances, job: MpiJob) -> InstanceRanks:
    """Which rank is whose. Raises ConfigError: they can't be this job's."""
    ranks = InstanceRanks(instances.placed)
    ranks.check(job)
    if not job.threads_may_take_turns:
        raise ConfigError(
            Given("instances"),
            f" need an MPI that lets threads take turns, and {job.library} doesn't: use another, "
            "or instances at addresses",
        )
    return ranks


class RankHub(ControlHub[ToInstance, FromInstance]):
    """Of a controller, which is rank 0.

    Args:
        job: its part in the job.
        instances: the others.
        silence_s: one that gives no sign of life for so long is lost.

    Raises:
        ConfigError: the job has other ranks than these take.
    """

    def __init__(self, job: MpiJob, instances: Instances, silence_s: float) -> None:
        leaders = check_job(instances, job).leaders
        self.names = tuple(f"rank {rank}" for rank in leaders)
        peers = [(rank, f"instance rank {rank}") for rank in leaders]
        hears = frozenset([*get_args(InstanceSays), Failed])
        super().__init__(job, peers, hears, silence_s=silence_s)

    has_hung_r_workers = False
    """Other processes' R-workers keep nobody here from ending."""

    def give_up(self, number: int) -> None:
        """See ``InstanceConnectionHub``."""
        self.connections[number].give_up()

    def close(self) -> None:
        """See ``MpiHub``. Those that hang, the job ends without: here; the
        launcher ends the others."""
        super().close()
        self._job.hanging.difference_update(end_ranks(self._job.hanging))

    def greet_all(
        self, hello: InstanceHello, timeout_s: float
    ) -> tuple[dict[int, InstanceWelcome], dict[int, WorkerError]]:
        """See ``InstanceConnectionHub``. They have as long to load their models as stages
        have."""
        return greet_together(self, hello, max(timeout_s, LOADING_TIMEOUT_S))

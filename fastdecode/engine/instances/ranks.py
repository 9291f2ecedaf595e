"""Instances that are ranks of one MPI job: the controller's end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from fastdecode.core.config.instances import Instances
from fastdecode.core.errors import WorkerError
from fastdecode.engine.instances.connections import FromInstance, greet_together
from fastdecode.engine.stages.links import LOADING_TIMEOUT_S
from fastdecode.wire.instances import (
    InstanceHello,
    InstanceSays,
    InstanceWelcome,
    ToInstance,
)
from fastdecode.wire.messages import Failed
from fastdecode.wire.mpi.connection import MpiJob
from fastdecode.wire.mpi.hub import CONTROL_LINE, MpiHub
from fastdecode.wire.mpi.ranks import InstanceRanks, link_address


def check_job(instances: Instances, job: MpiJob) -> InstanceRanks:
    """Which rank is whose. Raises ConfigError: they can't be this job's."""
    ranks = InstanceRanks(instances.placed)
    ranks.check(job.size)
    return ranks


class RankHub(MpiHub[ToInstance, FromInstance]):
    """Of a controller, which is rank 0.

    Args:
        job: its part in the job.
        instances: the others.
        silence_s: one that gives no sign of life for so long is lost.

    Raises:
        ConfigError: the job has other ranks than these take.
    """

    def __init__(self, job: MpiJob, instances: Instances, silence_s: float) -> None:
        leaders = [each.first for each in check_job(instances, job).stages]
        self.names: Sequence[str] = tuple(map(link_address, leaders))
        kinds = frozenset([*get_args(InstanceSays), Failed])
        super().__init__(job, kinds, silence_s=silence_s, is_hurried=False)
        for rank in leaders:
            self.connect(rank, f"instance rank {rank}", line=CONTROL_LINE)

    has_hung_r_workers = False
    """Other processes' R-workers keep nobody here from ending."""

    def give_up(self, number: int) -> None:
        """See ``InstanceConnectionHub``."""
        self.connections[number].give_up()

    def greet_all(
        self, hello: InstanceHello, timeout_s: float
    ) -> tuple[dict[int, InstanceWelcome], dict[int, WorkerError]]:
        """See ``InstanceConnectionHub``. They have as long to load their models as stages
        have."""
        return greet_together(self, hello, max(timeout_s, LOADING_TIMEOUT_S))

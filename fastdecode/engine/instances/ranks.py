"""Instances that are ranks of one MPI job: the controller's end."""

from __future__ import annotations

import time
from typing import get_args

from fastdecode.core.clock import Clock
from fastdecode.core.config.instances import Instances
from fastdecode.core.errors import ConfigError, Given, ProtocolError, WorkerError
from fastdecode.engine.instances.connections import FromInstance, InstanceConnectionHub, welcome_of
from fastdecode.engine.stages.links import LOADING_TIMEOUT_S
from fastdecode.wire.instances.messages import (
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
from fastdecode.wire.transport import TIMEOUT, PeerLostError


def check_job(instances: Instances, job: MpiJob) -> InstanceRanks:
    """Which rank is whose. Raises ConfigError: they can't be this job's."""
    ranks = InstanceRanks(instances.placed)
    ranks.check(job)
    if not job.threads_may_take_turns:
        raise ConfigError(
            Given("instance_ranks"),
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
        return greet_ranks(self, hello, max(timeout_s, LOADING_TIMEOUT_S))


def greet_ranks(
    hub: InstanceConnectionHub,
    hello: InstanceHello,
    patience_s: float,
    clock: Clock = time.monotonic,
) -> tuple[dict[int, InstanceWelcome], dict[int, WorkerError]]:
    """What those say within ``patience_s`` who live; why others aren't there."""
    welcomes: dict[int, InstanceWelcome] = {}
    failed: dict[int, WorkerError] = {}
    end_s = clock() + patience_s
    for number, line in enumerate(hub.connections):
        try:
            line.send(hello)
        except WorkerError as error:
            failed[number] = error
    while missing := [i for i in range(len(hub.connections)) if i not in {**welcomes, **failed}]:
        left_s = end_s - clock()
        if left_s <= 0:
            _give_up(hub, missing, patience_s, failed)
            break
        try:
            number, answer = hub.receive_any(left_s)
        except PeerLostError as lost:
            welcomes.pop(lost.index, None)
            failed[lost.index] = lost
            continue
        except WorkerError as error:
            if error.code != TIMEOUT:
                raise
            continue
        if number in welcomes and not isinstance(answer, Failed):
            continue  # how it is, while others load their models
        welcomes.pop(number, None)
        try:
            welcome = welcome_of(hub.connections[number], hello, answer)
            if welcome is None:
                raise ProtocolError("serves another controller, which can't be")
            welcomes[number] = welcome
        except (WorkerError, ProtocolError) as error:
            failed[number] = WorkerError(error.message, code=error.code)
    return welcomes, failed


def _give_up(
    hub: InstanceConnectionHub,
    missing: list[int],
    patience_s: float,
    failed: dict[int, WorkerError],
) -> None:
    """These live, and haven't said in time what they are."""
    for number in missing:
        why = (
            f"{hub.connections[number].peer} lives, but hasn't loaded its model in "
            f"{patience_s:g} s: see its own output for what it waits for"
        )
        failed[number] = WorkerError(why, code=TIMEOUT)
        hub.give_up(number)

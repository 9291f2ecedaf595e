"""Links between the R-workers of an MPI job."""

from __future__ import annotations

import re
from typing import Final, get_args

from fastdecode.core.errors import ConfigError
from fastdecode.wire.messages import FromRWorker, ToRWorker
from fastdecode.wire.mpi.connection import MpiConnection
from fastdecode.wire.mpi.hub import MpiHub
from fastdecode.wire.mpi.job import LINK_TAGS, MpiJob

_RANK: Final = re.compile(r"rank ([0-9]{1,9})")


class MpiNeighbours:
    """How an R-worker reaches, and is reached by, other ranks.

    Args:
        job: this process's part in the job.
        hub: where it is reached.
    """

    def __init__(self, job: MpiJob, hub: MpiHub[FromRWorker, ToRWorker]) -> None:
        self._job = job
        self._hub = hub
        self._links: MpiHub[ToRWorker, FromRWorker] = MpiHub(
            job,
            [],
            frozenset(get_args(FromRWorker)),
            pump_interval_s=0,  # the R-worker's own hub has one, and looks often
            keeps_places=False,
        )

    def connect(self, address: str, line: int) -> MpiConnection[ToRWorker, FromRWorker]:
        """See ``rworker.transfers.neighbours.Neighbours``."""
        rank = other_rank(self._job, address)
        return self._links.add(rank, f"R-worker rank {rank}", tag=link_tag(line))

    def expect(self, address: str, line: int) -> None:
        """See ``rworker.transfers.neighbours.Neighbours``."""
        rank = other_rank(self._job, address)
        self._hub.add(rank, f"the neighbour at rank {rank}", tag=link_tag(line))

    def close(self) -> None:
        """Close what was connected, and see off what was sent."""
        self._links.close()


def other_rank(job: MpiJob, address: str) -> int:
    """Which rank is meant. Raises ConfigError: none that a link leads to."""
    match = _RANK.fullmatch(address)
    rank = int(match[1]) if match else -1
    if not 0 < rank < job.size or rank == job.rank:
        raise ConfigError(f"{address!r} is no other R-worker of this MPI job")
    return rank


def link_tag(line: int) -> int:
    """What was sent over a link that is over must never come in over another."""
    return LINK_TAGS[2 * (line % (len(LINK_TAGS) // 2))]

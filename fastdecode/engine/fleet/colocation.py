"""An engine among others of its host."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.config.instances import InstanceRole
from fastdecode.wire.ranks import StageRanks
from rworker.transfers.neighbours import Neighbourhood


@dataclass(frozen=True)
class Colocation:
    """R-workers, or a device with KV, that reach those of other engines, in this process or
    elsewhere."""

    neighbours: Neighbourhood  # all of them, as far as they are of this process
    name: str  # what this engine's are called by, before their numbers
    num_engines: int  # on this host
    role: InstanceRole  # what it is given at first
    place: int = 0  # which of this host's it is: GPUs are counted so
    ranks: StageRanks | None = None
    """Its S-workers and R-workers, where they are ranks of an MPI job among others."""

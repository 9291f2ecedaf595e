"""An engine among others of its process."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.config.instances import InstanceRole
from rworker.stream.links import Neighbourhood


@dataclass(frozen=True)
class Beside:
    """R-workers of this process that reach those of other engines, in it or
    elsewhere."""

    neighbours: Neighbourhood
    """All of them."""
    name: str
    """What this engine's are called by, before their numbers."""
    num_engines: int
    """In this process, which share what this host has."""
    role: InstanceRole
    """What it is given at first."""

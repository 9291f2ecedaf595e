"""What moves kept blocks between a cache and where they go else."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rworker.tiers.health import Faults


@dataclass(eq=False)
class MoveJob:
    """Blocks to be moved."""

    number: int
    is_fetch: bool
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    """Of the cache, one for each key."""
    num_tokens: tuple[int, ...] = ()
    """Up to each block's end, as ``Retain`` has them; none of a fetch."""
    failed: set[int] = field(default_factory=set)
    """Places of blocks that could not be moved."""
    num_left: list[int] = field(default_factory=list)
    """Units to be done: of each group of layers, or of all."""
    asked_s: float = 0.0
    began_s: float = 0.0
    """When its first unit was."""
    seconds: float = 0.0
    """That it took since it was asked for; while it isn't over, from its
    beginning until its last group was there."""
    num_told: int = 0
    """Groups that were reported to be there."""
    waited_s: float = 0.0
    """That somebody has waited for layers of it."""

    @property
    def is_over(self) -> bool:
        return not any(self.num_left)

    @property
    def num_there(self) -> int:
        """Leading groups that are there; of blocks that are stored there is one."""
        return next((i for i, left in enumerate(self.num_left) if left), len(self.num_left))

    @property
    def has_more(self) -> bool:
        """Whether more is there than was reported."""
        return self.num_there > self.num_told


class LowerTier:
    """Where the kept blocks of one cache go: a file (``Mover``), or memory that is not
    the cache's. One thread calls. Nothing of this waits, where copies are over at once.
    """

    num_layers: int
    """Of the cache."""
    stored_bytes: int
    """Of a block, as it is stored."""

    def begin(self, job: MoveJob) -> None:
        """Move blocks."""
        raise NotImplementedError

    def progress(self, job: MoveJob) -> int:
        """Leading layers of all of a job's blocks that are there, or have failed; of blocks
        that are stored: 0, or all."""
        return self.num_layers

    def take_faults(self) -> Faults:
        """What has gone wrong since the last call."""
        return Faults()

    def wait(self, timeout_s: float | None) -> None:
        """Until some job has come further than was asked, or so long; or all are over."""

    def wait_for_layer(self, numbers: Collection[int], layer: int) -> None:
        """Until a layer of these jobs' blocks is there, or has failed."""

    def drop(self, keys: Iterable[bytes]) -> None:
        """Blocks are not kept any more."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is moved any more when this returns."""

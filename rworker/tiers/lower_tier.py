"""Jobs that move cached blocks, and the interface of lower tiers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass(eq=False)
class MoveJob:
    """Blocks to be moved."""

    number: int
    is_fetch: bool
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    """Blocks of the cache, one for each key."""
    num_tokens: tuple[int, ...] = ()
    """Tokens up to each block's end, as in ``Retain``. Empty for a fetch."""
    failed: set[int] = field(default_factory=set)
    """Places of blocks that could not be moved."""
    num_left: list[int] = field(default_factory=list)
    """Units to be done, of each group of layers, or of all."""
    asked_s: float = 0.0
    began_s: float = 0.0
    """When its first unit began."""
    seconds: float = 0.0
    """Time that it took since it was asked for. Until it is over, time from its beginning until its
    last group was there."""
    num_told: int = 0
    """Groups that were reported to be there."""
    waited_s: float = 0.0
    """Time that steps have waited for its layers."""

    @property
    def is_over(self) -> bool:
        return not any(self.num_left)

    @property
    def num_there(self) -> int:
        """Leading groups that are there. Blocks that are stored have one."""
        return next((i for i, left in enumerate(self.num_left) if left), len(self.num_left))

    @property
    def has_more(self) -> bool:
        """True if more is there than was reported."""
        return self.num_there > self.num_told


class LowerTier:
    """Where the cached blocks of one cache go: a file (``Mover``), or other memory. One thread
    calls. Where copies are over at once, no method waits."""

    num_layers: int
    """Layers of the cache."""
    stored_bytes: int
    """Bytes of a block, as it is stored."""

    def begin(self, job: MoveJob) -> None:
        """Move blocks. Nothing else writes them until the job is over."""
        raise NotImplementedError

    def progress(self, job: MoveJob) -> int:
        """Return the leading layers that all of a job's blocks have, or have failed in. Of blocks
        that are stored: 0 or all."""
        return self.num_layers

    def take_faults(self) -> tuple[int, int, int, int]:
        """Return the unread, damaged, unwritten and late blocks since the last call."""
        return 0, 0, 0, 0

    def wait(self, timeout_s: float | None) -> None:
        """Wait until some job has come further than was reported, or all are over."""

    def wait_for_layer(self, numbers: Collection[int], layer: int) -> None:
        """Wait until a layer of these jobs' blocks is there, or has failed."""

    def drop(self, keys: Iterable[bytes]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """End all moves."""

"""Attention of one step: parts that each attend some of its rows, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from fastdecode.core.holders import Holder, HolderId
from fastdecode.engine.step.batch import HolderSpan, StepBatch
from sworker.worker import Pass, SWorker

if TYPE_CHECKING:
    from fastdecode.engine.fleet.groups import HolderPool
    from fastdecode.engine.step.remote import RemotePart


class StepRecord:
    """What the parts of one step note: times, and which holders were lost.

    Args:
        spans: The step's rows as holders see them.
    """

    def __init__(self, spans: Iterable[HolderSpan]) -> None:
        self.spans = tuple(spans)
        self.r_s: dict[HolderId, float] = {span.holder: 0.0 for span in self.spans}
        """Seconds that each holder has computed."""
        self.gpu_s: dict[HolderId, Callable[[], float]] = {}
        """Seconds that a GPU has attended for a holder, beyond ``r_s``."""
        self.in_s_part_s = 0.0
        """Seconds of ``r_s`` in which the S-worker's own thread computed."""
        self.round_trip_s = math.inf
        """The shortest way of a layer to an R-worker and back, without its compute."""
        self.sent_s: list[float] = []
        """When q, k and v of each layer were sent, on ``time.perf_counter``."""
        self.lost: set[HolderId] = set()
        """Holders that were lost before the step was over."""

    @property
    def r_compute_s(self) -> dict[HolderId, float]:
        """Seconds that each holder has attended, on a GPU too."""
        on_gpu_s = {holder: seconds() for holder, seconds in self.gpu_s.items()}
        return {holder: s + on_gpu_s.get(holder, 0.0) for holder, s in self.r_s.items()}


class Outgoing(Protocol):
    """A layer's q, k and v on their way to the host, to be sent from there."""

    @property
    def done(self) -> bool:
        """True if they are on the host."""

    def wait(self) -> None:
        """Wait until they are."""

    def send(self) -> None:
        """Send them to R-workers. Call once, in the order of layers."""


class AttentionPart(Protocol):
    """Attends some rows of one step."""

    def scatter(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, place: Tensor | None
    ) -> Outgoing | None:
        """Take a layer's q [T, Hq, D], k and v [T, Hkv, D] of all rows.

        Args:
            place: Where o [T, Hq, D] may be put, the same in every layer.

        Returns:
            What is to be sent once it is on the host. None if nothing is.
        """

    def ready(self) -> bool:
        """Return True if ``take`` may be called."""

    def take(self, o: Tensor | None) -> Tensor:
        """Write this part's rows into the layer's o [T, Hq, D]. The first part gets None, and
        gives o."""


class Begun(NamedTuple):
    """A step for which holders have made room."""

    parts: tuple[AttentionPart, ...] = ()
    forward: Pass | None = None
    """Runs the step, or slices of it, without ``scatter``. None if the caller begins it."""
    remote: RemotePart | None = None
    """The part that R-workers answer."""


class Attention(Protocol):
    """Begins steps where KV is: on R-workers, on the S-worker's device, or on both."""

    @property
    def fleet(self) -> HolderPool: ...

    @property
    def holders(self) -> Seq[Holder]:
        """What they are, by their ids."""

    def begin(self, batch: StepBatch, s_worker: SWorker) -> tuple[StepRecord, Begun]:
        """Begin a step: make room for its tokens where their K and V will be."""

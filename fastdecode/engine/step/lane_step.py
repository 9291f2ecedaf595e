"""A lane's step: parts that each attend some of its rows, what is in flight, and what it took."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.holders import Holder, HolderId
from fastdecode.core.trace import Trace
from fastdecode.engine.step.batch import HolderSpan, StepBatch
from fastdecode.schedule.lanes import LaneChoice
from fastdecode.schedule.times import MeasuredTimes, RPartTime
from fastdecode.wire.stages import StageDone
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


class HostCopy(Protocol):
    """Data on its way to the host."""

    @property
    def done(self) -> bool:
        """True if they are on the host."""

    def wait(self) -> None:
        """Wait until they are."""


class Outgoing(HostCopy, Protocol):
    """A layer's q, k and v on their way to the host, to be sent from there."""

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
        """The kinds of holders, by their ids."""

    def begin(self, batch: StepBatch, s_worker: SWorker) -> tuple[StepRecord, Begun]:
        """Begin a step: make room for the K and V of its tokens."""


class StageForward(Protocol):
    """A step's way through other stages, when a stage has run its own layers."""

    @property
    def copy(self) -> HostCopy:
        """The stage's output, on its way to the host."""

    @property
    def can_advance(self) -> bool:
        """True if ``advance`` has something to do."""

    def advance(self) -> Tensor | None:
        """Send the output, or take in what other stages have returned.

        Returns:
            The step's logits [R, vocab], once there are any. At stages behind the first R is 0.
        """

    def deliver(self, done: StageDone) -> None:
        """Take in that a later stage has done its part of the step."""

    @property
    def reports(self) -> Seq[StageDone]:
        """Reports of later stages about it."""


@dataclass(eq=False)
class LaneStep:
    """A lane's step, in flight or just finished."""

    lane: int
    batch: StepBatch
    logit_rows: NDArray[np.int64]  # [R]
    record: StepRecord
    begun: Begun
    forward: Pass
    passage: StageForward | None = None
    """Its way through the stages behind this one, if there are any."""
    logits: Tensor | None = None  # [R, vocab], once all layers are done
    is_drawn: bool = False
    """True once the tokens that follow were asked for."""
    draws: HostCopy | None = None
    """Their way to the host. None if no sequence wants any, or not yet."""
    fed_by: HostCopy | None = None
    """The lane's tokens before, which it embeds, while the host does not know them: it
    draws none before that."""
    s_compute_s: float = 0.0
    """Time of the S-worker's thread for it so far, messages included. Where a GPU computes
    less, this is what lanes share."""

    def __post_init__(self) -> None:
        asks = self.batch.asks
        self.asked_rows = None if asks is None else self.batch.asked_rows
        """[P] rows beside ``logit_rows`` whose logits may be asked of ``forward``."""
        remote = self.begun.remote
        self.is_looked_at = len(self.begun.parts) != 1 or remote is None or remote.may_be_behind
        """True if other things than answers may let it continue."""

    @property
    def wanted_rows(self) -> NDArray[np.int64]:
        """[R + P] all rows of which logits are wanted."""
        if self.asked_rows is None:
            return self.logit_rows
        return np.concatenate((self.logit_rows, self.asked_rows))

    @property
    def step(self) -> int:
        """The step's number; unique among all lanes."""
        return self.batch.spans[0].begin.step

    @property
    def settled(self) -> bool:
        """True if R-workers owe no answer to it."""
        remote = self.begun.remote
        return remote is None or remote.settled

    @property
    def can_advance(self) -> bool:
        """True if the next layer may be computed, or the step is over."""
        if self.logits is None:
            if self.passage is not None:
                return self.passage.can_advance
            is_ready = True
            for part in self.begun.parts:
                is_ready = is_ready and part.ready()
            return is_ready
        if not self.is_drawn:
            return self.fed_by is None
        return self.settled and (self.draws is None or self.draws.done)

    @property
    def has_come(self) -> bool:
        """True if what it embeds is on the host, and the engine does not know yet."""
        return self.fed_by is not None and self.fed_by.done

    @property
    def coming(self) -> list[HostCopy]:
        """What is on its way to the host for it."""
        of_stage = None if self.passage is None else self.passage.copy
        copies = (self.fed_by, of_stage, self.draws)
        return [x for x in copies if x is not None and not x.done]

    def advance(self) -> bool:
        """Continue with the layer's o. Return False if this stage's layers are done."""
        forward, o = self.forward, None
        if forward.is_over:
            return False
        for part in self.begun.parts:
            o = part.take(o)
        assert o is not None
        return forward.advance(o)

    def scatter(self) -> list[Outgoing]:
        """Give the parts the next layer. Returns what is to be sent once it is on the host."""
        forward, leaving = self.forward, []
        for part in self.begun.parts:
            out = part.scatter(forward.layer, forward.q, forward.k, forward.v, forward.place)
            if out is not None:
                leaving.append(out)
        return leaving

    def lose(self, holder: HolderId) -> None:
        """Expect no answer of a holder any more: its rows mean nothing."""
        if holder not in self.record.r_s:
            return  # it has no rows in the step
        self.record.lost.add(holder)
        self.is_looked_at = True
        if self.begun.remote is not None:
            self.begun.remote.awaited.discard(holder)

    def count_s_part(self, layer: int | None, started_s: float, trace: Trace | None) -> None:
        """Count what the S-worker's thread has computed until now, up to a layer's attention.
        ``layer``: None if up to the logits."""
        now_s = time.perf_counter()
        self.s_compute_s += now_s - started_s
        if trace is not None:
            trace.s_part(self.lane, self.step, layer, started_s, now_s)

    def tell(self, times: MeasuredTimes, lanes: LaneChoice | None, completed_s: float) -> None:
        """Report how long the finished step's parts took, without those of lost holders. With
        several stages, report what the slowest one's took.

        Args:
            completed_s: What drawing tokens and handing them on has taken.
        """
        reports = () if self.passage is None else self.passage.reports
        r_compute_s = self.record.r_compute_s
        r_parts: dict[int, RPartTime] = {
            span.holder: RPartTime(
                span.counts.load_tokens,
                span.counts.num_prompt_tokens,
                max(
                    r_compute_s[span.holder],
                    *(float(done.r_compute_s[span.holder]) for done in reports),
                    0.0,
                ),
            )
            for span in self.record.spans
            if span.holder not in self.record.lost
        }
        # A GPU works on while this thread is elsewhere.
        s_part_s = max(self.s_part_s(completed_s), *(done.s_part_s for done in reports), 0.0)
        times.observe(self.batch.num_decoding, self.batch.num_prompt_tokens, s_part_s, r_parts)
        if self.batch.num_decoding:
            times.observe_trip(self.round_trips_s + sum([done.round_trip_s for done in reports]))
        if lanes is not None:
            loads = {holder: part.load_tokens for holder, part in r_parts.items()}
            lanes.observe(self.lane, self.batch.num_decoding, loads)

    def s_part_s(self, completed_s: float = 0.0) -> float:
        """Return the seconds that this stage's S-part has computed for it."""
        own_s = self.s_compute_s + completed_s - self.record.in_s_part_s
        return max(own_s, self.forward.device_s())

    @property
    def round_trips_s(self) -> float:
        """Trips of all layers so far, by the shortest."""
        return self.record.round_trip_s * (self.forward.layer + 1)

"""A lane's step: what is in flight of it, and what it took."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.trace import Trace
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.remote import LaneAttention
from fastdecode.schedule.lanes import LaneChoice
from fastdecode.schedule.times import MeasuredTimes, RPartTime
from fastdecode.wire.stages import StageDone
from sworker.worker import Pass


class HostCopy(Protocol):
    """Tokens that are on their way to the host."""

    @property
    def done(self) -> bool:
        """Whether they are there."""

    def wait(self) -> None:
        """Wait until they are."""


class StageForward(Protocol):
    """A step's way on, when a stage of several has run its own layers."""

    @property
    def copy(self) -> HostCopy:
        """The stage's output, on its way to the host."""

    @property
    def can_go_on(self) -> bool:
        """Whether ``go_on`` has something to do."""

    def go_on(self) -> Tensor | None:
        """Send what is here, or take in what has come back. Returns the step's
        logits [R, vocab], once there are any; to stages behind the first there
        is nobody to draw for, R = 0."""

    def deliver(self, done: StageDone) -> None:
        """A later stage has done its part of the step."""

    @property
    def reports(self) -> Seq[StageDone]:
        """What later stages have said of it."""


class NextStage(Protocol):
    """What a stage of several does with its steps."""

    def leave(self, step: LaneStep) -> StageForward | None:
        """Its own layers are done. None: so are all."""

    def take_done(self) -> Seq[StageDone]:
        """What later stages have said of steps; told once."""

    @property
    def has_orders(self) -> bool:
        """Whether it has been told anything that isn't of a step in flight."""


@dataclass(eq=False)
class LaneStep:
    """A lane's step, in flight or just finished."""

    lane: int
    batch: StepBatch
    logit_rows: NDArray[np.int64]  # [R]
    remote: LaneAttention
    forward: Pass
    is_whole: bool = False
    """All layers were run at once."""
    passage: StageForward | None = None
    """Its way through the stages behind this one, if there are any, and through
    the layers before."""
    asked_rows: NDArray[np.int64] | None = None
    """[P] rows beside ``logit_rows`` whose logits may be asked of ``forward``."""
    logits: Tensor | None = None  # [R, vocab], once all layers are done
    is_drawn: bool = False
    """The tokens that follow were asked for."""
    draws: HostCopy | None = None
    """They are drawn; None: nobody wants any, or not yet."""
    fed_by: HostCopy | None = None
    """The lane's tokens before, which it embeds, while the host doesn't know
    them: it draws none before that does."""
    s_compute_s: float = 0.0
    """All that the S-worker's thread did for it so far, messages included:
    where that is more than a GPU computes, it is what lanes share."""
    started_s: float = field(default_factory=time.perf_counter)
    round_trip_s: float = math.inf
    """The shortest of a layer's ways to an R-worker and back, its compute aside."""

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
    def can_go_on(self) -> bool:
        """Whether the next layer may be computed, or the step is over."""
        if self.logits is None:
            return self.remote.ready if self.passage is None else self.passage.can_go_on
        if not self.is_drawn:
            return self.fed_by is None
        return self.remote.settled and (self.draws is None or self.draws.done)

    @property
    def has_come(self) -> bool:
        """Whether what it embeds is on the host, and nobody was told."""
        return self.fed_by is not None and self.fed_by.done

    @property
    def coming(self) -> list[HostCopy]:
        """What is on its way to the host for it, and isn't there."""
        of_stage = None if self.passage is None else self.passage.copy
        copies = (self.fed_by, of_stage, self.draws)
        return [x for x in copies if x is not None and not x.done]

    @property
    def r_compute_s(self) -> float:
        """The busiest R-worker's compute for this step."""
        return max(self.remote.r_compute_s.values(), default=0.0)

    def count_s_part(self, layer: int | None, started_s: float, trace: Trace | None) -> None:
        """The S-worker's thread has computed for it until now; up to a layer's
        attention, or None: to its logits."""
        now_s = time.perf_counter()
        self.s_compute_s += now_s - started_s
        if trace is not None:
            trace.s_part(self.lane, self.step, layer, started_s, now_s)

    def tell(self, times: MeasuredTimes, lanes: LaneChoice | None, completed_s: float) -> None:
        """Tell how long the finished step's parts took, those of holders that
        were lost aside. ``completed_s``: what drawing tokens and handing them
        on has taken. With several stages, what the slowest one's took."""
        reports = () if self.passage is None else self.passage.reports
        r_parts: dict[int, RPartTime] = {
            span.holder: RPartTime(
                span.counts.load_tokens,
                span.counts.num_prompt_tokens,
                max(
                    self.remote.r_compute_s[span.holder],
                    *(float(done.r_compute_s[span.holder]) for done in reports),
                    0.0,
                ),
            )
            for span in self.remote.batch.spans
            if span.holder not in self.remote.lost
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
        """Seconds that this stage's S-part has computed for it."""
        own_s = self.s_compute_s + completed_s - self.remote.in_s_part_s
        return max(own_s, self.forward.device_s())

    @property
    def round_trips_s(self) -> float:
        """Of all layers so far, by the shortest."""
        return self.round_trip_s * (self.forward.layer + 1)

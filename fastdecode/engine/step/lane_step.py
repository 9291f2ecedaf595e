"""A lane's step: what is in flight of it, and what it took."""

from __future__ import annotations

import math
import time
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
from sworker.worker import Pass


class Draws(Protocol):
    """Tokens that are on their way to the host."""

    @property
    def done(self) -> bool:
        """Whether they are there."""

    def wait(self) -> None:
        """Wait until they are."""


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
    logits: Tensor | None = None  # [R, vocab], once all layers are done
    is_drawn: bool = False
    """The tokens that follow were asked for."""
    draws: Draws | None = None
    """They are drawn; None: nobody wants any, or not yet."""
    fed_by: Draws | None = None
    """The lane's tokens before, which it embeds, while the host doesn't know
    them: it draws none before that does."""
    s_compute_s: float = 0.0
    """All that the S-worker's thread did for it so far, messages included:
    where that is more than a GPU computes, it is what lanes share."""
    started_s: float = field(default_factory=time.perf_counter)
    round_trip_s: float = math.inf
    """The shortest of a layer's ways to an R-worker and back, its compute aside."""

    @property
    def step(self) -> int:
        """The step's number; unique among all lanes."""
        return self.batch.spans[0].begin.step

    @property
    def can_go_on(self) -> bool:
        """Whether the next layer may be computed, or the step is over."""
        if self.logits is None:
            return self.remote.ready
        if not self.is_drawn:
            return self.fed_by is None
        return self.remote.settled and (self.draws is None or self.draws.done)

    @property
    def has_come(self) -> bool:
        """Whether what it embeds is on the host, and nobody was told."""
        return self.fed_by is not None and self.fed_by.done

    @property
    def coming(self) -> list[Draws]:
        """What is on its way to the host for it, and isn't there."""
        return [x for x in (self.fed_by, self.draws) if x is not None and not x.done]

    @property
    def r_compute_s(self) -> float:
        """The busiest R-worker's compute for this step."""
        return max(self.remote.r_compute_s.values(), default=0.0)

    def count_s_part(self, layer: int | None, started_s: float, trace: Trace) -> None:
        """The S-worker's thread has computed for it until now; up to a layer's
        attention, or None: to its logits."""
        now_s = time.perf_counter()
        self.s_compute_s += now_s - started_s
        trace.s_part(self.lane, self.step, layer, started_s, now_s)

    def tell(self, times: MeasuredTimes, lanes: LaneChoice | None, completed_s: float) -> None:
        """Tell how long the finished step's parts took, those of holders that
        were lost aside. ``completed_s``: what drawing tokens and handing them
        on has taken."""
        r_parts: dict[int, RPartTime] = {
            span.holder: RPartTime(
                span.counts.load_tokens,
                span.counts.num_prompt_tokens,
                self.remote.r_compute_s[span.holder],
            )
            for span in self.remote.batch.spans
            if span.holder not in self.remote.lost
        }
        # A GPU works on while this thread is elsewhere.
        own_s = self.s_compute_s + completed_s - self.remote.in_s_part_s
        s_part_s = max(own_s, self.forward.device_s())
        times.observe(self.batch.num_decoding, self.batch.num_prompt_tokens, s_part_s, r_parts)
        if lanes is not None:
            loads = {holder: part.load_tokens for holder, part in r_parts.items()}
            lanes.observe(
                self.lane,
                self.batch.num_decoding,
                loads,
                self.round_trip_s * (self.forward.layer + 1),
            )

"""The two-stage pipeline: lanes of the running batch that take turns on the
S-worker while R-workers attend the others.

A **lane** is a part of the running batch that moves through the layers as one.
While lane A's attention runs on the R-workers, the S-worker computes lane B::

    S-worker   | A: layer 0 | B: layer 0 | A: layer 1 | B: layer 1 | A: layer 2 | …
    R-workers               | A: layer 0 | B: layer 0 | A: layer 1 | B: layer 1 | …

Nothing is fixed about whose turn it is. The S-worker takes the lane that has
been ready longest, and waits only when no lane is ready. Lanes don't share
steps either: one that has finished its step starts its next while the others
are in the middle of theirs. With one lane, S-part and R-part alternate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.holders import Holder
from fastdecode.core.trace import NoTrace, Trace
from fastdecode.engine.step.arrivals import Arrival, Arrivals, LaneWait
from fastdecode.engine.step.lane_step import HostCopy, LaneStep, NextStage
from fastdecode.engine.step.lanes import Lanes
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.remote import Attention
from sworker.worker import SWorker

Draw: TypeAlias = "Callable[[LaneStep], HostCopy | None]"
TakeIn: TypeAlias = "Callable[[int], object]"


class Pipeline:
    """Runs lanes' steps side by side. One thread drives it.

    Args:
        onward: where steps go behind this stage's layers; None: it has all.
    """

    def __init__(
        self,
        s_worker: SWorker,
        attention: Attention,
        num_lanes: int,
        trace: Trace | None = None,
        onward: NextStage | None = None,
    ) -> None:
        self._trace = None if isinstance(trace, NoTrace) else trace
        self._onward = onward
        self._s_worker = s_worker
        self._attention = attention
        self.holders: Final[Seq[Holder]] = attention.holders
        """What they are, by their ids."""
        self.lanes: Final = Lanes(num_lanes)
        self.arrivals: Final = Arrivals(attention.fleet, self.lanes, trace or NoTrace(), onward)
        # Some lanes wait for R-workers, and one never does.
        self._is_hybrid = len({holder.kind for holder in attention.holders}) > 1
        self._fed: list[LaneStep] = []  # the host doesn't know yet what they embed
        self._waiting = LaneWait(attention.fleet, self.lanes, is_hybrid=self._is_hybrid)
        # Else lanes wait for answers alone.
        self._copies = s_worker.gpu is not None or onward is not None or self._is_hybrid
        self.wait_s = 0.0
        """Time in which the S-worker had nothing to do but wait for R-workers, in all."""

    def launch(
        self,
        lane: int,
        batch: StepBatch,
        logit_rows: NDArray[np.int64],
        planned_s: float = 0.0,
        fed_by: HostCopy | None = None,
    ) -> None:
        """Start an idle lane's step: embed, the first layer's S-step, and off
        to the R-workers; or all layers, where they aren't needed.
        ``planned_s``: seconds that it has taken so far; ``fed_by``: the lane's
        tokens before, if they are still on their way to the host."""
        started = time.perf_counter()
        remote = self._attention.begin(batch)
        whole = remote.run_through(self._s_worker)
        forward = whole or self._s_worker.begin(batch.rows, lane, batch.feed, batch.hidden)
        step = LaneStep(lane, batch, logit_rows, remote, forward, s_compute_s=planned_s)
        step.is_whole, step.fed_by = forward.is_over, fed_by
        if batch.asks is not None:
            step.asked_rows = batch.asked_rows
        self.lanes.enter(step)
        if fed_by is not None:
            self._fed.append(step)
        if not step.is_whole:
            self._scatter(step)
        step.count_s_part(0, started, self._trace)

    def run(self, draw: Draw | None = None, take_in: TakeIn | None = None) -> LaneStep | None:
        """Go on until some lane has finished its step, or there is news (``arrivals``)
        or an order (``NextStage``); then None.

        Args:
            draw: called with a step as soon as it has logits. It starts to
                draw, and other lanes go on while tokens come to the host.
            take_in: called with a lane as soon as the tokens that its step was
                fed are on the host; before it draws others.
        """
        lanes, arrivals = self.lanes, self.arrivals
        while True:
            if lanes.unsent:
                lanes.dispatch()
            if self._fed:
                self._take_in_fed(take_in)
            arrivals.note_losses()
            if self._onward is not None:
                arrivals.note_done()
            lanes.collect_ready()
            if self._is_hybrid and lanes.ready:
                # Who is on the device can always go on; R-workers answer all the same.
                arrivals.take_in_all()
                lanes.collect_ready()
            if arrivals.has_news:
                return None
            if not lanes.ready:
                copies = self._copies or lanes.unsent
                self._wait(self._waiting.first_to_come if copies else self._attention.fleet.receive)
                if not lanes.ready:
                    continue
            step = lanes.take_ready()
            if step.logits is None:
                self._advance(step)
            if step.logits is not None and step.fed_by is None and not step.is_drawn:
                self._draw(step, draw)
            if step.logits is not None and step.can_go_on:
                lanes.leave(step)
                return step

    def receive(self, most_s: float = math.inf) -> None:
        """Wait for a message, so many seconds at most, and take it in. One is owed."""
        self._wait(partial(self._attention.fleet.receive, most_s=most_s))

    def _take_in_fed(self, take_in: TakeIn | None) -> None:
        for step in self._fed.copy():
            if step.has_come:
                self._fed.remove(step)
                step.fed_by = None
                assert take_in is not None
                take_in(step.lane)

    def _advance(self, step: LaneStep) -> None:
        started = time.perf_counter()
        is_layered = step.passage is None and not step.is_whole
        goes_on = is_layered and step.forward.advance(step.remote.take())
        if goes_on:
            self._scatter(step)
        elif self._onward is None:
            step.logits = step.forward.logits(step.logit_rows)
        else:
            step.logits = _pass_on(step, self._onward)
        step.count_s_part(step.forward.layer if goes_on else None, started, self._trace)

    def _draw(self, step: LaneStep, draw: Draw | None) -> None:
        step.is_drawn = True
        if draw is not None:
            started = time.perf_counter()
            step.draws = draw(step)
            step.s_compute_s += time.perf_counter() - started

    def _scatter(self, step: LaneStep) -> None:
        forward = step.forward
        if not step.remote.scatter(forward.layer, forward.q, forward.k, forward.v, forward.place):
            self.lanes.scattered(step)

    def _wait(self, wait: Callable[[], Arrival | None]) -> None:
        started = time.perf_counter()
        received = wait()
        now = time.perf_counter()
        self.wait_s += now - started
        if self._trace is not None:
            self._trace.waited(started, now)
        if received is not None:
            self.arrivals.take_in(*received, now)
            self.arrivals.take_in_until_ready()


def _pass_on(step: LaneStep, onward: NextStage) -> Tensor | None:
    """This stage's layers are done. The step's logits [R, vocab], once there are any."""
    if step.passage is not None:
        return step.passage.go_on()
    step.passage = onward.leave(step)
    return step.forward.logits(step.logit_rows) if step.passage is None else None

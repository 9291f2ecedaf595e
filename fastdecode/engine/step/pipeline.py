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
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.holders import Holder, HolderId
from fastdecode.core.trace import NoTrace, Trace
from fastdecode.engine.step.arrivals import Arrival, Arrivals, LaneWait, News
from fastdecode.engine.step.lane_step import HostCopy, LaneStep, NextStage
from fastdecode.engine.step.lanes import Lanes
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.remote import Attention
from sworker.worker import Pass, SWorker

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
        self._lanes = Lanes(num_lanes)
        self._arrivals = Arrivals(attention.fleet, self._lanes, trace or NoTrace(), onward)
        # Some lanes wait for R-workers, and one never does.
        self._is_hybrid = len({holder.kind for holder in attention.holders}) > 1
        self._waiting = LaneWait(attention.fleet, self._lanes, is_hybrid=self._is_hybrid)
        self.wait_s = 0.0
        """Time in which the S-worker had nothing to do but wait for R-workers, in all."""

    @property
    def holders(self) -> Seq[Holder]:
        """What they are, by their ids."""
        return self._attention.holders

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    def set_num_lanes(self, num_lanes: int) -> None:
        """From now on there are so many. No step is in flight."""
        self._lanes.resize(num_lanes)

    @property
    def idle_lanes(self) -> list[int]:
        return self._lanes.idle

    @property
    def in_flight(self) -> list[LaneStep]:
        return self._lanes.in_flight

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
        forward = whole or begin_pass(self._s_worker, batch, lane)
        step = LaneStep(lane, batch, logit_rows, remote, forward, s_compute_s=planned_s)
        step.is_whole, step.fed_by = forward.is_over, fed_by
        if batch.asks is not None:
            step.asked_rows = batch.asked_rows
        self._lanes.enter(step)
        if not step.is_whole:
            self._scatter(step)
        step.count_s_part(0, started, self._trace)

    def run(self, draw: Draw | None = None, take_in: TakeIn | None = None) -> LaneStep | None:
        """Go on until some lane has finished its step, or there is news
        (``take_news``) or an order (``NextStage``); then None.

        Args:
            draw: called with a step as soon as it has logits. It starts to
                draw, and other lanes go on while tokens come to the host.
            take_in: called with a lane as soon as the tokens that its step was
                fed are on the host; before it draws others.
        """
        lanes, arrivals = self._lanes, self._arrivals
        while True:
            lanes.dispatch()
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
                self._wait(self._waiting.first_to_come)
                continue
            step = lanes.take_ready()
            if step.logits is None:
                self._advance(step)
            if step.logits is not None and step.fed_by is None and not step.is_drawn:
                self._draw(step, draw)
            if step.logits is not None and step.can_go_on:
                lanes.leave(step)
                return step

    def take_news(self) -> list[News]:
        """What has come in the meantime that is no part of a step, in its
        order. Each is told once."""
        return self._arrivals.take_news()

    def lose(self, holder: HolderId) -> None:
        """A holder answers nothing of the steps in flight any more."""
        self._lanes.lose(holder)

    def receive(self, most_s: float = math.inf) -> None:
        """Wait for a message, so many seconds at most, and take it in. One is owed."""
        self._wait(partial(self._attention.fleet.receive, most_s=most_s))

    def _take_in_fed(self, take_in: TakeIn | None) -> None:
        for step in self._lanes.in_flight:
            if step.fed_by is not None and step.fed_by.done:
                step.fed_by = None
                assert take_in is not None
                take_in(step.lane)

    def _advance(self, step: LaneStep) -> None:
        started = time.perf_counter()
        if step.passage is not None:
            step.logits = step.passage.go_on()
            step.count_s_part(None, started, self._trace)
        elif not step.is_whole and step.forward.advance(step.remote.take()):
            self._scatter(step)
            step.count_s_part(step.forward.layer, started, self._trace)
        else:
            step.passage = None if self._onward is None else self._onward.leave(step)
            if step.passage is not None:
                step.count_s_part(None, started, self._trace)
                return
            step.logits = step.forward.logits(step.logit_rows)
            step.count_s_part(None, started, self._trace)

    def _draw(self, step: LaneStep, draw: Draw | None) -> None:
        step.is_drawn = True
        if draw is not None:
            started = time.perf_counter()
            step.draws = draw(step)
            step.s_compute_s += time.perf_counter() - started

    def _scatter(self, step: LaneStep) -> None:
        forward = step.forward
        if not step.remote.scatter(forward.layer, forward.q, forward.k, forward.v, forward.place):
            self._lanes.scattered(step)

    def _wait(self, wait: Callable[[], Arrival | None]) -> None:
        started = time.perf_counter()
        received = wait()
        now = time.perf_counter()
        self.wait_s += now - started
        if self._trace is not None:
            self._trace.waited(started, now)
        if received is not None:
            self._arrivals.take_in(*received, now)
            self._arrivals.take_in_until_ready()


def begin_pass(s_worker: SWorker, batch: StepBatch, lane: int) -> Pass:
    """A step up to its first layer's attention, wherever it begins."""
    if batch.hidden is not None:
        return s_worker.go_on(batch.hidden, batch.positions, lane)
    return s_worker.begin(batch.token_ids, batch.positions, lane, batch.feed)

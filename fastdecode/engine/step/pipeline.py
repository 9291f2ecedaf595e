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

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.holders import Holder
from fastdecode.core.trace import NoTrace, Trace
from fastdecode.engine.step.arrivals import Arrival, Arrivals, News
from fastdecode.engine.step.lane_step import Draws, LaneStep
from fastdecode.engine.step.lanes import Lanes
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.remote import Attention
from fastdecode.wire.patience import look_until_found
from sworker.worker import SWorker

Draw: TypeAlias = "Callable[[LaneStep], Draws | None]"


class Pipeline:
    """Runs lanes' steps side by side. One thread drives it."""

    def __init__(
        self, s_worker: SWorker, attention: Attention, num_lanes: int, trace: Trace | None = None
    ) -> None:
        self._trace = trace or NoTrace()
        self._s_worker = s_worker
        self._attention = attention
        self._lanes = Lanes(num_lanes)
        self._arrivals = Arrivals(attention.fleet, self._lanes, self._trace)
        # Some lanes wait for R-workers, and one never does.
        self._is_hybrid = len({holder.kind for holder in attention.holders}) > 1
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
        self, lane: int, batch: StepBatch, logit_rows: NDArray[np.int64], planned_s: float = 0.0
    ) -> None:
        """Start an idle lane's step: embed, the first layer's S-step, and off
        to the R-workers; or all layers, where they aren't needed.
        ``planned_s``: seconds that it has taken so far."""
        started = time.perf_counter()
        remote = self._attention.begin(batch)
        whole = remote.run_through(self._s_worker)
        forward = whole or self._s_worker.begin(batch.token_ids, batch.positions, lane)
        step = LaneStep(lane, batch, logit_rows, remote, forward, s_compute_s=planned_s)
        step.is_whole = whole is not None
        self._lanes.enter(step)
        if not step.is_whole:
            self._scatter(step)
        step.count_s_part(0, started, self._trace)

    def run(self, draw: Draw | None = None) -> LaneStep | None:
        """Go on until some lane has finished its step, or there is news
        (``take_news``); then None.

        Args:
            draw: called with a step as soon as it has logits. It starts to
                draw, and other lanes go on while tokens come to the host.
        """
        lanes, arrivals = self._lanes, self._arrivals
        while True:
            lanes.dispatch()
            arrivals.note_losses()
            lanes.collect_ready()
            if self._is_hybrid and lanes.has_ready:
                # Who is on the device can always go on; R-workers answer all the same.
                arrivals.take_in_all()
                lanes.collect_ready()
            if arrivals.has_news:
                return None
            if not lanes.has_ready:
                self._wait(self._first_to_come)
                continue
            step = lanes.take_ready()
            if step.logits is None:
                self._advance(step, draw)
            if step.logits is not None and step.can_go_on:
                lanes.leave(step)
                return step

    def take_news(self) -> list[News]:
        """What has come in the meantime that is no part of a step, in its
        order. Each is told once."""
        return self._arrivals.take_news()

    def receive(self) -> None:
        """Wait for a message, and take it in. Somebody owes one."""
        self._wait(self._attention.fleet.receive)

    def _advance(self, step: LaneStep, draw: Draw | None) -> None:
        started = time.perf_counter()
        if not step.is_whole and step.forward.advance(step.remote.take()):
            self._scatter(step)
            step.count_s_part(step.forward.layer, started, self._trace)
        else:
            step.logits = step.forward.logits(step.logit_rows)
            step.count_s_part(None, started, self._trace)
            if draw is not None:
                started = time.perf_counter()
                step.draws = draw(step)
                step.s_compute_s += time.perf_counter() - started

    def _scatter(self, step: LaneStep) -> None:
        forward = step.forward
        step.remote.scatter(forward.layer, forward.q, forward.k, forward.v, forward.place)
        self._lanes.scattered(step)

    def _first_to_come(self) -> Arrival | None:
        """No lane can go on: wait for an answer or for a copy to the host,
        whichever is first, for the one while the other is here would keep a
        lane from running. An answer is returned, what is copied is sent."""
        fleet, unsent = self._attention.fleet, self._lanes.first_unsent
        copies = [step.draws for step in self.in_flight if step.draws and not step.draws.done]
        if unsent is None and not copies and not self._is_hybrid:
            return fleet.receive()
        if not fleet.is_owed and not copies and unsent is not None:
            unsent.remote.wait_for_copy()
            return None
        if not fleet.is_owed and copies and unsent is None and not self._is_hybrid:
            copies[0].wait()
            return None
        found = look_until_found(partial(self._look, copies, len(fleet.lost)), None)
        return found[0] if found else None

    def _look(self, copies: Seq[Draws], num_lost: int) -> list[Arrival] | None:
        """An answer, if one is here; none: something was sent or drawn, a lane
        can go on, or somebody was lost; None: nothing has happened."""
        fleet = self._attention.fleet
        received = fleet.receive(wait=False) if fleet.is_owed else None
        if received is not None:
            return [received]
        has_come = self._lanes.dispatch() or any(copy.done for copy in copies)
        # Of a lane on the device nobody says so who isn't asked.
        can_go_on = self._is_hybrid and self._lanes.any_can_go_on
        return [] if has_come or can_go_on or len(fleet.lost) > num_lost else None

    def _wait(self, wait: Callable[[], Arrival | None]) -> None:
        started = time.perf_counter()
        received = wait()
        now = time.perf_counter()
        self.wait_s += now - started
        self._trace.waited(started, now)
        if received is not None:
            self._arrivals.take_in(*received, now)

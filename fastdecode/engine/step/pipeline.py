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
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.exhaustive import assert_never
from fastdecode.core.holders import Holder, HolderId
from fastdecode.core.trace import NoTrace, Trace
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.remote import Attention, LaneAttention
from fastdecode.schedule.lanes import LaneChoice
from fastdecode.schedule.times import MeasuredTimes, RPartTime
from fastdecode.wire.kv.chunks import ChunkStored, FetchedChunk
from fastdecode.wire.kv.taking_over import TakenOver
from fastdecode.wire.messages import Accepted, Answer, AttendResult, Refused, Report, Welcome
from fastdecode.wire.patience import look_until_found
from sworker.worker import Pass, SWorker

News: TypeAlias = "tuple[HolderId, Accepted | Refused | TakenOver | WorkerError]"
"""A holder's answer about parts, or why it was lost."""

Arrival: TypeAlias = "tuple[HolderId, Answer]"

Draw: TypeAlias = "Callable[[LaneStep], Draws | None]"


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
    draws: Draws | None = None
    """What was drawn from them, if something was."""
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
        return self.remote.settled and (self.draws is None or self.draws.done)

    @property
    def r_compute_s(self) -> float:
        """The busiest R-worker's compute for this step."""
        return max(self.remote.r_compute_s.values(), default=0.0)

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
            for span in self.batch.spans
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


class Pipeline:
    """Runs lanes' steps side by side. One thread drives it."""

    def __init__(
        self, s_worker: SWorker, attention: Attention, num_lanes: int, trace: Trace | None = None
    ) -> None:
        self._trace = trace or NoTrace()
        self._s_worker = s_worker
        self._attention = attention
        self._lanes: list[LaneStep | None] = [None] * num_lanes
        self._ready: deque[LaneStep] = deque()
        self._unsent: deque[LaneStep] = deque()  # scattered, but not on the host yet; once a layer
        self._news: list[News] = []
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
        assert not self.in_flight
        self._lanes = [None] * num_lanes

    @property
    def idle_lanes(self) -> list[int]:
        return [lane for lane, step in enumerate(self._lanes) if step is None]

    @property
    def in_flight(self) -> list[LaneStep]:
        return [step for step in self._lanes if step is not None]

    def launch(
        self, lane: int, batch: StepBatch, logit_rows: NDArray[np.int64], planned_s: float = 0.0
    ) -> None:
        """Start an idle lane's step: embed, the first layer's S-step, and off
        to the R-workers; or all layers, where they aren't needed.
        ``planned_s``: seconds that it has taken so far."""
        assert self._lanes[lane] is None
        started = time.perf_counter()
        remote = self._attention.begin(batch)
        whole = remote.run_through(self._s_worker)
        forward = whole or self._s_worker.begin(batch.token_ids, batch.positions, lane)
        step = LaneStep(lane, batch, logit_rows, remote, forward, s_compute_s=planned_s)
        step.is_whole = whole is not None
        self._lanes[lane] = step
        if not step.is_whole:
            self._scatter(step)
        self._count_s_part(step, 0, started)

    def run(self, draw: Draw | None = None) -> LaneStep | None:
        """Go on until some lane has finished its step, or there is news
        (``take_news``); then None.

        Args:
            draw: called with a step as soon as it has logits. It starts to
                draw, and other lanes go on while tokens come to the host.
        """
        while True:
            self._dispatch()
            self._note_losses()
            self._collect_ready()
            if self._is_hybrid and self._ready:
                self._take_in_answers()
            if self._news:
                return None
            if not self._ready:
                self._wait(self._first_to_come)
                continue
            step = self._ready.popleft()
            if step.logits is None:
                self._advance(step, draw)
            if step.logits is not None and step.can_go_on:
                self._lanes[step.lane] = None
                # What isn't sent by now was for holders that are lost; others
                # may be in their place soon.
                self._unsent = deque(other for other in self._unsent if other is not step)
                return step

    def take_news(self) -> list[News]:
        """What has come in the meantime that is no part of a step, in its
        order. Each is told once."""
        self._note_losses()
        news, self._news = self._news, []
        return news

    def _note_losses(self) -> None:
        for holder, error in self._attention.fleet.take_losses():
            for step in self.in_flight:
                step.remote.lose(holder)
            self._news.append((holder, error))

    def _advance(self, step: LaneStep, draw: Draw | None) -> None:
        started = time.perf_counter()
        if not step.is_whole and step.forward.advance(step.remote.take()):
            self._scatter(step)
            self._count_s_part(step, step.forward.layer, started)
        else:
            step.logits = step.forward.logits(step.logit_rows)
            self._count_s_part(step, None, started)
            if draw is not None:
                started = time.perf_counter()
                step.draws = draw(step)
                step.s_compute_s += time.perf_counter() - started

    def _count_s_part(self, step: LaneStep, layer: int | None, started: float) -> None:
        now = time.perf_counter()
        step.s_compute_s += now - started
        self._trace.s_part(step.lane, step.step, layer, started, now)

    def _scatter(self, step: LaneStep) -> None:
        forward = step.forward
        step.remote.scatter(forward.layer, forward.q, forward.k, forward.v, forward.place)
        self._unsent.append(step)

    def _dispatch(self) -> bool:
        """Send what has come to the host, in the order in which it was
        computed. Whether anything went."""
        sent = False
        while self._unsent:
            step, started = self._unsent[0], time.perf_counter()
            if not step.remote.dispatch():
                break
            step.s_compute_s += time.perf_counter() - started
            self._unsent.popleft()
            sent = True
        return sent

    def _collect_ready(self) -> None:
        """Queue the lanes that have become able to go on."""
        for step in self.in_flight:
            if step.can_go_on and step not in self._ready:
                self._ready.append(step)

    def receive(self) -> None:
        """Wait for a message, and take it in. Somebody owes one."""
        self._wait(self._attention.fleet.receive)

    def _first_to_come(self) -> Arrival | None:
        """No lane can go on: wait for an answer or for a copy to the host,
        whichever is first, for the one while the other is here would keep a
        lane from running. An answer is returned, what is copied is sent."""
        fleet = self._attention.fleet
        copies = [step.draws for step in self.in_flight if step.draws and not step.draws.done]
        if not self._unsent and not copies and not self._is_hybrid:
            return fleet.receive()
        if not fleet.is_owed and not copies and self._unsent:
            self._unsent[0].remote.wait_for_copy()
            return None
        if not fleet.is_owed and copies and not self._unsent and not self._is_hybrid:
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
        has_come = self._dispatch() or any(copy.done for copy in copies) or self._can_go_on()
        return [] if has_come or len(fleet.lost) > num_lost else None

    def _can_go_on(self) -> bool:
        """Whether a lane on the device can, which nobody says who isn't asked."""
        return self._is_hybrid and any(step.can_go_on for step in self.in_flight)

    def _take_in_answers(self) -> None:
        """Take in what R-workers have answered by now, though a lane can go on:
        one that is on the device always can."""
        fleet = self._attention.fleet
        while fleet.is_owed and (received := fleet.receive(wait=False)) is not None:
            self._take_in(*received, time.perf_counter())
        self._collect_ready()

    def _wait(self, wait: Callable[[], Arrival | None]) -> None:
        started = time.perf_counter()
        received = wait()
        now = time.perf_counter()
        self.wait_s += now - started
        self._trace.waited(started, now)
        if received is not None:
            self._take_in(*received, now)

    def _take_in(self, holder: HolderId, message: Answer, now: float) -> None:
        try:
            self._route(holder, message, now)
        except ProtocolError as error:
            self._attention.fleet.lose(holder, error)

    def _route(self, holder: HolderId, answer: Answer, arrived_s: float) -> None:
        match answer:
            case AttendResult():
                self._deliver(holder, answer, arrived_s)
            case Accepted() | Refused() | TakenOver():
                self._news.append((holder, answer))
            case Welcome() | Report() | ChunkStored() | FetchedChunk():
                raise ProtocolError(
                    f"{self._attention.fleet.peer(holder)} sent {type(answer).__name__}, which "
                    "nobody asked for"
                )
            case _:
                assert_never(answer)

    def _deliver(self, holder: HolderId, result: AttendResult, arrived_s: float) -> None:
        step = self._lanes[result.lane] if 0 <= result.lane < len(self._lanes) else None
        if step is None:
            raise ProtocolError(
                f"{self._attention.fleet.peer(holder)} answered for lane {result.lane}, which is "
                "idle"
            )
        step.remote.deliver(holder, result)
        sent = step.remote.sent_s[result.layer]
        round_trip_s = max(0.0, arrived_s - sent - result.compute_s)
        step.round_trip_s = min(step.round_trip_s, round_trip_s)
        self._trace.attended(
            holder, step.lane, result.step, result.layer, sent, arrived_s, result.compute_s
        )
        step.s_compute_s += time.perf_counter() - arrived_s

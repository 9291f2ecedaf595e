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
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.holders import Holder, HolderId
from fastdecode.core.trace import Trace
from fastdecode.engine.step.batch import StepBatch
from fastdecode.engine.step.remote import Attention, Begun, HostCopy, Leaving, StepRecord
from fastdecode.wire.blocks import TakenOver
from fastdecode.wire.messages import Accepted, Answer, AttendResult, Refused, Welcome
from fastdecode.wire.stages import StageDone
from fastdecode.wire.traits import unasked
from fastdecode.wire.waiting import look_until_found
from sworker.worker import Pass, SWorker

Draw: TypeAlias = "Callable[[LaneStep], HostCopy | None]"
"""Starts to draw tokens of a step that has logits. Other lanes run while they come to the host."""
TakeIn: TypeAlias = "Callable[[int], object]"
"""Takes in the tokens that a lane's step was fed, once they are on the host and before it draws."""
Arrival: TypeAlias = "tuple[HolderId, Answer]"
News: TypeAlias = "tuple[HolderId, Accepted | Refused | TakenOver | Welcome | WorkerError]"
"""A holder's answer about parts, or why it was lost."""


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
    asked_rows: NDArray[np.int64] | None = None
    """[P] rows beside ``logit_rows`` whose logits may be asked of ``forward``."""
    is_looked_at: bool = False
    """True if other things than answers may let it continue."""
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

    @property
    def step(self) -> int:
        """The step's number; unique among all lanes."""
        return self.batch.spans[0].begin.step

    @property
    def can_advance(self) -> bool:
        """True if the next layer may be computed, or the step is over."""
        if self.logits is None:
            if self.passage is not None:
                return self.passage.can_advance
            return all(part.ready() for part in self.begun.parts)
        if not self.is_drawn:
            return self.fed_by is None
        remote = self.begun.remote  # R-workers may still owe answers
        is_settled = remote is None or remote.settled
        return is_settled and (self.draws is None or self.draws.done)

    @property
    def has_come(self) -> bool:
        """True if what it embeds is on the host, and the engine does not know yet."""
        return self.fed_by is not None and self.fed_by.done

    @property
    def coming(self) -> list[HostCopy]:
        """Copies on their way to the host for it."""
        of_stage = None if self.passage is None else self.passage.copy
        copies = (self.fed_by, of_stage, self.draws)
        return [x for x in copies if x is not None and not x.done]

    def lose(self, holder: HolderId) -> None:
        """Stop expecting answers of a lost holder: its rows mean nothing."""
        if holder not in self.record.r_s:
            return  # it has no rows in the step
        self.record.lost.add(holder)
        self.is_looked_at = True
        if self.begun.remote is not None:
            self.begun.remote.awaited.discard(holder)

    def s_part_s(self, completed_s: float = 0.0) -> float:
        """Return the seconds that this stage's S-part has computed for it, with those of drawing
        its tokens and handing them on (``completed_s``). A GPU works while the thread doesn't."""
        own_s = self.s_compute_s + completed_s - self.record.in_s_part_s
        return max(own_s, self.forward.device_s())

    @property
    def round_trips_s(self) -> float:
        """Trips of all layers so far, by the shortest."""
        return self.record.round_trip_s * (self.forward.layer + 1)


class NextStage(Protocol):
    """What a stage of several does with its steps."""

    def leave(self, step: LaneStep) -> StageForward | None:
        """Take over a step whose own layers are done. None if no layers are left."""

    def take_done(self) -> Seq[StageDone]:
        """Return the reports of later stages about steps. Each is returned once."""

    @property
    def has_orders(self) -> bool:
        """True if it was sent anything that does not belong to a step in flight."""


class Pipeline:
    """Runs lanes' steps side by side. One thread drives it.

    Args:
        onward: Where steps go behind this stage's layers. None if it has all layers.
    """

    def __init__(
        self,
        s_worker: SWorker,
        attention: Attention,
        num_lanes: int,
        trace: Trace | None = None,
        onward: NextStage | None = None,
    ) -> None:
        self._trace, self._onward = trace, onward
        self._s_worker, self._attention = s_worker, attention
        self._fleet = attention.fleet
        self.holders: Final[Seq[Holder]] = attention.holders
        """What they are, by their ids."""
        self.num_lanes = num_lanes
        self.in_flight: Final[dict[int, LaneStep]] = {}
        """The steps in flight by lane, in the order in which they began."""
        self._ready: deque[LaneStep] = deque()
        """Steps that can continue, in the order in which they became able to."""
        self._unsent: deque[tuple[LaneStep, Leaving]] = deque()
        """Layers that are scattered, and not on the host yet, as they were computed."""
        # Some lanes wait for R-workers, and one never does.
        self._is_hybrid = len({holder.kind for holder in attention.holders}) > 1
        self._fed: list[LaneStep] = []  # the host doesn't know yet what they embed
        self._news: list[News] = []
        self._num_awaited = 0
        """Answers that the step of the last one still awaits."""
        self.wait_s = 0.0
        """Time in which the S-worker had nothing to do but wait for R-workers, in all."""

    @property
    def idle(self) -> list[int]:
        """The lanes without a step."""
        return [lane for lane in range(self.num_lanes) if lane not in self.in_flight]

    def resize(self, num_lanes: int) -> None:
        """Continue with this many lanes. No step is in flight."""
        assert not self.in_flight
        self.num_lanes = num_lanes

    def lose(self, holder: HolderId) -> None:
        """Expect no answer of a holder to the steps in flight any more."""
        for step in self.in_flight.values():
            step.lose(holder)

    def launch(
        self,
        lane: int,
        batch: StepBatch,
        logit_rows: NDArray[np.int64],
        planned_s: float = 0.0,
        fed_by: HostCopy | None = None,
    ) -> None:
        """Start an idle lane's step: embed, the first layer's S-step, and off to the
        R-workers; or all layers, where they aren't needed.

        Args:
            planned_s: Seconds that it has taken so far.
            fed_by: The lane's tokens before, if they are still on their way to the host.
        """
        started = time.perf_counter()
        assert lane not in self.in_flight
        record, begun = self._attention.begin(batch, self._s_worker)
        forward = begun.forward or self._s_worker.begin(batch.rows, lane, batch.feed, batch.hidden)
        asked_rows = None if batch.asks is None else batch.asked_rows
        remote = begun.remote
        is_looked_at = len(begun.parts) != 1 or remote is None or remote.may_be_behind
        step = LaneStep(
            lane, batch, logit_rows, record, begun, forward, asked_rows, is_looked_at, fed_by=fed_by
        )
        self.in_flight[lane] = step
        if fed_by is not None:
            self._fed.append(step)
        self._scatter(step)
        now = time.perf_counter()
        step.s_compute_s = planned_s + now - started
        if self._trace is not None:
            self._trace.s_part(lane, step.step, 0, started, now)

    def run(self, draw: Draw | None = None, take_in: TakeIn | None = None) -> LaneStep | None:
        """Run until some lane has finished its step, and return that. Return None if there is news
        (``take_news``) or an order (``NextStage``) before."""
        fleet, ready = self._fleet, self._ready
        while True:
            if self._unsent:
                self._dispatch()
            if self._fed:
                self._take_in_fed(take_in)
            if fleet.gone:
                self._note_losses()
            if self._onward is not None:
                self._note_done(self._onward)
            are_looked_at = False
            for step in self.in_flight.values():
                if step.is_looked_at:
                    are_looked_at = True
                    if step not in ready and step.can_advance:
                        ready.append(step)
            if self._is_hybrid and ready:
                self._take_in_all()
            if self._news or fleet.has_moves:
                return None
            if self._onward is not None and self._onward.has_orders:
                return None
            if not ready:
                has_copies = are_looked_at or self._unsent or self._fed or self._is_hybrid
                self._wait(self._first_to_come if has_copies else fleet.receive)
                if not ready:
                    continue
            step = ready.popleft()
            if step.logits is None:
                self._advance(step)
            if step.logits is not None:
                if step.fed_by is None and not step.is_drawn:
                    step.is_drawn, started = True, time.perf_counter()
                    step.draws = None if draw is None else draw(step)
                    step.s_compute_s += time.perf_counter() - started
                if step.can_advance:
                    del self.in_flight[step.lane]
                    # What isn't sent by now is for lost holders, which may be replaced soon.
                    if self._unsent:
                        self._unsent = deque([x for x in self._unsent if x[0] is not step])
                    return step

    def receive(self, most_s: float = math.inf) -> None:
        """Wait for a message, at most ``most_s`` seconds, and take it in. One is owed."""
        self._wait(partial(self._fleet.receive, most_s=most_s))

    def take_news(self) -> list[News]:
        """Return what has come that belongs to no step, in its order. Each is returned once."""
        if self._fleet.gone:
            self._note_losses()
        news, self._news = self._news, []
        return news

    def _dispatch(self) -> bool:
        """Send what has come to the host, in the order in which it was computed. Return True
        if anything was sent."""
        sent = False
        while self._unsent and self._unsent[0][1].staged.done:
            step, leaving = self._unsent.popleft()
            started = time.perf_counter()
            leaving.part.send(leaving.layer, leaving.staged)
            step.s_compute_s += time.perf_counter() - started
            sent = True
        return sent

    def _take_in_fed(self, take_in: TakeIn | None) -> None:
        for step in self._fed.copy():
            if step.has_come:
                self._fed.remove(step)
                step.fed_by = None
                assert take_in is not None
                take_in(step.lane)

    def _scatter(self, step: LaneStep) -> None:
        """Give a step's parts the next layer, which may have to come to the host first."""
        forward = step.forward
        for part in step.begun.parts:
            leaving = part.scatter(forward.layer, forward.q, forward.k, forward.v, forward.place)
            if leaving is not None:
                self._unsent.append((step, leaving))

    def _advance(self, step: LaneStep) -> None:
        """Run a step's next layer, or its way through other stages, or get its logits."""
        started, layer, o = time.perf_counter(), None, None
        passage, forward = step.passage, step.forward
        for part in step.begun.parts if passage is None else ():
            o = part.take(o)
        if passage is not None:
            step.logits = passage.advance()
        elif o is not None and forward.advance(o):
            layer = forward.layer
            self._scatter(step)
        else:
            step.is_looked_at = True
            step.passage = None if self._onward is None else self._onward.leave(step)
            if step.passage is None:
                step.logits = forward.logits(step.logit_rows)
        now = time.perf_counter()
        step.s_compute_s += now - started
        if self._trace is not None:
            self._trace.s_part(step.lane, step.step, layer, started, now)

    def _note_losses(self) -> None:
        """Tell the steps in flight which holders were lost."""
        self._news += self._fleet.take_losses()
        for holder in self._fleet.lost:
            self.lose(holder)

    def _note_done(self, onward: NextStage) -> None:
        """Tell the steps in flight what later stages have done of them."""
        for done in onward.take_done():
            step = self.in_flight.get(done.lane)
            if step is None or step.passage is None or step.step != done.step:
                raise WorkerError(
                    f"stage {done.stage} reports on step {done.step} in lane {done.lane}, which "
                    "isn't under way: are all stages of the same version?",
                    code="stage_lost",
                )
            step.passage.deliver(done)

    def _wait(self, wait: Callable[[], Arrival | None]) -> None:
        started = time.perf_counter()
        received = wait()
        now = time.perf_counter()
        self.wait_s += now - started
        if self._trace is not None:
            self._trace.waited(started, now)
        # A look that finds nothing takes longer than the turn of the loop that is saved by one
        # that finds something. So look only while the lane of the last answer awaits several.
        fleet = self._fleet
        while received is not None:
            self._take_in(*received, now)
            if self._num_awaited <= 1 or self._ready or self._news or not fleet.is_owed:
                return
            received, now = fleet.receive(most_s=0.0), time.perf_counter()

    def _take_in(self, holder: HolderId, message: Answer, arrived_s: float) -> None:
        """Take in a message. A holder that sends what isn't due is lost."""
        try:
            if message.__class__ is not AttendResult:  # no call, as isinstance is, in every layer
                if not isinstance(message, Accepted | Refused | TakenOver | Welcome):
                    raise ProtocolError(f"{self._fleet.peer(holder)} {unasked(message)}")
                self._news.append((holder, message))
                return
            step = self.in_flight.get(message.lane)
            if step is None or (remote := step.begun.remote) is None:
                text = f"answered for lane {message.lane}, which is idle"
                raise ProtocolError(f"{self._fleet.peer(holder)} {text}")
            is_last = remote.answered(holder, message)
        except ProtocolError as error:
            self._fleet.lose(holder, error)
            return
        record, sent_s = step.record, step.record.sent_s[message.layer]
        round_trip_s = arrived_s - sent_s - message.compute_s
        if round_trip_s < record.round_trip_s:
            record.round_trip_s = max(0.0, round_trip_s)
        if self._trace is not None:
            self._trace.attended(
                holder, step.lane, message.step, message.layer, sent_s, arrived_s, message.compute_s
            )
        step.s_compute_s += time.perf_counter() - arrived_s
        self._num_awaited = len(remote.awaited)
        if is_last and step not in self._ready and (not step.is_looked_at or step.can_advance):
            self._ready.append(step)

    def _take_in_all(self) -> None:
        """Take in what is here: the lane on the device can always run, and R-workers answer."""
        fleet = self._fleet
        while fleet.is_owed and (received := fleet.receive(most_s=0.0)) is not None:
            self._take_in(*received, time.perf_counter())

    def _first_to_come(self) -> Arrival | None:
        """Wait for an answer or for a copy to the host, whichever is first, while no lane can
        run. Return an answer; send what is copied."""
        fleet, unsent = self._fleet, self._unsent[0][1] if self._unsent else None
        # The others await answers alone, and weren't ready when the pipeline looked.
        looked_at = [x for x in self.in_flight.values() if x.is_looked_at or x.fed_by is not None]
        copies = [copy for step in looked_at for copy in step.coming]
        if any(step.can_advance or step.has_come for step in looked_at):
            return None  # by now
        if unsent is None and not copies and not self._is_hybrid:
            return fleet.receive()
        if not fleet.is_owed and not copies and unsent is not None:
            unsent.staged.wait()
            return None
        if not fleet.is_owed and copies and unsent is None and not self._is_hybrid:
            copies[0].wait()
            return None
        found = look_until_found(partial(self._look, copies, fleet.lost.keys()), None)
        return found[0] if found else None

    def _look(self, copies: Seq[HostCopy], lost: Collection[HolderId]) -> list[Arrival] | None:
        """Return an answer, if one is here. None if nothing has happened, and nothing if
        something was sent or drawn, a lane can run, a transfer is reported, or an R-worker
        was lost."""
        fleet = self._fleet
        received = fleet.receive(most_s=0.0) if fleet.is_owed else None
        if received is not None:
            return [received]
        has_come = self._dispatch() or any(copy.done for copy in copies)
        # A lane on the device says so only when it is asked.
        can_advance = self._is_hybrid and any(
            step.can_advance or step.has_come for step in self.in_flight.values()
        )
        has_changed = has_come or can_advance or fleet.has_moves or fleet.lost.keys() != lost
        return [] if has_changed else None

"""What comes from holders: attention to the lane's step that awaits it,
everything else to whoever asks for news."""

from __future__ import annotations

import time
from collections.abc import Collection
from collections.abc import Sequence as Seq
from functools import partial
from typing import TypeAlias

from fastdecode.core.errors import ProtocolError, WorkerError, assert_never
from fastdecode.core.holders import HolderId
from fastdecode.core.trace import NoTrace, Trace
from fastdecode.engine.fleet.groups import HolderPool
from fastdecode.engine.step.lane_step import HostCopy, NextStage
from fastdecode.engine.step.lanes import Lanes
from fastdecode.wire.blocks import (
    ChunkStored,
    ExportDescription,
    ExportExpired,
    FetchedChunk,
    TakenOver,
)
from fastdecode.wire.messages import Accepted, Answer, AttendResult, Refused, Report, Welcome
from fastdecode.wire.waiting import look_until_found

News: TypeAlias = "tuple[HolderId, Accepted | Refused | TakenOver | Welcome | WorkerError]"
"""A holder's answer about parts, or why it was lost."""

Arrival: TypeAlias = "tuple[HolderId, Answer]"


class Arrivals:
    """Takes in what ``fleet`` receives.

    Args:
        lanes: whose steps await answers.
        trace: is told when they came.
        onward: what this stage of several does with its steps.
    """

    def __init__(
        self, fleet: HolderPool, lanes: Lanes, trace: Trace, onward: NextStage | None = None
    ) -> None:
        self._fleet, self._lanes = fleet, lanes
        self._trace = None if isinstance(trace, NoTrace) else trace
        self._onward = onward
        self._news: list[News] = []
        self._num_awaited = 0
        """Other answers that the step of the last one awaits."""

    @property
    def has_news(self) -> bool:
        """Whether something has come that is no part of a step."""
        has_orders = self._onward is not None and self._onward.has_orders
        return bool(self._news) or self._fleet.moves.has_moves or has_orders

    def take_news(self) -> list[News]:
        """What has, in its order. Each is told once."""
        self.note_losses()
        news, self._news = self._news, []
        return news

    def note_losses(self) -> None:
        """Tell the steps in flight who was lost."""
        if not self._fleet.gone:  # asked many times in a step
            return
        self._news += self._fleet.take_losses()
        for holder in self._fleet.lost:
            self._lanes.lose(holder)

    def note_done(self) -> None:
        """Tell the steps in flight what later stages have done of them."""
        for done in () if self._onward is None else self._onward.take_done():
            step = self._lanes.step_of(done.lane)
            if step is None or step.passage is None or step.step != done.step:
                raise WorkerError(
                    f"stage {done.stage} reports on step {done.step} in lane {done.lane}, which "
                    "isn't under way: are all stages of the same version?",
                    code="stage_lost",
                )
            step.passage.deliver(done)

    def take_in_all(self) -> None:
        """What is here by now; never waits."""
        while self._fleet.is_owed and (received := self._fleet.receive(most_s=0.0)) is not None:
            self.take_in(*received, time.perf_counter())

    def take_in_until_ready(self) -> None:
        """What is here by now, but nothing more once an answer has made a lane
        ready or something has come that is no part of a step: that comes first.
        Never waits.

        It looks only while the lane of the last answer awaits several others: a
        look that finds nothing takes longer than the turn of the loop that is
        saved by one that finds something."""
        fleet, ready = self._fleet, self._lanes.ready
        while self._num_awaited > 1 and fleet.is_owed and not ready and not self._news:
            received = fleet.receive(most_s=0.0)
            if received is None:
                return
            self.take_in(*received, time.perf_counter())

    def take_in(self, holder: HolderId, message: Answer, now: float) -> None:
        """One message that came now. Whoever sends what isn't due is lost."""
        try:
            if message.__class__ is AttendResult:  # as nearly all are; no call, as isinstance is
                self._deliver(holder, message, now)
            else:
                self._route(holder, message)
        except ProtocolError as error:
            self._fleet.lose(holder, error)

    def _route(self, holder: HolderId, answer: Answer) -> None:
        match answer:
            case Accepted() | Refused() | TakenOver() | Welcome():
                self._news.append((holder, answer))
            case (
                AttendResult()
                | Report()
                | ChunkStored()
                | FetchedChunk()
                | ExportDescription()
                | ExportExpired()
            ):
                raise ProtocolError(
                    f"{self._fleet.peer(holder)} sent {type(answer).__name__}, which nobody "
                    "asked for"
                )
            case _:
                assert_never(answer)

    def _deliver(self, holder: HolderId, result: AttendResult, arrived_s: float) -> None:
        step = self._lanes.step_of(result.lane)
        if step is None:
            raise ProtocolError(
                f"{self._fleet.peer(holder)} answered for lane {result.lane}, which is idle"
            )
        step.remote.deliver(holder, result)
        sent = step.remote.sent_s[result.layer]
        round_trip_s = max(0.0, arrived_s - sent - result.compute_s)
        step.round_trip_s = min(step.round_trip_s, round_trip_s)
        if self._trace is not None:
            self._trace.attended(
                holder, step.lane, result.step, result.layer, sent, arrived_s, result.compute_s
            )
        step.s_compute_s += time.perf_counter() - arrived_s
        self._num_awaited = step.remote.num_awaited
        if not self._num_awaited:
            self._lanes.note_ready(step)


class LaneWait:
    """For ``fleet``'s answers and for copies of ``lanes``' steps to the host.

    Args:
        is_hybrid: some lanes wait for R-workers, and one never does.
    """

    def __init__(self, fleet: HolderPool, lanes: Lanes, *, is_hybrid: bool) -> None:
        self._fleet, self._lanes, self._is_hybrid = fleet, lanes, is_hybrid

    def first_to_come(self) -> Arrival | None:
        """No lane can go on: wait for an answer or for a copy to the host,
        whichever is first, for the one while the other is here would keep a
        lane from running. An answer is returned, what is copied is sent."""
        fleet, unsent = self._fleet, self._lanes.unsent[0] if self._lanes.unsent else None
        # Others go on by answers alone, and weren't able to when the pipeline looked.
        with_copies = [
            step
            for step in self._lanes.in_flight
            if step.fed_by is not None or step.draws is not None or step.passage is not None
        ]
        copies = [copy for step in with_copies for copy in step.coming] if with_copies else []
        if (with_copies or self._is_hybrid) and self._lanes.any_can_go_on:
            return None  # by now
        if unsent is None and not copies and not self._is_hybrid:
            return fleet.receive()
        if not fleet.is_owed and not copies and unsent is not None:
            unsent.remote.wait_for_copy()
            return None
        if not fleet.is_owed and copies and unsent is None and not self._is_hybrid:
            copies[0].wait()
            return None
        found = look_until_found(partial(self._look, copies, fleet.lost.keys()), None)
        return found[0] if found else None

    def _look(self, copies: Seq[HostCopy], lost: Collection[HolderId]) -> list[Arrival] | None:
        """An answer, if one is here; none: something was sent or drawn, a lane
        can go on, a transfer is reported, or an R-worker was lost; None: nothing has
        happened."""
        fleet = self._fleet
        received = fleet.receive(most_s=0.0) if fleet.is_owed else None
        if received is not None:
            return [received]
        has_come = self._lanes.dispatch() or any(copy.done for copy in copies)
        # A lane on the device says so only when it is asked.
        can_go_on = self._is_hybrid and self._lanes.any_can_go_on
        is_reported = fleet.moves.has_moves
        has_changed = has_come or can_go_on or is_reported or fleet.lost.keys() != lost
        return [] if has_changed else None

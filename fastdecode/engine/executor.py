"""Carries out what the lifecycle of sequences wants: lanes' steps, rooms on
holders, and what requests come to."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, field, replace

from fastdecode.core.errors import ProtocolError, WorkerError
from fastdecode.core.exhaustive import assert_never
from fastdecode.core.holders import HolderId, HolderKind, PartId
from fastdecode.core.resuming import Session
from fastdecode.core.spec import longest_window
from fastdecode.core.trace import NoTrace, Trace
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.engine.instances.kv_exchange import ExportAddresses, FetchingTime, KVExchange
from fastdecode.engine.pending_samples import PendingSamples, StepSamples
from fastdecode.engine.recovery import Recovery
from fastdecode.engine.requests import Requests
from fastdecode.engine.reservations import event_for, holder_of, message_for, move_event
from fastdecode.engine.session.recorder import Recorder
from fastdecode.engine.stats import EngineStats
from fastdecode.engine.step.lane_step import LaneStep
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.pipeline import Pipeline
from fastdecode.schedule.lanes import LaneChoice
from fastdecode.schedule.life import events
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.plan import Chunk, DropCopies, Forget, Keep, Offload, Restore
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.wire.kv.exporting import Pulled
from fastdecode.wire.kv.taking_over import SESSION_RESUMED, TakenOver
from sworker.worker import SWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Watch:
    """Who is told what the engine does."""

    trace: Trace = field(default_factory=NoTrace)
    """What every step did."""
    times: MeasuredTimes | None = None
    """How long the parts of every step took."""
    lanes: LaneChoice | None = None
    """Decides on the number of lanes; None: it stays what it is."""
    session: Session | None = None
    """Which tokens sequences have, and where they are."""
    exports: ExportAddresses = field(default_factory=ExportAddresses)
    """How other instances' R-workers reach this one's."""


class Executor:
    """Tells the lifecycle what happens, and does what it wants.

    Args:
        s_worker, pipeline, fleet, lifecycle, recovery, watch: see ``Engine``.
        requests: what isn't finished.
        stats: kept up to date.
    """

    def __init__(
        self,
        s_worker: SWorker,
        pipeline: Pipeline,
        fleet: Fleet,
        lifecycle: Lifecycle,
        recovery: Recovery,
        watch: Watch,
        requests: Requests,
        stats: EngineStats,
    ) -> None:
        self._s_worker = s_worker
        self._pipeline = pipeline
        self._fleet = fleet
        self._lifecycle = lifecycle
        self._recovery = recovery
        self._watch = watch
        self._requests = requests
        self._stats = stats
        self._window = longest_window(s_worker.spec.attention)
        self._answer_at_once = all(holder.answers_at_once for holder in pipeline.holders)
        kinds = [holder.kind for holder in pipeline.holders]
        # The device, if R-workers are there too: it is none of them.
        self._beside = {
            HolderId(i)
            for i, kind in enumerate(kinds)
            if kind is HolderKind.DEVICE and HolderKind.R_WORKER in kinds
        }
        self._num_launched = 0
        self._pending_samples = PendingSamples(
            s_worker, lifecycle.lives, requests, stats, watch.trace
        )
        self._recorder = Recorder(watch.session, lifecycle.lives)
        self.handing = KVExchange(fleet, requests, lifecycle.handing, watch.exports)
        """What is done for other instances, and by them."""
        self._fetching = FetchingTime()
        # By lane: of steps that are over, on their way to the host.
        self._coming: dict[int, StepSamples] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight, tokens are on their way to the host, or
        an answer about a room is owed."""
        lifecycle = self._lifecycle
        owed = lifecycle.grants or lifecycle.adoptions or lifecycle.is_moving
        return bool(self._pipeline.in_flight or self._coming or owed)

    def step(self) -> None:
        """Run until some lane has finished a step, or until there is nothing to
        run.

        Raises:
            WorkerError: no holder is left.
        """
        started = began = time.perf_counter()
        before_s = began_wait_s = self._pipeline.wait_s
        r_compute_s = self._stats.r_compute_s
        num_steps, num_prompt_tokens = self._stats.num_steps, self._stats.num_prompt_tokens
        is_prefill = _runs_prompt(self._pipeline)
        if self._watch.lanes is not None:
            self.regroup(self._watch.lanes.decide())
        while self._stats.num_steps == num_steps:
            self._launch_idle()
            if not self.is_busy:
                self.handing.is_idle = True
                return
            is_prefill = _runs_prompt(self._pipeline)
            runs = bool(self._pipeline.in_flight)
            self.run_on()
            if not runs:  # what was waited for before a step is none of its time
                began, began_wait_s = time.perf_counter(), self._pipeline.wait_s
        ended, wait_s = time.perf_counter(), self._pipeline.wait_s
        self._stats.count_time(ended - started, wait_s - before_s, is_prefill=is_prefill)
        idle_s = max(0.0, wait_s - began_wait_s - (self._stats.r_compute_s - r_compute_s))
        self._lifecycle.stepped(
            self._stats.num_prompt_tokens - num_prompt_tokens, ended - began, idle_s
        )

    def _launch_idle(self) -> None:
        """Take in what has happened, and start the idle lanes' steps."""
        if not self.is_busy:
            self.handing.listen()
        self._take_news()
        if not self._recovery.is_stranded():
            for lane in self._pipeline.idle_lanes:
                self._launch(lane)
        for lane in set(self._coming).intersection(self._pipeline.idle_lanes):
            self._take_in(lane)  # nobody steps with them

    def look(self) -> None:
        """Take in who was lost, and who has come, while there is nothing to
        run.

        Raises:
            WorkerError: no holder is left.
        """
        self._fleet.look()
        self._take_news()
        self._recovery.is_stranded()

    def run_on(self) -> None:
        """Run until some lane has finished its step, or there is news."""
        if not self._pipeline.in_flight and self._coming:
            self._take_in_all()
            return
        finished = self._pipeline.run(self._pending_samples.draw, self._take_in)
        if finished is None:
            self._take_news()
        else:
            self._finish_step(finished)

    def regroup(self, num_lanes: int) -> None:
        """Go on with so many lanes, when the steps in flight have ended."""
        if num_lanes == self._pipeline.num_lanes:
            return
        while self._pipeline.in_flight:
            self.run_on()
        self._take_in_all()
        logger.info("%d lanes from now on, in place of %d", num_lanes, self._pipeline.num_lanes)
        self.tell(events.Regrouped(num_lanes))
        self._pipeline.set_num_lanes(num_lanes)
        if self._watch.lanes is not None:
            self._watch.lanes.regrouped(num_lanes)

    def _take_news(self) -> None:
        """Tell the lifecycle who has answered, who was lost, and who has come in
        whose place.

        Raises:
            WorkerError: another S-worker goes on with this session.
        """
        for holder, news in self._pipeline.take_news():
            if isinstance(news, WorkerError):
                if news.code == SESSION_RESUMED:
                    raise copy(news)
                self.tell(self._recovery.lose(holder, news, self._lifecycle))
            elif isinstance(news, TakenOver):
                if (taken := self._recovery.taken_over(holder, news)) is not None:
                    self._stats.num_rejoined += taken.is_home
                    self.tell(taken)
            elif not self._lifecycle.grants.awaits(holder, PartId(news.sequence_id)):
                answer = (
                    f"{self._fleet.peer(holder)} sent {type(news).__name__}, which nobody asked for"
                )
                self._fleet.lose(holder, ProtocolError(answer))
            else:
                self.tell(event_for(news, self._fleet.peer(holder)))
        for moved in self._fleet.moves.take_tiers():
            if isinstance(moved, Pulled):
                self._stats.fetched_bytes += moved.num_bytes
                self._stats.fetch_s += moved.seconds
                ended_s = time.perf_counter()
                self._stats.fetching_s += self._fetching.add(ended_s, moved.seconds)
            self.tell(move_event(moved))
        replicas = self._recovery.replicas
        if replicas is not None:
            replicas.take_news(self._num_launched - 1)
        for emptied in self._recovery.emptied(self._lifecycle):
            self.tell(emptied)
        for joined in self._recovery.joined(self._lifecycle):
            self._stats.num_rejoined += isinstance(joined, events.Joined)
            self.tell(joined)
        if replicas is not None:
            replicas.mend()

    def tell(self, event: events.Event) -> None:
        """Tell the lifecycle what has happened, and do what it wants.

        Raises:
            CapacityError: a submitted request could never fit.
        """
        self.handing.is_idle = False
        for instruction in self._lifecycle.handle(event):
            match instruction:
                case (
                    events.Open()
                    | events.Fork()
                    | events.Resume()
                    | events.Extend()
                    | events.Truncate()
                    | events.Close()
                    | Keep()
                    | Forget()
                    | Offload()
                    | Restore()
                    | DropCopies()
                ):
                    self._fleet.send(holder_of(instruction), message_for(instruction))
                    if isinstance(instruction, (events.Open, events.Fork, events.Resume)):
                        self._recorder.opened(instruction.part.part_id)
                case events.Finish():
                    self._requests.finish(instruction.sequence, instruction.reason, self._stats)
                case events.Fail():
                    logger.warning(
                        "request %s failed: %s", instruction.request_id, instruction.error
                    )
                    self._requests.forget(instruction.request_id).fail(instruction.error)
                case events.Pull():
                    self.handing.pull(instruction)
                case events.HandOver():
                    self.handing.offer(instruction)
                case events.HasFetched():
                    self.handing.fetched(instruction)
                case events.TakeOver():
                    if (lost := self._recovery.take_over(instruction)) is not None:
                        self.tell(lost)
                case events.Run():
                    raise AssertionError("a lane runs when it is launched")
                case _:
                    assert_never(instruction)
        self._stats.num_recomputed = self._lifecycle.endings.num_recomputed
        self._stats.num_suspended = self._lifecycle.num_suspended
        self._stats.num_cached_prompt_tokens = self._lifecycle.starting.num_reused_tokens
        self._stats.num_gap_tokens = self._lifecycle.starting.num_gap_tokens

    def _launch(self, lane: int) -> None:
        """Plan and start a lane's step, as far as anybody has room."""
        started, waited = time.perf_counter(), self._pipeline.wait_s
        self.tell(events.LaneIdle(lane))
        while self._answer_at_once and self._lifecycle.grants:
            self._take_news()  # whoever was lost just now answers nothing
            if self._lifecycle.grants:
                self._pipeline.receive()
                self._take_news()
        while self._fleet.is_owed_at_once:  # a room on the device
            self._pipeline.receive()
            self._take_news()
        for run in self._lifecycle.handle(events.LaneReady(lane)):
            assert isinstance(run, events.Run)
            step, holders = self._num_launched, self._pipeline.holders
            batch = StepBatch.build(run.chunks, holders, step=step, lane=lane, window=self._window)
            self._num_launched += 1
            fed_by = None
            if lane in self._coming:
                tokens = self._coming[lane]
                batch, fed_by = replace(batch, feed=tokens.feed(batch)), tokens.drawing
                self._stats.num_ahead += 1
            planned_s = time.perf_counter() - started - (self._pipeline.wait_s - waited)
            self._pipeline.launch(lane, batch, batch.last_rows[batch.draws], planned_s, fed_by)

    def _finish_step(self, step: LaneStep) -> None:
        """A lane's step is over: draw the next tokens, and tell the lifecycle."""
        ran_s = time.perf_counter()
        each_s = {
            holder: seconds
            for holder, seconds in step.remote.r_compute_s.items()
            if holder not in self._beside
        }
        self._stats.count_step(max(each_s.values(), default=0.0), each_s)
        wanted = self._lifecycle.lives.wanted(step.batch.chunks)
        self._recorder.stepped(wanted)
        # Before what the step has ended is freed: the holders have held it all through the step.
        self._count_load(wanted)
        tokens, step.draws = step.draws, None  # or the two would keep each other, and the model
        if isinstance(tokens, StepSamples) and tokens.goes_ahead:
            self._coming[step.lane] = tokens
            coming = self._lifecycle.lives.wanted(tokens.chunks)
            sequences = tuple([chunk.sequence for chunk in coming])
            self.tell(events.StepDone(step.lane, (), sequences))
            return
        drawn = self._pending_samples.accept(tokens) if isinstance(tokens, StepSamples) else ()
        self.tell(events.StepDone(step.lane, drawn))
        self._told(step, drawn, ran_s)

    def _take_in(self, lane: int) -> None:
        """Take in the tokens of a lane's step that is over; wait for them, if
        they aren't here."""
        tokens, began_s = self._coming.pop(lane), time.perf_counter()
        drawn = self._pending_samples.accept(tokens)
        self.tell(events.Came(drawn))
        self._told(tokens.step, drawn, began_s)

    def _take_in_all(self) -> None:
        for lane in list(self._coming):
            self._take_in(lane)

    def _told(self, step: LaneStep, drawn: tuple[events.Drawn, ...], began_s: float) -> None:
        """The lifecycle knows what came of a step. ``began_s``: when taking it in began."""
        self._recorder.drew(drawn)
        self._requests.tell(drawn)
        if self._watch.times is not None:
            step.tell(self._watch.times, self._watch.lanes, time.perf_counter() - began_s)

    def _count_load(self, wanted: Seq[Chunk]) -> None:
        load = self._lifecycle.lives.num_cached_tokens + sum([chunk.num_tokens for chunk in wanted])
        self._stats.count_load(load, sum([chunk.num_in_prompt for chunk in wanted]))
        scheduler = self._lifecycle.scheduler
        now = time.perf_counter()
        self._watch.trace.load(now, scheduler.num_running, len(scheduler.waiting), load)


def _runs_prompt(pipeline: Pipeline) -> bool:
    """Whether part of a prompt runs in any step in flight."""
    return any(step.batch.num_prompt_tokens for step in pipeline.in_flight)

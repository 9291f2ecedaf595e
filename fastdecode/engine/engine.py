"""The engine: requests in, one step of a lane at a time, tokens out to each request's listener.

A request's life: ``submit`` → waiting → room opened on its holders (``Open``) → its prompt run in
one or more chunks → one token drawn a step → finished, its blocks freed (``Close``).

One turn of the loop: take events (from R-workers and extensions) → apply them to the state of
sequences (``fastdecode.schedule.life.lifecycle``) → carry out its instructions (send them, or
have the extension do that handles them) → launch idle lanes → run the pipeline until a lane's
step is over. The loop names no feature (``fastdecode.engine.extensions``), and doesn't know how a
step is scheduled, what a layer computes, or where an R-worker runs.

When an R-worker is lost, its sequences start again elsewhere, and what was cached is recomputed
from their tokens, prompt and generated alike. Since a token depends on the sequence alone, the
text does not change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import replace
from typing import Any, Final

from fastdecode.core.config.instances import InstanceRole
from fastdecode.core.delta import Listener
from fastdecode.core.errors import (
    FastDecodeError,
    ProtocolError,
    WorkerError,
    duplicate_id,
    without_frames,
)
from fastdecode.core.holders import HolderId, HolderKind, PartId
from fastdecode.core.sequence import Request
from fastdecode.core.spec import longest_window
from fastdecode.core.trace import Trace
from fastdecode.engine.extensions import EngineState, Extension, Recovery
from fastdecode.engine.requests import Requests, Samples, StepSamples
from fastdecode.engine.stats import EngineFigures, EngineStats, figures_of
from fastdecode.engine.step.batch import StepBatch
from fastdecode.engine.step.pipeline import LaneStep, Pipeline
from fastdecode.engine.step.remote import HostCopy
from fastdecode.schedule.life import events
from fastdecode.schedule.plan import Send
from fastdecode.wire.blocks import SESSION_RESUMED, Open, Refused
from fastdecode.wire.traits import unasked
from sworker.failures import raise_typed
from sworker.worker import SWorker

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests to their end. Not thread-safe: one thread submits and steps.

    Args:
        recovery: Decides what follows the loss of an R-worker. If None, its sequences are
            recomputed, and nothing replaces it.
    """

    def __init__(
        self,
        s_worker: SWorker,
        pipeline: Pipeline,
        state: EngineState,
        recovery: Recovery | None = None,
        extensions: Seq[Extension] = (),
        trace: Trace | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._state = state
        self._fleet = state.fleet
        self._lifecycle = state.lifecycle
        self.requests: Final[Requests] = state.requests
        self.stats: Final[EngineStats] = state.stats
        self._trace = trace
        self._recovery = recovery or Recovery(state)
        self._extensions = tuple(extensions)
        self._reporting = (*extensions, self._recovery)  # the latter has no part in steps
        self._doers = {kind: each for each in self._reporting for kind in each.instructions}
        self._takers = {kind: each for each in self._reporting for kind in each.answers}
        self._samples = Samples(s_worker, state, trace)
        self._window = longest_window(s_worker.spec.attention)
        self._answer_at_once = all(holder.answers_at_once for holder in pipeline.holders)
        r_workers = {h for h, x in enumerate(pipeline.holders) if x.kind is HolderKind.R_WORKER}
        self._timed = r_workers or set(range(len(pipeline.holders)))
        """Holders whose compute counts as R-workers': all but a device beside R-workers."""
        self._is_idle = False  # nothing could be started, and nothing has happened since
        # Tokens of steps that are over, on their way to the host, by lane.
        self._coming: dict[int, StepSamples] = {}
        self.broken: FastDecodeError | None = None
        """Why a step broke down. After that the engine takes no requests."""

    @property
    def num_unfinished_sequences(self) -> int:
        """Sequences that are waiting or running. A request has n."""
        return self.requests.num_sequences

    @property
    def num_running(self) -> int:
        """Sequences that are running, or about to."""
        return self._lifecycle.scheduler.num_running

    @property
    def has_work(self) -> bool:
        """True if a step would do anything: for requests, cancelled ones, or an extension."""
        have_work = (extension.has_work for extension in self._reporting)
        return bool(self.requests) or self._has_pending or any(have_work)

    @property
    def pause_s(self) -> float:
        """How long a step would do nothing, whatever work there is: all R-workers are lost and
        replacements may come, or an extension waits for other engines."""
        if self._recovery.pause_s or not self._is_idle:
            return self._recovery.pause_s
        pauses_s = [extension.idle_pause_s for extension in self._reporting]
        return min([pause_s for pause_s in pauses_s if pause_s], default=0.0)

    def figures(self) -> EngineFigures:
        return figures_of(self.stats, self._lifecycle.scheduler, self._fleet)

    def give_role(self, role: InstanceRole) -> None:
        """Prepare for what an instance with this role is given."""
        self._lifecycle.scheduler.set_whole_prompts(role is InstanceRole.PREFILL)

    def submit(self, request: Request, listener: Listener | None = None) -> None:
        """Queue a valid request. ``listener`` gets its tokens, and its error if a step ends it
        with one.

        Raises:
            RequestError: If an unfinished request has the same id, or its text can't be made.
            CapacityError: If the request could never fit on any R-worker. Nothing is queued.
            FastDecodeError: If the engine broke down before, with this error.
        """
        if self.broken is not None:
            raise copy(self.broken)
        if request.request_id in self.requests:
            raise duplicate_id(request.request_id)
        self._apply(events.Submitted(request))
        sequences = self._lifecycle.sequences.of_request(request.request_id)
        try:
            self.requests.add(request, sequences, time.perf_counter(), listener)
        except FastDecodeError:
            self._apply(events.Cancelled(request.request_id))
            raise

    def end_conversation(self, token_ids: Seq[int], salt: str) -> None:
        """Release what is kept for a conversation that has ended with these tokens."""
        self._apply(events.Ended(tuple(token_ids), salt))

    def cancel(self, request_id: str) -> bool:
        """Forget an unfinished request. Return False if none has this id. Its memory is free when
        the step in flight is over, or earlier."""
        if request_id not in self.requests:
            return False
        self.requests.forget(request_id)
        self._apply(events.Cancelled(request_id))
        return True

    def cancel_waiting(self, among: Container[str] | None = None) -> list[str]:
        """Forget requests of which nothing has run yet, among these or all. Return their ids."""
        untouched = self._lifecycle.sequences.untouched_requests()
        waiting = [request_id for request_id in untouched if among is None or request_id in among]
        for request_id in waiting:
            self.cancel(request_id)
        return waiting

    def abandon(self, error: FastDecodeError) -> None:
        """End every unfinished request with this error, after a step broke down. The engine then
        takes no requests, since what its R-workers hold is unknown."""
        self.broken = without_frames(error)
        self.requests.fail_all(error)

    def look(self) -> None:
        """Find out which R-workers are lost or replaced, while there is no work: steps do so
        otherwise.

        Raises:
            WorkerError: If no R-worker is left.
        """
        self._fleet.look()
        self._take_news()
        self._recovery.is_stranded()

    def set_num_lanes(self, num_lanes: int) -> None:
        """Change the number of lanes, once the steps in flight have ended."""
        if num_lanes == self._pipeline.num_lanes:
            return
        while self._pipeline.in_flight:
            self._run_on()
        self._take_in_all()
        logger.info("running %d lanes instead of %d", num_lanes, self._pipeline.num_lanes)
        self._apply(events.Regrouped(num_lanes))
        self._pipeline.resize(num_lanes)
        for extension in self._extensions:
            extension.regrouped(num_lanes)

    def step(self) -> None:
        """Run until some lane has finished a step, or until there is nothing to run (see
        ``pause_s``).

        Raises:
            WorkerError: If no R-worker is left, or the S-worker failed: call ``abandon``.
        """
        try:
            stats, pipeline = self.stats, self._pipeline
            started = began = time.perf_counter()
            before_s = began_wait_s = pipeline.wait_s
            r_compute_s = stats.r_compute_s
            num_steps, num_prompt_tokens = stats.num_steps, stats.num_prompt_tokens
            is_prefill, num_lanes = False, pipeline.num_lanes
            for extension in self._extensions:
                num_lanes = extension.num_lanes(num_lanes)
            if num_lanes != pipeline.num_lanes:
                self.set_num_lanes(num_lanes)
            while stats.num_steps == num_steps:
                if not self._has_pending:
                    for extension in self._extensions:
                        extension.listen()
                self._take_news()
                if not (self._recovery.is_watching and self._recovery.is_stranded()):
                    for lane in pipeline.idle:
                        self._launch(lane)
                if self._coming:
                    for lane in self._coming.keys() & pipeline.idle:
                        self._take_in(lane)  # no step of that lane follows
                if not self._has_pending:
                    self._is_idle = True
                    return
                steps = pipeline.in_flight.values()
                is_prefill, runs = any(x.batch.num_prompt_tokens for x in steps), bool(steps)
                self._run_on()
                if not runs:  # waits before a step are not part of its time
                    began, began_wait_s = time.perf_counter(), pipeline.wait_s
            ended, wait_s = time.perf_counter(), pipeline.wait_s
            stats.wait_s += wait_s - before_s
            if is_prefill:
                stats.prefill_s += ended - started
            else:
                stats.decode_s += ended - started
            if self._lifecycle.keeps_blocks:
                idle_s = max(0.0, wait_s - began_wait_s - (stats.r_compute_s - r_compute_s))
                num_run = stats.num_prompt_tokens - num_prompt_tokens
                self._lifecycle.stepped(num_run, ended - began, idle_s)
        except Exception as error:
            raise_typed(error)

    @property
    def _has_pending(self) -> bool:
        """True if a step is in flight, tokens are coming to the host, or a room is asked for."""
        return bool(self._pipeline.in_flight or self._coming or self._lifecycle.is_owed)

    def _run_on(self) -> None:
        """Run until some lane has finished its step, or news has arrived."""
        if not self._pipeline.in_flight and self._coming:
            self._take_in_all()
            return
        finished = self._pipeline.run(self._samples.draw, self._take_in)
        if finished is None:
            self._take_news()
        else:
            self._finish_step(finished)

    def _take_news(self) -> None:
        """Apply what R-workers have answered, which of them were lost, and events of extensions.

        Raises:
            WorkerError: If another S-worker has resumed this session.
        """
        for holder, news in self._pipeline.take_news():
            self._take(holder, news)
        for extension in self._extensions:
            self._apply_all(extension.news())
        if self._recovery.is_watching:
            self._apply_all(self._recovery.news())

    def _take(self, holder: HolderId, news: Any) -> None:
        peer = self._fleet.peer(holder)
        if isinstance(news, WorkerError):
            if news.code == SESSION_RESUMED:
                raise copy(news)
            self._apply(self._recovery.lose(holder))
        elif (taker := self._takers.get(type(news))) is not None:
            self._apply_all(taker.take(holder, news))
        elif self._lifecycle.grants.awaits(holder, part_id := PartId(news.sequence_id)):
            if isinstance(news, Refused):
                self._apply(events.Refused(part_id, peer, news.code, news.message))
            else:
                self._apply(events.Opened(part_id))
        else:
            self._fleet.lose(holder, ProtocolError(f"{peer} {unasked(news)}"))

    def _apply_all(self, happened: Iterable[events.Event]) -> None:
        for event in happened:
            self._apply(event)

    def _apply(self, event: events.Event) -> None:
        """Apply an event to the state of sequences, and carry out what follows.

        Raises:
            CapacityError: If a submitted request could never fit.
        """
        self._is_idle = False
        for instruction in self._lifecycle.handle(event):
            self._carry_out(instruction)

    def _carry_out(self, instruction: Any) -> None:
        """Send it to its holder, hand it to its request, or to the extension that handles it."""
        kind = type(instruction)
        if kind is events.Ask or kind is Send:
            self._fleet.send(instruction.holder, instruction.message)
            if type(instruction.message) is Open:
                for extension in self._extensions:
                    extension.opened(instruction.part)
        elif kind is events.Finish:
            for extension in self._extensions:
                extension.finishing(instruction)
            self.requests.finish(instruction.sequence, instruction.reason, self.stats)
        elif kind is events.Fail:
            request_id, error = instruction.request_id, instruction.error
            logger.warning("request %s failed: %s", request_id, error)
            self.requests.forget(request_id).fail(error)
        else:
            self._apply_all(self._doers[kind].do(instruction))

    def _launch(self, lane: int) -> None:
        """Plan and start a lane's step, as far as holders have room."""
        started, waited = time.perf_counter(), self._pipeline.wait_s
        self._apply(events.LaneIdle(lane))
        if self._lifecycle.grants.asked:
            self._await_rooms()
        for run in self._lifecycle.handle(events.LaneReady(lane)):
            assert isinstance(run, events.Run)
            step, holders = self._state.num_launched, self._pipeline.holders
            batch = StepBatch.build(run.chunks, holders, step=step, lane=lane, window=self._window)
            self._state.num_launched += 1
            if self.requests.prompt_questions.open:
                batch = replace(batch, asks=self.requests.prompt_questions.asks(batch))
            fed_by: HostCopy | None = None
            if (tokens := self._coming.get(lane)) is not None and tokens.drawing is not None:
                batch, fed_by = replace(batch, feed=tokens.feed(batch)), tokens.drawing.fetched
                self.stats.num_ahead += 1
            planned_s = time.perf_counter() - started - (self._pipeline.wait_s - waited)
            self._pipeline.launch(lane, batch, batch.last_rows[batch.draws], planned_s, fed_by)

    def _await_rooms(self) -> None:
        """Take in the answers of holders that answer at once."""
        while self._answer_at_once and self._lifecycle.grants.asked:
            self._take_news()  # one that was lost just now answers nothing
            if self._lifecycle.grants.asked:
                self._pipeline.receive()
                self._take_news()
        while self._fleet.is_owed_at_once:
            self._pipeline.receive()
            self._take_news()

    def _finish_step(self, step: LaneStep) -> None:
        """Apply the tokens of a lane's step that is over, or let its next step begin first."""
        ran_s, stats, lives = time.perf_counter(), self.stats, self._lifecycle.sequences
        each_s = {x: s for x, s in step.record.r_compute_s.items() if x in self._timed}
        stats.num_steps += 1
        stats.r_compute_s += max(each_s.values(), default=0.0)
        for holder, busy_s in each_s.items():
            stats.r_busy_s += busy_s
            stats.r_busy_each_s[holder] += busy_s
        wanted = lives.wanted(step.batch.chunks)
        for extension in self._extensions:
            extension.ran(wanted)
        # Before what the step has ended is freed: the holders have held it all through the step.
        load = lives.num_cached_tokens
        for chunk in wanted:
            load += chunk.num_tokens
            if chunk.sequence.num_cached < len(chunk.sequence.request.prompt_token_ids):
                stats.num_prompt_tokens += chunk.num_in_prompt
        stats.load_sum += load
        stats.load_peak = max(stats.load_peak, load)
        if self._trace is not None:
            scheduler = self._lifecycle.scheduler
            self._trace.load(ran_s, scheduler.num_running, len(scheduler.waiting), load)
        tokens, step.draws = step.draws, None  # else a cycle would keep the model alive
        if isinstance(tokens, StepSamples) and tokens.goes_ahead:
            self._coming[step.lane] = tokens
            sequences = tuple([chunk.sequence for chunk in lives.wanted(tokens.chunks)])
            self._apply(events.StepDone(step.lane, (), sequences))
            return
        drawn = self._samples.accept(tokens) if isinstance(tokens, StepSamples) else ()
        self._apply(events.StepDone(step.lane, drawn))
        self._hand_out(step, drawn, ran_s)

    def _take_in(self, lane: int) -> None:
        """Take in the tokens of a lane's step that is over. Wait until they are on the host."""
        tokens, began_s = self._coming.pop(lane), time.perf_counter()
        drawn = self._samples.accept(tokens)
        self._apply(events.Came(drawn))
        self._hand_out(tokens.step, drawn, began_s)

    def _take_in_all(self) -> None:
        for lane in list(self._coming):
            self._take_in(lane)

    def _hand_out(self, step: LaneStep, drawn: tuple[events.Drawn, ...], began_s: float) -> None:
        """Hand a step's tokens, which have been applied, to requests' listeners. ``began_s``: When
        taking them in began."""
        for extension in self._extensions:
            extension.drew(drawn)
        self.requests.tell(drawn)
        for extension in self._extensions:
            extension.completed(step, time.perf_counter() - began_s)

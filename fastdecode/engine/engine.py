"""The engine: carries out what the lifecycle of its sequences wants, one step
of a lane at a time.

A request's life: ``submit`` → waiting → room opened on its holders
(``OpenSequence`` or ``ForkSequence``) → its prompt run in one or more chunks →
one token drawn a step → finished, its blocks freed (``CloseSequence``), its
output returned by ``step``. What comes next is decided by
``fastdecode.schedule.life.lifecycle``, which is told what happens; nothing here
knows how a step is scheduled, what a layer computes, or where an R-worker runs.

When an R-worker is lost, its sequences start again elsewhere, and what was
cached is recomputed from their tokens, prompt and generated alike. Since a
token depends on the sequence alone, the text goes on as if nothing had
happened.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass, field

from fastdecode.core.errors import (
    FastDecodeError,
    ProtocolError,
    RequestError,
    WorkerError,
    without_frames,
)
from fastdecode.core.holders import PartId
from fastdecode.core.sequence import Request, RequestOutput
from fastdecode.core.spec import longest_window
from fastdecode.core.trace import NoTrace, Trace
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.engine.recovery import Recovery
from fastdecode.engine.requests import Listener, Requests
from fastdecode.engine.reservations import event_for, message_for
from fastdecode.engine.stats import EngineStats
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.pipeline import LaneStep, Pipeline
from fastdecode.schedule.lanes import LaneControl
from fastdecode.schedule.life import events
from fastdecode.schedule.life.lifecycle import Lifecycle
from fastdecode.schedule.plan import Chunk
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.text.codec import TextCodec
from sworker.worker import SWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Watch:
    """Who is told what the engine does."""

    trace: Trace = field(default_factory=NoTrace)
    """What every step did."""
    times: MeasuredTimes | None = None
    """How long the parts of every step took."""
    lanes: LaneControl | None = None
    """Decides on the number of lanes; None: it stays what it is."""


class Engine:
    """Runs requests to their end. Not thread-safe: one thread submits and
    steps.

    Args:
        s_worker: every layer that has weights.
        pipeline: runs the lanes' steps.
        fleet: the holders.
        lifecycle: decides what is opened, what steps, and what becomes of whom.
        codec: between text and token ids.
        eos_token_ids: any of them ends a sequence, unless the request ignores
            EOS.
        recovery: lets in those that come in the place of lost holders; None:
            nobody comes.
        watch: who is told.
    """

    def __init__(
        self,
        s_worker: SWorker,
        pipeline: Pipeline,
        fleet: Fleet,
        lifecycle: Lifecycle,
        codec: TextCodec,
        eos_token_ids: tuple[int, ...],
        recovery: Recovery | None = None,
        watch: Watch | None = None,
    ) -> None:
        spec = s_worker.spec
        self._s_worker = s_worker
        self._pipeline = pipeline
        self._fleet = fleet
        self._lifecycle = lifecycle
        self._requests = Requests(codec, eos_token_ids, spec.vocab_size)
        self._recovery = recovery or Recovery(fleet)
        self._watch = watch or Watch()
        self._window = longest_window(spec.attention)
        self._answer_at_once = all(holder.answers_at_once for holder in pipeline.holders)
        self._num_launched = 0
        self.broken: FastDecodeError | None = None
        """Why a step broke down, after which it takes no requests any more."""
        self.stats = EngineStats()

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting or running."""
        return len(self._requests)

    @property
    def num_unfinished_sequences(self) -> int:
        """Sequences that are waiting or running: a request's n."""
        return self._requests.num_sequences

    @property
    def num_running(self) -> int:
        """Sequences that are running, or about to."""
        return self._lifecycle.scheduler.num_running

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: for requests, or for what is left of cancelled ones."""
        return bool(self._requests or self._pipeline.in_flight or self._lifecycle.grants)

    def submit(
        self, request: Request, prompt: str | None = None, listener: Listener | None = None
    ) -> None:
        """Queue a valid request. ``prompt`` is its text, if it came as text, to
        be given back with the output; ``listener`` is told what it says, and
        its error if a step ends it with one.

        Raises:
            RequestError: an unfinished request has the same id, or its text
                can't be made.
            CapacityError: the request could never fit on any R-worker; nothing
                was queued.
            FastDecodeError: the engine broke down before, with this error.
        """
        if self.broken is not None:
            raise copy(self.broken)
        if request.request_id in self._requests:
            raise RequestError(
                f"request id {request.request_id!r} is that of one unfinished: give each its own",
                code="duplicate_id",
            )
        self._carry_out(events.Submitted(request))
        sequences = self._lifecycle.lives.sequences(request.request_id)
        try:
            self._requests.add(request, prompt, sequences, time.perf_counter(), listener)
        except FastDecodeError:
            self._carry_out(events.Cancelled(request.request_id))
            raise

    def step(self) -> list[RequestOutput]:
        """Run until some lane has finished a step. Returns the requests that
        are over.

        Raises:
            WorkerError: no R-worker is left. ``abandon`` is all that can be
                done then.
        """
        started = time.perf_counter()
        wait_s = self._pipeline.wait_s
        num_steps = self.stats.num_steps
        outputs: list[RequestOutput] = []
        is_prefill = False
        if self._watch.lanes is not None:
            outputs += self.set_num_lanes(self._watch.lanes.decide())
        while self.stats.num_steps == num_steps:
            outputs += self._take_news()
            if not self._recovery.is_stranded:
                for lane in self._pipeline.idle_lanes:
                    outputs += self._launch(lane)
            in_flight = self._pipeline.in_flight
            if not in_flight and not self._lifecycle.grants:
                return outputs
            is_prefill = any(step.batch.num_prompt_tokens for step in in_flight)
            outputs += self._run_on()
        self.stats.count_time(
            time.perf_counter() - started, self._pipeline.wait_s - wait_s, is_prefill=is_prefill
        )
        return outputs

    def set_num_lanes(self, num_lanes: int) -> list[RequestOutput]:
        """Go on with so many lanes, when the steps in flight have ended.
        Returns the requests that are over by then."""
        outputs: list[RequestOutput] = []
        if num_lanes != self._pipeline.num_lanes:
            while self._pipeline.in_flight:
                outputs += self._run_on()
            logger.info("%d lanes from now on, in place of %d", num_lanes, self._pipeline.num_lanes)
            outputs += self._carry_out(events.Regrouped(num_lanes))
            self._pipeline.set_num_lanes(num_lanes)
            self._s_worker.set_num_lanes(num_lanes)
            if self._watch.lanes is not None:
                self._watch.lanes.regrouped(num_lanes)
        return outputs

    def cancel(self, request_id: str) -> bool:
        """Forget an unfinished request; False if there is none of this id. What
        it holds is free as soon as the step in flight is over, at the
        latest."""
        if request_id not in self._requests:
            return False
        self._requests.forget(request_id)
        self._carry_out(events.Cancelled(request_id))
        return True

    def cancel_waiting(self, among: Container[str] | None = None) -> list[str]:
        """Forget the requests, ``among`` these or all, of which nothing has run
        yet. Returns their ids."""
        untouched = self._lifecycle.lives.untouched_requests()
        waiting = [request_id for request_id in untouched if among is None or request_id in among]
        for request_id in waiting:
            self.cancel(request_id)
        return waiting

    def cancel_all(self) -> None:
        """Forget every unfinished request, and free what it holds."""
        for request_id in self._requests.ids:
            self.cancel(request_id)
        while self.broken is None and (self._pipeline.in_flight or self._lifecycle.grants):
            self._run_on()

    def abandon(self, error: FastDecodeError) -> list[RequestOutput]:
        """A step broke down: end every unfinished request with this error. The
        engine takes no requests from then on, since what its R-workers hold is
        unknown."""
        self.broken = without_frames(error)
        return self._requests.fail_all(error)

    def _run_on(self) -> list[RequestOutput]:
        """Run until some lane has finished its step, or there is news. Returns
        the requests that are over."""
        finished = self._pipeline.run()
        return self._take_news() if finished is None else self._finish_step(finished)

    def _take_news(self) -> list[RequestOutput]:
        """Tell the lifecycle who has answered, who was lost, and who has come in whose place."""
        outputs: list[RequestOutput] = []
        for holder, news in self._pipeline.take_news():
            if isinstance(news, WorkerError):
                self._recovery.lose(holder, news)
                outputs += self._carry_out(events.Lost(holder))
            elif not self._lifecycle.grants.awaits(holder, PartId(news.sequence_id)):
                answer = (
                    f"{self._fleet.peer(holder)} sent {type(news).__name__}, which nobody asked for"
                )
                self._fleet.lose(holder, ProtocolError(answer))
            else:
                outputs += self._carry_out(event_for(news, self._fleet.peer(holder)))
        for joined in self._recovery.joined(self._lifecycle):
            self.stats.num_rejoined += 1
            outputs += self._carry_out(joined)
        return outputs

    def _launch(self, lane: int) -> list[RequestOutput]:
        """Plan and start a lane's step, as far as anybody has room. Returns the
        requests that are over."""
        started, waited = time.perf_counter(), self._pipeline.wait_s
        outputs = self._carry_out(events.LaneIdle(lane))
        while self._answer_at_once and self._lifecycle.grants:
            outputs += self._take_news()  # whoever was lost just now answers nothing
            if self._lifecycle.grants:
                self._pipeline.receive()
                outputs += self._take_news()
        for run in self._lifecycle.handle(events.LaneReady(lane)):
            assert isinstance(run, events.Run)
            step, holders = self._num_launched, self._pipeline.holders
            batch = StepBatch.build(run.chunks, holders, step=step, lane=lane, window=self._window)
            self._num_launched += 1
            planned_s = time.perf_counter() - started - (self._pipeline.wait_s - waited)
            self._pipeline.launch(lane, batch, batch.last_rows[batch.draws], planned_s)
        return outputs

    def _finish_step(self, step: LaneStep) -> list[RequestOutput]:
        """A lane's step is over: draw the next tokens, and tell the lifecycle.
        Returns the requests that are over."""
        ran_s = time.perf_counter()
        self.stats.count_step(step.r_compute_s, sum(step.remote.r_compute_s.values()))
        wanted = self._lifecycle.lives.wanted(step.batch.chunks)
        drawing, rows = _drawing(step, wanted)
        assert step.logits is not None
        logits = step.logits if len(rows) == len(step.logits) else step.logits[rows]
        # Before what the step has ended is freed: the holders have held it all through the step.
        started = time.perf_counter()
        load = self._lifecycle.lives.num_cached_tokens + sum([chunk.num_tokens for chunk in wanted])
        self.stats.count_load(load, sum([_in_prompt(chunk) for chunk in wanted]))
        scheduler = self._lifecycle.scheduler
        self._watch.trace.load(started, scheduler.num_running, scheduler.num_waiting, load)
        generations = [self._requests.generation(chunk.sequence) for chunk in drawing]
        sampled = self._s_worker.sample(logits, [one.sampling for one in generations])
        now = time.perf_counter()
        self._watch.trace.sampled(step.lane, step.step, len(sampled), started, now)
        drawn = self._requests.accept(generations, sampled, self.stats, now)
        outputs = self._carry_out(events.StepDone(step.lane, drawn))
        self._requests.tell(drawn)
        if self._watch.times is not None:
            step.tell(self._watch.times, self._watch.lanes, time.perf_counter() - ran_s)
        return outputs

    def _carry_out(self, event: events.Event) -> list[RequestOutput]:
        """Tell the lifecycle what has happened, and do what it wants. Returns
        the requests that are over."""
        outputs: list[RequestOutput] = []
        for instruction in self._lifecycle.handle(event):
            match instruction:
                case events.Open() | events.Fork() | events.Extend() | events.Close():
                    self._fleet.send(instruction.part.holder, message_for(instruction))
                case events.Finish():
                    output = self._requests.finish(
                        instruction.sequence, instruction.reason, self.stats
                    )
                    outputs += () if output is None else (output,)
                case events.Fail():
                    logger.warning(
                        "request %s failed: %s", instruction.request_id, instruction.error
                    )
                    outputs.append(
                        self._requests.forget(instruction.request_id).failed(instruction.error)
                    )
                case events.Run():
                    raise AssertionError("a lane runs when it is launched")
        self.stats.num_recomputed = self._lifecycle.num_recomputed
        self.stats.num_suspended = self._lifecycle.num_suspended
        return outputs


def _drawing(step: LaneStep, wanted: Seq[Chunk]) -> tuple[list[Chunk], list[int]]:
    """Of a step that is over, the chunks for which a token is drawn, as far as
    they are wanted; and their rows among the step's logits."""
    drawing = [
        chunk
        for chunk, draws in zip(step.batch.chunks, step.batch.draws.tolist(), strict=True)
        if draws
    ]
    if len(wanted) == len(step.batch.chunks):
        return drawing, list(range(len(drawing)))
    ids = {chunk.sequence.sequence_id for chunk in wanted}
    rows = [row for row, chunk in enumerate(drawing) if chunk.sequence.sequence_id in ids]
    return [drawing[row] for row in rows], rows


def _in_prompt(chunk: Chunk) -> int:
    """Tokens of it that are of the prompt."""
    sequence = chunk.sequence
    return min(chunk.num_tokens, max(0, sequence.num_prompt_tokens - sequence.num_cached))

"""The engine: carries out the scheduler's plans, one step of a lane at a time.

A request's life: ``submit`` → waiting → started on an R-worker (``OpenSequence`` or ``ForkSequence``) → its prompt run
in one or more chunks → one token drawn a step → finished, its blocks freed (``CloseSequence``), its output returned by
``step``. Nothing here knows how a step is scheduled, what a layer computes, or where an R-worker runs.

When an R-worker is lost, its sequences are requeued: they start again on another one, and what was cached is recomputed
from their tokens, prompt and generated alike. Since a token depends on the sequence alone, the text goes on as if
nothing had happened.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection
from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from fastdecode.core.errors import CapacityError, FastDecodeError, RequestError, WorkerError, without_frames
from fastdecode.core.sequence import FinishReason, Request, RequestOutput, Sequence
from fastdecode.core.spec import longest_window
from fastdecode.core.trace import NoTrace, Trace
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.engine.requests import Group, Run
from fastdecode.engine.reservations import Refusal, close, make_room
from fastdecode.engine.stats import EngineStats
from fastdecode.engine.step.layout import StepBatch
from fastdecode.engine.step.pipeline import LaneStep, Pipeline
from fastdecode.schedule.lanes import LaneControl
from fastdecode.schedule.scheduler import Chunk, Scheduler, StepPlan
from fastdecode.schedule.times import MeasuredTimes
from fastdecode.text.codec import TextCodec
from sworker.sampler import SampledToken
from sworker.worker import SWorker

if TYPE_CHECKING:
    from fastdecode.engine.fleet.workers import Newcomers

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests to their end. Not thread-safe: one thread submits and steps.

    Args:
        s_worker: every layer that has weights.
        pipeline: runs the lanes' steps.
        fleet: the R-workers.
        scheduler: decides what starts and what steps.
        codec: between text and token ids.
        eos_token_ids: any of them ends a sequence, unless the request ignores EOS.
        trace: told what every step did.
        times: told how long the parts of every step took.
        lanes: decides on the number of lanes; None: it stays what it is.
        replacements: R-workers that take the place of lost ones.
    """

    def __init__(
        self,
        s_worker: SWorker,
        pipeline: Pipeline,
        fleet: Fleet,
        scheduler: Scheduler,
        codec: TextCodec,
        eos_token_ids: tuple[int, ...],
        trace: Trace | None = None,
        times: MeasuredTimes | None = None,
        lanes: LaneControl | None = None,
        replacements: Newcomers | None = None,
    ) -> None:
        self._replacements = replacements
        self._times = times
        self._lane_control = lanes
        self._trace = trace or NoTrace()
        self._s_worker = s_worker
        self._window = longest_window(s_worker.spec.attention)
        self._pipeline = pipeline
        self._fleet = fleet
        self._scheduler = scheduler
        self._codec = codec
        self._eos_token_ids = eos_token_ids
        self._groups: dict[str, Group] = {}
        self._runs: dict[int, Run] = {}
        self._dropped: dict[int, Run] = {}
        self._sequence_ids = itertools.count()
        self._num_launched = 0
        self._mourned: set[int] = set()  # lost R-workers of which the scheduler knows
        self.broken: FastDecodeError | None = None
        """Why a step broke down, after which it takes no requests any more."""
        self.stats = EngineStats()

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting or running."""
        return len(self._groups)

    @property
    def num_unfinished_sequences(self) -> int:
        """Sequences that are waiting or running: a request's n."""
        return len(self._runs)

    def submit(self, request: Request, prompt: str | None = None) -> None:
        """Queue a valid request. ``prompt`` is its text, if it came as text, to be given back with the output.

        Raises:
            RequestError: an unfinished request has the same id.
            CapacityError: the request could never fit on any R-worker; nothing was queued.
            FastDecodeError: the engine broke down before, with this error.
        """
        if self.broken is not None:
            raise copy(self.broken)
        if request.request_id in self._groups:
            raise RequestError(
                f"request id {request.request_id!r} is that of one unfinished: give each its own", code="duplicate_id"
            )
        runs = []
        now = time.perf_counter()
        for index in range(request.params.n):
            sequence = Sequence.of(next(self._sequence_ids), request, index)
            runs.append(Run.of(sequence, self._codec, self._eos_token_ids, self._s_worker.spec.vocab_size, now))
        self._scheduler.add(run.sequence for run in runs)
        self._groups[request.request_id] = Group(request, prompt, runs)
        self._runs.update((run.sequence.sequence_id, run) for run in runs)

    def step(self) -> list[RequestOutput]:
        """Run until some lane has finished a step. Returns the requests that are over.

        Raises:
            WorkerError: no R-worker is left. ``abandon`` is all that can be done then.
        """
        started = time.perf_counter()
        wait_s = self._pipeline.wait_s
        outputs = self._recover()
        if self._lane_control is not None:
            outputs += self.set_num_lanes(self._lane_control.decide())
        for lane in self._pipeline.idle_lanes:
            outputs += self._launch(lane)
        if not self._pipeline.in_flight:
            return outputs
        is_prefill = any(chunk.num_tokens > 1 for step in self._pipeline.in_flight for chunk in step.batch.chunks)
        outputs += self._finish_step()
        elapsed = time.perf_counter() - started
        self.stats.wait_s += self._pipeline.wait_s - wait_s
        if is_prefill:
            self.stats.prefill_s += elapsed
        else:
            self.stats.decode_s += elapsed
        return outputs

    def _finish_step(self) -> list[RequestOutput]:
        """Run until some lane has finished its step. Returns the requests that are over."""
        finished = self._pipeline.run()
        self.stats.num_steps += 1
        self.stats.r_compute_s += finished.r_compute_s
        self.stats.r_busy_s += sum(finished.remote.r_compute_s.values())
        ran_s = time.perf_counter()
        outputs = self._complete(finished)
        if self._times is not None:
            finished.tell(self._times, self._lane_control, self._fleet.lost, time.perf_counter() - ran_s)
        return outputs

    def set_num_lanes(self, num_lanes: int) -> list[RequestOutput]:
        """Go on with so many lanes, when the steps in flight have ended. Returns the requests that are over by then."""
        outputs: list[RequestOutput] = []
        if num_lanes != self._pipeline.num_lanes:
            while self._pipeline.in_flight:
                outputs += self._finish_step()
            logger.info("%d lanes from now on, in place of %d", num_lanes, self._pipeline.num_lanes)
            self._scheduler.regroup(num_lanes)
            self._pipeline.set_num_lanes(num_lanes)
            self._s_worker.set_num_lanes(num_lanes)
            if self._lane_control is not None:
                self._lane_control.regrouped(num_lanes)
        return outputs

    def _count_load(self) -> float:
        """Note the load. Returns the time."""
        now = time.perf_counter()
        load = sum(run.sequence.num_cached for run in self._runs.values())
        self.stats.count_load(load)
        self._trace.load(now, self._scheduler.num_running, self._scheduler.num_waiting, load)
        return now

    def cancel_waiting(self) -> list[str]:
        """Forget the requests of which nothing has run yet. Returns their ids."""
        waiting = [
            group
            for group in self._groups.values()
            if not group.completions
            and all(run.sequence.worker is None and not run.sequence.num_generated for run in group.runs)
        ]
        for group in waiting:
            self._drop(group)
        return [group.request.request_id for group in waiting]

    def cancel_all(self) -> None:
        """Forget every unfinished request, and free what it holds."""
        for group in list(self._groups.values()):
            self._drop(group)
        while self._pipeline.in_flight and self.broken is None:
            self._complete(self._pipeline.run())

    def abandon(self, error: FastDecodeError) -> list[RequestOutput]:
        """A step broke down: end every unfinished request with this error. The engine takes no requests from then on,
        since what its R-workers hold is unknown."""
        self.broken = without_frames(error)
        groups = list(self._groups.values())
        self._groups.clear()
        self._runs.clear()
        return [group.failed(error) for group in groups]

    def _launch(self, lane: int) -> list[RequestOutput]:
        """Plan and start a lane's step. Returns the requests whose sequences were refused by their R-worker."""
        started, waited = time.perf_counter(), self._pipeline.wait_s
        plan = self._scheduler.plan(lane)
        refused = self._make_room(plan)
        chunks = [c for c in plan.chunks if c.sequence.sequence_id in self._runs and c.sequence.worker is not None]
        if chunks:
            prompts_on_r = self._pipeline.prompts_on_r
            step, window = self._num_launched, self._window
            batch = StepBatch.build(chunks, step=step, lane=lane, prompts_on_r=prompts_on_r, window=window)
            self._num_launched += 1
            ready = np.array([chunk.num_tokens == chunk.sequence.num_uncached for chunk in batch.chunks])
            planned_s = time.perf_counter() - started - (self._pipeline.wait_s - waited)
            self._pipeline.launch(lane, batch, batch.last_rows[ready], planned_s)
        return refused

    def _make_room(self, plan: StepPlan) -> list[RequestOutput]:
        """Free, enlarge and open what the plan says on the R-workers. Returns the requests that were refused."""
        self.stats.num_suspended += len(plan.suspends)
        # Only now, when every answer is in, is it known which sequences have to be closed again.
        outputs = [self._refused(refusal) for refusal in make_room(plan, self._runs, self._fleet, self._pipeline)]
        return [output for output in outputs if output is not None]

    def _refused(self, refusal: Refusal) -> RequestOutput | None:
        """An R-worker has less room than it said. The sequence waits until there is some; returns the request, failed,
        if there never will be: not if nothing of ours takes room there, as then nothing that ends would make any."""
        run, sequence, answer = refusal.run, refusal.run.sequence, refusal.answer
        if sequence.sequence_id not in self._runs:
            return None  # a sibling was refused for good
        part = "" if sequence.parts is None else f"part {refusal.part + 1} of "
        asked = f"{part}request {sequence.request.request_id}"
        message = f"{self._fleet.peer(refusal.worker)} refused {asked}: {answer.message}"
        if answer.code == CapacityError.default_code and refusal.has_neighbours:
            logger.warning("%s: it waits", message)
            close(run, self._fleet)
            self._scheduler.requeue(sequence)
            return None
        group = self._groups[sequence.request.request_id]
        return self._fail(group, CapacityError(message, code=answer.code))

    def _complete(self, step: LaneStep) -> list[RequestOutput]:
        """A lane's step is over: note what is cached now, draw the next tokens, finish what they end."""
        lost = self._fleet.lost
        survivors, rows = [], []
        row = 0
        for chunk in step.batch.chunks:
            sequence = chunk.sequence
            has_logits = chunk.num_tokens == sequence.num_uncached
            run = self._runs.get(sequence.sequence_id)
            if run is not None and not (lost and _is_hit(sequence, lost)):
                self._count_cached(chunk)
                if has_logits:
                    survivors.append(run)
                    rows.append(row)
            dropped = self._dropped.pop(sequence.sequence_id, None)
            if dropped is not None:
                self._release(dropped)
            row += has_logits
        assert step.logits is not None
        logits = step.logits if len(rows) == row else step.logits[rows]
        # Before what the step has ended is freed: the R-workers have held it all through the step.
        started = self._count_load()
        drawn = self._s_worker.sample(logits, [run.sampling for run in survivors])
        now = time.perf_counter()
        self._trace.sampled(step.lane, step.step, len(drawn), started, now)
        return self._accept(survivors, drawn, now)

    def _count_cached(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        in_prompt = min(chunk.num_tokens, max(0, sequence.num_prompt_tokens - sequence.num_cached))
        self.stats.num_prompt_tokens += in_prompt
        sequence.num_cached += chunk.num_tokens

    def _recover(self) -> list[RequestOutput]:
        """Requeue the sequences of lost R-workers, but for those whose step is still in flight. Returns the requests
        that no R-worker that is left could hold.

        Raises:
            WorkerError: none is left.
        """
        lost = self._fleet.lost
        if not lost:
            return []
        outputs: list[RequestOutput] = []
        if len(lost) == len(self._fleet):
            if self._replacements is None or not self._replacements.await_any(lost):
                raise copy(next(iter(lost.values())))
            while self._pipeline.in_flight:  # nothing comes of these steps; but whoever was in them starts again
                outputs += self._finish_step()
        hopeless: list[Sequence] = []
        for worker in lost.keys() - self._mourned:
            hopeless += self._scheduler.lose_worker(worker)
            self._mourned.add(worker)
        flying = self._flying()
        for run in self._runs.values():
            sequence = run.sequence
            if _is_hit(sequence, lost) and sequence.sequence_id not in flying:
                close(run, self._fleet)  # the parts that others hold
                self.stats.num_recomputed += 1
                try:
                    self._scheduler.requeue(sequence)
                except CapacityError:
                    hopeless.append(sequence)
        self._readmit()
        error = WorkerError("its R-worker was lost, and no R-worker that is left has room for it")
        # Those that have been readmitted just now may have room.
        hopeless = [sequence for sequence in hopeless if not self._scheduler.is_possible(sequence)]
        request_ids = dict.fromkeys(sequence.request.request_id for sequence in hopeless)
        return outputs + [self._fail(self._groups[request_id], error) for request_id in request_ids]

    def _readmit(self) -> None:
        """Use R-workers that have come in the place of lost ones, once no step in flight remembers those."""
        if self._replacements is None:
            return
        chunks = [chunk for step in self._pipeline.in_flight for chunk in step.batch.chunks]
        flying = {worker for chunk in chunks for worker in chunk.sequence.workers}
        for worker, welcome in self._replacements.look(self._fleet.lost).items():
            if worker not in flying:
                self._replacements.admit(worker)
                self._fleet.revive(worker)
                self._scheduler.regain_worker(worker, welcome.num_blocks)
                self._mourned.remove(worker)
                self.stats.num_rejoined += 1
                logger.warning("%s has joined in the place of one that was lost", self._fleet.peer(worker))

    def _accept(self, runs: list[Run], sampled: list[SampledToken], now: float) -> list[RequestOutput]:
        """Append the tokens drawn just now; finish the sequences that they end. Returns the requests that are over."""
        outputs = []
        for run, drawn in zip(runs, sampled, strict=True):
            group = self._groups.get(run.sequence.request.request_id)
            if group is None:
                continue  # a sibling failed in this very step
            if drawn.error is not None:
                outputs.append(self._fail(group, drawn.error))
                continue
            self.stats.num_output_tokens += 1
            if run.first_token_s is None:
                run.first_token_s = now
                self.stats.ttft.add(now - run.submitted_s)
            reason = run.append(drawn, self._eos_token_ids)
            if reason is not None:
                if run.sequence.num_generated > 1:
                    self.stats.tpot.add((now - run.first_token_s) / (run.sequence.num_generated - 1))
                output = self._finish(group, run, reason)
                if output is not None:
                    outputs.append(output)
        return outputs

    def _finish(self, group: Group, run: Run, reason: FinishReason) -> RequestOutput | None:
        """One sequence is over. Returns the request's output once all of its sequences are."""
        group.completions.append(run.completion(reason))
        self._release(self._runs.pop(run.sequence.sequence_id))
        if len(group.completions) < len(group.runs):
            return None
        del self._groups[group.request.request_id]
        return group.output()

    def _fail(self, group: Group, error: FastDecodeError) -> RequestOutput:
        self._drop(group)
        logger.warning("request %s failed: %s", group.request.request_id, error)
        return group.failed(error)

    def _drop(self, group: Group) -> None:
        flying = self._flying()
        for run in group.runs:
            sequence_id = run.sequence.sequence_id
            if sequence_id in self._runs and sequence_id in flying:
                # Its R-worker still writes to its blocks: free them when the step is over.
                self._dropped[sequence_id] = self._runs.pop(sequence_id)
            elif sequence_id in self._runs:
                self._release(self._runs.pop(sequence_id))
        del self._groups[group.request.request_id]

    def _flying(self) -> set[int]:
        """Sequences whose step is in flight."""
        return {chunk.sequence.sequence_id for step in self._pipeline.in_flight for chunk in step.batch.chunks}

    def _release(self, run: Run) -> None:
        close(run, self._fleet)
        self._scheduler.finish(run.sequence)


def _is_hit(sequence: Sequence, lost: Collection[int]) -> bool:
    """Whether a part of it was on a lost R-worker."""
    return any(worker in lost for worker in sequence.workers)

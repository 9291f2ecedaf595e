"""The engine: carries out the scheduler's plans, one step of the running batch at a time.

A request's life: ``submit`` → waiting → started on an R-worker (``OpenSequence`` or ``ForkSequence``) → its prompt run
in one or more chunks → one token drawn a step → finished, its blocks freed (``CloseSequence``), its output returned by
``step``. Nothing here knows how a step is scheduled, what a layer computes, or where an R-worker runs.
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, field

import numpy as np

from fastdecode.core.errors import CapacityError, FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.sequence import Completion, FinishReason, Request, RequestOutput, Sequence, TokenLogprob
from fastdecode.engine.attend import RemoteAttention, StepBatch
from fastdecode.engine.text import SequenceText, TextCodec
from fastdecode.schedule.scheduler import Chunk, Scheduler, Start
from fastdecode.wire.messages import Accepted, CloseSequence, Failed, ForkSequence, OpenSequence, Refused
from sworker.sampler import SampledToken, SamplingState
from sworker.worker import SWorker

logger = logging.getLogger(__name__)


@dataclass
class EngineStats:
    """Totals since the engine started. Steps that run any prompt chunk count as prefill, the others as decode."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens run; those of a shared prompt count once, its last token once a sequence."""
    num_output_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    """The S-worker had nothing to do but wait for o."""
    r_compute_s: float = 0.0
    """The busiest R-worker's compute of every step, summed."""

    @property
    def step_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def s_compute_s(self) -> float:
        """Time in steps that wasn't spent waiting for R-workers."""
        return self.step_s - self.wait_s


@dataclass(eq=False)
class _Run:
    """A live sequence, and what it has said so far."""

    sequence: Sequence
    sampling: SamplingState
    text: SequenceText
    is_open: bool = False
    """Its R-worker has accepted it."""
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(eq=False)
class _Group:
    """A live request, and those of its completions that are done."""

    request: Request
    prompt: str | None
    runs: list[_Run]
    completions: list[Completion] = field(default_factory=list)


class Engine:
    """Runs requests to their end. Not thread-safe: one thread submits and steps.

    Args:
        s_worker: every layer that has weights.
        attention: the ``attend`` whose KV lives on the R-workers, and the connections to them.
        scheduler: decides what starts and what steps.
        codec: between text and token ids.
        eos_token_ids: any of them ends a sequence, unless the request ignores EOS.
    """

    def __init__(
        self,
        s_worker: SWorker,
        attention: RemoteAttention,
        scheduler: Scheduler,
        codec: TextCodec,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._s_worker = s_worker
        self._attention = attention
        self._scheduler = scheduler
        self._codec = codec
        self._eos_token_ids = eos_token_ids
        self._groups: dict[str, _Group] = {}
        self._runs: dict[int, _Run] = {}
        self._sequence_ids = itertools.count()
        self._broken: FastDecodeError | None = None
        self.stats = EngineStats()

    @property
    def num_unfinished(self) -> int:
        """Requests that are waiting or running."""
        return len(self._groups)

    def submit(self, request: Request, prompt: str | None = None) -> None:
        """Queue a valid request. ``prompt`` is its text, if it came as text, to be given back with the output.

        Raises:
            CapacityError: the request could never fit on any R-worker; nothing was queued.
            FastDecodeError: the engine broke down before, with this error.
        """
        if self._broken is not None:
            raise self._broken
        assert request.request_id not in self._groups, "request ids are unique among the unfinished"
        runs = []
        for index in range(request.params.n):
            sequence = Sequence.of(next(self._sequence_ids), request, index)
            sampling = SamplingState(
                params=request.params,
                seed=request.seed,
                prompt_token_ids=request.prompt_token_ids,
                eos_token_ids=self._eos_token_ids,
                vocab_size=self._s_worker.spec.vocab_size,
                sample_index=index,
            )
            text = self._codec.sequence_text(request.params)
            runs.append(_Run(sequence, sampling, text))
        self._scheduler.add(run.sequence for run in runs)
        self._groups[request.request_id] = _Group(request, prompt, runs)
        self._runs.update((run.sequence.sequence_id, run) for run in runs)

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the requests that it finished, in order of arrival within the step."""
        started = time.perf_counter()
        plan = self._scheduler.plan()
        refused = self._start(plan.starts)
        chunks = [c for c in plan.chunks if c.sequence.sequence_id in self._runs]
        if not chunks:
            assert refused, "a scheduler with unfinished sequences plans at least one chunk"
            return refused
        batch = StepBatch.build(chunks, step=self.stats.num_steps)
        ready = np.array([chunk.num_tokens == chunk.sequence.num_uncached for chunk in batch.chunks])
        self._attention.begin(batch)
        logits = self._s_worker.run(batch.token_ids, batch.positions, batch.last_rows[ready], self._attention)
        wait_s, r_compute_s = self._attention.finish()
        is_prefill = self._count_cached(batch.chunks)
        runs = [self._runs[c.sequence.sequence_id] for c, r in zip(batch.chunks, ready, strict=True) if r]
        finished = self._accept(runs, self._s_worker.sample(logits, [run.sampling for run in runs]))
        self._count_step(time.perf_counter() - started, wait_s, r_compute_s, is_prefill=is_prefill)
        return refused + finished

    def cancel_all(self) -> None:
        """Forget every unfinished request, and free what it holds."""
        for group in list(self._groups.values()):
            self._drop(group)

    def abandon(self, error: FastDecodeError) -> list[RequestOutput]:
        """A step broke down: end every unfinished request with this error. The engine takes no requests from then on,
        since what its R-workers hold is unknown."""
        self._broken = error
        groups = list(self._groups.values())
        self._groups.clear()
        self._runs.clear()
        return [_failed(group, error) for group in groups]

    def _start(self, starts: tuple[Start, ...]) -> list[RequestOutput]:
        """Open the sequences on their R-workers. Returns the requests that were refused."""
        connections = self._attention.connections
        for start in starts:
            sequence = start.sequence
            reserve = sequence.max_cached_tokens
            message: OpenSequence | ForkSequence
            if start.parent is None:
                message = OpenSequence(sequence.sequence_id, reserve)
            else:
                message = ForkSequence(start.parent.sequence_id, sequence.sequence_id, start.num_shared_tokens, reserve)
            connections[start.worker].send(message)
        refusals: list[tuple[str, Refused]] = []
        for start in starts:
            answer = connections[start.worker].receive(self._attention.timeout_s)
            if isinstance(answer, Failed):
                raise WorkerError(f"R-worker {answer.worker} failed: {answer.message}", code=answer.code)
            if not isinstance(answer, (Accepted, Refused)):
                raise ProtocolError(
                    f"R-worker {connections[start.worker].peer} answered {type(answer).__name__} to the opening of "
                    f"sequence {start.sequence.sequence_id}"
                )
            if isinstance(answer, Refused):
                refusals.append((start.sequence.request.request_id, answer))
            else:
                self._runs[start.sequence.sequence_id].is_open = True
        # Only now, when every answer is in, is it known which sequences have to be closed again.
        return [
            self._fail(self._groups[request_id], CapacityError(refused.message, code=refused.code))
            for request_id, refused in refusals
            if request_id in self._groups
        ]

    def _count_cached(self, chunks: tuple[Chunk, ...]) -> bool:
        """Note that the chunks' tokens are cached now. Returns whether any of them ran part of a prompt."""
        num_prompt_tokens = 0
        for chunk in chunks:
            sequence = chunk.sequence
            num_prompt_tokens += min(chunk.num_tokens, max(0, sequence.num_prompt_tokens - sequence.num_cached))
            sequence.num_cached += chunk.num_tokens
        self.stats.num_prompt_tokens += num_prompt_tokens
        return num_prompt_tokens > 0

    def _count_step(self, step_s: float, wait_s: float, r_compute_s: float, *, is_prefill: bool) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.wait_s += wait_s
        stats.r_compute_s += r_compute_s
        if is_prefill:
            stats.prefill_s += step_s
        else:
            stats.decode_s += step_s

    def _accept(self, runs: list[_Run], sampled: list[SampledToken]) -> list[RequestOutput]:
        """Append the drawn tokens; finish the sequences that they end. Returns the requests that are over."""
        outputs = []
        for run, drawn in zip(runs, sampled, strict=True):
            group = self._groups.get(run.sequence.request.request_id)
            if group is None:
                continue  # a sibling failed in this very step
            if drawn.error is not None:
                outputs.append(self._fail(group, drawn.error))
                continue
            self.stats.num_output_tokens += 1
            reason = self._append(run, drawn)
            if reason is not None:
                output = self._finish(group, run, reason)
                if output is not None:
                    outputs.append(output)
        return outputs

    def _append(self, run: _Run, drawn: SampledToken) -> FinishReason | None:
        sequence, params = run.sequence, run.sequence.request.params
        token = drawn.token_id
        sequence.token_ids.append(token)
        run.sampling.observe(token)
        if drawn.logprob is not None:
            run.logprobs.append(drawn.logprob)
        if (token in self._eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids:
            return "stop"
        if run.text.append(token):
            return "stop"
        return "length" if sequence.num_generated >= sequence.request.max_tokens else None

    def _finish(self, group: _Group, run: _Run, reason: FinishReason) -> RequestOutput | None:
        """One sequence is over. Returns the request's output once all of its sequences are."""
        sequence = run.sequence
        group.completions.append(
            Completion(
                index=sequence.index,
                text=run.text.finish(),
                token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens :]),
                finish_reason=reason,
                logprobs=tuple(run.logprobs) if sequence.request.params.logprobs is not None else None,
            )
        )
        self._release(run)
        if len(group.completions) < len(group.runs):
            return None
        request = group.request
        del self._groups[request.request_id]
        completions = tuple(sorted(group.completions, key=lambda completion: completion.index))
        return RequestOutput(request.request_id, group.prompt, request.prompt_token_ids, completions)

    def _fail(self, group: _Group, error: FastDecodeError) -> RequestOutput:
        self._drop(group)
        logger.warning("request %s failed: %s", group.request.request_id, error)
        return _failed(group, error)

    def _drop(self, group: _Group) -> None:
        for run in group.runs:
            if run.sequence.sequence_id in self._runs:
                self._release(run)
        del self._groups[group.request.request_id]

    def _release(self, run: _Run) -> None:
        sequence, worker = run.sequence, run.sequence.worker
        del self._runs[sequence.sequence_id]
        self._scheduler.finish(sequence)
        if run.is_open:
            assert worker is not None
            self._attention.connections[worker].send(CloseSequence(sequence.sequence_id))


def _failed(group: _Group, error: FastDecodeError) -> RequestOutput:
    return RequestOutput(group.request.request_id, group.prompt, group.request.prompt_token_ids, error=error)

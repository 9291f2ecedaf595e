"""Requests that an engine has not finished yet: what their sequences have generated so far, and
the tokens of lanes' steps, which are drawn on the S-worker's device and taken in on the host."""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from fastdecode.core.delta import Delta, Listener
from fastdecode.core.errors import FastDecodeError, RequestError
from fastdecode.core.holders import SequenceId
from fastdecode.core.sequence import COMING, FinishReason, Request, Sequence, TokenLogprob
from fastdecode.core.trace import Trace
from fastdecode.engine.prompt_logprobs import AskedRows, PromptLogprobs, PromptQuestions
from fastdecode.engine.stats import EngineStats
from fastdecode.engine.step.batch import StepBatch
from fastdecode.engine.step.pipeline import LaneStep
from fastdecode.schedule.life.events import Drawn
from fastdecode.schedule.plan import Chunk
from fastdecode.text.codec import SequenceText, TextCodec
from fastdecode.text.grammars import GrammarMasks
from sworker.buffers import Feed
from sworker.sampling.sampler import (
    NON_FINITE,
    Drawing,
    SampledToken,
    SamplingState,
    prompt_logprobs,
)
from sworker.worker import SWorker

if TYPE_CHECKING:
    from fastdecode.engine.extensions import EngineState


@dataclass(eq=False)
class Generation:
    """What a sequence has generated so far, and what its next token is drawn with."""

    sequence: Sequence
    sampling: SamplingState
    text: SequenceText
    submitted_s: float
    first_token_s: float | None = None
    last_token_s: float = 0.0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_told: int = 0  # tokens that deltas were made of
    num_known: int = 0
    """Tokens that were drawn before it was submitted, and have no logprobs here."""
    eos_token_ids: tuple[int, ...] = ()

    def append(self, drawn: SampledToken) -> FinishReason | None:
        """Take in a token. Return why the sequence is over, if it is."""
        params, token = self.sequence.request.params, drawn.token_id
        is_eos = token in self.eos_token_ids and not params.ignore_eos
        self.sampling.observe(token)
        if drawn.logprob is not None:
            self.logprobs.append(drawn.logprob)
        if is_eos or token in params.stop_token_ids:
            self.text.append_last(token)
            return "stop"
        is_over = self.text.append(token)
        grammar = self.sampling.grammar
        return "stop" if is_over or (grammar is not None and grammar.is_complete) else None

    def delta(self, reason: FinishReason | None) -> Delta:
        """Return what is new since the last one, or all that is left if the sequence is over."""
        sequence, first = self.sequence, self.num_told
        of_logprobs = max(0, first - self.num_known)
        self.num_told = sequence.num_generated
        if reason is not None:
            self.text.finish()
        return Delta(
            request_id=sequence.request.request_id,
            index=sequence.index,
            text=self.text.take(),
            token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens + first :]),
            logprobs=tuple(self.logprobs[of_logprobs:])
            if sequence.request.params.logprobs is not None
            else None,
            finish_reason=reason,
            num_cached_tokens=0 if reason is None else sequence.num_reused,
            stop_reason=self._stop_reason() if reason == "stop" else None,
        )

    def _stop_reason(self) -> int | str | None:
        """Return the token or stop string that ended it. None if EOS did."""
        if self.text.stopped_by is not None:
            return self.text.stopped_by
        params, last = self.sequence.request.params, self.sequence.token_ids[-1]
        is_eos = last in self.eos_token_ids and not params.ignore_eos
        return last if last in params.stop_token_ids and not is_eos else None


@dataclass(eq=False)
class Group:
    """A request and its sequences."""

    request: Request
    generations: list[Generation]
    listener: Listener | None
    num_unfinished: int
    prompt_logprobs: PromptLogprobs | None = None

    def tell(self, generation: Generation, reason: FinishReason | None) -> None:
        """Give the listener one more token, or with a reason the last one."""
        if self.listener is not None and (self.listener.every_step or reason is not None):
            delta = generation.delta(reason)
            if self.prompt_logprobs is not None:
                delta = replace(delta, prompt_logprobs=self.prompt_logprobs.take())
            self.listener.tell(delta)

    def fail(self, error: FastDecodeError) -> None:
        if self.listener is not None:
            self.listener.tell(Delta(self.request.request_id, 0, error=error))


class Requests:
    """All that an engine has not finished yet.

    Args:
        eos_token_ids: Any of them ends a sequence, unless the request ignores EOS.
    """

    def __init__(
        self, codec: TextCodec, eos_token_ids: tuple[int, ...], vocab_size: int, masks: GrammarMasks
    ) -> None:
        self._masks = masks
        self.prompt_questions = PromptQuestions()
        self._codec = codec
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._groups: dict[str, Group] = {}
        self._generations: dict[SequenceId, Generation] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    @property
    def ids(self) -> list[str]:
        return list(self._groups)

    @property
    def num_sequences(self) -> int:
        return len(self._generations)

    def add(
        self, request: Request, sequences: Iterable[Sequence], now: float, listener: Listener | None
    ) -> None:
        """Add a request that has just been submitted."""
        generations = [self._generation(sequence, now) for sequence in sequences]
        group = Group(request, generations, listener, len(generations))
        if request.params.prompt_logprobs is not None:
            group.prompt_logprobs = self.prompt_questions.add(request)
        self._groups[request.request_id] = group
        self._generations.update((one.sequence.sequence_id, one) for one in generations)

    def _generation(self, sequence: Sequence, now: float) -> Generation:
        """Return the generation of a sequence that has just been submitted. What was drawn for it
        before counts as if it were now."""
        request, drawn = sequence.request, sequence.request.drawn.get(sequence.index, ())
        sampling = SamplingState(
            params=request.params,
            seed=request.seed,
            prompt_token_ids=request.prompt_token_ids,
            eos_token_ids=self._eos_token_ids,
            vocab_size=self._vocab_size,
            sample_index=sequence.index,
            bad_words=request.bad_words,
        )
        text = self._codec.sequence_text(request.params, request.prompt_token_ids)
        generation = Generation(sequence, sampling, text, now, eos_token_ids=self._eos_token_ids)
        for token in drawn:
            generation.append(SampledToken(token))
        generation.num_known = len(drawn)
        if request.params.structured_outputs is not None:
            sampling.grammar = self._masks.state(request.params.structured_outputs, drawn)
        return generation

    def generations_of(self, chunks: Iterable[Chunk]) -> list[Generation]:
        """Return what the chunks' sequences have generated."""
        known = self._generations
        return [known[chunk.sequence.sequence_id] for chunk in chunks]

    def tell(self, drawn: Iterable[Drawn]) -> None:
        """Give listeners what was drawn, once the lifecycle has taken it in. They have the end of
        sequences that are over already."""
        for one in drawn:
            generation = self._generations.get(one.sequence.sequence_id)
            if generation is not None and one.error is None:
                group = self._groups[one.sequence.request.request_id]
                if group.listener is not None and group.listener.every_step:
                    group.tell(generation, None)

    def say(self, delta: Delta) -> None:
        """Give a request's listener a delta without tokens."""
        group = self._groups.get(delta.request_id)
        if group is not None and group.listener is not None:
            group.listener.tell(delta)

    def finish(self, sequence: Sequence, reason: FinishReason, stats: EngineStats) -> None:
        """End a sequence, and its request with the last one."""
        generation = self._generations.pop(sequence.sequence_id)
        if generation.first_token_s is not None and sequence.num_generated > 1:
            stats.tpot.add(
                (generation.last_token_s - generation.first_token_s) / (sequence.num_generated - 1)
            )
        group = self._groups[sequence.request.request_id]
        group.tell(generation, reason)
        group.num_unfinished -= 1
        if not group.num_unfinished:
            self.forget(group.request.request_id)

    def forget(self, request_id: str) -> Group:
        """Drop a request that is over, or ends before its time."""
        group = self._groups.pop(request_id)
        self.prompt_questions.open.pop(request_id, None)
        for generation in group.generations:
            self._generations.pop(generation.sequence.sequence_id, None)
        return group

    def fail_all(self, error: FastDecodeError) -> None:
        for request_id in self.ids:
            self.forget(request_id).fail(error)


@dataclass(frozen=True)
class StepSamples:
    """Tokens, and log-probabilities of prompts, of one step."""

    step: LaneStep
    chunks: Seq[Chunk]  # chunks that a token is drawn for
    drawing: Drawing | None  # None without chunks
    started_s: float
    ended_s: float | None  # None while the tokens are on their way to the host
    goes_ahead: bool
    """The lane's next step begins without waiting for them."""
    asked: AskedRows | None = None  # rows whose next tokens are a prompt's
    found: Tensor | None = None
    """Their log-probabilities, on the device (``prompt_logprobs``)."""

    @property
    def done(self) -> bool:
        return self.goes_ahead or self.drawing is None or self.drawing.fetched.done

    def wait(self) -> None:
        if self.drawing is not None:
            self.drawing.fetched.wait()

    def feed(self, batch: StepBatch) -> Feed | None:
        """Return what the lane's next step is fed of the tokens."""
        rows = np.flatnonzero(batch.token_ids == COMING)
        if not rows.size or self.drawing is None:
            return None
        drawn_at = {chunk.sequence.sequence_id: i for i, chunk in enumerate(self.chunks)}
        of_rows = np.searchsorted(batch.last_rows, rows).tolist()
        sources = [drawn_at[batch.chunks[i].sequence.sequence_id] for i in of_rows]
        return Feed(self.drawing.tokens, np.array(sources, np.int64), rows)


class Samples:
    """Starts to draw, and takes in what was drawn."""

    def __init__(self, s_worker: SWorker, state: EngineState, trace: Trace | None) -> None:
        self._s_worker, self._trace, self._state = s_worker, trace, state
        self._lives, self._requests = state.lifecycle.sequences, state.requests

    def draw(self, step: LaneStep) -> StepSamples | None:
        """Start to draw the next tokens of sequences whose text is complete so far.

        Returns: None if no sequence wants one, and no prompt its log-probabilities.
        """
        assert step.logits is not None
        asked, found = (None, None) if step.asked_rows is None else self._ask(step)
        draws = step.batch.draws.tolist()
        chunks = [chunk for chunk, is_last in zip(step.batch.chunks, draws, strict=True) if is_last]
        rows = _rows_of(chunks, self._lives.wanted(chunks))
        started_s = time.perf_counter()
        if not rows:
            if asked is None:
                return None
            return StepSamples(step, (), None, started_s, started_s, False, asked, found)
        logits = step.logits if len(rows) == len(chunks) else step.logits[list(rows)]
        chunks = [chunks[row] for row in rows]
        states = [one.sampling for one in self._requests.generations_of(chunks)]
        drawing = self._s_worker.draw(logits, states, step.lane)
        is_done = drawing.fetched.done
        # Where no token can be another one than the device believes, and
        # some sequence steps on for all that is known.
        goes_ahead = (
            not is_done
            and asked is None
            and self._s_worker.feeds
            and drawing.is_sure
            and any(x.sequence.num_generated + 1 < x.sequence.request.max_tokens for x in chunks)
        )
        ended_s = time.perf_counter() if is_done else None
        return StepSamples(step, chunks, drawing, started_s, ended_s, goes_ahead, asked, found)

    def _ask(self, step: LaneStep) -> tuple[AskedRows | None, Tensor | None]:
        worker, asked = self._s_worker, self._requests.prompt_questions.rows(step.batch)
        if asked is None or step.asked_rows is None:
            return None, None
        return asked, prompt_logprobs(
            step.forward.logits, step.asked_rows[asked.rows], asked.tokens, asked.count,
            worker.spec.vocab_size, worker.device,
        )  # fmt: skip

    def accept(self, tokens: StepSamples) -> tuple[Drawn, ...]:
        """Take in what was drawn for sequences that are still wanted. Wait until it is here. One
        that met an error ends its request: its siblings get no token."""
        lives = self._lives
        if tokens.asked is not None and tokens.found is not None:
            wanted = lives.wanted(tokens.asked.chunks)
            self._requests.prompt_questions.take_in(tokens.asked, tokens.found.tolist(), wanted)
        if tokens.drawing is None:
            return ()
        sampled = self._s_worker.drawn(tokens.drawing)
        now = time.perf_counter()
        step, ended_s = tokens.step, tokens.ended_s or now
        if self._trace is not None:
            self._trace.sampled(step.lane, step.step, len(sampled), tokens.started_s, ended_s)
        wanted = (lives.awaiting if tokens.goes_ahead else lives.wanted)(tokens.chunks)
        rows = _rows_of(tokens.chunks, wanted)
        generations = self._requests.generations_of([tokens.chunks[row] for row in rows])
        stats, drawn, failed = self._state.stats, list[Drawn](), set[str]()
        for generation, row in zip(generations, rows, strict=True):
            sequence, token = generation.sequence, sampled[row]
            if sequence.request.request_id in failed:
                continue
            if (error := token.error) is not None:
                failed.add(sequence.request.request_id)
                if error.code == NON_FINITE:
                    sequence.is_spoilt = True
                    peers = [self._state.fleet.peer(span.holder) for span in step.batch.spans]
                    text = f"{error.message}. Its step was attended by {', '.join(peers)}"
                    error = RequestError(text, code=NON_FINITE)
                drawn.append(Drawn(sequence, error=error))
                continue
            stats.num_output_tokens += 1
            if generation.first_token_s is None:
                generation.first_token_s = now
                if not generation.num_known:
                    stats.ttft.add(now - generation.submitted_s)
            generation.last_token_s = now
            drawn.append(Drawn(sequence, token.token_id, generation.append(token)))
        return tuple(drawn)


def _rows_of(chunks: Seq[Chunk], wanted: Seq[Chunk]) -> Seq[int]:
    """Return the places of wanted chunks among all."""
    if len(wanted) == len(chunks):
        return range(len(chunks))
    ids = {chunk.sequence.sequence_id for chunk in wanted}
    return [row for row, chunk in enumerate(chunks) if chunk.sequence.sequence_id in ids]

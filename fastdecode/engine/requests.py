"""Requests that an engine has not finished yet: what their sequences have generated so far."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.delta import Delta, Listener
from fastdecode.core.errors import FastDecodeError, RequestError
from fastdecode.core.holders import SequenceId
from fastdecode.core.sequence import FinishReason, Request, Sequence, TokenLogprob
from fastdecode.engine.stats import EngineStats
from fastdecode.engine.step.batch import StepBatch
from fastdecode.schedule.life.events import Drawn
from fastdecode.schedule.plan import Chunk
from fastdecode.text.codec import SequenceText, TextCodec
from fastdecode.text.grammars import GrammarMasks
from sworker.sampling.sampler import NON_FINITE, SampledToken, SamplingState, token_logprob


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
        """Take in a token. Returns why the sequence is over, if the token says so."""
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
        """What is new since the last one; all that is left if the sequence is over."""
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
class PromptLogprobs:
    """A prompt's log-probabilities, as far as they are known."""

    request: Request
    steps: dict[int, TokenLogprob] = field(default_factory=dict)
    """Keys are places in the prompt, from 1: the first token has none."""
    is_reported: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.steps) == len(self.request.prompt_token_ids) - 1

    def take(self) -> tuple[TokenLogprob | None, ...] | None:
        """All of them, the first of which is None; they are reported once."""
        if self.is_reported or not self.is_complete:
            return None
        self.is_reported = True
        return (None, *(self.steps[place] for place in sorted(self.steps)))


@dataclass(frozen=True)
class AskedRows:
    """Rows of one step whose next tokens are a prompt's."""

    rows: NDArray[np.int64]  # [P], among the step's rows that were asked for
    tokens: NDArray[np.int64]  # [P], what follows
    owners: tuple[tuple[PromptLogprobs, int], ...]
    """[P], whose, and the place in its prompt."""
    chunks: tuple[Chunk, ...]  # [P], whose rows they are

    @property
    def count(self) -> int:
        """The most likeliest tokens that any of them wants."""
        return max(owner.request.params.prompt_logprobs or 0 for owner, _ in self.owners)


class PromptQuestions:
    """What requests that aren't over want to know of their prompts."""

    def __init__(self) -> None:
        self._open: dict[str, PromptLogprobs] = {}

    def add(self, request: Request) -> PromptLogprobs:
        """One that wants some has been submitted."""
        asked = PromptLogprobs(request)
        if not asked.is_complete:
            self._open[request.request_id] = asked
        return asked

    def forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def asks(self, batch: StepBatch) -> NDArray[np.bool_] | None:
        """Return [N] which chunks' rows of a step are asked for. None if none are."""
        if not self._open:
            return None
        return np.array(
            [
                chunk.sequence.request.request_id in self._open
                and chunk.first < chunk.sequence.num_prompt_tokens - 1
                for chunk in batch.chunks
            ]
        )

    def rows(self, batch: StepBatch) -> AskedRows | None:
        """Return the asked rows of a step. None if no request wants them any more."""
        assert batch.asks is not None
        owners: list[tuple[PromptLogprobs, int]] = []
        rows: list[int] = []
        chunks: list[Chunk] = []
        row = 0
        for chunk, is_asked in zip(batch.chunks, batch.asks.tolist(), strict=True):
            if not is_asked:
                continue
            asked = self._open.get(chunk.sequence.request.request_id)
            for place in range(chunk.first + 1, chunk.first + 1 + chunk.num_tokens):
                is_new = asked is not None and place not in asked.steps
                if asked is not None and is_new and place < len(asked.request.prompt_token_ids):
                    owners.append((asked, place))
                    rows.append(row)
                    chunks.append(chunk)
                row += 1
        if not rows:
            return None
        tokens = [owner.request.prompt_token_ids[place] for owner, place in owners]
        return AskedRows(
            np.array(rows, np.int64), np.array(tokens, np.int64), tuple(owners), tuple(chunks)
        )

    def take_in(self, rows: AskedRows, found: Seq[Seq[float]], wanted: Seq[Chunk]) -> None:
        """Take in log-probabilities. No more is asked of prompts that are complete then.

        Args:
            found: what ``prompt_logprobs`` gave, on the host.
            wanted: chunks whose rows mean something: they lost no R-worker.
        """
        ids = {chunk.sequence.sequence_id for chunk in wanted}
        for (owner, place), chunk, token, numbers in zip(
            rows.owners, rows.chunks, rows.tokens.tolist(), found, strict=True
        ):
            if chunk.sequence.sequence_id in ids:
                count = owner.request.params.prompt_logprobs or 0
                owner.steps[place] = token_logprob(token, numbers, count)
                if owner.is_complete:
                    self.forget(owner.request.request_id)


@dataclass(eq=False)
class Group:
    """A request and its sequences."""

    request: Request
    generations: list[Generation]
    listener: Listener | None
    num_unfinished: int
    prompt_logprobs: PromptLogprobs | None = None

    def tell(self, generation: Generation, reason: FinishReason | None) -> None:
        """Tell the listener of one more token; with a reason, of the last one."""
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
        eos_token_ids: any of them ends a sequence, unless the request ignores EOS.
    """

    def __init__(
        self, codec: TextCodec, eos_token_ids: tuple[int, ...], vocab_size: int, masks: GrammarMasks
    ) -> None:
        self._masks = masks
        self.prompt_questions: PromptQuestions | None = None  # until a request has some
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
        """A request that has just been submitted."""
        generations = [self._generation(sequence, now) for sequence in sequences]
        group = Group(request, generations, listener, len(generations))
        if request.params.prompt_logprobs is not None:
            self.prompt_questions = self.prompt_questions or PromptQuestions()
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
        """What the chunks' sequences have generated."""
        known = self._generations
        return [known[chunk.sequence.sequence_id] for chunk in chunks]

    def accept(
        self,
        generations: Iterable[Generation],
        sampled: Iterable[SampledToken],
        stats: EngineStats,
        now: float,
        peers: Iterable[str] = (),
    ) -> tuple[Drawn, ...]:
        """Take in the tokens drawn just now. One that met an error ends its request: its
        siblings get none. ``peers``: R-workers of the step."""
        drawn: list[Drawn] = []
        failed: set[str] = set()
        for generation, token in zip(generations, sampled, strict=True):
            sequence = generation.sequence
            if sequence.request.request_id in failed:
                continue
            if token.error is not None:
                failed.add(sequence.request.request_id)
                peers = list(peers)
                drawn.append(_failed(sequence, token.error, peers))
                continue
            stats.num_output_tokens += 1
            if generation.first_token_s is None:
                generation.first_token_s = now
                if not generation.num_known:
                    stats.ttft.add(now - generation.submitted_s)
            generation.last_token_s = now
            reason = generation.append(token)
            drawn.append(Drawn(sequence, token.token_id, reason))
        return tuple(drawn)

    def tell(self, drawn: Iterable[Drawn]) -> None:
        """The lifecycle has taken in what was drawn: tell whoever listens. Of
        those that are over it told already."""
        for one in drawn:
            generation = self._generations.get(one.sequence.sequence_id)
            if generation is not None and one.error is None:
                group = self._groups[one.sequence.request.request_id]
                if group.listener is not None and group.listener.every_step:
                    group.tell(generation, None)

    def say(self, delta: Delta) -> None:
        """Tell whoever listens something about a request that is no token."""
        group = self._groups.get(delta.request_id)
        if group is not None and group.listener is not None:
            group.listener.tell(delta)

    def finish(self, sequence: Sequence, reason: FinishReason, stats: EngineStats) -> None:
        """A sequence is over, and its request, once all of them are."""
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
        """A request ends before its time."""
        group = self._groups.pop(request_id)
        if self.prompt_questions is not None:
            self.prompt_questions.forget(request_id)
        for generation in group.generations:
            self._generations.pop(generation.sequence.sequence_id, None)
        return group

    def fail_all(self, error: FastDecodeError) -> None:
        for request_id in self.ids:
            self.forget(request_id).fail(error)


def _failed(sequence: Sequence, error: RequestError, peers: Iterable[str]) -> Drawn:
    if error.code == NON_FINITE:
        sequence.is_spoilt = True
        text = f"{error.message}. Its step was attended by {', '.join(peers)}"
        error = RequestError(text, code=NON_FINITE)
    return Drawn(sequence, error=error)

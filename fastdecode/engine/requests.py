"""Requests that an engine has not finished yet: what their sequences have generated so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fastdecode.core.delta import Delta
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.holders import SequenceId
from fastdecode.core.sequence import (
    Completion,
    FinishReason,
    Request,
    RequestOutput,
    Sequence,
    TokenLogprob,
)
from fastdecode.engine.stats import EngineStats
from fastdecode.schedule.life.events import Drawn
from fastdecode.text.codec import SequenceText, TextCodec
from sworker.sampler import NON_FINITE, SampledToken, SamplingState


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
    num_told: int = 0
    """Tokens that deltas were made of."""

    @classmethod
    def of(
        cls,
        sequence: Sequence,
        codec: TextCodec,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        now: float,
    ) -> Generation:
        """Of a sequence that has just been submitted."""
        request = sequence.request
        sampling = SamplingState(
            params=request.params,
            seed=request.seed,
            prompt_token_ids=request.prompt_token_ids,
            eos_token_ids=eos_token_ids,
            vocab_size=vocab_size,
            sample_index=sequence.index,
        )
        return cls(
            sequence, sampling, codec.sequence_text(request.params, request.prompt_token_ids), now
        )

    def append(self, drawn: SampledToken, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """Take in a token. Returns why the sequence is over, if the token says so."""
        params, token = self.sequence.request.params, drawn.token_id
        self.sampling.observe(token)
        if drawn.logprob is not None:
            self.logprobs.append(drawn.logprob)
        if (token in eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids:
            return "stop"
        return "stop" if self.text.append(token) else None

    def delta(self, reason: FinishReason | None) -> Delta:
        """What is new since the last one; all that is left if the sequence is over."""
        sequence, first = self.sequence, self.num_told
        self.num_told = sequence.num_generated
        if reason is not None:
            self.text.finish()
        return Delta(
            request_id=sequence.request.request_id,
            index=sequence.index,
            text=self.text.take(),
            token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens + first :]),
            logprobs=tuple(self.logprobs[first:])
            if sequence.request.params.logprobs is not None
            else None,
            finish_reason=reason,
        )

    def completion(self, reason: FinishReason) -> Completion:
        """What the sequence has come to; once."""
        sequence = self.sequence
        return Completion(
            index=sequence.index,
            text=self.text.finish(),
            token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens :]),
            finish_reason=reason,
            logprobs=tuple(self.logprobs) if sequence.request.params.logprobs is not None else None,
        )


@dataclass(frozen=True)
class Listener:
    """Who is told what a request says."""

    tell: Callable[[Delta], None]
    every_step: bool
    """Be told after every step; or of each sequence only once it is over."""


@dataclass(eq=False)
class Group:
    """A request, and those of its completions that are done."""

    request: Request
    prompt: str | None
    generations: list[Generation]
    completions: list[Completion] = field(default_factory=list)
    listener: Listener | None = None

    def tell(self, generation: Generation, reason: FinishReason | None) -> None:
        """One of its sequences has one more token; with a reason, its last."""
        if self.listener is not None and (self.listener.every_step or reason is not None):
            self.listener.tell(generation.delta(reason))

    def output(self) -> RequestOutput:
        """What is given back once all completions are there."""
        completions = tuple(sorted(self.completions, key=lambda completion: completion.index))
        return RequestOutput(
            self.request.request_id, self.prompt, self.request.prompt_token_ids, completions
        )

    def failed(self, error: FastDecodeError) -> RequestOutput:
        """What is given back when the request ends with an error."""
        if self.listener is not None:
            self.listener.tell(Delta(self.request.request_id, 0, error=error))
        return RequestOutput(
            self.request.request_id, self.prompt, self.request.prompt_token_ids, error=error
        )


class Requests:
    """All that an engine has not finished yet.

    Args:
        codec: between text and token ids.
        eos_token_ids: any of them ends a sequence, unless the request ignores
            EOS.
        vocab_size: of the model.
    """

    def __init__(self, codec: TextCodec, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
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
        self,
        request: Request,
        prompt: str | None,
        sequences: Iterable[Sequence],
        now: float,
        listener: Listener | None = None,
    ) -> None:
        """A request that has just been submitted."""
        generations = [
            Generation.of(sequence, self._codec, self._eos_token_ids, self._vocab_size, now)
            for sequence in sequences
        ]
        self._groups[request.request_id] = Group(request, prompt, generations, listener=listener)
        self._generations.update((one.sequence.sequence_id, one) for one in generations)

    def generation(self, sequence: Sequence) -> Generation:
        """What a sequence has generated."""
        return self._generations[sequence.sequence_id]

    def accept(
        self,
        generations: Iterable[Generation],
        sampled: Iterable[SampledToken],
        stats: EngineStats,
        now: float,
    ) -> tuple[Drawn, ...]:
        """Take in the tokens drawn just now. One that met an error ends its
        request: its siblings get none. But logits that aren't finite are
        believed only the second time (``engine.step.checks``)."""
        drawn: list[Drawn] = []
        failed: set[str] = set()
        for generation, token in zip(generations, sampled, strict=True):
            sequence = generation.sequence
            if sequence.request.request_id in failed:
                continue
            if token.error is not None:
                if token.error.code == NON_FINITE and not sequence.is_checked:
                    drawn.append(Drawn(sequence, is_doubted=True))
                    continue
                failed.add(sequence.request.request_id)
                drawn.append(Drawn(sequence, error=token.error))
                continue
            stats.num_output_tokens += 1
            if generation.first_token_s is None:
                generation.first_token_s = now
                stats.ttft.add(now - generation.submitted_s)
            generation.last_token_s = now
            reason = generation.append(token, self._eos_token_ids)
            drawn.append(Drawn(sequence, token.token_id, reason))
        return tuple(drawn)

    def tell(self, drawn: Iterable[Drawn]) -> None:
        """The lifecycle has taken in what was drawn: tell whoever listens. Of
        those that are over it told already."""
        for one in drawn:
            generation = self._generations.get(one.sequence.sequence_id)
            if generation is not None and one.error is None and not one.is_doubted:
                self._groups[one.sequence.request.request_id].tell(generation, None)

    def finish(
        self, sequence: Sequence, reason: FinishReason, stats: EngineStats
    ) -> RequestOutput | None:
        """A sequence is over. Returns its request's output once all of them are."""
        generation = self._generations.pop(sequence.sequence_id)
        if generation.first_token_s is not None and sequence.num_generated > 1:
            stats.tpot.add(
                (generation.last_token_s - generation.first_token_s) / (sequence.num_generated - 1)
            )
        group = self._groups[sequence.request.request_id]
        group.tell(generation, reason)
        group.completions.append(generation.completion(reason))
        if len(group.completions) < group.request.params.n:
            return None
        return self._groups.pop(group.request.request_id).output()

    def forget(self, request_id: str) -> Group:
        """A request ends before its time."""
        group = self._groups.pop(request_id)
        for generation in group.generations:
            self._generations.pop(generation.sequence.sequence_id, None)
        return group

    def fail_all(self, error: FastDecodeError) -> list[RequestOutput]:
        """End all of them with an error."""
        outputs = [group.failed(error) for group in self._groups.values()]
        self._groups.clear()
        self._generations.clear()
        return outputs

"""Requests and sequences that an engine has not finished yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fastdecode.core.delta import Delta
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.sequence import Completion, FinishReason, Request, RequestOutput, Sequence, TokenLogprob
from fastdecode.text.codec import SequenceText, TextCodec
from sworker.sampler import SampledToken, SamplingState


@dataclass(eq=False)
class Run:
    """A live sequence, and what it has said so far."""

    sequence: Sequence
    sampling: SamplingState
    text: SequenceText
    submitted_s: float
    first_token_s: float | None = None
    held: tuple[tuple[int, int], ...] = ()
    """Where its parts are open: R-worker, and the id that it knows the part by. One where it isn't split."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_told: int = 0
    """Tokens that deltas were made of."""

    @classmethod
    def of(
        cls, sequence: Sequence, codec: TextCodec, eos_token_ids: tuple[int, ...], vocab_size: int, now: float
    ) -> Run:
        """A sequence that has just been submitted."""
        request = sequence.request
        sampling = SamplingState(
            params=request.params,
            seed=request.seed,
            prompt_token_ids=request.prompt_token_ids,
            eos_token_ids=eos_token_ids,
            vocab_size=vocab_size,
            sample_index=sequence.index,
        )
        return cls(sequence, sampling, codec.sequence_text(request.params, request.prompt_token_ids), now)

    def is_on(self, worker: int) -> bool:
        """Whether the R-worker holds a part of it."""
        return any(holder == worker for holder, _ in self.held)

    def append(self, drawn: SampledToken, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """Append a token. Returns why the sequence is over, if that ended it."""
        sequence, params = self.sequence, self.sequence.request.params
        token = drawn.token_id
        sequence.token_ids.append(token)
        self.sampling.observe(token)
        if drawn.logprob is not None:
            self.logprobs.append(drawn.logprob)
        if (token in eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids:
            return "stop"
        if self.text.append(token):
            return "stop"
        return "length" if sequence.num_generated >= sequence.request.max_tokens else None

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
            logprobs=tuple(self.logprobs[first:]) if sequence.request.params.logprobs is not None else None,
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
    """A live request, and those of its completions that are done."""

    request: Request
    prompt: str | None
    runs: list[Run]
    completions: list[Completion] = field(default_factory=list)
    listener: Listener | None = None

    def tell(self, run: Run, reason: FinishReason | None) -> None:
        """One of its sequences has one more token; with a reason, its last."""
        if self.listener is not None and (self.listener.every_step or reason is not None):
            self.listener.tell(run.delta(reason))

    def output(self) -> RequestOutput:
        """What is given back once all completions are there."""
        completions = tuple(sorted(self.completions, key=lambda completion: completion.index))
        return RequestOutput(self.request.request_id, self.prompt, self.request.prompt_token_ids, completions)

    def failed(self, error: FastDecodeError) -> RequestOutput:
        """What is given back when the request ends with an error."""
        if self.listener is not None:
            self.listener.tell(Delta(self.request.request_id, 0, error=error))
        return RequestOutput(self.request.request_id, self.prompt, self.request.prompt_token_ids, error=error)

"""Requests and sequences that an engine has not finished yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastdecode.core.errors import FastDecodeError
from fastdecode.core.sequence import Completion, Request, RequestOutput, Sequence, TokenLogprob
from fastdecode.engine.text import SequenceText
from fastdecode.schedule.scheduler import Start
from fastdecode.wire.messages import ForkSequence, OpenSequence
from sworker.sampler import SamplingState


@dataclass(eq=False)
class Run:
    """A live sequence, and what it has said so far."""

    sequence: Sequence
    sampling: SamplingState
    text: SequenceText
    submitted_s: float
    first_token_s: float | None = None
    is_open: bool = False
    """Its R-worker has accepted it."""
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(eq=False)
class Group:
    """A live request, and those of its completions that are done."""

    request: Request
    prompt: str | None
    runs: list[Run]
    completions: list[Completion] = field(default_factory=list)

    def failed(self, error: FastDecodeError) -> RequestOutput:
        """What is given back when the request ends with an error."""
        return RequestOutput(self.request.request_id, self.prompt, self.request.prompt_token_ids, error=error)


def opening(start: Start) -> OpenSequence | ForkSequence:
    """What is sent to start a sequence on its R-worker."""
    sequence_id = start.sequence.sequence_id
    reserve = start.sequence.max_cached_tokens if start.num_reserved_tokens is None else start.num_reserved_tokens
    if start.parent is None:
        return OpenSequence(sequence_id, reserve)
    return ForkSequence(start.parent.sequence_id, sequence_id, start.num_shared_tokens, reserve)

"""One request on its way through instances: what it has reported so far. Whichever
instance continues it, nothing is reported twice."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum

from fastdecode.core.delta import Delta, Listener
from fastdecode.core.errors import FastDecodeError, ProtocolError
from fastdecode.core.holders import KVSource
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.sequence import Request
from fastdecode.schedule.dispatch import DispatchJob
from fastdecode.schedule.kept_prefixes import BlockChain


class RequestStage(Enum):
    """Stage of a request."""

    QUEUED = "queued"  # no instance has it
    PREFILL = "prefill"
    OFFERED = "offered"  # its prompt is done, and waits for an instance that has room
    WAITING = "waiting"  # it waits for an instance that runs its prompt and continues it
    DECODE = "decode"
    OVER = "over"


@dataclass
class _Output:
    """Reported output of a sequence, over all runs."""

    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    is_over: bool = False
    kept_at: tuple[KVSource, ...] = ()  # where its blocks may be read


@dataclass(eq=False)
class InstanceRun:
    """A request at an instance."""

    asked: Request  # its id is a name that no other run has
    instance: int  # its number
    num_tokens: Counter[int] = field(default_factory=Counter)
    """Tokens and characters of each sequence from this run."""
    num_chars: Counter[int] = field(default_factory=Counter)
    over: set[int] = field(default_factory=set)  # sequences

    def check(self, delta: Delta, spec: ModelSpec) -> None:
        """Raise ProtocolError if an instance that runs this request can't have this output."""
        asked, index, tokens = self.asked, delta.index, delta.token_ids
        params, prompt = asked.params, asked.prompt_token_ids
        if index >= params.n:
            raise _lie(f"sequence {index} of {params.n}")
        if index in self.over and (tokens or delta.text or delta.finish_reason):
            raise _lie("a sequence goes on after its end")
        if (num_tokens := self.num_tokens[index] + len(tokens)) > asked.max_tokens:
            raise _lie(f"more than the {asked.max_tokens} tokens that were asked for")
        is_short = asked.hands_over or num_tokens < asked.max_tokens
        if delta.finish_reason == "length" and is_short:
            raise _lie("a sequence is as long as it may be, and isn't")
        if any(token >= spec.vocab_size for token in tokens):
            raise _lie(f"a token beyond the vocabulary of {spec.vocab_size}")
        drawn = tokens[len(tokens) - len(delta.logprobs or ()) :]
        if [step.token_id for step in delta.logprobs or ()] != list(drawn):
            raise _lie("logprobs of other tokens")
        if delta.prompt_logprobs is not None and len(delta.prompt_logprobs) != len(prompt):
            raise _lie("logprobs of another prompt")
        for source in delta.sources:
            if source.is_held and not asked.hands_over:
                raise _lie("a prompt is on offer that isn't to be handed over")
            is_within = source.end <= len(prompt) + asked.max_tokens * (not source.is_held)
            is_within &= source.first_head + source.num_heads <= spec.num_kv_heads
            if not is_within or source.first_layer + source.num_layers > spec.num_layers:
                raise _lie("more is on offer than the request has")


def _lie(what: str) -> ProtocolError:
    return ProtocolError(f"says of a request what can't be: {what}")


@dataclass(eq=False)
class RoutedRequest:
    """One request, and all that was reported of it."""

    request: Request
    listener: Listener | None
    job: DispatchJob
    stage: RequestStage = RequestStage.QUEUED
    offering: InstanceRun | None = None  # where its prompt is run, or kept
    decoding: InstanceRun | None = None
    sources: tuple[KVSource, ...] = ()  # sources of its whole prompt
    borrowed: tuple[KVSource, ...] = ()
    """Sources of its prompt's first tokens, which another instance may keep."""
    failure: FastDecodeError | None = None
    """Why the first instance that failed it did. None if none has."""
    said: list[_Output] = field(init=False)
    prompt_blocks: BlockChain | None = None
    """Blocks of its prompt. None until kept ones are looked up."""
    arrived_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None  # when its first token arrived, and its last so far
    last_s: float = 0.0

    def __post_init__(self) -> None:
        self.said = [_Output() for _ in range(self.request.params.n)]

    @property
    def num_left(self) -> int:
        """Sequences that aren't over."""
        return sum(not said.is_over for said in self.said)

    @property
    def has_said(self) -> bool:
        """Return whether any token of it is known."""
        return any(said.token_ids for said in self.said)

    def prompt_run(self, name: str) -> Request:
        """Return what an instance is asked that only runs its prompt."""
        prompt = replace(self.request, hands_over=self.request.max_tokens > 1, max_tokens=1)
        return replace(prompt, request_id=name, sources=self.borrowed)

    def whole_run(self, name: str) -> Request:
        """Return what an instance is asked that continues it to the end. Sequences that are over
        draw their last token once more, which isn't reported."""
        drawn = {
            index: tuple(said.token_ids[: len(said.token_ids) - said.is_over])
            for index, said in enumerate(self.said)
        }
        known = {index: tokens for index, tokens in drawn.items() if tokens}
        known = {**self.request.drawn, **known}
        sources = self.sources or self.borrowed
        return replace(self.request, request_id=name, drawn=known, sources=sources)

    def tell(self, run: InstanceRun, delta: Delta) -> None:
        """Report what is new of a run's delta."""
        index, said = delta.index, self.said[delta.index]
        first_token, first_char = run.num_tokens[index], run.num_chars[index]
        run.num_tokens[index] += len(delta.token_ids)
        run.num_chars[index] += len(delta.text)
        said.kept_at = delta.sources or said.kept_at
        if delta.finish_reason is not None:
            run.over.add(index)
        if said.is_over:
            return
        token_ids = delta.token_ids[max(0, len(said.token_ids) - first_token) :]
        text = delta.text[max(0, said.num_chars - first_char) :]
        if not (token_ids or text or delta.finish_reason):
            return
        logprobs, is_logged = delta.logprobs or (), self.request.params.logprobs is not None
        known = max(len(said.token_ids), len(self.request.drawn.get(index, ())))
        num_drawn = max(0, run.num_tokens[index] - known) * is_logged
        if len(logprobs) < num_drawn or (logprobs and not is_logged):
            raise _lie(f"{len(logprobs)} logprobs of {num_drawn} tokens")
        logprobs = logprobs[len(logprobs) - num_drawn :]
        said.token_ids += token_ids
        said.num_chars += len(text)
        said.is_over = delta.finish_reason is not None
        self.last_s = time.monotonic()
        if token_ids and self.first_s is None:
            self.first_s = self.last_s
        if self.listener is None:
            return
        told = Delta(
            self.request.request_id,
            index,
            text,
            token_ids,
            None if delta.logprobs is None else logprobs,
            delta.finish_reason,
            num_cached_tokens=delta.num_cached_tokens,
            stop_reason=delta.stop_reason,
            prompt_logprobs=delta.prompt_logprobs,
        )
        self.listener.tell(told)

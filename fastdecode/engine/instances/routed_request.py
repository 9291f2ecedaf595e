"""One request on its way through instances: what it has reported so far. Whichever
instance continues it, nothing is reported twice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from fastdecode.core.delta import Delta, Listener
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.holders import KVSource
from fastdecode.core.sequence import Request
from fastdecode.engine.instances.claims import Claims
from fastdecode.schedule.dispatch import DispatchJob
from fastdecode.schedule.kept_prefixes import BlockChain


class RequestStage(Enum):
    """Where a request is."""

    QUEUED = "queued"
    """No instance has it."""
    PREFILL = "prefill"
    OFFERED = "offered"
    """Its prompt is done, and waits for an instance that has room."""
    WAITING = "waiting"
    """It waits for an instance that runs its prompt and goes on with it."""
    DECODE = "decode"
    OVER = "over"


@dataclass
class _RunProgress:
    """Of what one run of a sequence says."""

    num_tokens: int = 0
    num_chars: int = 0


@dataclass
class _Reported:
    """What a sequence has said to whoever reads it."""

    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    is_over: bool = False
    kept_at: tuple[KVSource, ...] = ()
    """Where its blocks may be read."""


@dataclass(eq=False)
class InstanceRun:
    """A request at an instance, by the name that it has there."""

    name: str
    instance: int
    claims: Claims | None = None
    """What it has said; None: it hasn't been asked for yet."""
    seen: dict[int, _RunProgress] = field(default_factory=dict)


class RequestObserver(Protocol):
    """Is told of requests as they go; by their controller's thread, and never waits."""

    def arrived(self, routed: RoutedRequest) -> None:
        """It has been queued."""

    def told(self, routed: RoutedRequest) -> None:
        """An instance has said something of it."""

    def over(self, routed: RoutedRequest) -> None:
        """It has come to its end."""


@dataclass(eq=False)
class RoutedRequest:
    """One request.

    Args:
        listener: who reads it.
        job: the same, as far as dispatch is concerned.
    """

    request: Request
    listener: Listener | None
    job: DispatchJob
    stage: RequestStage = RequestStage.QUEUED
    offering: InstanceRun | None = None
    """Where its prompt is run, or kept."""
    decoding: InstanceRun | None = None
    sources: tuple[KVSource, ...] = ()
    """Of its whole prompt."""
    borrowed: tuple[KVSource, ...] = ()
    """Of its prompt's first tokens, which another instance may keep."""
    failure: FastDecodeError | None = None
    """Why the first instance that failed it did; None: none has."""
    said: list[_Reported] = field(init=False)
    prompt_blocks: BlockChain | None = None
    """Of its prompt; None: nobody has asked yet what is kept of it."""
    is_observed: bool = False
    """Whether it is told what it says after every step, whoever reads it."""
    arrived_s: float | None = None
    """These are its observer's."""
    first_s: float | None = None
    last_s: float | None = None

    def __post_init__(self) -> None:
        self.said = [_Reported() for _ in range(self.request.params.n)]

    @property
    def num_left(self) -> int:
        """Sequences that aren't over."""
        return sum(not said.is_over for said in self.said)

    @property
    def is_watched(self) -> bool:
        """Whether it is read after every step."""
        return self.is_observed or (self.listener is not None and self.listener.every_step)

    def run_of(self, delta: Delta) -> InstanceRun | None:
        """Which of its own runs says so; None: none any more."""
        for run in (self.offering, self.decoding):
            if run is not None and run.name == delta.request_id:
                return run
        return None

    @property
    def is_over(self) -> bool:
        """Whether all of its sequences are."""
        return all(said.is_over for said in self.said)

    @property
    def has_said(self) -> bool:
        """Whether any token of it is known."""
        return any(said.token_ids for said in self.said)

    def fail_at(self, instance: int, error: FastDecodeError) -> None:
        """An instance has failed it, and isn't given it again."""
        self.failure = self.failure or error
        self.job = replace(self.job, not_at=self.job.not_at | {instance})

    def prompt_run(self, name: str) -> Request:
        """What an instance is asked that runs its prompt, and no more."""
        hands_over = self.request.max_tokens > 1
        return replace(
            self.request,
            request_id=name,
            max_tokens=1,
            hands_over=hands_over,
            sources=self.borrowed,
        )

    def whole_run(self, name: str) -> Request:
        """What an instance is asked that goes on with it to the end. Sequences
        that are over draw their last token once more, which nobody is told."""
        drawn = {
            index: tuple(said.token_ids[: len(said.token_ids) - said.is_over])
            for index, said in enumerate(self.said)
        }
        known = {index: tokens for index, tokens in drawn.items() if tokens}
        known = {**self.request.drawn, **known}
        sources = self.sources or self.borrowed
        return replace(self.request, request_id=name, drawn=known, sources=sources)

    def tell(self, delta: Delta) -> None:
        """A run has said something: pass on what of it is new."""
        run = self.run_of(delta)
        if run is None:
            return
        if delta.sources:
            self.said[delta.index].kept_at = delta.sources
        said, seen = self.said[delta.index], run.seen.setdefault(delta.index, _RunProgress())
        first_token, first_char = seen.num_tokens, seen.num_chars
        seen.num_tokens += len(delta.token_ids)
        seen.num_chars += len(delta.text)
        if said.is_over:
            return
        token_ids = delta.token_ids[max(0, len(said.token_ids) - first_token) :]
        text = delta.text[max(0, said.num_chars - first_char) :]
        if not (token_ids or text or delta.finish_reason):
            return
        said.token_ids += token_ids
        said.num_chars += len(text)
        said.is_over = delta.finish_reason is not None
        if self.listener is not None:
            self.listener.tell(self._delta(delta, token_ids, text))

    def _delta(self, delta: Delta, token_ids: tuple[int, ...], text: str) -> Delta:
        logprobs = delta.logprobs
        if logprobs is not None:
            logprobs = logprobs[len(logprobs) - len(token_ids) :]
        return Delta(
            self.request.request_id,
            delta.index,
            text,
            token_ids,
            logprobs,
            delta.finish_reason,
            num_cached_tokens=delta.num_cached_tokens,
            stop_reason=delta.stop_reason,
            prompt_logprobs=delta.prompt_logprobs,
        )

"""Tokens as they come: what a sequence has said since one was told last, and
how that folds into an output."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Annotated, Final

from msgspec import Meta

from fastdecode.core.errors import FastDecodeError
from fastdecode.core.sequence import (
    MAX_N,
    Completion,
    Count,
    FinishReason,
    RequestOutput,
    Sources,
    TokenId,
    TokenIds,
    TokenLogprob,
)

CANCELLED = "cancelled"
"""The code of the error that a request ends with when it is taken back."""
MOST_VALUES: Final = 1_000_000
"""Of the deltas of one message: as JSON, some 30 bytes a value."""


@dataclass(frozen=True)
class Delta:
    """What is new of one sequence. Nothing that was sent is ever taken back."""

    request_id: str
    index: Annotated[int, Meta(ge=0, lt=MAX_N)]
    """Which of the request's ``n``."""
    text: str = ""
    """Ends in no half character, and in nothing that may become a stop string."""
    token_ids: TokenIds = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One a token, if the request wants them."""
    finish_reason: FinishReason | None = None
    """Given with the sequence's last delta."""
    error: FastDecodeError | None = None
    """Ends the whole request, all of its sequences."""
    num_cached_tokens: Count = 0
    """Tokens of the prompt that this sequence didn't run; given with its last delta."""
    sources: Sources = ()
    """Where blocks of its tokens may be read. If they are held, the request is handed over, and
    they are held until it is cancelled."""
    has_fetched: bool = False
    """The offered part of the prompt has been fetched: its source may release it."""
    fetch_failed: bool = False
    """It couldn't be fetched: its prompt is run again."""
    stop_reason: TokenId | str | None = None
    """Given with ``finish_reason``: see ``Completion``."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Of the request's prompt, if it wants them; sent once, with the first of its tokens."""

    @property
    def num_values(self) -> int:
        """Tokens and log-probabilities in it: what a message that carries it grows with."""
        steps = (*(self.logprobs or ()), *(self.prompt_logprobs or ()))
        return len(self.token_ids) + sum([1 + len(step.top) for step in steps if step is not None])

    def then(self, later: Delta) -> Delta:
        """This and the next one of the same sequence as one."""
        logprobs = (
            self.logprobs if later.logprobs is None else (*(self.logprobs or ()), *later.logprobs)
        )
        return Delta(
            self.request_id,
            self.index,
            self.text + later.text,
            self.token_ids + later.token_ids,
            logprobs,
            later.finish_reason or self.finish_reason,
            later.error,
            later.num_cached_tokens or self.num_cached_tokens,
            later.sources or self.sources,
            later.has_fetched or self.has_fetched,
            later.fetch_failed or self.fetch_failed,
            self.stop_reason if later.stop_reason is None else later.stop_reason,
            self.prompt_logprobs or later.prompt_logprobs,
        )


def parted(deltas: Iterable[Delta], most_values: int = MOST_VALUES) -> Iterator[list[Delta]]:
    """All deltas in turn, as lists for messages of a bounded size.

    Args:
        most_values: of the deltas of a list together, unless it is only one delta.
    """
    part: list[Delta] = []
    num_values = 0
    for delta in deltas:
        num_values += delta.num_values
        if part and num_values > most_values:
            yield part
            part, num_values = [], delta.num_values
        part.append(delta)
    if part:
        yield part


@dataclass(frozen=True)
class Listener:
    """Who is told what a request says."""

    tell: Callable[[Delta], None]
    every_step: bool
    """Be told after every step; or of each sequence only once it is over."""


@dataclass(eq=False)
class OutputFold:
    """One request's deltas, put together.

    Args:
        prompt: given back with the output.
        num_sequences: the request's ``n``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    num_sequences: int
    _parts: dict[int, list[Delta]] = field(default_factory=dict)
    _completions: list[Completion] = field(default_factory=list)
    _num_cached_tokens: int = 0
    _prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def num_unfinished(self) -> int:
        return self.num_sequences - len(self._completions)

    def add(self, delta: Delta) -> RequestOutput | None:
        """One more. Returns the output if that was the request's last."""
        if delta.error is not None:
            return self.failed(delta.error)
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        parts = self._parts.setdefault(delta.index, [])
        parts.append(delta)
        if delta.finish_reason is not None:
            del self._parts[delta.index]
            self._completions.append(_completion(parts, delta.finish_reason))
            self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
        if self.num_unfinished:
            return None
        completions = tuple(sorted(self._completions, key=lambda completion: completion.index))
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            completions,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )

    def failed(self, error: FastDecodeError) -> RequestOutput:
        """What the request comes to when it ends with an error."""
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, error=error)


def _completion(parts: list[Delta], reason: FinishReason) -> Completion:
    index = parts[0].index
    text = "".join([part.text for part in parts])
    token_ids = tuple([token for part in parts for token in part.token_ids])
    stop_reason = parts[-1].stop_reason
    if parts[-1].logprobs is None:
        return Completion(index, text, token_ids, reason, None, stop_reason)
    logprobs = tuple([step for part in parts for step in part.logprobs or ()])
    return Completion(index, text, token_ids, reason, logprobs, stop_reason)


class DeltaQueue:
    """Deltas on their way from the thread that owns an engine to one reader.

    A reader that is slow costs the engine nothing: it finds one delta a sequence, however many
    steps were made since it looked. So what waits here is bounded by what the reader has asked
    for and not read yet.

    Args:
        every_step: Deliver deltas after every step; if not, only of sequences that are over.
    """

    def __init__(self, *, every_step: bool = True) -> None:
        self.every_step = every_step
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, int], Pile] = {}
        # An interrupt may end a wait at any moment: these waits are of one call
        # in C, and leave nothing half done.
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._is_woken = False

    def put(self, deltas: Iterable[Delta]) -> None:
        """Add what a step has brought. Never waits for the reader."""
        with self._lock:
            for delta in deltas:
                place = delta.request_id, -1 if delta.error is not None else delta.index
                pile = self._pending.get(place)
                if pile is None:
                    self._pending[place] = Pile([delta])
                else:
                    pile.add(delta)
            if self._is_woken or not self._pending:
                return
            self._is_woken = True
        self._wakes.put(None)

    def take(self, timeout_s: float | None = None) -> list[Delta]:
        """Wait for deltas, for at most ``timeout_s``. Return one for each sequence, its steps
        merged in order; none if the time is over.

        An interrupt (Ctrl-C) ends the wait; the next call continues it."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        taken = self._swap()
        while not taken:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            try:
                self._wakes.get(timeout=left_s)  # perhaps for what was taken before
            except Empty:
                return []
            taken = self._swap()
        return [pile.whole() for pile in taken.values()]

    def _swap(self) -> dict[tuple[str, int], Pile]:
        with self._lock:
            taken, self._pending = self._pending, {}
            self._is_woken = False
        return taken


@dataclass
class Pile:
    """Deltas of one sequence, or an error, that nobody has read yet."""

    deltas: list[Delta]

    def add(self, delta: Delta) -> None:
        """Keeps few: halves of about the same size are joined, so that the work
        for a token stays small."""
        self.deltas.append(delta)
        while len(self.deltas) > 1 and len(self.deltas[-2].token_ids) <= len(
            self.deltas[-1].token_ids
        ):
            later = self.deltas.pop()
            self.deltas[-1] = self.deltas[-1].then(later)

    def whole(self) -> Delta:
        whole = self.deltas[0]
        for later in self.deltas[1:]:
            whole = whole.then(later)
        return whole

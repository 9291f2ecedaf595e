"""What outlives a run that was cut off: which tokens its sequences had, and on
which holders their KV is, as far as that was recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from fastdecode.core.holders import Part, PartId
from fastdecode.core.sequence import Sequence


@dataclass(frozen=True)
class HeldSequence:
    """An unfinished sequence of the run."""

    request_id: str
    index: int
    """Which of the request's ``n``."""
    num_siblings: int
    """Of the request, itself included: ``n``."""
    salt: str
    """Of its KV blocks' keys."""
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    """The prompt, then what was drawn."""
    parts: tuple[Part, ...]
    """Where its KV was, by the names that holders know; none: nowhere."""


@dataclass(frozen=True)
class BegunRequest:
    """What was drawn for an unfinished request."""

    prompt_token_ids: tuple[int, ...]
    drawn: Mapping[int, tuple[int, ...]]
    """By sequence; of those of which something is known."""


class Session(Protocol):
    """A run that can be cut off at any moment and gone on with by another
    process. An engine is told of it, and tells it what happens."""

    @property
    def number(self) -> int:
        """Secret of the run, by which R-workers know who may go on with it."""

    @property
    def is_resumed(self) -> bool:
        """Whether another process began it."""

    @property
    def held(self) -> Seq[HeldSequence]:
        """Sequences that were unfinished then."""

    @property
    def begun(self) -> Mapping[str, BegunRequest]:
        """Requests that were, by their ids."""

    def begin(self) -> None:
        """What was held is taken up. What R-workers know parts by from now on is told anew."""

    def place(self, sequence: Sequence) -> None:
        """A sequence has a place."""

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Sequences have more tokens."""

    @property
    def is_long(self) -> bool:
        """Whether there is more on record than is worth keeping."""

    def condense(self, sequences: Iterable[Sequence]) -> None:
        """Keep no more than what these sequences, all that aren't over, have."""


def begun_requests(held: Iterable[HeldSequence]) -> dict[str, BegunRequest]:
    """What was drawn for the requests of these sequences."""
    drawn: dict[str, dict[int, tuple[int, ...]]] = {}
    prompts: dict[str, tuple[int, ...]] = {}
    for one in held:
        prompts[one.request_id] = one.token_ids[: one.num_prompt_tokens]
        drawn.setdefault(one.request_id, {})[one.index] = one.token_ids[one.num_prompt_tokens :]
    return {name: BegunRequest(prompts[name], own) for name, own in drawn.items()}


def known_tokens(sequence: Sequence) -> list[int]:
    """A sequence's tokens, without one that is still coming."""
    return sequence.token_ids[:-1] if sequence.is_coming else sequence.token_ids


def first_part(sequence: Sequence) -> PartId | None:
    """By which its present place is known from others; None: it has none."""
    return None if sequence.residence is None else sequence.residence.parts[0].part_id

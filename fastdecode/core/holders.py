"""Where the KV cache of a sequence is, as values.

A **holder** is a cache, not a process: an R-worker may serve several, and one may move to another
R-worker. What a holder keeps of a sequence is a **part**: consecutive tokens, all of them where
the sequence is whole. The parts of a sequence together are its **residence**. All but the one that
grows are **closed**. What another engine's R-workers offer of one are its **sources**."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, NewType

from msgspec import Meta

from fastdecode.core.spec import MAX_HEADS, MAX_LAYERS, MAX_SEQUENCE_TOKENS

HolderId = NewType("HolderId", int)
"""A cache; counts from 0."""

SequenceId = NewType("SequenceId", int)
"""A sequence, as the engine counts them."""

PartId = NewType("PartId", int)
"""A part, as its holder knows it: unique among all parts that an engine ever opens."""


class HolderKind(Enum):
    """What a holder is."""

    DEVICE = "device"
    """Memory of the S-worker's own device."""
    R_WORKER = "r-worker"


@dataclass(frozen=True)
class Holder:
    """What a step has to know of a holder."""

    kind: HolderKind
    attends_prompts: bool
    """It attends prompts, past and chunk; else the S-worker attends a chunk and
    merges what is said of its past."""
    answers_at_once: bool
    """It works in the S-worker's own thread: nobody gains by not waiting for it."""
    token_bytes: int
    """What a token costs it, over all layers: memory to keep it, and as much to
    read in every step."""


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a sequence on one holder."""

    part_id: PartId
    holder: HolderId
    first_token: int
    num_tokens: int
    """That there is room for, of which the last part may have cached fewer."""

    @property
    def end(self) -> int:
        """The first token that is none of it any more."""
        return self.first_token + self.num_tokens


@dataclass(frozen=True)
class Residence:
    """All parts of a sequence, of whatever lengths, in the order of their
    tokens. A whole one has a single part. Tokens before the first part are of
    use to nobody any more: no layer sees as far back."""

    parts: tuple[Part, ...]
    num_tokens: int = field(init=False)
    """That there is room for in all, those included that are of no use."""

    def __post_init__(self) -> None:
        assert self.parts
        end = self.parts[0].first_token
        for part in self.parts:
            assert part.first_token == end and part.num_tokens >= 1, "parts follow upon each other"
            end = part.end
        object.__setattr__(self, "num_tokens", end)

    @property
    def holders(self) -> tuple[HolderId, ...]:
        return tuple([part.holder for part in self.parts])

    def index_of(self, token: int) -> int:
        """Which part a token is in; the last one, if there is no room for it yet."""
        for index, part in enumerate(self.parts):
            if token < part.end:
                return index
        return len(self.parts) - 1

    def is_on(self, holder: HolderId) -> bool:
        """Whether the holder has a part, or room for one."""
        return any(part.holder == holder for part in self.parts)

    def grown_to(self, num_tokens: int) -> Residence:
        """With room for so many in all, the last part longer by what is new."""
        *closed, last = self.parts
        return Residence((*closed, replace(last, num_tokens=num_tokens - last.first_token)))


def new_residence(
    holders: Seq[HolderId], sizes: Seq[int], part_ids: Iterator[PartId], first_token: int = 0
) -> Residence:
    """Parts of so many tokens each on these holders, with ids that no part had
    before. ``first_token``: of the first of them."""
    parts: list[Part] = []
    first = first_token
    for holder, num_tokens in zip(holders, sizes, strict=True):
        parts.append(Part(next(part_ids), holder, first, num_tokens))
        first += num_tokens
    return Residence(tuple(parts))


@dataclass(frozen=True)
class KVSource:
    """An R-worker that keeps blocks of some tokens of a sequence, over some layers and KV heads of
    the model."""

    address: Annotated[str, Meta(max_length=1 << 8)]
    """The address at which other R-workers reach it."""
    reading: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    """A secret number of its engine; a reader has to name it."""
    first_token: Annotated[int, Meta(ge=0, le=MAX_SEQUENCE_TOKENS)]
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_SEQUENCE_TOKENS)]
    first_head: Annotated[int, Meta(ge=0, le=MAX_HEADS)]
    num_heads: Annotated[int, Meta(ge=1, le=MAX_HEADS)]
    first_layer: Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
    num_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    is_held: bool = False
    """They stay until the request is cancelled there. Others may have been evicted."""

    def __post_init__(self) -> None:
        if not self.address.isprintable():
            raise ValueError(f"{self.address!r:.80} is not an address")

    @property
    def end(self) -> int:
        """Return the first token after these."""
        return self.first_token + self.num_tokens


def of_first_tokens(sources: tuple[KVSource, ...], num_tokens: int) -> tuple[KVSource, ...]:
    """Return what sources keep of a sequence's first tokens."""
    return tuple(
        replace(source, num_tokens=min(source.end, num_tokens) - source.first_token)
        for source in sources
        if source.first_token < num_tokens
    )


def num_offered(sources: tuple[KVSource, ...]) -> int:
    """Return how many leading tokens of a sequence the sources have."""
    return max((source.end for source in sources), default=0)

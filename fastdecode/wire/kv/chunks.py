"""Messages that move K and V between caches: the protocol of streams.

=================  =========  =======================================================
message            direction  meaning, and the answer
=================  =========  =======================================================
``ExpectTokens``   S/R → R    sequences have so many tokens more from now on, whose
                              K and V come as chunks; no answer
``StoreChunk``     S/R → R    K and V of tokens that are expected → ``ChunkStored``
``FetchChunk``     S/R/P → R  read K and V of cached tokens → ``FetchedChunk``, or
                              ``ExportExpired`` to a ticket
=================  =========  =======================================================

A **chunk** is one contiguous transfer of at most ``MAX_CHUNK_BYTES``: K and V of
consecutive tokens of N sequences, over the same layers and heads. Layers, heads
and tokens count as in the cache that stores the chunk, or that it is read from;
``kv`` and ``model_hash`` say which cache that is, and a chunk for any other is
refused. Its data is one of two forms::

    blocks  uint8 [num_layers, num_blocks, num_heads * head_bytes]
            whole KV blocks as they lie (``cpu_kernels.layout``), of the first
            sequence, then the second ...; tokens begin and end with a block
    tokens  k [num_layers, T, num_heads, row]  stored rows
            v [num_layers, T, num_heads, row]
            scales float32 [num_layers, T, num_heads, 2]; int8 and int4 only
            each beginning at a multiple of 64 bytes

**Expected tokens** come once in every layer and head, each layer's and head's in
order: a chunk continues what came before it. While some are still to come, the
sequence is **arriving**: nobody may step it, or fork it at tokens that aren't
there in every layer and head yet; it may be closed. In a neighbour's replica it
may be forked at any of its tokens, and truncated: the fork is arriving, too, and
has as much as its parent; what is still to come of it comes for it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import KVSpec, Shard
from fastdecode.wire.traits import OWNERS, THE_ONLY, ForHolder, Role, Worded

MAX_CHUNK_BYTES: Final = 4 << 20
"""No loop is kept from other messages for longer than such a one takes."""
MAX_PIECES: Final = 1 << 14
"""Of one chunk."""


class ChunkForm(Enum):
    """How K and V lie in a chunk."""

    BLOCKS = "blocks"
    TOKENS = "tokens"


@dataclass(frozen=True)
class ChunkStored:
    """The chunk's bytes are in the cache."""

    num_bytes: int


@dataclass(frozen=True, eq=False)
class FetchedChunk:
    data: Annotated[NDArray[np.uint8], "B"]


@dataclass(frozen=True)
class ExportExpired(Worded):
    """Nobody may read that by this ticket, or any more."""

    reason: str


@dataclass(frozen=True, eq=False)
class ExpectTokens(ForHolder):
    sequence_ids: Annotated[NDArray[np.int64], "N"]
    num_tokens: Annotated[NDArray[np.int32], "N"]
    """More than each has, at least 1; within its reservation."""
    holder: int = THE_ONLY


@dataclass(frozen=True, eq=False)
class StoreChunk(ForHolder):
    model_hash: str
    kv: KVSpec
    """Of the cache that is to store it."""
    form: ChunkForm
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    sequence_ids: Annotated[NDArray[np.int64], "N"]
    first_tokens: Annotated[NDArray[np.int32], "N"]
    num_tokens: Annotated[NDArray[np.int32], "N"]
    """At least 1 each."""
    data: Annotated[NDArray[np.uint8], "B"]
    holder: int = THE_ONLY

    answers = (ChunkStored,)

    def check(self, answer: Any) -> None:
        """See ``Asking``."""
        super().check(answer)
        if answer.num_bytes != len(self.data):
            raise ProtocolError(
                f"answered StoreChunk for {answer.num_bytes} bytes, where {len(self.data)} came"
            )


@dataclass(frozen=True, eq=False)
class FetchChunk(ForHolder):
    form: ChunkForm
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    sequence_ids: Annotated[NDArray[np.int64], "N"]
    first_tokens: Annotated[NDArray[np.int32], "N"]
    num_tokens: Annotated[NDArray[np.int32], "N"]
    holder: int = THE_ONLY
    ticket: str = ""
    """Reads the sequence that it stands for (``fastdecode.wire.kv.exporting``), whatever
    ``sequence_ids`` [1] says; empty: sequences of the peer's own cache."""
    session: int = 0
    """Of a prompt stage: reads the cache that ``holder`` is called in this session; 0: as
    ``ticket`` says."""
    lane: int = 0
    """Of the prompt stage's step that it is for; nothing to an R-worker."""

    answers = (FetchedChunk,)
    """To a ticket also ``ExportExpired``."""
    said_by = OWNERS | {Role.READER, Role.FEEDER}

    def for_holder(self, holder: int) -> FetchChunk:
        return self if self.session else replace(self, holder=holder)

    def part(self, shard: Shard) -> FetchChunk:
        first = 0 if shard.layers is None else shard.layers.start
        num_heads = self.num_heads if shard.heads is None else shard.heads.num_kv_heads
        return replace(self, first_layer=self.first_layer - first, num_heads=num_heads)

    def join(self, answers: Sequence[Any]) -> PastTokens:
        return PastTokens(answers[0].data, self, tuple(answer.data for answer in answers))


@dataclass(frozen=True, eq=False)
class PastTokens(FetchedChunk):
    """A cache group's answer to ``FetchChunk``. It is never sent."""

    asked: FetchChunk
    parts: tuple[NDArray[np.uint8], ...]
    """Of its members, in the order of heads."""

    @property
    def is_dropped(self) -> bool:
        """Whether a member's cache was dropped, and the tokens with it."""
        return not all(map(len, self.parts))


ChunkToRWorker: TypeAlias = ExpectTokens | StoreChunk | FetchChunk
ChunkAnswer: TypeAlias = ChunkStored | FetchedChunk | ExportExpired

CHUNK_OPCODES: Final[Mapping[type[Any], int]] = {
    ExpectTokens: 10,
    StoreChunk: 11,
    FetchChunk: 12,
    ChunkStored: 71,
    FetchedChunk: 72,
    ExportExpired: 118,
}
"""See ``fastdecode.wire.opcodes.OPCODES``."""

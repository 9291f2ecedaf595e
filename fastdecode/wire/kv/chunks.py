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

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, TypeAlias

from msgspec.structs import replace

from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import KVSpec, Shard
from fastdecode.wire.traits import (
    I32,
    I64,
    OWNERS,
    THE_ONLY,
    U8,
    ForHolder,
    Int,
    Message,
    Role,
    Text,
    Worded,
)

MAX_CHUNK_BYTES: Final = 4 << 20
"""No loop is kept from other messages for longer than such a one takes."""
MAX_PIECES: Final = 1 << 14
"""Of one chunk."""


class ChunkForm(Enum):
    """How K and V lie in a chunk."""

    BLOCKS = "blocks"
    TOKENS = "tokens"


class ChunkStored(Message, frozen=True, tag=71):
    """The chunk's bytes are in the cache."""

    num_bytes: Int


class FetchedChunk(Message, frozen=True, tag=72, eq=False):
    data: U8


class ExportExpired(Worded, frozen=True, tag=118):
    """Nobody may read that by this ticket, or any more."""

    reason: Text


class ExpectTokens(ForHolder, frozen=True, tag=10, eq=False):
    sequence_ids: I64
    num_tokens: I32
    """More than each has, at least 1; within its reservation."""
    holder: Int = THE_ONLY


class StoreChunk(ForHolder, frozen=True, tag=11, eq=False):
    model_hash: Text
    kv: KVSpec
    """Of the cache that is to store it."""
    form: ChunkForm
    first_layer: Int
    num_layers: Int
    first_head: Int
    num_heads: Int
    sequence_ids: I64
    first_tokens: I32
    num_tokens: I32
    """At least 1 each."""
    data: U8
    holder: Int = THE_ONLY

    answers = (ChunkStored,)

    def check(self, answer: Any) -> None:
        """See ``Asking``."""
        super().check(answer)
        if answer.num_bytes != len(self.data):
            raise ProtocolError(
                f"answered StoreChunk for {answer.num_bytes} bytes, where {len(self.data)} came"
            )


class FetchChunk(ForHolder, frozen=True, tag=12, eq=False):
    form: ChunkForm
    first_layer: Int
    num_layers: Int
    first_head: Int
    num_heads: Int
    sequence_ids: I64
    first_tokens: I32
    num_tokens: I32
    holder: Int = THE_ONLY
    ticket: Text = ""
    """Reads the sequence that it stands for (``fastdecode.wire.kv.exporting``), whatever
    ``sequence_ids`` [1] says; empty: sequences of the peer's own cache."""
    session: Int = 0
    """Of a prompt stage: reads the cache that ``holder`` is called in this session; 0: as
    ``ticket`` says."""
    lane: Int = 0
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


class PastTokens(FetchedChunk, frozen=True, eq=False):
    """A cache group's answer to ``FetchChunk``. It is never sent."""

    asked: FetchChunk
    parts: tuple[U8, ...]
    """Of its members, in the order of heads."""

    @property
    def is_dropped(self) -> bool:
        """Whether a member's cache was dropped, and the tokens with it."""
        return not all(map(len, self.parts))


ChunkToRWorker: TypeAlias = ExpectTokens | StoreChunk | FetchChunk
ChunkAnswer: TypeAlias = ChunkStored | FetchedChunk | ExportExpired

"""Messages by which a prompt's K and V go from the R-workers of one instance to
those of another.

==================  =========  ===================================================
message             direction  meaning, and the answer
==================  =========  ===================================================
``ExportSequence``  S → R      readers that name this ticket may read a sequence's
                               tokens, until the sequence is closed; no answer
``Pull``            S → R      fetch tokens of an empty sequence from R-workers that
                               export them, in the background → ``Pulled``
``Pulled``          R → S      that is over, and why if it failed; out of order
``DescribeExport``  R → R      what does this ticket stand for?
                               → ``ExportDescription`` or ``ExportExpired``
==================  =========  ===================================================

A **ticket** is 128 random bits, and the right to read one sequence's tokens as
they are when it is offered (``FetchChunk``). It ends when the sequence is closed, truncated, or
taken over, and never by time: from then on the answer to it is ``ExportExpired``,
and given no other data. Readers change nothing. An ``ExportSequence`` may come behind
whoever reads it, since they come over different connections: a reader that is
told ``ExportExpired`` at first asks again for a second.

While a sequence is pulled it is arriving (``fastdecode.wire.kv.chunks``): it may
be closed at any time, which ends the pull. Nothing is written to its blocks
from then on, whatever is still on its way. One ``Pulled`` comes for every
``Pull``. What has come of one that failed is of no use: the sequence is to be
closed.

Tokens, heads and layers count as in the whole sequence and the whole model: a
sequence may have parts on several R-workers, R-workers may share out the heads, and
pipeline stages have R-workers of their own, on either side.
"""

from __future__ import annotations

import re
from typing import Final, TypeAlias

from msgspec.structs import replace

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import KVSource as KVSource
from fastdecode.core.spec import KVSpec, Shard
from fastdecode.wire.kv.chunks import ExportExpired as ExportExpired
from fastdecode.wire.kv.tiers import TierNews
from fastdecode.wire.traits import (
    S_WORKERS,
    THE_ONLY,
    Asking,
    ForHolder,
    Int,
    Message,
    Role,
    Text,
    Worded,
)

MAX_SOURCES: Final = 1 << 10
"""Of one pull."""
_TICKET: Final = re.compile(r"[0-9a-f]{32}")
_MOST_S: Final = 1e9


def check_ticket(ticket: str) -> str:
    """Raises ProtocolError: it is none."""
    if not _TICKET.fullmatch(ticket):
        raise ProtocolError("a ticket is 32 digits of hex")
    return ticket


class ExportDescription(Message, frozen=True, tag=117):
    """What a ticket stands for: a sequence of a cache of this kind."""

    model_hash: Text
    kv: KVSpec
    num_tokens: Int


class ExportSequence(ForHolder, frozen=True, tag=56):
    sequence_id: Int
    ticket: Text
    holder: Int = THE_ONLY

    said_by = S_WORKERS
    in_every_stage = True


class Pull(ForHolder, frozen=True, tag=57):
    sequence_id: Int
    """Of the reader; it is open, with room, and has no tokens."""
    first_token: Int
    """In the whole sequence, of those that are pulled."""
    num_tokens: Int
    sources: tuple[KVSource, ...]
    timeout_s: float
    """That a source may say nothing, though it owes an answer."""
    bytes_per_s: float = 0.0
    """No faster than that; 0: as fast as it goes."""
    first_head: Int = 0
    """KV heads of the model before the cache's own."""
    first_layer: Int = 0
    """Likewise."""
    holder: Int = THE_ONLY

    said_by = S_WORKERS
    is_transfer = True
    in_every_stage = True
    is_long = True

    def part(self, shard: Shard) -> Pull:
        first_head = 0 if shard.heads is None else int(shard.heads.kv.start)
        first_layer = 0 if shard.layers is None else shard.layers.start
        return replace(
            self,
            first_head=self.first_head + first_head,
            first_layer=self.first_layer + first_layer,
        )


class Pulled(Worded, frozen=True, tag=116):
    holder: Int
    sequence_id: Int
    num_bytes: Int
    """Of K and V that have come."""
    seconds: float
    reason: Text
    """Why not all have; empty: they have."""

    def check(self) -> None:
        """Raises ProtocolError: no pull comes to that."""
        if not 0 <= self.sequence_id < 1 << 62:
            raise ProtocolError(f"speaks of a sequence {self.sequence_id}")
        if not 0 <= self.num_bytes < 1 << 62 or not 0 <= self.seconds < _MOST_S:
            raise ProtocolError(f"says that {self.num_bytes} bytes came in {self.seconds} s")


class DescribeExport(Asking, frozen=True, tag=58):
    protocol_version: Int
    ticket: Text

    answers = (ExportDescription, ExportExpired)
    said_by = frozenset({Role.READER})


HandingToRWorker: TypeAlias = ExportSequence | Pull | DescribeExport
MoveNews: TypeAlias = TierNews | Pulled
"""What is said of K and V that were moved in the background."""

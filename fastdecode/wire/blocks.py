"""Messages about KV blocks: reserve them, keep them, move them, and take a cache over.

======================  =========  =============================================================
message                 direction  meaning, and the answer
======================  =========  =============================================================
``Open``                S/R → R    reserve room for a new sequence: empty, or starting with tokens
                                   of a parent, or with cached blocks → ``Accepted``, ``Refused``
``Close``               S/R → R    free a sequence's blocks, or cache its last one; no answer
``Extend``              S/R → R    enlarge an open sequence's room → ``Accepted``, ``Refused``
``Truncate``            S/R → R    forget a sequence's last tokens → ``Accepted``, ``Refused``
``Name``                S/R → R    cache full blocks of a sequence under keys; no answer
``Forget``              S/R → R    evict cached blocks, or copies in the tier; no answer
``StoreChunk``          R → R      K and V of a replica's next tokens → ``Accepted``
``TakeOver``            S → R      the sender owns the cache, with these sequences, at most that
                                   many tokens of each, and these cached blocks. A replica in a
                                   file is read before → ``TakenOver``
``DropCache``           S → R      drop a replica, whichever peer uses it → ``Dropped``, later
``Replicate``           S → R      a neighbour is to store a replica of the cache, or none any
                                   more; no answer
``Replicated``          R → S      unasked: the neighbour has all that was cached when a lane's
                                   step had ended; at first, that it has room; or the replica is
                                   lost, and why
``UseTier``             S → R      open the lower tier → ``Inventory``, out of order
``Retain``              S → R      copy cached blocks to the tier → ``Done``, out of order
``Fetch``               S → R      make room for blocks of a source, and copy them
                                   → ``Progress`` now and then, then ``Done``, out of order
``ReadBlocks``          R → R      read cached blocks by their keys → ``BlockData``
======================  =========  =============================================================

**Chunks.** A chunk is one transfer of at most ``MAX_CHUNK_BYTES``, or of one token: K and V of
consecutive tokens of N sequences, over the same layers and heads. Its data::

    blocks  uint8 [num_layers, num_blocks, num_heads * head_bytes]
            whole KV blocks as ``cpu_kernels.layout`` has them, sequence by sequence
    tokens  k [num_layers, T, num_heads, row]  stored rows
            v [num_layers, T, num_heads, row]
            scales float32 [num_layers, T, num_heads, 2]; int8 and int4 only
            each beginning at a multiple of 64 bytes

**Replicas' tokens.** A chunk of a replica has all layers and heads of its tokens, which come in
their order.

**Cached blocks.** A key of 128 bits says what tokens a block and all before it hold. The cache
refers to a block as a sequence that never appends does, so a cached block is never written. A
sequence that is resumed with a **gap** first appends the tokens that fill it (``BeginStep``). Only
full blocks of open sequences are cached. A ``tail`` is the key of the last block as it stands.

**Tier.** A block that moves may not be forgotten before its job ends. A fetched block has its key
at once: a sequence that resumes with it attends a layer when that has come. If the block fails,
``Done`` comes before the answer to the step's last layer, and nothing of that step is valid.

**Sessions.** ``Hello.session`` is a secret of one engine's run. A replica outlives the neighbour
that stores it, until the last S-worker of the session has left. A cache with ``Hello.outlives``
stays when its S-worker is lost without ``Shutdown``. An S-worker of the same session may take
either over; the former owner's messages are refused then, and its connection ends. Taking over
rolls back: open steps end, tokens that some layer lacks are forgotten, and so are sequences and
blocks that are not named. An S-worker's ``Hello`` without ``resumes`` drops the session's replicas.

**Replicas.** An R-worker greets its neighbour as ``Role.NEIGHBOUR`` under the same session, and
repeats every change of its cache there. K and V follow its answers, never precede them. ``ON_DISK``
puts the replica into a file of the block directory.

**Reading.** ``Hello.reading`` is the right to read a cache's blocks by their keys, which only a
peer can name that knows all tokens and the salt. What is read by a key is that content, or
missing: a block may be named after its reader's request, so a reader asks again for a second where
the source holds its blocks (``KVSource.is_held``). Heads and layers of a ``KVSource`` count as in
the whole model, those of ``ReadBlocks`` as in the cache that is read. Full blocks travel as chunks
of ``blocks``, a last block that is not full as ``tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from hashlib import blake2b
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
from msgspec import Meta, field
from msgspec.structs import replace

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import KVSource as KVSource
from fastdecode.core.spec import MAX_LAYERS, KVSpec, Shard
from fastdecode.wire.traits import (
    I32,
    I64,
    KEY_WORDS,
    MAX_ID,
    S_WORKERS,
    THE_ONLY,
    U8,
    Activations,
    Asking,
    Block,
    CacheId,
    Count,
    F32Rows,
    ForHolder,
    Head,
    Holder,
    Keys,
    Lane,
    Layer,
    Message,
    Role,
    Seconds,
    SomeTokens,
    Text,
    Tokens,
    Wait,
    Worded,
    check_rows,
)

MAX_CHUNK_BYTES: Final = 4 << 20
"""Bytes of one chunk. No loop keeps other messages waiting for longer than such a chunk takes."""
MAX_PIECES: Final = 1 << 14  # sequences of one chunk
MAX_SOURCES: Final = 1 << 9  # sources of one fetch: with the longest addresses, they fit a head
MOST_LINK_BYTES: Final = 1 << 30
"""Bytes in flight on one replication link. A busy peer takes in twice that before it is lost."""
MOST_MOVED: Final = 1 << 12  # blocks of one job, and of one ``Inventory``
MAX_SLOTS: Final = 1 << 24  # blocks of one holder's lower tier
ON_DISK: Final = "disk:"
"""Stands for a neighbour's address: the replica goes into a file."""
NO_STEP: Final = -1  # stands for a step's number: none has ended yet
SESSION_RESUMED: Final = "session_resumed"
"""Error code for an S-worker whose cache another one has resumed."""
NO_PARENT: Final = -1  # stands for a sequence: it starts without one
MISSING: Final = -1  # stands for a number of tokens: the cache lacks the sequence


def no_keys() -> Keys:
    return np.zeros((0, KEY_WORDS), np.int64)


def words_of(keys: Sequence[bytes]) -> Keys:
    """Return keys as messages have them."""
    return np.frombuffer(b"".join(keys), np.int64).reshape(-1, KEY_WORDS)


def keys_of(words: Keys) -> list[bytes]:
    """Return the keys of a message."""
    data, size = words.tobytes(), 8 * KEY_WORDS
    return [data[at : at + size] for at in range(0, len(data), size)]


# Layers, and blocks of sequences.


class AttendResult(Message, frozen=True, tag=68, eq=False):
    step: Count
    lane: Lane
    layer: Layer
    o: Activations
    lse: F32Rows | None  # none unless the step wants it
    compute_s: Seconds  # seconds spent appending and attending, waiting excluded

    lends = True

    def check_arrays(self, shape: tuple[int, ...], dtype: np.dtype[Any], *, want_lse: bool) -> None:
        """Raise ProtocolError unless o [T, Hq, D] and lse are what was asked for."""
        if (found := (self.o.dtype, self.o.shape)) != (dtype, shape):
            raise ProtocolError(f"answered o of {found[0]} {found[1]}, not {dtype} {shape}")
        due = shape[:2] if want_lse else None
        if (lse := getattr(self.lse, "shape", None)) != due:
            raise ProtocolError(f"answered lse of shape {lse}, where {due or 'none'} was asked")


class Accepted(Message, frozen=True, tag=66):
    sequence_id: Count


class Refused(Worded, frozen=True, tag=67):
    sequence_id: Count
    code: Text
    """``out_of_capacity`` if it could fit later, ``exceeds_capacity`` if it never could."""
    message: Text


class Reserving(ForHolder, frozen=True):
    """Asks for memory."""

    answers = (Accepted, Refused)
    repeated = ("sequence_id",)
    in_every_stage = True

    def join(self, answers: Sequence[Any]) -> Accepted | Refused:
        found: Sequence[Accepted | Refused] = answers
        return next((answer for answer in found if isinstance(answer, Refused)), found[0])


class Open(Reserving, frozen=True, tag=2):
    sequence_id: Count
    num_reserved_tokens: SomeTokens
    """Room in tokens, those that it starts with included, so that no later step of the sequence can
    run out of blocks."""
    num_tokens: Tokens = 0
    """Tokens that it starts with: of the parent, whose blocks are shared, and copied when they are
    first appended to; or of the cached blocks and the gap, all but some of the last block's, if
    not all."""
    keys: Keys | None = None  # keys of cached blocks, in the order of their tokens
    gap_start: Tokens = 0
    gap_stop: Tokens = 0
    """The gap, in tokens: whole blocks missing between cached ones. Equal if all are cached."""
    parent_id: Annotated[int, Meta(ge=NO_PARENT, le=MAX_ID)] = NO_PARENT
    """Open sequence with at least ``num_tokens`` tokens, if it starts with these."""
    holder: CacheId = THE_ONLY

    def __post_init__(self) -> None:
        if self.gap_stop < self.gap_start:
            raise ProtocolError(f"gap_stop={self.gap_stop} is before gap_start={self.gap_start}")

    def undo(self) -> Close:
        return Close(self.sequence_id, self.holder)


class Close(ForHolder, frozen=True, tag=4):
    sequence_id: Count
    holder: CacheId = THE_ONLY
    tail: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""
    """Key under which to cache its last block, which is not full. Empty to free all blocks."""

    in_every_stage = True


class Extend(Reserving, frozen=True, tag=8):
    sequence_id: Count
    num_reserved_tokens: SomeTokens
    """Room in tokens, not less than before."""
    holder: CacheId = THE_ONLY


class Truncate(Reserving, frozen=True, tag=13):
    sequence_id: Count
    num_tokens: Tokens  # tokens that it keeps, at most as many as it has
    holder: CacheId = THE_ONLY


class Name(ForHolder, frozen=True, tag=16, eq=False):
    sequence_id: Count
    first_block: Block  # place of the first key's block in the sequence's block table
    keys: Keys
    holder: CacheId = THE_ONLY

    in_every_stage = True


class Forget(ForHolder, frozen=True, tag=18, eq=False):
    keys: Keys
    is_below: bool = False  # true for blocks of the lower tier, which may lack them
    holder: CacheId = THE_ONLY

    in_every_stage = True


# Chunks.


class ChunkForm(Enum):
    """Form of a chunk's data."""

    BLOCKS = "blocks"
    TOKENS = "tokens"


class StoreChunk(ForHolder, frozen=True, tag=11, eq=False):
    form: ChunkForm
    sequence_ids: I64
    first_tokens: I32  # tokens of each sequence that have come
    num_tokens: I32  # at least 1 each
    data: U8
    holder: CacheId = THE_ONLY

    answers = (Accepted,)
    said_by = frozenset({Role.NEIGHBOUR})
    repeated = ("sequence_id",)

    def __post_init__(self) -> None:
        check_rows(self.sequence_ids, first_tokens=self.first_tokens, num_tokens=self.num_tokens)

    @property
    def sequence_id(self) -> int:
        """The first of its sequences, which its answer names."""
        return int(self.sequence_ids[0])


# Sessions and replicas.


class TakenOver(Message, frozen=True, tag=73, eq=False):
    num_tokens: I32
    """Tokens of each sequence that every layer has, at most as many as were asked for; or
    ``MISSING``."""
    is_kept: U8 = field(default_factory=lambda: np.zeros(0, np.uint8))
    """1 for each named block that is cached, else 0."""


class TakeOver(ForHolder, frozen=True, tag=14, eq=False):
    session: Count
    sequence_ids: I64
    num_tokens: I32
    holder: CacheId = THE_ONLY
    keys: Keys = field(default_factory=no_keys)
    """Keys of cached blocks."""
    is_in_file: bool = False
    """Read the replica from its file, if the R-worker lacks the cache. What is missing, or can't
    be read, is ``MISSING``."""

    answers = (TakenOver,)
    said_by = S_WORKERS
    in_every_stage = True

    def __post_init__(self) -> None:
        check_rows(self.sequence_ids, num_tokens=self.num_tokens)

    def check(self, answer: Any) -> None:
        super().check(answer)
        check_rows(self.num_tokens, num_tokens=answer.num_tokens)
        check_rows(self.keys, is_kept=answer.is_kept)
        if (answer.num_tokens < MISSING).any() or (answer.num_tokens > self.num_tokens).any():
            raise ProtocolError("answered TakeOver with more tokens than were asked for")
        if (answer.is_kept > 1).any():
            raise ProtocolError("answered TakeOver with flags that are neither 0 nor 1")

    def join(self, answers: Sequence[Any]) -> TakenOver:
        return TakenOver(
            np.minimum.reduce([answer.num_tokens for answer in answers]),
            np.minimum.reduce([answer.is_kept for answer in answers]),
        )


class DropCache(ForHolder, frozen=True, tag=20):
    session: Count
    cache: Holder
    """Holder of a replica in this session, or of the peer's own cache. It may be missing."""
    holder: CacheId = THE_ONLY  # another holder of the R-worker, for the answer
    link: Count = 0  # files of replicas that came over links up to this one are dropped, too

    said_by = S_WORKERS


class Dropped(Message, frozen=True, tag=76):
    holder: CacheId
    cache: Holder


class Replicate(ForHolder, frozen=True, tag=15):
    keeper: Text
    """Address of the neighbour that stores the replica. Empty to stop replicating."""
    link_bytes: Annotated[int, Meta(ge=1, le=MOST_LINK_BYTES)]
    """Most bytes of K and V without an answer from the neighbour."""
    link: Count
    """Number of the link in reports. The link of the same number stays; another number makes a
    new one."""
    timeout_s: Wait  # longest silence of a neighbour that owes an answer
    holder: CacheId = THE_ONLY

    said_by = S_WORKERS


class Replicated(Worded, frozen=True, tag=74):
    holder: Holder
    lane: Lane
    step: Annotated[int, Meta(ge=NO_STEP, le=MAX_ID)]
    """Last step of the lane that the neighbour has in every layer. ``NO_STEP`` if it has only made
    room, or the replica is lost."""
    link: Count
    reason: Text = ""
    """Why the replica is lost. Empty if it is not."""


# The lower tier.


class UseTier(ForHolder, frozen=True, tag=40):
    identity: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """Names to the bit what blocks hold beside tokens. Blocks of another identity are not used."""
    holder: CacheId = THE_ONLY

    said_by = S_WORKERS
    is_transfer = True
    in_every_stage = True

    def part(self, shard: Shard) -> UseTier:
        heads, kept = shard.heads, self
        if heads is not None:
            kept = kept._of(f"{heads.kv.start}:{heads.kv.stop}")
        first = 0 if shard.layers is None else shard.layers.start
        return kept._of(f"layers from {first}") if first else kept

    def of_column(self, column: int) -> UseTier:
        """Return it for one of several groups. Blocks are there if all members have theirs, so each
        member must find its own group's file again."""
        return self._of(f"column {column}")

    def _of(self, part: str) -> UseTier:
        name = f"{self.identity}/{part}".encode()
        return replace(self, identity=blake2b(name, digest_size=32).hexdigest())


class Retain(ForHolder, frozen=True, tag=41, eq=False):
    job: Count
    keys: Keys
    num_tokens: I32  # tokens up to each block's end; ``Inventory`` reports them later
    holder: CacheId = THE_ONLY

    said_by = S_WORKERS
    is_transfer = True
    in_every_stage = True

    def __post_init__(self) -> None:
        check_rows(self.keys, num_tokens=self.num_tokens)


class Fetch(ForHolder, frozen=True, tag=42, eq=False):
    job: Count
    keys: Keys
    source: Annotated[tuple[KVSource, ...], Meta(max_length=MAX_SOURCES)] = ()
    """R-workers that keep these blocks together. Empty for the cache's own tier."""
    tail_tokens: Tokens = 0
    """Tokens of the last block. 0 if it is full."""
    timeout_s: Wait = 60.0
    """Longest silence of a source that owes an answer."""
    bytes_per_s: Annotated[float, Meta(ge=0, lt=1e15)] = 0.0
    """Highest pace. 0 for none."""
    first_head: Head = 0
    """KV heads of the model before the cache's own."""
    first_layer: Layer = 0
    """Layers of the model before the cache's own."""
    holder: CacheId = THE_ONLY

    said_by = S_WORKERS
    is_transfer = True
    in_every_stage = True

    def part(self, shard: Shard) -> Fetch:
        first_head = 0 if shard.heads is None else int(shard.heads.kv.start)
        first_layer = 0 if shard.layers is None else shard.layers.start
        return replace(
            self,
            first_head=self.first_head + first_head,
            first_layer=self.first_layer + first_layer,
        )


class BlockData(Message, frozen=True, tag=119, eq=False):
    is_there: U8
    """1 for each block that is cached, else 0."""
    data: U8
    """Chunk of the cached ones."""


class ReadBlocks(Asking, frozen=True, tag=59, eq=False):
    reading: Count
    model_hash: Text
    kv: KVSpec
    """Kind of the cache that the blocks are for. Its number of layers and heads may be another."""
    form: ChunkForm
    first_layer: Layer
    num_layers: Layer
    first_head: Head
    num_heads: Head
    keys: Keys
    num_tokens: I32  # tokens of each block

    answers = (BlockData,)
    said_by = frozenset({Role.READER})

    def __post_init__(self) -> None:
        check_rows(self.keys, num_tokens=self.num_tokens)


class Progress(Message, frozen=True, tag=102):
    holder: Holder
    job: Count
    num_there: Annotated[int, Meta(ge=1, lt=MAX_LAYERS)]
    """First layers of the cache that all of the job's blocks have, or have failed in."""
    num_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    """Layers of the cache."""
    seconds: Seconds
    """Time since the job began."""

    def __post_init__(self) -> None:
        if self.num_there >= self.num_layers:
            raise ProtocolError(f"num_there={self.num_there} of num_layers={self.num_layers}")


class Done(Worded, frozen=True, tag=100, eq=False):
    holder: Holder
    job: Count
    missing: Keys
    """Keys of blocks that were not moved."""
    num_bytes: Count
    seconds: Seconds
    num_unread: Count = 0
    """Blocks of any job since the last report that the disk did not give."""
    num_damaged: Count = 0
    """Blocks since then that were not as they had been written."""
    num_unwritten: Count = 0
    """Blocks since then that the disk did not take."""
    num_late: Count = 0
    """Blocks since then that a step could not wait for any longer."""
    reason: Text = ""
    """Why the job failed. Empty if its blocks failed one by one, or none did."""

    @property
    def faults(self) -> tuple[int, int, int, int]:
        """Unread, damaged, unwritten and late blocks."""
        return self.num_unread, self.num_damaged, self.num_unwritten, self.num_late


class Inventory(Message, frozen=True, tag=101, eq=False):
    """Part of a list of the tier's blocks, the oldest first."""

    holder: Holder
    num_slots: Annotated[int, Meta(ge=0, le=MAX_SLOTS)]
    """Blocks that the tier can have. 0 if there is no tier."""
    keys: Keys
    num_tokens: I32
    is_last: bool
    """True if the list ends here."""

    def __post_init__(self) -> None:
        check_rows(self.keys, num_tokens=self.num_tokens)
        if len(self.keys) > self.num_slots or (self.num_tokens < 1).any():
            raise ProtocolError(f"blocks without tokens, or more than num_slots={self.num_slots}")


KeptToRWorker: TypeAlias = Open | Extend | Truncate | Close | Name | Forget
"""Changes of a cache's sequences and cached blocks. A replica follows them."""
TierToRWorker: TypeAlias = UseTier | Retain | Fetch
BlocksToRWorker: TypeAlias = (
    KeptToRWorker | TierToRWorker | StoreChunk | TakeOver | DropCache | Replicate | ReadBlocks
)
BlocksAnswer: TypeAlias = Accepted | Refused | AttendResult | TakenOver | BlockData
ReplicationNews: TypeAlias = Replicated | Dropped
MoveNews: TypeAlias = Progress | Done | Inventory
"""Reports on K and V that moved in the background."""

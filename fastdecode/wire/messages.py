"""Messages between an S-worker and an R-worker. This docstring is the protocol.

==================  =========  =====================================================
message             direction  meaning, and the answer
==================  =========  =====================================================
``Hello``           S → R      protocol version, role, holder, model, KV cache and
                               attention of every layer → ``Welcome``; a second one
                               starts the holder afresh, without sequences or steps
``BeginStep``       S → R      which sequences step, how many tokens each appends
                               and attends; once a step and lane, not once a layer;
                               no answer
``Attend``          S → R      one layer of the lane's step: append k and v, attend
                               q → ``AttendResult``, always
``Inspect``         S → R      before this peer's ``Hello`` → ``Report``
``Shutdown``        S → R      this peer leaves, its caches are dropped; the
                               R-worker ends with its last S-worker; no answer
``Welcome``         R → S      the worker's name and capacity
``Accepted``        R → S      the sequence is open, or has a chunk's tokens
``Refused``         R → S      the sequence is not open, and why (out of blocks);
                               nothing was changed
``Report``          R → S      the worker's host, and what it would offer
``AttendResult``    R → S      o (and log-sum-exp, if the step asked for it), and
                               the seconds it took
``Failed``          R → S      the peer broke the protocol, or a kernel failed: the
                               worker stops serving this peer; it comes unasked
==================  =========  =====================================================

Messages about KV blocks are in ``fastdecode.wire.blocks``, those between the stages of a
pipeline in ``fastdecode.wire.stages``, a controller's in ``fastdecode.wire.instances``.

**Peers and roles.** An R-worker has several peers, and a peer's first message says what it is:
``Hello`` an S-worker or a neighbour (``Role``), ``Inspect`` or ``ReadBlocks`` a reader. A
**reader** changes nothing. A **neighbour** is an R-worker that has a replica of a cache stored
here: it stores chunks, and takes no steps. ``said_by`` of each message says which
roles may send it. A message that a peer may not send ends that peer's connection, with
``Failed``, and no other's.

**Holders.** A holder is a cache. ``Hello`` opens one for its sender, and no other peer may use it.
A second peer that wants a holder that is taken, or one without memory left for it, is refused as
``busy``. A peer may open several, and then its messages name the holder; ``THE_ONLY`` means the
one that the peer has. Answers don't name it: an R-worker answers a peer in the order in which it
was asked. When a peer is lost, its caches are dropped, but for those that outlive it
(``fastdecode.wire.blocks``).

One lane has at most one step open at a holder. Within a step, layers come in order
0 … num_layers - 1, and the last layer's ``Attend`` closes the step. ``Activations`` have the dtype
agreed in ``Hello`` (float32, or uint16 carrying the bits of a 16-bit float). T_kv sums ``num_new``
and T_q sums ``num_queries`` over the step's sequences, in the order of ``sequence_ids``.

The queries of a sequence are its last ``num_queries`` tokens. Query i stands at position
``num_past + num_new + num_beyond - num_queries + i`` and sees keys up to its own position, below
``num_visible``, and inside the layer's window. So one contract covers:

- decode: ``num_new = num_queries = 1``, ``num_visible = num_past + 1``;
- a prompt's first chunk, attended on the S-worker: ``num_queries = 0``;
- its later chunks, whose past alone is attended here, and merged there by log-sum-exp:
  ``num_queries = num_new``, ``num_visible = num_past``;
- several new tokens attended here causally: ``num_queries = num_new``,
  ``num_visible = num_past + num_new``.

A query that sees no key at all gets o = 0 and a log-sum-exp of -inf.

A long sequence may be **split**: its **parts**, consecutive tokens, are on several R-workers, each
a sequence of its own there, with positions from 0. New tokens are appended to the last part. The
others are **closed**: they append nothing and only attend (``num_new = 0``,
``num_visible = num_past``), to queries that stand ``num_beyond`` tokens further on.

A sequence that was resumed with a **gap** has cached tokens behind tokens that are missing. Its
next rows append the missing ones, and nothing else may. A row that ends with the gap may have a
second row of the same sequence in its step, behind all of its tokens. A query sees what is before
it, the gap's tokens of the same step included: a layer's K and V are appended before anything is
attended.

From ``BeginStep`` to the step's last ``Attend``, its sequences may be neither closed nor stepped in
another lane, and forked or cached only as far as tokens were cached before the step. A sequence
never grows past its reservation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as with_fields
from typing import Annotated, Any, Final, TypeAlias

import numpy as np
from msgspec import Meta
from msgspec.structs import replace

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, ProtocolError
from fastdecode.core.host.facts import HostFacts
from fastdecode.core.spec import MAX_BLOCK_SIZE, AttentionSpec, KVSpec, Shard
from fastdecode.core.version import VERSION
from fastdecode.core.words import make_printable
from fastdecode.wire.blocks import Accepted as Accepted
from fastdecode.wire.blocks import AttendResult as AttendResult
from fastdecode.wire.blocks import (
    BlocksAnswer,
    BlocksToRWorker,
    KeptToRWorker,
    MoveNews,
    ReadBlocks,
    ReplicationNews,
    TierToRWorker,
)
from fastdecode.wire.blocks import Close as Close
from fastdecode.wire.blocks import Extend as Extend
from fastdecode.wire.blocks import Open as Open
from fastdecode.wire.blocks import Refused as Refused
from fastdecode.wire.traits import (
    ANYBODY,
    I32,
    I64,
    OWNERS,
    S_WORKERS,
    THE_ONLY,
    Asking,
    Block,
    CacheId,
    Count,
    ForHolder,
    Holder,
    Lane,
    Layer,
    Role,
    Text,
    Worded,
    check_rows,
    compare_versions,
)
from fastdecode.wire.traits import MAX_BLOCKS as MAX_BLOCKS
from fastdecode.wire.traits import MAX_HOLDERS as MAX_HOLDERS
from fastdecode.wire.traits import MAX_ID as MAX_ID
from fastdecode.wire.traits import MAX_LANES as MAX_LANES
from fastdecode.wire.traits import Activations as Activations
from fastdecode.wire.traits import Message as Message

PROTOCOL_VERSION = 29

MAX_STEP_TOKENS = 1 << 23
"""Most tokens that a step of one lane appends on one R-worker, and most that it attends there.
With the longest sequence these are at most 2^24 positions, which kernels count exactly in
float32."""
MAX_THREADS: Final = 4096
"""Threads of one R-worker."""

Threads: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_THREADS)]


class Welcome(Worded, frozen=True, tag=65):
    worker: Text
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)]
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)]
    num_threads: Threads
    has_tier: bool = False
    """True if cached blocks may go to a lower tier (``UseTier``)."""
    is_resumed: bool = False
    """True if the cache is the session's former one (``Hello.resumes``)."""
    version: Text = VERSION
    """Version of FastDecode at the R-worker."""


class Report(Worded, frozen=True, tag=70):
    worker: Text
    host: HostFacts
    num_threads: Count
    kv_bytes: Count
    """Memory that it would give to K and V."""
    model_hash: Text
    """Only model that it serves. Empty for any."""


class Failed(Worded, frozen=True, tag=69):
    worker: Text
    code: Text
    message: Text


REFUSALS: Final = frozenset({"busy", "session_kept", "model_mismatch"})
"""Codes of ``Failed`` of an R-worker that serves another job or model. Nothing is wrong with it."""


class Hello(ForHolder, frozen=True, tag=1):
    model_hash: Text
    kv: KVSpec
    attention: tuple[AttentionSpec, ...]
    """``AttentionSpec`` of each layer."""
    activation_dtype: DType
    """Floating-point type of q, k, v and o."""
    holder: Holder = 0
    """Name of the cache that it opens."""
    role: Role = Role.S_WORKER
    max_blocks: Block = 0
    """Most KV blocks that are wanted. 0 for as many as there is memory for."""
    session: Count = 0
    """Secret of the run that the cache is for. 0 for none."""
    outlives: bool = False
    """The cache is kept for the session when its S-worker is lost."""
    reading: Count = 0
    """Right to read the cache's blocks (``ReadBlocks``). 0 if no peer has it."""
    resumes: bool = False
    """Resume such a cache. If there is none, or it has more blocks than are wanted, use a new
    one."""

    answers = (Welcome,)
    said_by = ANYBODY

    def __post_init__(self) -> None:
        make_printable(self)
        if not self.activation_dtype.is_float:
            raise ConfigError(
                f"activation_dtype={self.activation_dtype.value!r}: q, k, v and o travel as floats"
            )
        if self.role not in OWNERS:
            raise ConfigError(f"a {self.role.value} keeps no cache: it says Inspect, not Hello")
        is_of_session = self.session and self.role is Role.S_WORKER
        if (self.outlives or self.resumes) and not is_of_session:
            raise ConfigError("only an S-worker's cache of a session is kept for it, or resumed")

    def check(self, answer: Any) -> None:
        super().check(answer)
        welcome: Welcome = answer
        compare_versions(f"R-worker {welcome.worker}", welcome.version)
        most = self.max_blocks or MAX_BLOCKS
        if not 1 <= welcome.num_blocks <= most:
            raise ProtocolError(
                f"offers num_blocks={welcome.num_blocks}, which is not within 1..{most}"
            )
        if welcome.block_size != self.kv.block_size:
            raise ProtocolError(
                f"offers KV blocks of {welcome.block_size} tokens, not {self.kv.block_size}"
            )

    def part(self, shard: Shard) -> Hello:
        if (heads := shard.heads) is None:
            return self
        kv = with_fields(self.kv, num_kv_heads=heads.num_kv_heads)
        return replace(self, kv=kv, attention=tuple(heads.of(spec) for spec in self.attention))

    def join(self, answers: Sequence[Any]) -> Welcome:
        welcomes: Sequence[Welcome] = answers
        least = min(welcomes, key=lambda welcome: welcome.num_blocks)
        return replace(
            least,
            has_tier=all(welcome.has_tier for welcome in welcomes),
            is_resumed=all(welcome.is_resumed for welcome in welcomes),
        )


class BeginStep(ForHolder, frozen=True, tag=5, eq=False):
    step: Count
    lane: Lane
    sequence_ids: I64
    num_past: I32
    """Tokens cached before this step, as the R-worker counts them. With a gap, those before its
    first missing token, or all tokens in a second row beside the one that fills the gap."""
    num_new: I32
    """Tokens appended, at least 0; where it is 0, there are queries."""
    num_queries: I32
    """At least 0, at most num_new + num_beyond."""
    num_visible: I32
    """Most keys that are visible: num_past or num_past + num_new."""
    want_lse: bool = False
    num_beyond: I32 | None = None
    """Tokens of the whole sequence, up to the last query, that come after those here. None if
    there are none for any sequence."""
    holder: CacheId = THE_ONLY

    said_by = S_WORKERS

    def __post_init__(self) -> None:
        check_rows(
            self.sequence_ids, num_past=self.num_past, num_new=self.num_new,
            num_queries=self.num_queries, num_visible=self.num_visible, num_beyond=self.num_beyond,
        )  # fmt: skip


class Attend(ForHolder, frozen=True, tag=6, eq=False):
    step: Count
    lane: Lane
    layer: Layer
    q: Activations
    k: Activations
    v: Activations
    holder: CacheId = THE_ONLY

    lends = True
    said_by = S_WORKERS
    answers = (AttendResult,)
    repeated = ("step", "lane", "layer")

    def check(self, answer: Any) -> None:
        # The general check is several calls, and there is one in every layer.
        of_answer = (answer.step, answer.lane, answer.layer) if type(answer) in self.answers else ()
        if of_answer != (self.step, self.lane, self.layer):
            super().check(answer)

    def part(self, shard: Shard) -> Attend:
        if (heads := shard.heads) is None:
            return self
        # Copies, since a part of the heads doesn't lie in one piece.
        q = np.ascontiguousarray(self.q[:, heads.q])
        k = np.ascontiguousarray(self.k[:, heads.kv])
        return replace(self, q=q, k=k, v=np.ascontiguousarray(self.v[:, heads.kv]))

    def join(self, answers: Sequence[Any]) -> AttendResult:
        results: Sequence[AttendResult] = answers
        o = np.concatenate([result.o for result in results], axis=1)
        logs = [result.lse for result in results if result.lse is not None]
        lse = np.concatenate(logs, axis=1) if logs else None
        slowest_s = max(result.compute_s for result in results)
        return replace(results[0], o=o, lse=lse, compute_s=slowest_s)


class Inspect(Asking, frozen=True, tag=9):
    answers = (Report,)
    said_by = ANYBODY


class Shutdown(Asking, frozen=True, tag=7):
    said_by = ANYBODY


AboutCaches: TypeAlias = Hello | Inspect | Shutdown | BlocksToRWorker
"""Messages that an R-worker gets between steps, and during them."""
ToRWorker: TypeAlias = BeginStep | Attend | AboutCaches
Room: TypeAlias = KeptToRWorker | TierToRWorker
"""Messages with ``in_every_stage``: the R-workers of a column get them in all stages alike."""
Greeting: TypeAlias = Hello | Inspect | ReadBlocks
"""First messages of a peer."""
Answer: TypeAlias = Welcome | Report | BlocksAnswer
Unasked: TypeAlias = Failed | ReplicationNews | MoveNews
FromRWorker: TypeAlias = Answer | Unasked

"""Every message between an S-worker and an R-worker. This docstring is the
protocol.

==================  =========  =====================================================
message             direction  meaning, and the answer
==================  =========  =====================================================
``Hello``           S → R      protocol version, role, holder, model, KV cache and
                               attention of every layer → ``Welcome``; said again,
                               the holder begins anew: sequences, cache and open
                               steps are forgotten
``OpenSequence``    S → R      reserve room for a new sequence → ``Accepted`` or
                               ``Refused``
``ForkSequence``    S → R      a new sequence that starts with a prefix of its
                               parent's cached tokens (blocks are shared, copied on
                               write) → ``Accepted`` or ``Refused``
``ExtendSequence``  S → R      enlarge an open sequence's room → ``Accepted`` or
                               ``Refused``
``CloseSequence``   S → R      free a sequence's blocks; no answer
``KeepBlocks``      S → R      full blocks of a sequence are kept when it is closed,
                               each by a key (``fastdecode.wire.kv.kept``); no answer
``ResumeSequence``  S → R      a new sequence that starts with kept blocks →
                               ``Accepted`` or ``Refused``
``EndSequence``     S → R      as ``CloseSequence``; its last block, which isn't
                               full, is kept by a key; no answer
``ForgetBlocks``    S → R      blocks aren't kept any more; no answer
``BeginStep``       S → R      which sequences step, how many tokens each appends
                               and attends; travels once a step and lane, not once a
                               layer; no answer
``Attend``          S → R      one layer of the lane's step: append k and v, attend
                               q → ``AttendResult``, always
``Inspect``         S → R      tell about yourself; before this peer's ``Hello`` →
                               ``Report``
``Shutdown``        S → R      this peer leaves, its caches are dropped; the
                               R-worker ends with its last S-worker; no answer
``Welcome``         R → S      the worker's name and capacity
``Accepted``        R → S      the sequence is open
``Refused``         R → S      the sequence is not open, and why (out of blocks);
                               nothing was changed
``Report``          R → S      the worker's host, and what it would offer
``AttendResult``    R → S      o (and log-sum-exp, if the step asked for it), and
                               the seconds it took
``Failed``          R → S      the peer broke the protocol, or a kernel failed: the
                               worker stops serving this peer; it comes unasked
==================  =========  =====================================================

Those that move K and V between caches are in ``fastdecode.wire.kv.chunks``, those by
which a cache outlives who used it in ``fastdecode.wire.kv.taking_over``, those by
which a neighbour keeps it a second time in ``fastdecode.wire.kv.replicating``, those
about kept blocks on disk in ``fastdecode.wire.kv.tiers``, those by which the
R-workers of one instance read what another's offer in
``fastdecode.wire.kv.exporting``, those by which prompts come from stages of their
own in ``fastdecode.wire.kv.attending``. Those between the stages of a pipeline are in
``fastdecode.wire.stages``, a controller's in ``fastdecode.wire.instances.messages``.

**Peers and roles.** An R-worker has several peers, and a peer's first message
says what it is: ``Hello`` an S-worker or a neighbour (``Role``), ``Inspect`` or
``DescribeExport`` a reader, ``StorePrompt`` a prompt stage. A **reader** changes
nothing. A **neighbour** is an R-worker that has a cache kept here as another
one's replica: it stores, and never attends (``num_queries = 0``). A **prompt
stage** stores prompts in somebody else's cache. Which role may say what stands with each message
(``said_by``). What a peer may not say ends that peer's connection, with
``Failed``, and no other's.

**Holders.** A holder is a cache. ``Hello`` opens one for the peer that says it,
and nobody else may use it; a second peer that wants a holder that is taken, or
one beside which there is no memory left, is refused as ``busy``. A peer may
open several. Only then do messages name the holder that they are for:
``holder = THE_ONLY`` means the one that the peer has. Answers don't name it: an
R-worker answers a peer in the order in which it was asked. When a peer goes,
its caches go with it, but for those that outlive it
(``fastdecode.wire.kv.taking_over``); others stay.

One lane has at most one step open at a holder; within a step, layers come in
order 0 … num_layers - 1, and the last layer's ``Attend`` closes the step.
Arrays declare dtype and dims in their annotation, and the codec holds peers to
it: ``Activations`` are of the dtype agreed in ``Hello`` (float32, or uint16
carrying the bits of a 16-bit float); a dim that stands twice in one message is
the same both times. T_kv sums ``num_new`` and T_q sums ``num_queries`` over the
step's sequences, in the order of ``sequence_ids``.

Queries of one sequence are its last ``num_queries`` tokens: the query i of a
sequence stands at position
``num_past + num_new + num_beyond - num_queries + i`` and sees keys up to its
own position, below ``num_visible``, and inside the layer's window. So one
contract covers decode (``num_new = num_queries = 1``,
``num_visible = num_past + 1``), a prompt's first chunk, attended on the
S-worker (``num_queries = 0``), its later chunks, whose past alone is attended
here and merged there by log-sum-exp (``num_queries = num_new``,
``num_visible = num_past``), and several new tokens attended here causally
(``num_queries = num_new``, ``num_visible = num_past + num_new``). A query that
sees no key at all gets o = 0 and a log-sum-exp of -inf.

A long sequence may be **split**: consecutive tokens of it, its **parts**, are
on several R-workers, each a sequence of its own to them, with positions from 0.
New tokens are appended to the last part; the others are **closed**: they append
nothing and only attend (``num_new = 0``, ``num_visible = num_past``), to
queries that stand ``num_beyond`` tokens further on.

A sequence that was resumed with a **gap** (``fastdecode.wire.kv.kept``) has kept
tokens behind tokens that are missing. Its next rows append the missing ones, and
nothing else may; a row that ends with the gap may have a second one of the same
sequence in its step, behind all of its tokens. A query sees what is before it,
the gap's tokens of the same step included: a layer's K and V are appended
before anything is attended.

From ``BeginStep`` to the step's last ``Attend``, its sequences may be neither
closed nor stepped in another lane, and forked or kept only as far as tokens
were cached before the step: the others' K and V are not there in every layer
yet. A sequence never grows past its reservation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as with_fields
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec.structs import replace

from fastdecode.core.dtype import DType
from fastdecode.core.errors import ConfigError, ProtocolError
from fastdecode.core.host.facts import HostFacts
from fastdecode.core.spec import AttentionSpec, KVSpec, Shard
from fastdecode.core.version import VERSION
from fastdecode.core.words import make_printable
from fastdecode.wire.kv.attending import AttendResult as AttendResult
from fastdecode.wire.kv.attending import StorePrompt as StorePrompt
from fastdecode.wire.kv.chunks import ChunkAnswer, ChunkToRWorker
from fastdecode.wire.kv.exporting import (
    DescribeExport,
    ExportDescription,
    HandingToRWorker,
    MoveNews,
)
from fastdecode.wire.kv.kept import KeptToRWorker
from fastdecode.wire.kv.replicating import Replicate, ReplicationNews, Restore
from fastdecode.wire.kv.reserving import MAX_BLOCKS as MAX_BLOCKS
from fastdecode.wire.kv.reserving import Accepted as Accepted
from fastdecode.wire.kv.reserving import CloseSequence as CloseSequence
from fastdecode.wire.kv.reserving import Refused as Refused
from fastdecode.wire.kv.reserving import Reserving
from fastdecode.wire.kv.taking_over import (
    TakenOver,
    TakingOverToRWorker,
    TruncateSequence,
)
from fastdecode.wire.kv.tiers import TierToRWorker
from fastdecode.wire.traits import (
    ANYBODY,
    I32,
    I64,
    OWNERS,
    THE_ONLY,
    Asking,
    ForHolder,
    Int,
    Role,
    Text,
    Worded,
    compare_versions,
)
from fastdecode.wire.traits import Activations as Activations
from fastdecode.wire.traits import Message as Message

PROTOCOL_VERSION = 21

MAX_ID = (1 << 63) - 1
"""Of sequences and steps; both count from 0."""
MAX_LANES = 256
MAX_STEP_TOKENS = 1 << 23
"""That one step of one lane appends on one R-worker, and as many that it
attends there. With the longest sequence no more than the 2^24 positions that
kernels count exactly, in float32."""

MAX_HOLDERS: Final = 1 << 16
MAX_THREADS: Final = 4096  # of one R-worker


class Welcome(Worded, frozen=True, tag=65):
    worker: Text
    num_blocks: Int
    block_size: Int
    num_threads: Int
    has_tier: bool = False
    """Whether kept blocks may go to a lower tier (``UseTier``)."""
    is_resumed: bool = False
    """Whether the cache is one that was kept (``Hello.resumes``)."""
    version: Text = VERSION
    """Version of FastDecode at the R-worker."""


class Report(Worded, frozen=True, tag=70):
    worker: Text
    protocol_version: Int
    host: HostFacts
    num_threads: Int
    kv_bytes: Int
    """Memory that it would give to K and V."""
    model_hash: Text
    """Of the only model that it serves; empty: any."""


Answer: TypeAlias = (
    Welcome
    | Report
    | Accepted
    | Refused
    | AttendResult
    | ChunkAnswer
    | TakenOver
    | ExportDescription
)
"""What is said because somebody asked."""


class Failed(Worded, frozen=True, tag=69):
    worker: Text
    code: Text
    message: Text


class Hello(ForHolder, frozen=True, tag=1):
    protocol_version: Int
    model_hash: Text
    kv: KVSpec
    attention: tuple[AttentionSpec, ...]
    """One a layer."""
    activation_dtype: DType
    """Of q, k, v and o: a floating-point type."""
    holder: Int = 0
    """The cache that it opens, and what it is called from now on."""
    role: Role = Role.S_WORKER
    max_blocks: Int = 0
    """The most KV blocks that are wanted; 0: as many as there is memory for."""
    session: Int = 0
    """Secret of the run that the cache is for; 0: none."""
    outlives: bool = False
    """The cache is kept for the session when its S-worker is lost."""
    resumes: bool = False
    """Go on with such a cache; if there is none, or it has more blocks than are
    wanted, with a new one."""
    feeders: tuple[Text, ...] = ()
    """Addresses of those that bring prompts (``StorePrompt``), in the session's
    name; none: nobody else does."""

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
        if (self.outlives or self.resumes) and not self.session:
            raise ConfigError("a cache of no session can't be kept for it, nor gone on with")

    def check(self, answer: Any) -> None:
        """See ``Asking``."""
        super().check(answer)
        welcome: Welcome = answer
        compare_versions(f"R-worker {welcome.worker}", welcome.version)
        for name, value, most in (
            ("num_blocks", welcome.num_blocks, self.max_blocks or MAX_BLOCKS),
            ("num_threads", welcome.num_threads, MAX_THREADS),
        ):
            if not 1 <= value <= most:
                raise ProtocolError(f"offers {name}={value}, which is not within 1..{most}")
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


class OpenSequence(Reserving, frozen=True, tag=2):
    sequence_id: Int
    num_reserved_tokens: Int
    """Room is set aside for this many tokens, so that no later step of the
    sequence can run out of blocks."""
    holder: Int = THE_ONLY

    def undo(self) -> CloseSequence:
        return CloseSequence(self.sequence_id, self.holder)


class ForkSequence(Reserving, frozen=True, tag=3):
    parent_id: Int
    sequence_id: Int
    num_shared_tokens: Int
    """The prefix of the parent that the new sequence starts with: 1 to the
    parent's cached tokens, in whole tokens. Its blocks are shared; the first
    append into a shared block copies that block first."""
    num_reserved_tokens: Int
    """In all, the shared tokens included."""
    holder: Int = THE_ONLY

    def undo(self) -> CloseSequence:
        return CloseSequence(self.sequence_id, self.holder)


class ExtendSequence(Reserving, frozen=True, tag=8):
    sequence_id: Int
    num_reserved_tokens: Int
    """In all; not fewer than before."""
    holder: Int = THE_ONLY


class BeginStep(ForHolder, frozen=True, tag=5, eq=False):
    step: Int
    lane: Int
    sequence_ids: I64
    num_past: I32
    """Tokens cached before this step; must equal the worker's own count. Of a
    sequence with a gap, those before the gap's first missing token; or, in a
    second row beside the one that fills the gap, all of its tokens."""
    num_new: I32
    """Tokens appended, >= 0; where it is 0, something is attended."""
    num_queries: I32
    """0 or more, at most num_new + num_beyond."""
    num_visible: I32
    """Keys visible at most: num_past or num_past + num_new."""
    want_lse: bool = False
    num_beyond: I32 | None = None
    """Tokens of the whole sequence, up to the last query, that come after those
    here; None: 0 for all."""
    holder: Int = THE_ONLY


class Attend(ForHolder, frozen=True, tag=6, eq=False):
    step: Int
    lane: Int
    layer: Int
    q: Activations
    k: Activations
    v: Activations
    holder: Int = THE_ONLY

    lends = True
    answers = (AttendResult,)
    repeated = ("step", "lane", "layer")

    def check(self, answer: Any) -> None:
        """See ``Asking``; there is one in every layer."""
        of_answer = (answer.step, answer.lane, answer.layer) if type(answer) in self.answers else ()
        if of_answer != (self.step, self.lane, self.layer):
            super().check(answer)

    def part(self, shard: Shard) -> Attend:
        if (heads := shard.heads) is None:
            return self
        # Copies, since a part of the heads doesn't lie in one piece.
        q = np.ascontiguousarray(self.q[:, heads.q])
        k = np.ascontiguousarray(self.k[:, heads.kv])
        v = np.ascontiguousarray(self.v[:, heads.kv])
        return replace(self, q=q, k=k, v=v)

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


AboutCaches: TypeAlias = (
    Hello
    | OpenSequence
    | ForkSequence
    | ExtendSequence
    | CloseSequence
    | KeptToRWorker
    | TierToRWorker
    | ChunkToRWorker
    | StorePrompt
    | TakingOverToRWorker
    | Replicate
    | Restore
    | HandingToRWorker
    | Inspect
    | Shutdown
)
"""What an R-worker gets between steps, and during them."""
ToRWorker: TypeAlias = BeginStep | Attend | AboutCaches
Room: TypeAlias = (
    OpenSequence
    | ForkSequence
    | ExtendSequence
    | CloseSequence
    | KeptToRWorker
    | TruncateSequence
    | TierToRWorker
)
"""``in_every_stage``: what the R-workers of a column are told in all stages alike."""
Greeting: TypeAlias = Hello | Inspect | DescribeExport
"""What a peer may begin with."""
Unasked: TypeAlias = Failed | ReplicationNews | MoveNews
"""What an R-worker may say without having been asked."""
FromRWorker: TypeAlias = Answer | Unasked

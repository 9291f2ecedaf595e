"""What an R-worker decides: a peer's message in, instructions out. No sockets,
threads, clocks or kernels.

Everything that a peer says is checked here and in ``rworker.books``, before it
reaches the KV store or a kernel. A message that breaks the protocol changes
nothing; it is answered with ``Failed``, and the worker stops serving that peer.
Other peers notice nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from cpu_kernels import BlockLayout
from fastdecode.core.errors import ConfigError, FastDecodeError, ProtocolError
from fastdecode.wire.kv.chunks import ChunkToRWorker, ExpectTokens, FetchChunk, StoreChunk
from fastdecode.wire.kv.kept import (
    EndSequence,
    ForgetBlocks,
    KeepBlocks,
    KeptToRWorker,
    ResumeSequence,
)
from fastdecode.wire.kv.replicating import MOST_LINK_BYTES, Dropped, Replicate
from fastdecode.wire.kv.taking_over import DropCache, TakenOver, TakeOver, TruncateSequence
from fastdecode.wire.messages import (
    MAX_ID,
    Accepted,
    Attend,
    BeginStep,
    CloseSequence,
    ExtendSequence,
    Failed,
    ForkSequence,
    Hello,
    Inspect,
    OpenSequence,
    Refused,
    Shutdown,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.traits import ANYBODY, Role
from rworker.blocks.appending import Appended
from rworker.blocks.kv_store import DEFAULT_MAX_SEQUENCES, KVStore
from rworker.caches import NOBODY, Cache, Caches
from rworker.checks import check_hello, check_integer
from rworker.instructions import (
    Compute,
    CopyBlocks,
    Drop,
    EndStep,
    Follow,
    HangUp,
    Instruction,
    Link,
    PlaceChunk,
    Prepare,
    ReadChunk,
    Send,
    StepPlan,
    Stop,
    TellAboutHost,
)
from rworker.stream.changes import Change
from rworker.stream.checks import check_seconds, expect_tokens, fetch_chunk, store_chunk
from rworker.stream.taking_over import take_over, truncate, wanted_of


@dataclass
class _Peer:
    """What a peer has said of itself."""

    role: Role | None = None
    """None: nothing yet."""
    session: int = 0
    """Of the run that it is for; 0: none."""
    only_looks: bool = False
    """It inspected us first: what it opens then is for measuring, and no job."""

    @property
    def has_job(self) -> bool:
        return self.role is Role.S_WORKER and not self.only_looks


class RWorkerState:
    """One R-worker and its peers, which are numbers here.

    Args:
        name: what the worker calls itself towards people.
        kv_bytes: memory for K and V of all caches; as many blocks as fit in it
            are offered.
        num_threads: what to tell peers; the loop's executor has them.
        max_sequences: most sequences open at once in each cache.
        model_hash: serve S-workers that run this model only; None: any.
        keeps_serving: whether to stay when the last S-worker has left.
        awaits_return: whether to stay for a while when the last S-worker is
            lost, and hasn't taken its leave.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        name: str,
        *,
        kv_bytes: int,
        num_threads: int = 1,
        max_sequences: int = DEFAULT_MAX_SEQUENCES,
        model_hash: str | None = None,
        keeps_serving: bool = False,
        awaits_return: bool = False,
    ) -> None:
        for option, value in (
            ("kv_bytes", kv_bytes),
            ("num_threads", num_threads),
            ("max_sequences", max_sequences),
        ):
            if value < 1:
                raise ConfigError(f"R-worker {name}: {option}={value} must be at least 1")
        self.name = name
        self._kv_bytes = kv_bytes
        self._num_threads = num_threads
        self._model_hash = model_hash
        self._keeps_serving = keeps_serving
        self._awaits_return = awaits_return
        self.is_deserted = False
        """Whether the last S-worker is lost, and may return."""
        self._caches = Caches(kv_bytes, max_sequences)
        self._peers: dict[int, _Peer] = {}

    def handle(self, peer: int, message: ToRWorker) -> tuple[Instruction, ...]:
        """What to do about a peer's message, in this order. Never raises for what a peer did."""
        try:
            return self._dispatch(peer, message)
        except FastDecodeError as error:
            text = f"{type(message).__name__}: {error.message}"
            return Send(peer, Failed(self.name, error.code, text)), HangUp(peer)

    def lost(self, peer: int, *, may_return: bool = False) -> tuple[Instruction, ...]:
        """A peer is gone, or was hung up on: its caches go with it."""
        gone = self._peers.pop(peer, _Peer())
        if gone.role is Role.NEIGHBOUR and self._has_session(gone.session):
            self._caches.leave(peer)  # its replicas are what the session goes on with
        over = 0 if self._has_session(gone.session) else gone.session
        drops = tuple(Drop(holder) for holder in self._caches.drop(peer, over))
        is_over = gone.has_job and self._is_done
        if is_over and may_return and self._awaits_return:
            self.is_deserted = True
            return drops
        return (*drops, Stop()) if is_over else drops

    def check_invariants(self) -> None:
        """For tests and debugging."""
        for cache in self._caches:
            cache.books.check_invariants()
            if cache.owner == NOBODY:
                assert self._has_session(cache.books.hello.session), "a cache that nobody can take"
                continue
            assert self._peers[cache.owner].role in (Role.S_WORKER, Role.NEIGHBOUR), (
                "a cache of nobody's"
            )
        assert sum(cache.num_bytes for cache in self._caches) <= self._kv_bytes, (
            "more memory than there is"
        )

    def _has_session(self, session: int) -> bool:
        """Whether an S-worker of a session is there."""
        return any(peer.has_job and peer.session == session != 0 for peer in self._peers.values())

    @property
    def _is_done(self) -> bool:
        return not self._keeps_serving and not any(peer.has_job for peer in self._peers.values())

    def _dispatch(self, number: int, message: ToRWorker) -> tuple[Instruction, ...]:
        peer = self._peers.setdefault(number, _Peer())
        _check_speaker(peer, message)
        match message:
            case Attend():
                return self._attend(number, message)
            case BeginStep():
                return self._begin_step(self._cache(number, message), message)
            case OpenSequence() | ForkSequence() | ExtendSequence() | ResumeSequence():
                cache = self._cache(number, message)
                return _answered(number, cache, message, cache.books.reserve(message))
            case StoreChunk():
                cache = self._cache(number, message)
                slots = store_chunk(cache.books, message)
                return (PlaceChunk(number, cache.holder, message, slots),)
            case FetchChunk():
                cache = self._cache(number, message)
                slots = fetch_chunk(cache.books, message)
                return (ReadChunk(number, cache.holder, message, slots),)
            case ExpectTokens():
                cache = self._cache(number, message)
                return _copies(cache, expect_tokens(cache.books, message))
            case TruncateSequence():
                cache = self._cache(number, message)
                return _answered(number, cache, message, truncate(cache.books, message))
            case TakeOver():
                return self._take_over(number, peer, message)
            case DropCache():
                return self._drop(number, peer, message)
            case Replicate():
                return self._replicate(number, self._cache(number, message), message)
            case CloseSequence() | EndSequence():
                cache = self._cache(number, message)
                cache.books.close(message)
                return _followed(cache, message)
            case KeepBlocks():
                self._cache(number, message).books.keep(message)
                return ()
            case ForgetBlocks():
                self._cache(number, message).books.forget(message)
                return ()
            case Hello():
                return self._hello(number, peer, message)
            case Inspect():
                return (self._inspect(number, peer),)
            case Shutdown():
                return (self._leave(number, peer),)
            case _:
                raise _unknown(message)

    def _cache(
        self,
        number: int,
        message: OpenSequence
        | ForkSequence
        | ExtendSequence
        | CloseSequence
        | KeptToRWorker
        | BeginStep
        | Attend
        | ChunkToRWorker
        | TruncateSequence
        | Replicate,
    ) -> Cache:
        return self._caches.of(number, message.holder)

    def _inspect(self, number: int, peer: _Peer) -> Instruction:
        if peer.role in (Role.S_WORKER, Role.NEIGHBOUR):
            raise ProtocolError("Inspect came in the middle of a job: it has to come before Hello")
        peer.role, peer.only_looks = Role.READER, True
        return TellAboutHost(number, self._num_threads, self._kv_bytes, self._model_hash or "")

    def _leave(self, number: int, peer: _Peer) -> Instruction:
        """Whoever leaves takes only its own with it; the last S-worker ends the R-worker."""
        others = any(other.has_job for key, other in self._peers.items() if key != number)
        may_end = peer.role in (None, Role.S_WORKER) and not others and not self._keeps_serving
        return Stop() if may_end else HangUp(number)

    def _hello(self, number: int, peer: _Peer, hello: Hello) -> tuple[Instruction, ...]:
        check_hello(hello)
        if peer.role not in (None, Role.READER, hello.role):
            raise ProtocolError(f"it greeted as {peer.role.value}, and now as {hello.role.value}")
        if peer.session not in (0, hello.session):
            raise ProtocolError("it greeted in another session before")
        if self._model_hash not in (None, hello.model_hash) and not peer.only_looks:
            raise ProtocolError(
                f"the S-worker runs the model {hello.model_hash}, this R-worker is kept for "
                f"{self._model_hash}",
                code="model_mismatch",
            )
        kv = hello.kv
        try:
            layout = BlockLayout(kv.num_kv_heads, kv.head_dim, kv.dtype.value, kv.block_size)
        except ValueError as error:
            raise ConfigError(f"the KV cache asked for can't be laid out: {error}") from None
        cache = self._caches.open(number, hello, layout)
        peer.role = hello.role
        peer.session = hello.session
        self.is_deserted = self.is_deserted and not peer.has_job
        num_blocks = cache.books.store.num_blocks
        return (
            Prepare(cache.holder, layout, num_blocks, hello.attention, hello.activation_dtype),
            Send(number, Welcome(self.name, num_blocks, kv.block_size, self._num_threads)),
        )

    def _take_over(self, number: int, peer: _Peer, message: TakeOver) -> tuple[Instruction, ...]:
        """Whoever had the cache before has none any more: it is hung up on."""
        if peer.role is None:
            raise ProtocolError("the first message must be Hello")
        wanted = wanted_of(message)
        cache, before = self._caches.take_over(number, message.holder, message.session)
        told = Send(number, TakenOver(take_over(cache.books, wanted)))
        return (told,) if before in (number, NOBODY) else (told, HangUp(before))

    def _drop(self, number: int, peer: _Peer, message: DropCache) -> tuple[Instruction, ...]:
        """Whoever else used the cache is hung up on."""
        if peer.role is None:
            raise ProtocolError("the first message must be Hello")
        session = check_integer("session", message.session, 0, MAX_ID)
        found = self._caches.remove(number, message.cache, session)
        told = Send(number, Dropped(message.holder, message.cache))
        if found is None:
            return (told,)
        if found.owner in (number, NOBODY):
            return Drop(found.holder), told
        return Drop(found.holder), HangUp(found.owner), told

    @staticmethod
    def _begin_step(cache: Cache, begin: BeginStep) -> tuple[Instruction, ...]:
        appended = cache.books.begin_step(begin)
        cache.plans[begin.lane] = _plan(begin, appended, cache.books.store)
        return _copies(cache, appended)

    def _attend(self, number: int, attend: Attend) -> tuple[Instruction, ...]:
        cache = self._cache(number, attend)
        was_last = cache.books.attend(attend)
        plan = cache.plans.pop(attend.lane) if was_last else cache.plans[attend.lane]
        compute = Compute(number, cache.holder, plan, attend.layer, attend.q, attend.k, attend.v)
        if was_last and cache.is_replicated:
            return compute, EndStep(cache.holder, attend.lane, attend.step)
        return (compute,)

    @staticmethod
    def _replicate(number: int, cache: Cache, message: Replicate) -> tuple[Instruction, ...]:
        link_bytes = check_integer("link_bytes", message.link_bytes, 1, MOST_LINK_BYTES)
        if message.keeper and not cache.books.hello.session:
            raise ProtocolError("a cache of no session can't be replicated: nobody could go on")
        serial = check_integer("link", message.link, 0, MAX_ID)
        timeout_s = check_seconds("timeout_s", message.timeout_s)
        cache.is_replicated = bool(message.keeper)
        who = (message.keeper, message.guest)
        link = Link(number, cache.holder, cache.books, *who, link_bytes, serial, timeout_s)
        return (link,)


def _check_speaker(peer: _Peer, message: ToRWorker) -> None:
    """Raises ProtocolError: whoever the peer is may not say that. One that
    hasn't said who it is has no cache either."""
    said_by = getattr(message, "said_by", ANYBODY)  # at run time it may be no message at all
    if peer.role is not None and peer.role not in said_by:
        raise ProtocolError(f"a {peer.role.value} may not say that")


def _followed(
    cache: Cache, change: Change | ResumeSequence | EndSequence
) -> tuple[Instruction, ...]:
    """What the cache has accepted, its replica is told, too. To a replica, which
    keeps no blocks of its own, what is resumed from kept ones is new."""
    if not cache.is_replicated:
        return ()
    if isinstance(change, ResumeSequence):
        change = OpenSequence(change.sequence_id, change.num_reserved_tokens)
    elif isinstance(change, EndSequence):
        change = CloseSequence(change.sequence_id)
    return (Follow(cache.holder, change),)


def _answered(
    to: int, cache: Cache, change: Change | ResumeSequence, answer: Accepted | Refused
) -> tuple[Instruction, ...]:
    told = Send(to, answer)
    return (told, *_followed(cache, change)) if isinstance(answer, Accepted) else (told,)


def _copies(cache: Cache, appended: Appended) -> tuple[Instruction, ...]:
    """What has to be copied before anything is written."""
    if not appended.copy_sources.size:
        return ()
    return (CopyBlocks(cache.holder, appended.copy_sources, appended.copy_targets),)


def _plan(begin: BeginStep, appended: Appended, store: KVStore) -> StepPlan:
    """What every layer of a step has in common. Keeps nothing of the peer's arrays."""
    with_queries = begin.num_queries > 0
    num_queries = begin.num_queries[with_queries]
    query_ends = begin.num_past + begin.num_new
    if begin.num_beyond is not None:
        query_ends += begin.num_beyond
    return StepPlan(
        step=begin.step,
        lane=begin.lane,
        slots=appended.slots,
        block_tables=store.block_tables(begin.sequence_ids[with_queries]),
        query_starts=np.concatenate(([0], np.cumsum(num_queries))).astype(np.int32),
        query_positions=query_ends[with_queries] - num_queries,
        context_lens=begin.num_visible[with_queries],
        want_lse=begin.want_lse,
    )


def _unknown(message: NoReturn) -> ProtocolError:
    """Every message is handled, says the type checker; at run time, an object that is none."""
    return ProtocolError(f"{type(message).__name__} is not a message to an R-worker")

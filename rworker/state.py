"""What an R-worker decides: a peer's message in, instructions out. No sockets, threads, clocks or
kernels.

Every message of a peer is checked here and in ``rworker.cache_state``, before it reaches the KV
store or a kernel. A message that breaks the protocol changes nothing. It is answered with
``Failed``, and the worker stops serving that peer, without effect on others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from hmac import compare_digest
from typing import NoReturn, TypeAlias

import numpy as np

from fastdecode.core.errors import ConfigError, FastDecodeError, ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import (
    SESSION_RESUMED,
    BlockData,
    ChunkForm,
    DropCache,
    Dropped,
    Fetch,
    Forget,
    KeptToRWorker,
    Name,
    ReadBlocks,
    Replicate,
    Retain,
    StoreChunk,
    TakeOver,
    TierToRWorker,
    Truncate,
    UseTier,
)
from fastdecode.wire.messages import (
    REFUSALS,
    AboutCaches,
    Accepted,
    Attend,
    BeginStep,
    Close,
    Extend,
    Failed,
    Hello,
    Inspect,
    Open,
    Shutdown,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.traits import ANYBODY, OWNERS, THE_ONLY, Role
from rworker.blocks.kv_store import DEFAULT_MAX_SEQUENCES
from rworker.caches import NOBODY, Caches, HolderCache
from rworker.checks import check_hello, checked_keys
from rworker.instructions import (
    OVER,
    RESTORER,
    Drop,
    DropStored,
    Follow,
    HangUp,
    Instruction,
    LinkReplica,
    MoveBlocks,
    OpenTier,
    PlaceChunk,
    Prepare,
    ReadChunk,
    ReadReplica,
    RemoveReplica,
    Send,
    SendBlocks,
    Stop,
    TellAboutHost,
    Unlink,
)
from rworker.serving_terms import ANYBODY_ONCE, ServingTerms
from rworker.step_plan import attend, begin_step, copies
from rworker.stream.checks import check_read, shape_of, store_chunk
from rworker.stream.chunks import layout_of
from rworker.stream.taking_over import nothing_of, take_over, truncate, wanted_of

_OfCache: TypeAlias = KeptToRWorker | TierToRWorker | StoreChunk | Replicate
"""Messages about one of the sender's caches."""


@dataclass
class _Peer:
    """A peer's role and session, as its messages give them."""

    role: Role | None = None
    session: int = 0
    """Session of its run. 0 for none."""
    only_looks: bool = False
    """It inspected first: what it opens then is for measuring, not for a job."""

    @property
    def has_job(self) -> bool:
        return self.role is Role.S_WORKER and not self.only_looks

    def look(self, message: Inspect | ReadBlocks) -> None:
        """Make it a reader. Raise ProtocolError if it has a cache here."""
        if self.role in OWNERS:
            name = type(message).__name__
            raise ProtocolError(f"{name} came in the middle of a job: it has to come before Hello")
        self.role, self.only_looks = Role.READER, True


class RWorkerState:
    """One R-worker and its peers, which are numbers here.

    Args:
        name: name of the worker for people.
        kv_bytes: memory for K and V of all caches, in as many blocks as fit.
        num_threads: threads of the loop's executor, for reports to peers.
        max_sequences: most sequences open at once in each cache.
        has_tier: cached blocks may go to a lower tier.
        is_padded: blocks are laid out by ``BlockLayout``. False if they are tensors, not padded.
        serving: which S-workers to serve, and for how long.

    Raises:
        ConfigError: If an option is out of range.
    """

    def __init__(
        self,
        name: str,
        *,
        kv_bytes: int,
        num_threads: int = 1,
        max_sequences: int = DEFAULT_MAX_SEQUENCES,
        has_tier: bool = False,
        is_padded: bool = True,
        serving: ServingTerms = ANYBODY_ONCE,
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
        self._has_tier = has_tier
        self._is_padded = is_padded
        self._serving = serving
        self.is_deserted = False
        """True if the last S-worker is lost, and may return."""
        self.num_lost = 0
        """S-workers that were lost, and may return."""
        self._caches = Caches(kv_bytes, max_sequences)
        self._peers: dict[int, _Peer] = {}

    def handle(self, peer: int, message: ToRWorker) -> tuple[Instruction, ...]:
        """Return what follows from a peer's message, in order. Never raise for what a peer did."""
        try:
            return self._dispatch(peer, message)
        except FastDecodeError as error:
            kind = "" if error.code in REFUSALS else f"{type(message).__name__}: "
            return Send(peer, Failed(self.name, error.code, kind + error.message)), HangUp(peer)

    def cache_of(self, peer: int, holder: int = THE_ONLY) -> HolderCache:
        """Return a peer's cache, for an S-worker that attends in it without messages.

        Raises:
            ProtocolError: If the peer has no such cache.
        """
        return self._caches.of(peer, holder)

    def lost(
        self, peer: int, *, may_return: bool = False, is_torn: bool = False
    ) -> tuple[Instruction, ...]:
        """Drop the caches of a peer that is gone, but those that it may return for (``HangUp``)."""
        gone = self._peers.pop(peer, _Peer())
        done: list[Instruction] = []
        if gone.role is Role.NEIGHBOUR and self._has_session(gone.session) and not is_torn:
            self._caches.leave(peer)  # its replicas are what the session continues with
        if gone.has_job and may_return:
            self.num_lost += 1
            if self._serving.keep_s > 0:
                done += map(Unlink, self._caches.desert(peer))
        over = 0 if self._has_session(gone.session) else gone.session
        done += map(Drop, self._caches.drop(peer, over))
        if gone.has_job and self._is_done:
            if self.kept or (may_return and self._serving.return_s > 0):
                self.is_deserted = True
            else:
                done.append(Stop())
        return tuple(done)

    @property
    def kept(self) -> list[HolderCache]:
        """The caches that are kept for lost S-workers, for a grace period (``kept_for_s``)."""
        return [cache for cache in self._caches if cache.is_kept]

    def forget_kept(self, holders: Iterable[HolderId]) -> tuple[Instruction, ...]:
        """Drop kept caches that were not resumed in time."""
        return tuple(map(Drop, self._caches.drop_kept(holders)))

    def check_invariants(self) -> None:
        for cache in self._caches:
            cache.books.check_invariants()
            if cache.is_kept:
                assert self._serving.keep_s > 0 and not cache.is_replicated
                continue
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
        return any(peer.has_job and peer.session == session != 0 for peer in self._peers.values())

    @property
    def _is_done(self) -> bool:
        return not self._serving.keeps_serving and not any(
            peer.has_job for peer in self._peers.values()
        )

    def _dispatch(self, number: int, message: ToRWorker) -> tuple[Instruction, ...]:
        peer = self._peers.get(number)
        if peer is None:
            peer = self._peers[number] = _Peer()
        said_by = getattr(message, "said_by", ANYBODY)  # at run time it may be no message at all
        # A peer without a role has no cache either.
        if peer.role is not None and peer.role not in said_by:
            raise ProtocolError(f"a {peer.role.value} may not say that")
        match message:
            case Attend():
                return attend(number, self._caches.of(number, message.holder), message)
            case BeginStep():
                return begin_step(self._caches.of(number, message.holder), message)
            case _:
                return self._manage(number, peer, message)

    def _manage(self, number: int, peer: _Peer, message: AboutCaches) -> tuple[Instruction, ...]:
        match message:
            case TakeOver():
                return self._take_over(number, peer, message)
            case DropCache():
                return self._drop(number, peer, message)
            case ReadBlocks():
                peer.look(message)
                return _read_blocks(number, self._caches, message)
            case Hello():
                return self._hello(number, peer, message)
            case Inspect():
                peer.look(message)
                info = self._num_threads, self._kv_bytes, self._serving.model_hash or ""
                return (TellAboutHost(number, *info),)
            case Shutdown():
                own = [x for x in self._caches if x.owner == number and x.is_replicated]
                links = (LinkReplica(number, x.holder, x.books, "", 1, OVER, 0.0) for x in own)
                return (*links, self._leave(number, peer))
            case _ if isinstance(message, _OfCache):
                return _of_cache(number, self._caches.of(number, message.holder), message)
            case _:
                raise _unknown(message)

    def _leave(self, number: int, peer: _Peer) -> Instruction:
        """Let a peer leave. The last S-worker ends the R-worker."""
        others = any(other.has_job for key, other in self._peers.items() if key != number)
        is_needed = others or self._serving.keeps_serving or bool(self.kept)
        may_end = peer.role in (None, Role.S_WORKER) and not is_needed
        return Stop() if may_end else HangUp(number)

    def _hello(self, number: int, peer: _Peer, hello: Hello) -> tuple[Instruction, ...]:
        check_hello(hello)
        if peer.role not in (None, Role.READER, hello.role):
            raise ProtocolError(f"it greeted as {peer.role.value}, and now as {hello.role.value}")
        if peer.session not in (0, hello.session):
            raise ProtocolError("it greeted in another session before")
        if self._serving.model_hash not in (None, hello.model_hash) and not peer.only_looks:
            raise ProtocolError(
                f"the S-worker runs the model {hello.model_hash}, this R-worker is kept for "
                f"{self._serving.model_hash}: start it with another --model-hash, or without",
                code="model_mismatch",
            )
        kv = hello.kv
        try:
            layout = layout_of(kv)
        except ValueError as error:
            raise ConfigError(f"the KV cache asked for can't be laid out: {error}") from None
        resumed = self._caches.resume(number, hello) if hello.resumes else None
        block_bytes = layout.block_bytes * kv.num_layers if self._is_padded else kv.block_bytes
        late = self._drop_late(hello)
        on_disk = number == RESTORER
        if resumed is None:
            cache = self._caches.open(number, hello, block_bytes, is_on_disk=on_disk)
        else:
            cache = resumed[0]
        peer.role = hello.role
        peer.session = hello.session
        self.is_deserted = self.is_deserted and not peer.has_job
        num_blocks = cache.books.store.num_blocks
        mine = (self.name, num_blocks, kv.block_size, self._num_threads)
        is_resumed = resumed is not None
        welcome = Send(number, Welcome(*mine, has_tier=self._has_tier, is_resumed=is_resumed))
        if resumed is not None:
            fence = _fence(self.name, number, resumed[1])
            return (Unlink(cache.holder), welcome, *fence)
        specs = (hello.attention, hello.activation_dtype)
        prepare = Prepare(cache.holder, layout, num_blocks, *specs, on_disk)
        return (*late, prepare, welcome)

    def _drop_late(self, hello: Hello) -> list[Instruction]:
        """Drop replicas that a neighbour opened late, which was given up and did not know it. An
        S-worker that greets wants none yet."""
        if hello.role is not Role.S_WORKER or hello.resumes:
            return []
        replicas = self._caches.drop_replicas(hello.session)
        owners = dict.fromkeys(x.owner for x in replicas if x.owner != NOBODY)
        return [*(Drop(x.holder) for x in replicas), *map(HangUp, owners)]

    def _take_over(self, number: int, peer: _Peer, message: TakeOver) -> tuple[Instruction, ...]:
        """Give a peer a cache, and hang up on the former owner."""
        if peer.role is None:
            raise ProtocolError("the first message must be Hello")
        wanted = wanted_of(message)
        if message.is_in_file and self._caches.at(message.holder) is None:
            if not 0 != message.session == peer.session:
                raise ProtocolError("a replica is restored in the session in which it was made")
            return (ReadReplica(number, message),)
        cache, before = self._caches.take_over(number, message.holder, message.session)
        answer, changes = take_over(cache.books, *wanted)
        done: list[Instruction] = [Send(number, answer)]
        done += [Follow(cache.holder, change) for change in changes if cache.is_replicated]
        if before not in (number, NOBODY):
            done += Unlink(cache.holder), HangUp(before)
        return tuple(done)

    def restored(self, order: ReadReplica) -> tuple[Instruction, ...]:
        """Return what follows once a replica was read from its file, as far as possible."""
        if self._caches.at(order.message.holder) is None:
            return (Send(order.to, nothing_of(*wanted_of(order.message))),)
        return self.handle(order.to, order.message)

    def _drop(self, number: int, peer: _Peer, message: DropCache) -> tuple[Instruction, ...]:
        """Drop a cache, and hang up on another peer that used it."""
        if peer.role is None:
            raise ProtocolError("the first message must be Hello")
        session, link = message.session, message.link
        found = self._caches.remove(number, message.cache, session)
        files = (RemoveReplica(HolderId(message.cache), session, link),) if link else ()
        answer = (*files, Send(number, Dropped(message.holder, message.cache)))
        if found is None:
            return answer
        if found.owner in (number, NOBODY):
            return Drop(found.holder), *answer
        return Drop(found.holder), HangUp(found.owner), *answer


def _read_blocks(
    number: int, caches: Iterable[HolderCache], message: ReadBlocks
) -> tuple[Instruction, ...]:
    """Return what answers a reader. A cache that it may not read has none of the blocks.

    Raises:
        ProtocolError: If the reader's cache is of another kind, or the message asks for too much.
    """
    right = message.reading.to_bytes(8, "big")
    keys = checked_keys(message.keys)
    for cache in caches:
        hello, cached = cache.books.hello, cache.books.store.cached
        own = hello.reading.to_bytes(8, "big")
        if not (hello.reading and compare_digest(own, right) and hello.role is Role.S_WORKER):
            continue
        check_read(hello, message)
        sizes = zip(keys, message.num_tokens.tolist(), strict=True)
        there = [cached.num_tokens(key) == size for key, size in sizes]
        if any(there):
            is_there, counts = np.array(there, np.uint8), message.num_tokens[there]
            places = cached.of_keys(itertools.compress(keys, there)).astype(np.int64)
            if message.form is ChunkForm.TOKENS:
                slots = zip(places * hello.kv.block_size, counts, strict=True)
                places = np.concatenate([first + np.arange(count) for first, count in slots])
            shape = shape_of(hello.kv, message, int(counts.sum()))
            return (SendBlocks(number, is_there, ReadChunk(cache.holder, shape, places)),)
    return (Send(number, BlockData(np.zeros(len(keys), np.uint8), np.zeros(0, np.uint8))),)


def _of_cache(number: int, cache: HolderCache, message: _OfCache) -> tuple[Instruction, ...]:
    """Return what follows from a message of the cache's owner."""
    books = cache.books
    match message:
        case Open() | Extend() | Truncate():
            return _answered(number, cache, message)
        case StoreChunk():
            appended, shape, places = store_chunk(books, message)
            place = PlaceChunk(cache.holder, shape, places, message.data)
            return *copies(cache, appended), place, Send(number, Accepted(message.sequence_id))
        case UseTier():
            if books.store.cached.jobs:
                raise ProtocolError("the lower tier is in use")
            return (OpenTier(number, cache.holder, message.identity),)
        case Retain() | Fetch():
            job = books.store.cached.begin(message)
            return (MoveBlocks(number, cache.holder, books, job, message),)
        case Forget(is_below=True):
            return (DropStored(cache.holder, tuple(checked_keys(message.keys))),)
        case Replicate(keeper, link_bytes, link, timeout_s):
            if keeper and not books.hello.session:
                raise ProtocolError("a cache without a session can't have a replica to take over")
            cache.is_replicated = bool(keeper)
            return (LinkReplica(number, cache.holder, books, keeper, link_bytes, link, timeout_s),)
        case Close():
            books.close(message)
        case Name():
            books.keep(message)
        case Forget():
            books.forget(message)
    return _followed(cache, message)


def _fence(name: str, number: int, before: int) -> tuple[Instruction, ...]:
    """Hang up on the former owner of a resumed cache."""
    if before in (number, NOBODY):
        return ()
    reason = "another S-worker goes on with this session: there is to be one at a time"
    return Send(before, Failed(name, SESSION_RESUMED, reason)), HangUp(before)


def _followed(cache: HolderCache, change: KeptToRWorker) -> tuple[Instruction, ...]:
    """Let a replica follow a change that the cache has accepted."""
    return (Follow(cache.holder, change),) if cache.is_replicated else ()


def _answered(
    to: int, cache: HolderCache, change: Open | Extend | Truncate
) -> tuple[Instruction, ...]:
    books = cache.books
    answer = truncate(books, change) if isinstance(change, Truncate) else books.reserve(change)
    followed = _followed(cache, change) if isinstance(answer, Accepted) else ()
    return Send(to, answer), *followed


def _unknown(message: NoReturn) -> ProtocolError:
    """Refuse an object that is not a message. The type checker sees that each is handled."""
    return ProtocolError(f"{type(message).__name__} is not a message to an R-worker")

"""The caches of one R-worker by holder: the owner of each, and its share of the memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from fastdecode.core.errors import CapacityError, ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.wire.messages import Hello
from fastdecode.wire.traits import THE_ONLY, Role
from rworker.cache_state import CacheState, blocks_within

if TYPE_CHECKING:
    from rworker.step_plan import StepPlan

NOBODY: Final = -1  # as owner of a cache: its peer is gone, and another may take it over


@dataclass(eq=False)
class HolderCache:
    holder: HolderId
    owner: int
    """The peer that opened it or took it over. Only this peer may use it."""
    books: CacheState
    num_bytes: int
    plans: dict[int, StepPlan] = field(default_factory=dict)
    """Plans of the open steps, by lane."""
    is_replicated: bool = False
    """A neighbour gets every change."""
    kept_for_s: float = math.inf
    """Time for which it is kept."""

    def is_of(self, session: int) -> bool:
        """Return True if it was opened in this session. 0 stands for none."""
        return session != 0 and self.books.hello.session == session

    @property
    def is_kept(self) -> bool:
        """True if its S-worker is lost, and may resume the session."""
        return self.owner == NOBODY and self.books.hello.outlives

    def may_be_resumed(self, hello: Hello) -> bool:
        """Return True if it was kept for this S-worker, and is what that wants."""
        own = self.books.hello
        is_alike = (own.model_hash, own.kv, own.attention, own.activation_dtype) == (
            hello.model_hash,
            hello.kv,
            hello.attention,
            hello.activation_dtype,
        )
        fits = not hello.max_blocks or self.books.store.num_blocks <= hello.max_blocks
        return self.is_of(hello.session) and own.outlives and is_alike and fits


class Caches:
    """Caches by holder.

    Args:
        kv_bytes: memory for all caches.
        max_sequences: most sequences open at once in each.
    """

    def __init__(self, kv_bytes: int, max_sequences: int) -> None:
        self._kv_bytes = kv_bytes
        self._max_sequences = max_sequences
        self._caches: dict[HolderId, HolderCache] = {}

    def __iter__(self) -> Iterator[HolderCache]:
        return iter(self._caches.values())

    def open(
        self, peer: int, hello: Hello, block_bytes: int, *, is_on_disk: bool = False
    ) -> HolderCache:
        """Open an empty cache in place of the one that the peer had under that name.

        Args:
            block_bytes: bytes of one block id in all layers.
            is_on_disk: it takes no memory of this R-worker.

        Raises:
            ProtocolError: (code ``busy``) If it is another peer's, or others have the memory.
            CapacityError: If there is no memory for one KV block.
        """
        holder = HolderId(hello.holder)
        present = self._caches.get(holder)
        if present is not None and not _may_replace(present, peer, hello):
            raise _busy(present)
        free_bytes = self._kv_bytes - sum(cache.num_bytes for cache in self if cache is not present)
        if is_on_disk:
            free_bytes = hello.max_blocks * block_bytes
        try:
            num_blocks = blocks_within(free_bytes, block_bytes, hello)
        except CapacityError:
            for cache in self:
                if cache.owner != peer:
                    raise _busy(cache) from None
            raise
        books = CacheState(hello, num_blocks, max_sequences=self._max_sequences)
        num_bytes = 0 if is_on_disk else num_blocks * block_bytes
        self._caches[holder] = HolderCache(holder, peer, books, num_bytes)
        return self._caches[holder]

    def resume(self, peer: int, hello: Hello) -> tuple[HolderCache, int] | None:
        """Give a peer the cache that outlives the former one, and forget its cached blocks.

        Returns:
            The cache, and its former owner. None if there is no such cache.
        """
        cache = self._caches.get(HolderId(hello.holder))
        if cache is None or not cache.may_be_resumed(hello):
            return None
        before, cache.owner = cache.owner, peer
        cache.plans.clear()
        cache.is_replicated = False
        cache.books.hello = replace(cache.books.hello, reading=hello.reading)
        cache.books.store.cached.give_up()
        cache.books.store.cached.forget_all()
        return cache, before

    def at(self, holder: int) -> HolderCache | None:
        return self._caches.get(HolderId(holder))

    def of(self, peer: int, holder: int) -> HolderCache:
        """Return the cache that a peer's message is for.

        Raises:
            ProtocolError: If the peer has no such cache, or several and names none.
        """
        caches = self._caches
        # Most have one, whose holder isn't named; and it is asked for every message.
        named = next(iter(caches)) if holder == THE_ONLY and len(caches) == 1 else holder
        cache = caches.get(HolderId(named))
        if cache is not None and cache.owner == peer:
            return cache
        if holder != THE_ONLY:
            raise ProtocolError(f"holder {holder!r} is not one that this peer has opened")
        owned = [cache for cache in self if cache.owner == peer]
        if len(owned) != 1:
            why = f"it names no holder, but has {len(owned)}"
            raise ProtocolError(why if owned else "the first message must be Hello")
        return owned[0]

    def take_over(self, peer: int, holder: int, session: int) -> tuple[HolderCache, int]:
        """Give a peer a cache of its session. Return the cache, and its former owner.

        Raises:
            ProtocolError: If there is none, or it is of another session, or has a replica.
        """
        cache = self.of(peer, holder) if holder == THE_ONLY else self._caches.get(HolderId(holder))
        if cache is None or (cache.owner != peer and not cache.is_of(session)):
            raise ProtocolError(f"holder {holder!r} has no cache of this session")
        if cache.is_replicated and cache.owner != peer:
            raise ProtocolError(f"holder {holder!r} has a replica: end that first (Replicate)")
        before, cache.owner = cache.owner, peer
        if before != peer:
            cache.books.store.cached.give_up()
        hello = cache.books.hello
        cache.books.hello = replace(hello, role=Role.S_WORKER)
        cache.plans.clear()
        return cache, before

    def remove(self, peer: int, holder: int, session: int) -> HolderCache | None:
        """Forget a cache, whichever peer uses it. Return it, or None if there is none.

        Raises:
            ProtocolError: If it is of another session.
        """
        cache = self._caches.get(HolderId(holder))
        if cache is not None:
            if cache.owner != peer and not cache.is_of(session):
                raise ProtocolError(f"holder {holder!r} has no cache of this session")
            del self._caches[cache.holder]
        return cache

    def drop_replicas(self, session: int) -> list[HolderCache]:
        """Forget the replicas of a session that neighbours have opened. Return them."""
        replicas = [x for x in self if x.is_of(session) and x.books.hello.role is Role.NEIGHBOUR]
        self._forget(replicas)
        return replicas

    def leave(self, peer: int) -> None:
        """Let others take over the caches of a peer that is gone."""
        for cache in self:
            if cache.owner == peer and cache.books.hello.session:
                cache.owner = NOBODY

    def desert(self, peer: int) -> list[HolderId]:
        """Keep the caches of a lost S-worker that may resume its session. Return their holders."""
        deserted = [x for x in self if x.owner == peer and x.books.hello.outlives]
        for cache in deserted:
            cache.owner = NOBODY
            cache.is_replicated = False
            cache.books.store.cached.give_up()
        return [cache.holder for cache in deserted]

    def drop(self, peer: int, session: int = 0) -> list[HolderId]:
        """Forget a peer's caches, and a session's replicas without an owner. Return the holders."""
        return self._forget(
            cache
            for cache in self
            if cache.owner == peer
            or (cache.owner == NOBODY and cache.is_of(session) and not cache.is_kept)
        )

    def drop_kept(self, holders: Iterable[HolderId]) -> list[HolderId]:
        """Forget kept caches that were not resumed in time. Return the holders."""
        return self._forget(self._caches[holder] for holder in holders)

    def _forget(self, caches: Iterable[HolderCache]) -> list[HolderId]:
        dropped = [cache.holder for cache in caches]
        for holder in dropped:
            del self._caches[holder]
        return dropped


def _busy(cache: HolderCache) -> ProtocolError:
    """Return why a peer can't have another's cache, or its memory."""
    if cache.is_kept:
        left = f"{cache.kept_for_s:.0f} s more" if math.isfinite(cache.kept_for_s) else "a while"
        return ProtocolError(
            f"it keeps the KV cache of a job whose S-worker is lost for {left} (its "
            "--session-keep-s): resume that job (run-batch --resume), give it up (run-batch "
            "--overwrite with its output), or wait",
            code="session_kept",
        )
    why = "it is busy with another job: wait until that ends, or choose another R-worker"
    return ProtocolError(why, code="busy")


def _may_replace(present: HolderCache, peer: int, hello: Hello) -> bool:
    """Return True if a peer may replace a cache by a new one."""
    return present.owner == peer or (present.owner == NOBODY and present.is_of(hello.session))

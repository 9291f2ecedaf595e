"""The caches of one R-worker, by holder: whose each is, and how the R-worker's
memory is shared out among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from cpu_kernels import BlockLayout
from fastdecode.core.errors import CapacityError, ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.wire.messages import Hello
from fastdecode.wire.traits import THE_ONLY, Role
from rworker.books import Books, blocks_within
from rworker.instructions import StepPlan

NOBODY: Final = -1
"""In the place of a peer: whoever used the cache is gone, and it may be taken over."""


@dataclass(eq=False)
class Cache:
    """One holder's cache."""

    holder: HolderId
    owner: int
    """The peer that opened it or took it over, the only one that may use it."""
    books: Books
    num_bytes: int
    plans: dict[int, StepPlan] = field(default_factory=dict)
    """Of the open steps, by lane."""
    is_replicated: bool = False
    """A neighbour is told of every change."""

    def is_of(self, session: int) -> bool:
        """Whether it was opened in this session; 0 is none."""
        return session != 0 and self.books.hello.session == session


class Caches:
    """All that one R-worker keeps.

    Args:
        kv_bytes: memory for all of them.
        max_sequences: most sequences open at once in each.
    """

    def __init__(self, kv_bytes: int, max_sequences: int) -> None:
        self._kv_bytes = kv_bytes
        self._max_sequences = max_sequences
        self._caches: dict[HolderId, Cache] = {}

    def __iter__(self) -> Iterator[Cache]:
        return iter(self._caches.values())

    def open(self, peer: int, hello: Hello, layout: BlockLayout) -> Cache:
        """A cache as ``hello`` asks for it, empty, in place of the one that the
        peer had under that name.

        Raises:
            ProtocolError: (``busy``) it is another peer's, or others have the
                memory.
            CapacityError: there isn't the memory for one KV block.
        """
        holder = HolderId(hello.holder)
        present = self._caches.get(holder)
        if present is not None and not _may_replace(present, peer, hello):
            raise ProtocolError(f"holder {holder} serves another S-worker", code="busy")
        free_bytes = self._kv_bytes - sum(cache.num_bytes for cache in self if cache is not present)
        block_bytes = layout.block_bytes * hello.kv.num_layers
        try:
            num_blocks = blocks_within(free_bytes, block_bytes, hello)
        except CapacityError:
            if any(cache.owner != peer for cache in self):
                raise ProtocolError(
                    "it serves another S-worker, which has its memory", code="busy"
                ) from None
            raise
        books = Books(hello, num_blocks, max_sequences=self._max_sequences)
        self._caches[holder] = Cache(holder, peer, books, num_blocks * block_bytes)
        return self._caches[holder]

    def of(self, peer: int, holder: int) -> Cache:
        """The cache that a peer's message is for.

        Raises:
            ProtocolError: the peer has no such cache, or several and names
                none.
        """
        if holder != THE_ONLY:
            cache = self._caches.get(HolderId(holder))
            if cache is None or cache.owner != peer:
                raise ProtocolError(f"holder {holder!r} is not one that this peer has opened")
            return cache
        owned = [cache for cache in self if cache.owner == peer]
        if len(owned) != 1:
            raise ProtocolError(
                f"it names no holder, but has {len(owned)}"
                if owned
                else "the first message must be Hello"
            )
        return owned[0]

    def take_over(self, peer: int, holder: int, session: int) -> tuple[Cache, int]:
        """A cache is the peer's from now on: the cache, and whose it was.

        Raises:
            ProtocolError: there is none, or it is of another session; or it has
                a replica, which would be told nothing of it.
        """
        cache = self.of(peer, holder) if holder == THE_ONLY else self._caches.get(HolderId(holder))
        if cache is None or (cache.owner != peer and not cache.is_of(session)):
            raise ProtocolError(f"holder {holder!r} has no cache of this session")
        if cache.is_replicated:
            raise ProtocolError(f"holder {holder!r} has a replica: end that first (Replicate)")
        before, cache.owner = cache.owner, peer
        hello = cache.books.hello
        cache.books.hello = replace(hello, role=Role.S_WORKER)
        cache.plans.clear()
        return cache, before

    def remove(self, peer: int, holder: int, session: int) -> Cache | None:
        """A cache is over, whoever uses it. Which it was; None: there is none.

        Raises:
            ProtocolError: it is of another session.
        """
        cache = self._caches.get(HolderId(holder))
        if cache is not None:
            if cache.owner != peer and not cache.is_of(session):
                raise ProtocolError(f"holder {holder!r} has no cache of this session")
            del self._caches[cache.holder]
        return cache

    def leave(self, peer: int) -> None:
        """A peer is gone that nothing should go with: its caches may be taken over."""
        for cache in self:
            if cache.owner == peer and cache.books.hello.session:
                cache.owner = NOBODY

    def drop(self, peer: int, session: int = 0) -> list[HolderId]:
        """Forget a peer's caches, and those of a session that are nobody's.
        Which they were."""
        dropped = [
            cache.holder
            for cache in self
            if cache.owner == peer or (cache.owner == NOBODY and cache.is_of(session))
        ]
        for holder in dropped:
            del self._caches[holder]
        return dropped


def _may_replace(present: Cache, peer: int, hello: Hello) -> bool:
    """Whether a peer may have a new cache in the place of one that is there."""
    return present.owner == peer or (present.owner == NOBODY and present.is_of(hello.session))

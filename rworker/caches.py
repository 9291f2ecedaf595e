"""The caches of one R-worker, by holder: whose each is, and how the R-worker's
memory is shared out among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cpu_kernels import BlockLayout
from fastdecode.core.errors import CapacityError, ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.wire.messages import Hello
from fastdecode.wire.traits import THE_ONLY
from rworker.books import Books, blocks_within
from rworker.instructions import StepPlan


@dataclass(eq=False)
class Cache:
    """One holder's cache."""

    holder: HolderId
    owner: int
    """The peer that opened it, the only one that may use it."""
    books: Books
    num_bytes: int
    plans: dict[int, StepPlan] = field(default_factory=dict)
    """Of the open steps, by lane."""


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
        if present is not None and present.owner != peer:
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

    def drop(self, peer: int) -> list[HolderId]:
        """Forget a peer's caches. Which they were."""
        dropped = [cache.holder for cache in self if cache.owner == peer]
        for holder in dropped:
            del self._caches[holder]
        return dropped

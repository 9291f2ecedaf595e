"""What an R-worker is told about a cache's lower tier, as instructions; and what
it tells."""

from __future__ import annotations

from dataclasses import astuple

from fastdecode.core.errors import ProtocolError
from fastdecode.wire.kv.kept import words_of
from fastdecode.wire.kv.tiers import (
    DropBlocks,
    FetchBlocks,
    Fetching,
    Moved,
    StoreBlocks,
    TierToRWorker,
    UseTier,
)
from rworker.blocks.moving import keys_to_drop
from rworker.caches import HolderCache
from rworker.checks import checked_identity
from rworker.instructions import DropStored, Instruction, MoveBlocks, OpenTier
from rworker.tiers.tiers import Done, Further


def about_tier(number: int, cache: HolderCache, message: TierToRWorker) -> tuple[Instruction, ...]:
    """What a peer's message about a cache's lower tier comes to.

    Args:
        number: the peer's.

    Raises:
        ProtocolError: that can't be done now, or is never to be done.
    """
    match message:
        case UseTier():
            if cache.books.moving:
                raise ProtocolError("the lower tier is in use")
            return (OpenTier(number, cache.holder, checked_identity(message.identity)),)
        case StoreBlocks() | FetchBlocks():
            return (MoveBlocks(number, cache.holder, cache.books.moving.begin(message)),)
        case DropBlocks():
            return (DropStored(cache.holder, tuple(keys_to_drop(message))),)


def moved(cache: HolderCache, news: Done | Further) -> Moved | Fetching:
    """A job of a cache is over, or has come further: what whoever asked for it
    is told."""
    if isinstance(news, Further):
        return Fetching(news.holder, news.number, news.num_there, news.num_layers, news.seconds)
    move = cache.books.moving.end(news.number, news.failed)
    failed = words_of([move.keys[place] for place in sorted(news.failed)])
    faults = astuple(news.faults)
    return Moved(news.holder, news.number, failed, news.num_bytes, news.seconds, *faults)

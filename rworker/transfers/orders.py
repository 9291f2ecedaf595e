"""Messages that begin and end transfers of a cache, as instructions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from hmac import compare_digest
from typing import Final

import numpy as np
from msgspec.structs import replace

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import (
    BlockData,
    ChunkForm,
    Fetch,
    Forget,
    ReadBlocks,
    Replicate,
    Restore,
    Retain,
    TierToRWorker,
    UseTier,
)
from fastdecode.wire.messages import PROTOCOL_VERSION
from fastdecode.wire.traits import Role
from rworker.caches import HolderCache
from rworker.checks import checked_keys
from rworker.instructions import (
    DropStored,
    Instruction,
    LinkReplica,
    MoveBlocks,
    OpenTier,
    ReadChunk,
    ReadReplica,
    Send,
)
from rworker.stream.checks import check_read

OVER: Final = -1
"""In the place of a link's number: there is none any more."""


def read_blocks(
    number: int, caches: Iterable[HolderCache], message: ReadBlocks
) -> tuple[Instruction, ...]:
    """Return what answers a reader. A cache that it may not read has none of the blocks.

    Raises:
        ProtocolError: If the reader's cache is of another kind, or the message asks for too much.
    """
    if message.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the reader speaks protocol version {message.protocol_version}, this R-worker "
            f"{PROTOCOL_VERSION}: install the same version of fastdecode on both",
            code="protocol_version",
        )
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
            request = replace(message, keys=message.keys[there], num_tokens=counts)
            return (ReadChunk(number, cache.holder, request, places, is_there),)
    return (Send(number, BlockData(np.zeros(len(keys), np.uint8), np.zeros(0, np.uint8))),)


def about_tier(
    number: int, cache: HolderCache, message: TierToRWorker | Forget
) -> tuple[Instruction, ...]:
    """What a peer's message about a cache's lower tier comes to.

    Args:
        number: the peer's.

    Raises:
        ProtocolError: that can't be done now, or is never to be done.
    """
    books = cache.books
    match message:
        case UseTier():
            if books.store.cached.jobs:
                raise ProtocolError("the lower tier is in use")
            return (OpenTier(number, cache.holder, message.identity),)
        case Retain() | Fetch():
            move = books.store.cached.begin(message)
            return (MoveBlocks(number, cache.holder, books, move, message),)
        case Forget():
            return (DropStored(cache.holder, tuple(checked_keys(message.keys))),)


def to_restore(
    session: int, present: HolderCache | None, message: Restore
) -> tuple[Instruction, ...]:
    """What comes of a replica that is to be read from its file.

    Args:
        session: in which the peer has greeted; 0: none.
        present: a cache of that holder.

    Raises:
        ProtocolError: it is another session's.
    """
    holder = HolderId(message.holder)
    if not session or message.session != session:
        raise ProtocolError("a replica is restored in the session in which it was made")
    return (ReadReplica(holder, session, message.link),) if present is None else ()


def links_over(number: int, caches: Iterable[HolderCache]) -> Iterator[LinkReplica]:
    """A peer takes its leave: nobody needs the replicas of its caches any more."""
    for cache in caches:
        if cache.owner == number and cache.is_replicated:
            yield LinkReplica(number, cache.holder, cache.books, "", 1, OVER, 0.0)


def link_for(number: int, cache: HolderCache, message: Replicate) -> LinkReplica:
    """What a peer says of a cache's replica, as an instruction.

    Args:
        number: the peer's.

    Raises:
        ProtocolError: there can be none like that.
    """
    if message.keeper and not cache.books.hello.session:
        raise ProtocolError("a cache of no session can't be replicated: nobody could go on")
    cache.is_replicated = bool(message.keeper)
    return LinkReplica(
        number, cache.holder, cache.books, message.keeper, message.link_bytes, message.link,
        message.timeout_s,
    )  # fmt: skip

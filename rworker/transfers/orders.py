"""Messages that begin and end transfers of a cache, as instructions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
from msgspec.structs import replace

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import MAX_SEQUENCE_TOKENS
from fastdecode.wire.blocks import (
    DescribeExport,
    ExportDescription,
    ExportExpired,
    ExportSequence,
    Fetch,
    FetchChunk,
    Forget,
    Pull,
    Replicate,
    Restore,
    Retain,
    TierToRWorker,
    UseTier,
)
from fastdecode.wire.messages import PROTOCOL_VERSION
from rworker.cache_state import CacheState
from rworker.caches import HolderCache
from rworker.checks import checked_keys
from rworker.instructions import (
    BeginPull,
    DropStored,
    EndPull,
    Instruction,
    LinkReplica,
    MoveBlocks,
    OpenTier,
    ReadChunk,
    ReadReplica,
    Send,
)
from rworker.step_plan import copies
from rworker.stream.checks import expect_tokens, fetch_chunk
from rworker.stream.chunks import expectation
from rworker.transfers.exports import ExportedSequence

OVER: Final = -1
"""In the place of a link's number: there is none any more."""
_GONE: Final = ExportExpired("nothing is offered by this ticket: it was released, or never given")


def about_handing(
    number: int, cache: HolderCache, message: ExportSequence | Pull
) -> tuple[Instruction, ...]:
    """What a peer's message about its own cache comes to.

    Args:
        number: the peer's.

    Raises:
        ProtocolError: that can't be done.
    """
    if isinstance(message, ExportSequence):
        _offer(cache.books, message)
        return ()
    sequence, num_tokens = message.sequence_id, message.num_tokens
    if message.first_token + num_tokens > MAX_SEQUENCE_TOKENS:
        raise ProtocolError(f"no sequence is longer than {MAX_SEQUENCE_TOKENS} tokens")
    if cache.books.num_settled(sequence) or sequence in cache.books.arrivals:
        raise ProtocolError(f"sequence {sequence} has tokens: an empty one is pulled")
    appended = expect_tokens(cache.books, expectation({sequence: num_tokens}))
    cache.pulled.add(sequence)
    return (*copies(cache, appended), BeginPull(number, cache.holder, cache.books, message))


def after_close(cache: HolderCache, sequence: int) -> tuple[Instruction, ...]:
    """A sequence is closed: nothing comes for it any more."""
    if sequence not in cache.pulled:
        return ()
    cache.pulled.discard(sequence)
    return (EndPull(cache.holder, sequence),)


def about_offer(
    number: int, caches: Iterable[HolderCache], message: DescribeExport | FetchChunk
) -> tuple[Instruction, ...]:
    """What a reader's message comes to, whose the cache may be.

    Raises:
        ProtocolError: no offer is like that.
    """
    if isinstance(message, DescribeExport) and message.protocol_version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the reader speaks protocol version {message.protocol_version}, this R-worker "
            f"{PROTOCOL_VERSION}: install the same version of fastdecode on both",
            code="protocol_version",
        )
    for cache in caches:
        offered = cache.books.offers.find(message.ticket)
        if offered is not None:
            return (_told(number, cache, offered, message),)
    return (Send(number, _GONE),)


def _told(
    number: int, cache: HolderCache, offered: ExportedSequence, message: DescribeExport | FetchChunk
) -> Instruction:
    hello = cache.books.hello
    if isinstance(message, DescribeExport):
        return Send(number, ExportDescription(hello.model_hash, hello.kv, offered.num_tokens))
    request = replace(message, sequence_ids=np.array([offered.sequence], np.int64))
    places = fetch_chunk(cache.books, request)
    if int(message.first_tokens[0] + message.num_tokens[0]) > offered.num_tokens:
        raise ProtocolError(f"{offered.num_tokens} tokens are on offer, and not what is behind")
    return ReadChunk(number, cache.holder, request, places)


def _offer(books: CacheState, message: ExportSequence) -> None:
    sequence = message.sequence_id
    books.steps.check_at_rest(sequence)
    tables = books.store.tables
    num_tokens = books.num_settled(sequence)
    if sequence in books.arrivals or tables.row(sequence) in tables.gaps or not num_tokens:
        raise ProtocolError(f"sequence {sequence} lacks tokens: it can't be offered")
    books.offers.give(message.ticket, sequence, num_tokens)


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
            if books.moving:
                raise ProtocolError("the lower tier is in use")
            return (OpenTier(number, cache.holder, message.identity),)
        case Retain() | Fetch():
            return (MoveBlocks(number, cache.holder, books, books.moving.begin(message)),)
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

"""Whether a chunk fits a cache's books, and where its tokens are.

Like all that peers say of a cache, what breaks the protocol raises
``ProtocolError`` and changes nothing.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import MAX_SEQUENCE_TOKENS, KVSpec
from fastdecode.wire.blocks import (
    MAX_CHUNK_BYTES,
    MAX_PIECES,
    ChunkForm,
    ExpectTokens,
    FetchChunk,
    ReadBlocks,
    StoreChunk,
)
from fastdecode.wire.messages import Hello
from rworker.blocks.appending import Appended
from rworker.cache_state import CacheState
from rworker.checks import check_arrays
from rworker.stream.chunks import ChunkShape, layout_of, sides_of

_BYTES: Final = np.dtype(np.uint8)
_Piece: TypeAlias = tuple[int, int, int]
"""Sequence, first token, how many."""


def expect_tokens(books: CacheState, message: ExpectTokens) -> Appended:
    """Make room for tokens that come as chunks. Copies that it asks for come
    before anything is written."""
    ids, counts = message.sequence_ids, message.num_tokens
    if not 1 <= len(ids) <= MAX_PIECES:
        raise ProtocolError(f"1 to {MAX_PIECES} sequences expect tokens at a time, not {len(ids)}")
    sequences = ids.tolist()
    if len(set(sequences)) < len(sequences):
        raise ProtocolError("a sequence expects tokens twice")
    if (counts < 1).any() or (counts > MAX_SEQUENCE_TOKENS).any():
        raise ProtocolError(f"num_tokens must be within 1..{MAX_SEQUENCE_TOKENS}")
    for sequence in sequences:
        books.steps.check_at_rest(sequence)
    present = books.store.num_tokens(ids)
    appended = books.store.append(ids, counts)
    for sequence, before, more in zip(sequences, present.tolist(), counts.tolist(), strict=True):
        books.arrivals.expect(sequence, before, more)
    return appended


def store_chunk(books: CacheState, chunk: StoreChunk) -> NDArray[np.int64]:
    """A chunk has come: where it goes, as ``PlaceChunk`` has it."""
    hello = books.hello
    if chunk.model_hash != hello.model_hash:
        raise ProtocolError(
            f"the chunk is of the model {chunk.model_hash}, this cache of {hello.model_hash}",
            code="model_mismatch",
        )
    if chunk.kv != hello.kv:
        raise ProtocolError(f"the chunk is for a cache of {chunk.kv}, this one is of {hello.kv}")
    pieces, num_bytes = _checked(books, chunk)
    check_arrays(_BYTES, ("data", chunk.data, (num_bytes,)))
    if len({sequence for sequence, _, _ in pieces}) < len(pieces):
        raise ProtocolError("a chunk has one piece of a sequence at most")
    layers, heads = sides_of(chunk)
    for sequence, first, count in pieces:
        books.arrivals.check(sequence, layers, heads, first, count)
    for sequence, _, count in pieces:
        books.arrivals.arrive(sequence, layers, heads, count)
    return _places(books, chunk, pieces)


def fetch_chunk(books: CacheState, request: FetchChunk) -> NDArray[np.int64]:
    """Somebody reads: from where, as ``ReadChunk`` has it."""
    pieces, _ = _checked(books, request)
    settled = books.settled(request.sequence_ids).tolist()
    for (sequence, first, count), num_settled in zip(pieces, settled, strict=True):
        if first + count > num_settled:
            raise ProtocolError(
                f"tokens {first}..{first + count - 1} of sequence {sequence} are asked for, of "
                f"which {num_settled} are in every layer"
            )
    return _places(books, request, pieces)


def _checked(books: CacheState, chunk: StoreChunk | FetchChunk) -> tuple[list[_Piece], int]:
    """Layers, heads and counts are within what there can be. Its pieces, and how many
    bytes they make."""
    kv = books.hello.kv
    _check_sides(kv, chunk)
    columns = chunk.sequence_ids, chunk.first_tokens, chunk.num_tokens
    if not 1 <= len(columns[0]) <= MAX_PIECES:
        raise ProtocolError(f"a chunk has 1 to {MAX_PIECES} pieces, not {len(columns[0])}")
    sequences, firsts, counts = (column.tolist() for column in columns)
    if min(firsts) < 0 or min(counts) < 1 or max(counts) > MAX_SEQUENCE_TOKENS:
        raise ProtocolError("first_tokens must be at least 0, and num_tokens at least 1")
    size = kv.block_size
    if chunk.form is ChunkForm.BLOCKS and any(at % size for at in (*firsts, *counts)):
        raise ProtocolError(f"tokens must begin and end with a block of {size}")
    num_bytes = _checked_bytes(kv, chunk, sum(counts))
    return list(zip(sequences, firsts, counts, strict=True)), num_bytes


def check_read(hello: Hello, message: ReadBlocks) -> None:
    """
    Raises:
        ProtocolError: If the reader's cache is not of this cache's kind, or it asks for more than
            a chunk of whole blocks, or of some tokens of each.
    """
    kv, other = hello.kv, message.kv
    kinds = [
        (model, kind.dtype.value, kind.head_dim, kind.block_size)
        for model, kind in ((hello.model_hash, kv), (message.model_hash, other))
    ]
    if kinds[0] != kinds[1]:
        raise ProtocolError(
            f"the reader keeps K and V of {kinds[1]}, and this R-worker of {kinds[0]} (model, KV "
            "dtype, head_dim, block size): give both instances the same options"
        )
    _check_sides(kv, message)
    counts = message.num_tokens.tolist()
    least = kv.block_size if message.form is ChunkForm.BLOCKS else 1
    if not 1 <= len(counts) <= MAX_PIECES or min(counts) < least or max(counts) > kv.block_size:
        raise ProtocolError(
            f"{len(counts)} blocks are asked for, at most with {max(counts, default=0)} tokens: 1 "
            f"to {MAX_PIECES} blocks of {least} to {kv.block_size} tokens are read at a time"
        )
    _checked_bytes(kv, message, sum(counts))


def _check_sides(kv: KVSpec, chunk: StoreChunk | FetchChunk | ReadBlocks) -> None:
    for name, first, count, most in (
        ("layer", chunk.first_layer, chunk.num_layers, kv.num_layers),
        ("head", chunk.first_head, chunk.num_heads, kv.num_kv_heads),
    ):
        if not 1 <= count <= most - first:
            raise ProtocolError(f"first_{name}={first} and num_{name}s={count} of {most} {name}s")


def _checked_bytes(kv: KVSpec, chunk: StoreChunk | FetchChunk | ReadBlocks, num_tokens: int) -> int:
    """Return the bytes of a chunk, at most ``MAX_CHUNK_BYTES``."""
    num_bytes = ChunkShape.of(layout_of(kv), chunk, num_tokens).num_bytes
    if num_bytes > MAX_CHUNK_BYTES:
        raise ProtocolError(f"a chunk of {num_bytes} bytes; {MAX_CHUNK_BYTES} is the most")
    return num_bytes


def _places(
    books: CacheState, chunk: StoreChunk | FetchChunk, pieces: list[_Piece]
) -> NDArray[np.int64]:
    """Of a chunk that fits: see ``PlaceChunk``."""
    if chunk.form is ChunkForm.TOKENS:
        return books.store.slots(chunk.sequence_ids, chunk.first_tokens, chunk.num_tokens)
    tables, size = books.store.tables, books.store.block_size
    runs = [
        tables.blocks[tables.row(sequence), first // size : (first + count) // size]
        for sequence, first, count in pieces
    ]
    return np.concatenate(runs, dtype=np.int64)

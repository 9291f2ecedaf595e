"""Checks of chunks against a cache's books, and where their tokens are.

What breaks the protocol raises ``ProtocolError`` and changes nothing.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import MAX_SEQUENCE_TOKENS, KVSpec
from fastdecode.wire.blocks import MAX_CHUNK_BYTES, MAX_PIECES, ChunkForm, ReadBlocks, StoreChunk
from fastdecode.wire.messages import Hello
from rworker.blocks.appending import Appended
from rworker.blocks.kv_store import KVStore
from rworker.cache_state import CacheState, check_arrays
from rworker.stream.chunks import ChunkShape, layout_of

_BYTES: Final = np.dtype(np.uint8)


def store_chunk(
    books: CacheState, chunk: StoreChunk
) -> tuple[Appended, ChunkShape, NDArray[np.int64]]:
    """Take in a chunk of a replica. Return room for its tokens, its shape, and its places as
    ``PlaceChunk`` has them. Copies of the room precede what is written."""
    ids, firsts, counts = chunk.sequence_ids, chunk.first_tokens, chunk.num_tokens
    sequences: list[int] = ids.tolist()
    size = books.hello.kv.block_size
    if not 1 <= len(sequences) <= MAX_PIECES:
        raise ProtocolError(f"a chunk has 1 to {MAX_PIECES} pieces, not {len(sequences)}")
    if firsts.min() < 0 or counts.min() < 1 or counts.max() > MAX_SEQUENCE_TOKENS:
        raise ProtocolError("first_tokens must be at least 0, and num_tokens at least 1")
    if chunk.form is ChunkForm.BLOCKS and ((firsts % size).any() or (counts % size).any()):
        raise ProtocolError(f"tokens must begin and end with a block of {size}")
    if len(set(sequences)) < len(sequences):
        raise ProtocolError("a chunk has one piece of a sequence at most")
    num_tokens = int(counts.sum(dtype=np.int64))
    shape = ChunkShape.whole(books.hello.kv, chunk.form, num_tokens)
    check_arrays(_BYTES, ("data", chunk.data, (_checked_bytes(shape),)))
    appended = books.store_tokens(ids, firsts, counts)
    return appended, shape, places_of(books.store, chunk.form, ids, firsts, counts)


def places_of(
    store: KVStore,
    form: ChunkForm,
    sequence_ids: NDArray[np.int64],
    first_tokens: NDArray[np.int32],
    num_tokens: NDArray[np.int32],
) -> NDArray[np.int64]:
    """Return where tokens are, as ``PlaceChunk`` has it."""
    if form is ChunkForm.TOKENS:
        return store.slots(sequence_ids, first_tokens, num_tokens)
    tables, size = store.tables, store.block_size
    pieces = zip(sequence_ids.tolist(), first_tokens, num_tokens, strict=True)
    runs = [
        tables.blocks[tables.row(sequence), first // size : (first + count) // size]
        for sequence, first, count in pieces
    ]
    return np.concatenate(runs, dtype=np.int64)


def check_read(hello: Hello, message: ReadBlocks) -> None:
    """Check a request of a reader.

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
    for name, first, count, most in (
        ("layer", message.first_layer, message.num_layers, kv.num_layers),
        ("head", message.first_head, message.num_heads, kv.num_kv_heads),
    ):
        if not 1 <= count <= most - first:
            raise ProtocolError(f"first_{name}={first} and num_{name}s={count} of {most} {name}s")
    counts = message.num_tokens.tolist()
    least = kv.block_size if message.form is ChunkForm.BLOCKS else 1
    if not 1 <= len(counts) <= MAX_PIECES or min(counts) < least or max(counts) > kv.block_size:
        raise ProtocolError(
            f"{len(counts)} blocks are asked for, at most with {max(counts, default=0)} tokens: 1 "
            f"to {MAX_PIECES} blocks of {least} to {kv.block_size} tokens are read at a time"
        )
    _checked_bytes(shape_of(kv, message, sum(counts)))


def shape_of(kv: KVSpec, message: ReadBlocks, num_tokens: int) -> ChunkShape:
    """Return the shape of the chunk that answers a reader."""
    layers = range(message.first_layer, message.first_layer + message.num_layers)
    heads = range(message.first_head, message.first_head + message.num_heads)
    return ChunkShape(layout_of(kv), message.form, layers, heads, num_tokens)


def _checked_bytes(shape: ChunkShape) -> int:
    """Return the bytes of a chunk, at most ``MAX_CHUNK_BYTES`` or one token."""
    num_bytes = shape.num_bytes
    if num_bytes > MAX_CHUNK_BYTES and shape.num_tokens > 1:
        raise ProtocolError(f"a chunk of {num_bytes} bytes; {MAX_CHUNK_BYTES} is the most")
    return num_bytes

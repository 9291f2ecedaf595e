"""Whether a chunk fits a cache's books, and where its tokens are.

Like all that peers say of a cache, what breaks the protocol raises
``ProtocolError`` and changes nothing.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import ProtocolError
from fastdecode.core.spec import MAX_SEQUENCE_TOKENS
from fastdecode.wire.kv.chunks import (
    MAX_CHUNK_BYTES,
    MAX_PIECES,
    ChunkForm,
    ExpectTokens,
    FetchChunk,
    StoreChunk,
)
from rworker.blocks.appending import Appended
from rworker.cache_state import CacheState
from rworker.checks import check_array, check_integer
from rworker.stream.chunks import ChunkShape, layout_of

_MOST_S: Final = 1e6


def expect_tokens(books: CacheState, message: ExpectTokens) -> Appended:
    """Make room for tokens that come as chunks. Copies that it asks for come
    before anything is written."""
    ids, counts = message.sequence_ids, message.num_tokens
    shape = np.shape(ids)
    if len(shape) != 1 or not 1 <= shape[0] <= MAX_PIECES:
        raise ProtocolError(f"1 to {MAX_PIECES} sequences expect tokens at a time, not {shape}")
    check_array("sequence_ids", ids, np.dtype(np.int64), shape)
    check_array("num_tokens", counts, np.dtype(np.int32), shape)
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
    """A chunk has come: where its tokens go, slots int64 [T]."""
    hello = books.hello
    if chunk.model_hash != hello.model_hash:
        raise ProtocolError(
            f"the chunk is of the model {chunk.model_hash}, this cache of {hello.model_hash}",
            code="model_mismatch",
        )
    if chunk.kv != hello.kv:
        raise ProtocolError(f"the chunk is for a cache of {chunk.kv}, this one is of {hello.kv}")
    num_bytes = _check_shape(books, chunk)
    check_array("data", chunk.data, np.dtype(np.uint8), (num_bytes,))
    layers, heads = _sides(chunk)
    pieces = _pieces(chunk)
    if len({sequence for sequence, _, _ in pieces}) < len(pieces):
        raise ProtocolError("a chunk has one piece of a sequence at most")
    for sequence, first, count in pieces:
        books.arrivals.check(sequence, layers, heads, first, count)
    for sequence, _, count in pieces:
        books.arrivals.arrive(sequence, layers, heads, count)
    return books.store.slots(chunk.sequence_ids, chunk.first_tokens, chunk.num_tokens)


def fetch_chunk(books: CacheState, request: FetchChunk) -> NDArray[np.int64]:
    """Somebody reads: where the tokens are, slots int64 [T]."""
    _check_shape(books, request)
    for sequence, first, count in _pieces(request):
        num_settled = books.num_settled(sequence)
        if first + count > num_settled:
            raise ProtocolError(
                f"tokens {first}..{first + count - 1} of sequence {sequence} are asked for, of "
                f"which {num_settled} are in every layer"
            )
    return books.store.slots(request.sequence_ids, request.first_tokens, request.num_tokens)


def _check_shape(books: CacheState, chunk: StoreChunk | FetchChunk) -> int:
    """Layers, heads and counts are within what there can be. How many bytes that makes."""
    kv = books.hello.kv
    for name, first, count, most in (
        ("layer", chunk.first_layer, chunk.num_layers, kv.num_layers),
        ("head", chunk.first_head, chunk.num_heads, kv.num_kv_heads),
    ):
        check_integer(f"first_{name}", first, 0, most - 1)
        check_integer(f"num_{name}s", count, 1, most - first)
    shape = np.shape(chunk.sequence_ids)
    if len(shape) != 1 or not 1 <= shape[0] <= MAX_PIECES:
        raise ProtocolError(f"a chunk has 1 to {MAX_PIECES} pieces, not {shape}")
    check_array("sequence_ids", chunk.sequence_ids, np.dtype(np.int64), shape)
    for name in ("first_tokens", "num_tokens"):
        check_array(name, getattr(chunk, name), np.dtype(np.int32), shape)
    first, count = chunk.first_tokens, chunk.num_tokens
    if first.min() < 0 or count.min() < 1 or count.max() > MAX_SEQUENCE_TOKENS:
        raise ProtocolError("first_tokens must be at least 0, and num_tokens at least 1")
    if chunk.form is ChunkForm.BLOCKS:
        _check_blocks(first, count, kv.block_size)
    num_bytes = ChunkShape.of(layout_of(kv), chunk).num_bytes
    if num_bytes > MAX_CHUNK_BYTES:
        raise ProtocolError(f"a chunk of {num_bytes} bytes; {MAX_CHUNK_BYTES} is the most")
    return num_bytes


def _check_blocks(first: NDArray[np.int32], count: NDArray[np.int32], block_size: int) -> None:
    """Pieces are whole blocks."""
    if (first % block_size).any() or (count % block_size).any():
        raise ProtocolError(f"tokens must begin and end with a block of {block_size}")


def _sides(chunk: StoreChunk) -> tuple[slice, slice]:
    """Its layers and heads."""
    return (
        slice(chunk.first_layer, chunk.first_layer + chunk.num_layers),
        slice(chunk.first_head, chunk.first_head + chunk.num_heads),
    )


def _pieces(chunk: StoreChunk | FetchChunk) -> list[tuple[int, int, int]]:
    """(sequence, first token, how many) of each."""
    columns = chunk.sequence_ids, chunk.first_tokens, chunk.num_tokens
    return list(zip(*[column.tolist() for column in columns], strict=True))


def check_seconds(name: str, value: float) -> float:
    """
    Raises:
        ProtocolError: it is no number of seconds that anybody would wait.
    """
    if not (math.isfinite(value) and 0 < value <= _MOST_S):
        raise ProtocolError(f"{name}={value!r} is not a number of seconds within 0..{_MOST_S:g}")
    return value

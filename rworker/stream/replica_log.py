"""What the replica knows of each sequence of a cache, and what to send it next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from fastdecode.wire.kv.chunks import (
    MAX_CHUNK_BYTES,
    MAX_PIECES,
    ChunkForm,
    ExpectTokens,
    FetchChunk,
    StoreChunk,
)
from fastdecode.wire.kv.taking_over import TruncateSequence
from fastdecode.wire.messages import CloseSequence, ExtendSequence, ForkSequence, OpenSequence
from rworker.cache_state import CacheState
from rworker.stream.changes import Change
from rworker.stream.chunk_endpoints import ChunkSource
from rworker.stream.chunks import ChunkShape, expectation, layout_of

ToNeighbour: TypeAlias = Change | ExpectTokens | StoreChunk


class ReplicaLog:
    """Of the sequences that the replica has: how many tokens of each it knows
    of, and of how many K and V were sent.

    Args:
        books: the cache's.
        source: reads K and V out of it, at once.
    """

    def __init__(self, books: CacheState, source: ChunkSource) -> None:
        self._books = books
        self._source = source
        self._kv = kv = books.hello.kv
        one = ChunkShape(layout_of(kv), ChunkForm.TOKENS, kv.num_layers, kv.num_kv_heads, 1)
        self._most_tokens = max(1, (MAX_CHUNK_BYTES - one.padding_bytes) // one.unit_bytes)
        self._sent: dict[int, int] = {}
        self._announced: dict[int, int] = {}

    def change(self, change: Change) -> Iterator[ToNeighbour]:
        """A change, and what has to be known before it."""
        sequence = change.sequence_id
        match change:
            case OpenSequence():
                self._sent[sequence] = self._announced[sequence] = 0
            case ForkSequence(parent, _, num_shared):
                yield from self._announce(parent, num_shared)
                self._announced[sequence] = num_shared
                self._sent[sequence] = min(num_shared, self._sent[parent])
            case TruncateSequence(_, num_tokens):
                yield from self._announce(sequence, num_tokens)
                for counts in (self._sent, self._announced):
                    counts[sequence] = min(num_tokens, counts[sequence])
            case CloseSequence():
                del self._sent[sequence], self._announced[sequence]
            case ExtendSequence():
                pass
        yield change

    def behind(self) -> dict[int, int]:
        """Sequences with tokens that haven't been sent, and how many; all
        changes are made."""
        ids = np.fromiter(self._sent, np.int64, len(self._sent))
        is_open = np.array([sequence in self._books.store for sequence in self._sent], bool)
        ids = ids[is_open]
        sent = np.fromiter(self._sent.values(), np.int64, len(self._sent))[is_open]
        behind = self._books.settled(ids) - sent
        some = behind > 0
        return dict(zip(ids[some].tolist(), behind[some].tolist(), strict=True))

    def fitting(self, behind: dict[int, int]) -> dict[int, int]:
        """Of those that are behind: as many as one chunk takes."""
        room = self._most_tokens
        tokens: dict[int, int] = {}
        for sequence, count in behind.items():
            if not room or len(tokens) == MAX_PIECES:
                break
            tokens[sequence] = min(room, count)
            room -= tokens[sequence]
        return tokens

    def num_bytes(self, tokens: dict[int, int]) -> int:
        """K and V of so many tokens of sequences, in all layers."""
        return self._num_bytes(self._kv.num_layers, tokens)

    def send(self, tokens: dict[int, int]) -> Iterator[ExpectTokens | StoreChunk]:
        """The next tokens of sequences, so many of each."""
        new = {
            sequence: more
            for sequence, count in tokens.items()
            if (more := self._sent[sequence] + count - self._announced[sequence]) > 0
        }
        if new:
            yield expectation(new)
            for sequence, more in new.items():
                self._announced[sequence] += more
        yield from self._chunks(tokens)
        for sequence, count in tokens.items():
            self._sent[sequence] += count

    def _announce(self, sequence: int, num_tokens: int) -> Iterator[ExpectTokens]:
        """A sequence is known to have that many tokens, at least."""
        lacking = num_tokens - self._announced[sequence]
        if lacking > 0:
            self._announced[sequence] = num_tokens
            yield expectation({sequence: lacking})

    def _chunks(self, tokens: dict[int, int]) -> Iterator[StoreChunk]:
        """In one chunk, but where one token is too large for it."""
        kv = self._kv
        step = kv.num_layers
        while step > 1 and self._num_bytes(step, tokens) > MAX_CHUNK_BYTES:
            step = -(-step // 2)
        ids = np.fromiter(tokens, np.int64, len(tokens))
        counts = np.fromiter(tokens.values(), np.int32, len(tokens))
        first = np.array([self._sent[sequence] for sequence in tokens], np.int32)
        for layer in range(0, kv.num_layers, step):
            layers = min(step, kv.num_layers - layer)
            where = ChunkForm.TOKENS, layer, layers, 0, kv.num_kv_heads, ids, first, counts
            self._source.ask(FetchChunk(*where))
            data = self._source.fetch()
            yield StoreChunk(self._books.hello.model_hash, kv, *where, data)

    def _num_bytes(self, num_layers: int, tokens: dict[int, int]) -> int:
        kv, num_tokens = self._kv, sum(tokens.values())
        shape = ChunkShape(layout_of(kv), ChunkForm.TOKENS, num_layers, kv.num_kv_heads, num_tokens)
        return shape.num_bytes

"""What the replica knows of each sequence of a cache, and what to send it next.

A sequence that is resumed from kept blocks shares them at the replica, too: what
the replica lacks of them is sent before it. One that is resumed with a gap, or from
blocks that several open sequences bring, isn't replicated, nor are its forks: its
kept blocks are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.wire.blocks import (
    MAX_CHUNK_BYTES,
    MAX_PIECES,
    NO_PARENT,
    ChunkForm,
    ExpectTokens,
    Forget,
    Name,
    StoreChunk,
    Truncate,
    keys_of,
    words_of,
)
from fastdecode.wire.messages import MAX_ID, Close, Extend, Open
from rworker.cache_state import CacheState
from rworker.stream.changes import Change
from rworker.stream.chunk_endpoints import LocalCache
from rworker.stream.chunks import ChunkShape, expectation, layout_of
from rworker.stream.cutting import CacheKind, TokenRuns, cut_runs
from rworker.stream.kept_log import KeptLog

ToNeighbour: TypeAlias = Change | ExpectTokens | StoreChunk

CARRIER: Final = MAX_ID
"""Id of the sequence that brings the replica kept blocks that no other one brings."""


class ReplicaLog:
    """Of the sequences that the replica has: how many tokens of each it knows
    of, and of how many K and V were sent.

    Args:
        books: the cache's.
        source: reads K and V out of it, at once.
    """

    def __init__(self, books: CacheState, source: LocalCache) -> None:
        self._books = books
        self._source = source
        self._kv = kv = books.hello.kv
        self._kind = CacheKind(books.hello.model_hash, kv)
        self._kept = KeptLog(books.store.cached, kv.block_size)
        one = ChunkShape(layout_of(kv), ChunkForm.TOKENS, kv.num_layers, kv.num_kv_heads, 1)
        self._most_tokens = max(1, MAX_CHUNK_BYTES // one.unit_bytes)
        self._sent: dict[int, int] = {}
        self._announced: dict[int, int] = {}

    @property
    def lacking(self) -> list[bytes]:
        """Keys of kept blocks that have to be carried to the replica: as many as one
        chunk takes."""
        return self._kept.lacking(self.most_carried)

    def needed(self, change: Change) -> list[bytes] | None:
        """Keys of kept blocks that have to be carried before a change; None: some
        have to come from the lower tier first."""
        if not isinstance(change, Open) or change.keys is None:
            return []
        keys = keys_of(change.keys)
        if change.gap_start < change.gap_stop or self._kept.parent(keys) is not None:
            return []
        return self._kept.to_carry(keys)

    def change(self, change: Change) -> Iterator[ToNeighbour]:
        """A change, and what the replica has to know before it."""
        match change:
            case Name(sequence, first):
                self._kept.keep(sequence, first, keys_of(change.keys))
                if sequence in self._sent:
                    yield from self._kept.sent(sequence, self._sent[sequence])
                else:
                    self._kept.leave(sequence)
            case Forget():
                if gone := self._kept.forget(keys_of(change.keys)):
                    yield Forget(words_of(gone))
            case Open(sequence, keys=None, parent_id=parent) if parent == NO_PARENT:
                self._sent[sequence] = self._announced[sequence] = 0
                yield change
            case Open(keys=None):
                if change.parent_id in self._sent:
                    yield from self._fork(change)
            case Open():
                yield from self._resume(change)
            case Close():
                yield from self._close(change.sequence_id)
                if change.tail:
                    self._kept.keep_tail(bytes.fromhex(change.tail))
            case Truncate() | Extend():
                if change.sequence_id in self._sent:
                    yield from self._resize(change)

    def _fork(self, fork: Open) -> Iterator[ToNeighbour]:
        parent, num_shared = fork.parent_id, fork.num_tokens
        yield from self._announce(parent, num_shared)
        self._announced[fork.sequence_id] = num_shared
        self._sent[fork.sequence_id] = min(num_shared, self._sent[parent])
        yield fork

    def _resume(self, change: Open) -> Iterator[ToNeighbour]:
        """Nothing of it has to be carried any more."""
        assert change.keys is not None
        sequence, keys = change.sequence_id, keys_of(change.keys)
        if change.gap_start < change.gap_stop:
            return
        if self._kept.has(keys):
            self._sent[sequence] = self._announced[sequence] = change.num_tokens
            yield change
        elif (parent := self._kept.parent(keys)) is not None:
            sizes = change.num_reserved_tokens, change.num_tokens
            yield from self._fork(Open(sequence, *sizes, parent_id=parent))

    def _resize(self, change: Truncate | Extend) -> Iterator[ToNeighbour]:
        sequence = change.sequence_id
        if isinstance(change, Truncate):
            yield from self._announce(sequence, change.num_tokens)
            self._kept.leave(sequence, change.num_tokens)
            for counts in (self._sent, self._announced):
                counts[sequence] = min(change.num_tokens, counts[sequence])
        yield change

    def _close(self, sequence: int) -> Iterator[Close]:
        self._kept.leave(sequence)
        self._announced.pop(sequence, None)
        if self._sent.pop(sequence, None) is not None:
            yield Close(sequence)

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
        """Of tokens that are behind: as many as one chunk takes. A sequence that is cut ends
        with a block, if it can: whole blocks travel as they lie."""
        room, size = self._most_tokens, self._kv.block_size
        tokens: dict[int, int] = {}
        for sequence, count in behind.items():
            if not room or len(tokens) == MAX_PIECES:
                break
            num_tokens = min(room, count)
            rest = (self._sent[sequence] + num_tokens) % size
            if rest < num_tokens < count:
                tokens[sequence] = num_tokens - rest
                break  # what room is left holds no block
            tokens[sequence] = num_tokens
            room -= num_tokens
        return tokens

    def num_bytes(self, tokens: dict[int, int]) -> int:
        """K and V of so many tokens of sequences, in all layers."""
        kv, num_tokens = self._kv, sum(tokens.values())
        sides = kv.num_layers, kv.num_kv_heads
        return ChunkShape(layout_of(kv), ChunkForm.TOKENS, *sides, num_tokens).num_bytes

    def send(self, tokens: dict[int, int]) -> Iterator[ToNeighbour]:
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
            yield from self._kept.sent(sequence, self._sent[sequence])

    def carry(self, keys: Sequence[bytes]) -> Iterator[ToNeighbour]:
        """Kept blocks, by themselves: as the blocks of a sequence that is closed at once.

        Args:
            keys: of at most ``most_carried`` blocks, which can be read.
        """
        num_tokens = len(keys) * self._kv.block_size
        yield Open(CARRIER, num_tokens)
        yield expectation({CARRIER: num_tokens})
        yield from self._chunks({CARRIER: num_tokens}, self._kept.places(keys))
        yield self._kept.carried(CARRIER, keys)
        yield Close(CARRIER)

    @property
    def most_carried(self) -> int:
        """Blocks that one chunk takes, or one if it doesn't take that."""
        return max(1, self._most_tokens // self._kv.block_size)

    def _announce(self, sequence: int, num_tokens: int) -> Iterator[ExpectTokens]:
        """A sequence is known to have that many tokens, at least."""
        lacking = num_tokens - self._announced[sequence]
        if lacking > 0:
            self._announced[sequence] = num_tokens
            yield expectation({sequence: lacking})

    def _chunks(
        self, tokens: dict[int, int], blocks: NDArray[np.int64] | None = None
    ) -> Iterator[StoreChunk]:
        """In as few chunks as hold them. ``blocks``: whose tokens they are, [B], if they are
        none of a sequence's of the cache."""
        kv, kind = self._kv, self._kind
        ids = np.fromiter(tokens, np.int64, len(tokens))
        counts = np.fromiter(tokens.values(), np.int32, len(tokens))
        first = np.array([self._sent.get(sequence, 0) for sequence in tokens], np.int32)
        runs = TokenRuns(ids, ids, first, first, counts)
        sides = (range(kv.num_layers), 0), (range(kv.num_kv_heads), 0)
        for cut in cut_runs(runs, kind, kind, *sides):
            if blocks is None:
                self._source.ask(cut.request)
            else:
                at, count = int(cut.request.first_tokens[0]), int(cut.request.num_tokens[0])
                there = slice(at // kv.block_size, (at + count) // kv.block_size)
                self._source.ask_places(cut.request, blocks[there])
            yield cut.filled(self._source.fetch())

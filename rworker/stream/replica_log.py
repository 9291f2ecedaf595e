"""What the replica knows of each sequence of a cache, and what to send it next.

A sequence that is resumed from cached blocks shares them at the replica, too: what
the replica lacks of them is sent before it. One that is resumed with a gap, or from
blocks that several open sequences bring, isn't replicated, nor are its forks: its
cached blocks are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import (
    MAX_CHUNK_BYTES,
    MAX_PIECES,
    NO_PARENT,
    ChunkForm,
    Forget,
    KeptToRWorker,
    Name,
    StoreChunk,
    Truncate,
    keys_of,
    words_of,
)
from fastdecode.wire.codec import ALIGNMENT
from fastdecode.wire.messages import MAX_ID, Close, Extend, Open
from rworker.cache_state import CacheState
from rworker.instructions import ReadChunk
from rworker.stream.checks import places_of
from rworker.stream.chunks import ChunkShape
from rworker.stream.kept_log import KeptLog
from rworker.stream.memory import ChunkMemory

ToNeighbour: TypeAlias = KeptToRWorker | StoreChunk

CARRIER: Final = MAX_ID
"""Id of the sequence that brings the replica kept blocks that no other one brings."""


class ReplicaLog:
    """The sequences that the replica has, and how many tokens of each were sent.

    Args:
        books: books of the cache.
        memory: memory of the cache.
    """

    def __init__(self, holder: HolderId, books: CacheState, memory: ChunkMemory) -> None:
        self._holder, self._books, self._memory = holder, books, memory
        self._kv = kv = books.hello.kv
        self._kept = KeptLog(books.store.cached, kv.block_size)
        sizes = [ChunkShape.whole(kv, form, kv.block_size).num_bytes for form in ChunkForm]
        # Arrays of stored rows have padding between them.
        room = (MAX_CHUNK_BYTES - 2 * ALIGNMENT) * kv.block_size
        self._most_tokens = max(1, room // max(sizes))
        self._sent: dict[int, int] = {}

    @property
    def lacking(self) -> list[bytes]:
        """Keys of cached blocks that have to be carried to the replica, up to one chunk's."""
        return self._kept.lacking(self.most_carried)

    def needed(self, change: KeptToRWorker) -> list[bytes] | None:
        """Return keys of cached blocks that have to be carried before a change. None if some have
        to come from the lower tier first."""
        if not isinstance(change, Open) or change.keys is None:
            return []
        keys = keys_of(change.keys)
        if change.gap_start < change.gap_stop or self._kept.parent(keys) is not None:
            return []
        return self._kept.to_carry(keys)

    def change(self, change: KeptToRWorker) -> Iterator[ToNeighbour]:
        """Return what to send of a change, once all that it needs is carried."""
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
                self._sent[sequence] = 0
                yield change
            case Open(keys=None):
                if change.parent_id in self._sent:
                    yield self._fork(change)
            case Open(gap_start=start, gap_stop=stop):
                if start == stop:
                    yield from self._resume(change)
            case Close(sequence):
                self._kept.leave(sequence)
                if self._sent.pop(sequence, None) is not None:
                    yield Close(sequence)
                if change.tail:
                    self._kept.keep_tail(bytes.fromhex(change.tail))
            case Truncate(sequence, num_tokens):
                if sequence in self._sent:
                    self._kept.leave(sequence, num_tokens)
                    self._sent[sequence] = min(num_tokens, self._sent[sequence])
                    yield change
            case Extend(sequence):
                if sequence in self._sent:
                    yield change

    def _fork(self, fork: Open) -> Open:
        """Note a new sequence that shares another's first tokens, which may still have to come."""
        self._sent[fork.sequence_id] = min(fork.num_tokens, self._sent[fork.parent_id])
        return fork

    def _resume(self, change: Open) -> Iterator[ToNeighbour]:
        assert change.keys is not None
        sequence, keys = change.sequence_id, keys_of(change.keys)
        if self._kept.has(keys):
            self._sent[sequence] = change.num_tokens
            yield change
        elif (parent := self._kept.parent(keys)) is not None:
            sizes = change.num_reserved_tokens, change.num_tokens
            yield self._fork(Open(sequence, *sizes, parent_id=parent))

    def behind(self) -> dict[int, int]:
        """Count the tokens of each sequence that haven't been sent, once all changes are made."""
        ids = np.fromiter(self._sent, np.int64, len(self._sent))
        is_open = np.array([sequence in self._books.store for sequence in self._sent], bool)
        ids = ids[is_open]
        sent = np.fromiter(self._sent.values(), np.int64, len(self._sent))[is_open]
        behind = self._books.settled(ids) - sent
        some = behind > 0
        return dict(zip(ids[some].tolist(), behind[some].tolist(), strict=True))

    def fitting(self, behind: dict[int, int]) -> dict[int, int]:
        """Return how many of the tokens ``behind`` one chunk takes. A sequence that is cut ends
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

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes of K and V of tokens, in all layers."""
        return ChunkShape.whole(self._kv, ChunkForm.TOKENS, num_tokens).num_bytes

    def send(self, tokens: dict[int, int]) -> Iterator[ToNeighbour]:
        """Send the next tokens of sequences, by their counts. Whole blocks travel as they lie.
        What is before and behind them travels as tokens."""
        ids = np.fromiter(tokens, np.int64, len(tokens))
        counts = np.fromiter(tokens.values(), np.int32, len(tokens))
        firsts = np.array([self._sent[sequence] for sequence in tokens], np.int32)
        size = self._kv.block_size
        starts = np.minimum(-firsts % size, counts)
        whole = (counts - starts) // size * size
        starts *= whole > 0  # a sequence that has no whole block is one piece
        ends = starts + whole
        for form, from_, to in (
            (ChunkForm.TOKENS, np.zeros_like(starts), starts),
            (ChunkForm.BLOCKS, starts, ends),
            (ChunkForm.TOKENS, ends, counts),
        ):
            some = to > from_
            if some.any():
                run = ids[some], (firsts + from_)[some], (to - from_)[some]
                yield self._chunk(form, *run, places_of(self._books.store, form, *run))
        for sequence, count in tokens.items():
            self._sent[sequence] += count
            yield from self._kept.sent(sequence, self._sent[sequence])

    def carry(self, keys: Sequence[bytes]) -> Iterator[ToNeighbour]:
        """Send cached blocks by themselves: as the blocks of a sequence that is closed at once.

        Args:
            keys: keys of at most ``most_carried`` blocks, which can be read.
        """
        size = self._kv.block_size
        num_tokens, blocks = len(keys) * size, self._kept.places(keys)
        yield Open(CARRIER, num_tokens)
        form, places, step = ChunkForm.BLOCKS, blocks, num_tokens
        if num_tokens > self._most_tokens:  # one block, in pieces
            form, step = ChunkForm.TOKENS, self._most_tokens
            places = blocks * size + np.arange(size)
        for first in range(0, num_tokens, step):
            count = min(step, num_tokens - first)
            some = places if form is ChunkForm.BLOCKS else places[first : first + count]
            at, num = np.array([first], np.int32), np.array([count], np.int32)
            yield self._chunk(form, np.array([CARRIER]), at, num, some)
        yield self._kept.carried(CARRIER, keys)
        yield Close(CARRIER)

    @property
    def most_carried(self) -> int:
        """Blocks that one chunk takes, or one if it doesn't take that."""
        return max(1, self._most_tokens // self._kv.block_size)

    def _chunk(
        self,
        form: ChunkForm,
        sequence_ids: NDArray[np.int64],
        first_tokens: NDArray[np.int32],
        num_tokens: NDArray[np.int32],
        places: NDArray[np.int64],
    ) -> StoreChunk:
        shape = ChunkShape.whole(self._kv, form, int(num_tokens.sum()))
        data = self._memory.read(ReadChunk(self._holder, shape, places))
        return StoreChunk(form, sequence_ids, first_tokens, num_tokens, data)

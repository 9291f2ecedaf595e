"""What the replica knows of each sequence of a cache, and what to send it next.

What a sequence starts with precedes it: tokens of the sequence that it is a fork of, and cached
blocks. So the replica shares blocks as the cache does. A sequence that is resumed with a gap, or
from blocks that were evicted before they could be sent, has no replica, nor have its forks. Its
cached blocks have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
from msgspec.structs import replace
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
        self._losses: Counter[int] = Counter()  # changes to come that take tokens away

    @property
    def lacking(self) -> list[bytes]:
        """Keys of cached blocks that have to be carried to the replica, up to one chunk's."""
        return self._kept.lacking(self.most_carried)

    def expect(self, change: KeptToRWorker) -> None:
        """Note a change that the cache has made, and the replica is to follow."""
        if isinstance(change, Close | Truncate):
            self._losses[change.sequence_id] += 1

    def needed(self, change: KeptToRWorker) -> tuple[dict[int, int], list[bytes]] | None:
        """Return what has to be sent before a change: how many of the next tokens of sequences, and
        the keys of cached blocks. None if some have to come from the lower tier first."""
        if not isinstance(change, Open) or change.gap_start < change.gap_stop:
            return {}, []
        ends, keys = {change.parent_id: change.num_tokens}, list[bytes]()
        if change.keys is not None:
            needed = self._kept.needed(keys_of(change.keys), self._can_send)
            if needed is None:
                return None
            ends, keys = needed
        missing = {s: end - self._sent[s] for s, end in ends.items() if self._can_send(s)}
        return {s: count for s, count in missing.items() if count > 0}, keys

    def _can_send(self, sequence: int) -> bool:
        """Return True if the cache still has all tokens of a sequence that the replica is to get
        before the next change."""
        is_open = sequence in self._sent and sequence in self._books.store
        return is_open and not self._losses[sequence]

    def change(self, change: KeptToRWorker) -> Iterator[ToNeighbour]:
        """Return what to send of a change, once all that it needs is sent."""
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
            case Open(sequence, keys=None):
                if (sent := self._sent.get(change.parent_id)) is not None:
                    self._sent[sequence] = shared = min(sent, change.num_tokens)
                    parent = change.parent_id if shared else NO_PARENT
                    yield replace(change, num_tokens=shared, parent_id=parent)
            case Open(sequence, gap_start=start, gap_stop=stop):
                if start == stop and self._kept.has(keys_of(change.keys)):
                    self._sent[sequence] = change.num_tokens
                    yield change
            case Close(sequence):
                self._losses -= Counter((sequence,))
                self._kept.leave(sequence)
                if self._sent.pop(sequence, None) is not None:
                    yield Close(sequence)
                if change.tail:
                    self._kept.keep_tail(bytes.fromhex(change.tail))
            case Truncate(sequence, num_tokens):
                self._losses -= Counter((sequence,))
                if sequence in self._sent:
                    self._kept.leave(sequence, num_tokens)
                    self._sent[sequence] = count = min(num_tokens, self._sent[sequence])
                    yield Truncate(sequence, count)
            case Extend(sequence):
                if sequence in self._sent:
                    yield change

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

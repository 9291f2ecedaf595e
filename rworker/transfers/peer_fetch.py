"""Fetches cached blocks from other R-workers by their keys, unit by unit."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ConfigError, FastDecodeError, ProtocolError
from fastdecode.wire.blocks import (
    MAX_CHUNK_BYTES,
    BlockData,
    ChunkForm,
    Done,
    Fetch,
    KVSource,
    ReadBlocks,
    words_of,
)
from fastdecode.wire.messages import FromRWorker
from rworker.instructions import MoveBlocks, PlaceChunk
from rworker.stream.checks import shape_of
from rworker.stream.chunks import ChunkShape, layout_of
from rworker.stream.memory import ChunkMemory
from rworker.transfers.neighbours import PeerLink
from rworker.transfers.throttle import Throttle

logger = logging.getLogger(__name__)

NAMED_WITHIN_S: Final = 1.0
"""Longest time from a request for a block to its naming, as they use separate connections."""
_ASK_AGAIN_S: Final = 5e-3
_MOST_BYTES: Final = MAX_CHUNK_BYTES - 256  # of K and V; stored rows have padding between them
_MOST_BLOCKS: Final = 1 << 10


@dataclass(frozen=True)
class _Read:
    """One message: these blocks, over layers and KV heads of the model that one source has."""

    source: KVSource
    layers: range
    heads: range
    places: tuple[int, ...]
    """Places of its blocks among the job's keys."""
    num_tokens: int
    """Tokens of each block."""
    form: ChunkForm


class PeerFetch:
    """One job that fetches blocks from other R-workers; see ``Transfer``. A block fails if a
    source lacks it, all of them if a source fails.

    Args:
        order: The blocks, for which there is room.
        message: Where they come from.
        memory: Memory of the cache.
        throttle: Shared by all such jobs.
        clock: Gives seconds.
    """

    def __init__(
        self,
        order: MoveBlocks,
        message: Fetch,
        memory: ChunkMemory,
        throttle: Throttle,
        clock: Clock,
    ) -> None:
        self.to: Final = order.to
        self.bytes_per_s: Final = message.bytes_per_s
        self._order, self._message, self._memory = order, message, memory
        self._throttle, self._clock = throttle, clock
        self._hello = order.books.hello
        self._links: dict[str, PeerLink] = {}
        self._reads: deque[_Read] = deque()
        self._not_named: list[_Read] = []
        self._ask_again_s = 0.0
        self._began_s = clock()
        self._num_due = 0
        self._num_bytes = 0
        self._failure: FastDecodeError | None = None
        self._is_over = False

    @property
    def is_done(self) -> bool:
        return not (self._reads or self._not_named or self._num_due)

    def uses(self, address: str) -> bool:
        """Return True if a source is at this address."""
        return address in self._links

    def begin(self, link_to: Callable[[str], PeerLink]) -> None:
        """Reach the sources.

        Raises:
            FastDecodeError: If one cannot be reached, or they do not have all layers and heads.
        """
        self._reads.extend(self._all_reads())
        for address in {read.source.address for read in self._reads}:
            link = self._links[address] = link_to(address)
            link.timeout_s = max(link.timeout_s, self._message.timeout_s)

    def advance(self) -> Iterable[Done]:
        """Ask for units as far as pace and the links' credit allow."""
        if self._failure is not None:
            raise self._failure
        if self._not_named and self._clock() >= self._ask_again_s:
            self._reads.extendleft(self._not_named)
            self._not_named.clear()
        while self._throttle.may_ask and (num_bytes := self._ask_next()):
            self._throttle.asked(num_bytes, self.bytes_per_s)
        return ()

    def end(self, reason: str) -> Done:
        seconds = max(0.0, self._clock() - self._began_s)
        done = self._order.end(self._num_bytes, seconds, reason=reason)
        if num_missing := len(done.missing):
            logger.info("%d blocks are not fetched: %s", num_missing, reason or "they are gone")
        return done

    def close(self) -> None:
        """Take no more answers. Other jobs use the links, too."""
        self._is_over = True

    def _all_reads(self) -> Iterator[_Read]:
        """Cut all that is to come into units. What the sources share of the model's layers and
        heads has to be what this cache keeps."""
        kv, message = self._hello.kv, self._message
        own_layers = range(message.first_layer, message.first_layer + kv.num_layers)
        own_heads = range(message.first_head, message.first_head + kv.num_kv_heads)
        shares = np.zeros((kv.num_layers, kv.num_kv_heads), np.int32)
        num_keys, tail = len(self._order.move.keys), message.tail_tokens
        full = range(num_keys - bool(tail))
        for source in message.source:
            layers = _common(own_layers, source.first_layer, source.num_layers)
            heads = _common(own_heads, source.first_head, source.num_heads)
            at = layers.start - own_layers.start, heads.start - own_heads.start
            shares[at[0] : at[0] + len(layers), at[1] : at[1] + len(heads)] += 1
            if not (layers and heads):
                continue
            head_bytes = layout_of(kv).head_bytes
            num_heads = max(1, min(len(heads), _MOST_BYTES // head_bytes))
            num_layers = max(1, min(len(layers), _MOST_BYTES // (num_heads * head_bytes)))
            each = _MOST_BYTES // (num_heads * num_layers * head_bytes)
            num_blocks = max(1, min(_MOST_BLOCKS, each))
            boxes = [(x, y) for x in _runs(layers, num_layers) for y in _runs(heads, num_heads)]
            for places in _runs(full, num_blocks):
                for box in boxes:
                    yield _Read(source, *box, tuple(places), kv.block_size, ChunkForm.BLOCKS)
            for box in boxes if tail else ():
                yield _Read(source, *box, (num_keys - 1,), tail, ChunkForm.TOKENS)
        if (shares != 1).any():
            raise ConfigError(
                f"the sources do not keep each of {kv.num_layers} layers and {kv.num_kv_heads} "
                f"KV heads once, from layer {own_layers.start} and head {own_heads.start} on"
            )

    def _ask_next(self) -> int:
        """Ask for the next unit whose link has credit. Return its bytes, or 0 if there is none."""
        most = self._throttle.most_owed(self.bytes_per_s)
        for _ in range(len(self._reads)):
            read = self._reads.popleft()
            link = self._links[read.source.address]
            if link.num_owed < most:
                return self._ask(link, read)
            self._reads.append(read)
        return 0

    def _ask(self, link: PeerLink, read: _Read) -> int:
        keys = [self._order.move.keys[place] for place in read.places]
        source, hello = read.source, self._hello
        message = ReadBlocks(
            source.reading,
            hello.model_hash,
            hello.kv,
            read.form,
            read.layers.start - source.first_layer,
            len(read.layers),
            read.heads.start - source.first_head,
            len(read.heads),
            words_of(keys),
            np.full(len(keys), read.num_tokens, np.int32),
        )
        link.send(message, partial(self._answered, read))
        self._num_due += 1
        return shape_of(hello.kv, message, len(keys) * read.num_tokens).num_bytes

    def _answered(self, read: _Read, answer: FromRWorker) -> None:
        """Take an answer. An error in it ends this job, and no other."""
        self._num_due -= 1
        if self._is_over or self._failure is not None:
            return
        try:
            self._take(read, answer)
        except FastDecodeError as error:
            self._failure = error

    def _take(self, read: _Read, answer: FromRWorker) -> None:
        if not isinstance(answer, BlockData) or len(answer.is_there) != len(read.places):
            peer = read.source.address
            raise ProtocolError(f"{peer} answered {type(answer).__name__} to ReadBlocks")
        there = [p for p, is_there in zip(read.places, answer.is_there, strict=True) if is_there]
        if there:
            self._place(replace(read, places=tuple(there)), answer)
        if len(there) < len(read.places):
            self._miss(replace(read, places=tuple(x for x in read.places if x not in there)))

    def _miss(self, read: _Read) -> None:
        """Note blocks that a source lacks, or whose names it does not know yet."""
        now_s = self._clock()
        if read.source.is_held and now_s - self._began_s < NAMED_WITHIN_S:
            self._not_named.append(read)
            self._ask_again_s = now_s + _ASK_AGAIN_S
        else:
            self._order.move.failed.update(read.places)

    def _place(self, read: _Read, answer: BlockData) -> None:
        """Write a chunk into the blocks that wait for it."""
        kv, message, count = self._hello.kv, self._message, len(read.places)
        blocks = np.array([self._order.move.blocks[place] for place in read.places], np.int64)
        from_layer, from_head = message.first_layer, message.first_head
        layers = range(read.layers.start - from_layer, read.layers.stop - from_layer)
        heads = range(read.heads.start - from_head, read.heads.stop - from_head)
        shape = ChunkShape(layout_of(kv), read.form, layers, heads, count * read.num_tokens)
        due = shape.num_bytes
        if len(answer.data) != due:
            peer, num_bytes = read.source.address, len(answer.data)
            raise ProtocolError(f"{peer} sent {num_bytes} bytes of {count} blocks, not {due}")
        if read.form is ChunkForm.TOKENS:
            blocks = blocks * kv.block_size + np.arange(read.num_tokens)
        self._memory.place(PlaceChunk(self._order.holder, shape, blocks, answer.data))
        self._num_bytes += due


def _common(own: range, first: int, count: int) -> range:
    """Return what both have; empty, within ``own``, if that is nothing."""
    start = min(max(own.start, first), own.stop)
    return range(start, max(start, min(own.stop, first + count)))


def _runs(whole: range, most: int) -> list[range]:
    return [whole[at : at + most] for at in range(0, len(whole), most)]

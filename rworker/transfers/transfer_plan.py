"""The chunks that a pull has not asked for yet: known once every source has
answered what it has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId, PartId, SequenceId
from fastdecode.wire.kv.exporting import ExportDescription
from rworker.instructions import BeginPull
from rworker.stream.chunks import ChunkShape, layout_of
from rworker.stream.cutting import CacheKind, ChunkCut, cut_pieces
from rworker.stream.pieces import Box, Piece, Region, redistribute, turns

_SEQUENCE: Final = SequenceId(0)
"""As both sides' parts are called here."""
_HERE: Final = HolderId(-1)


class TransferPlan:
    """In an order in which each layer's and head's tokens follow upon each
    other: turn by turn, and within a turn of one source after the other.

    Args:
        order: what was asked for, and of whom.
    """

    def __init__(self, order: BeginPull) -> None:
        self._message = order.message
        self._own = CacheKind(order.books.hello.model_hash, order.books.hello.kv)
        self._kinds: dict[int, CacheKind] = {}  # of the sources
        self._turns: deque[list[Piece]] = deque()
        self._cuts: deque[tuple[int, Iterator[ChunkCut]]] = deque()  # of this turn

    @property
    def are_all_taken(self) -> bool:
        """Whether every source has said what it has, and nothing of it is left."""
        is_planned = len(self._kinds) == len(self._message.sources)
        return is_planned and not (self._turns or self._cuts)

    def learn(self, index: int, offer: ExportDescription, peer: str) -> None:
        """What a source has. Raises FastDecodeError: it isn't what is wanted."""
        source, kind = self._message.sources[index], CacheKind(offer.model_hash, offer.kv)
        self._own.check_takes(kind)
        if kind.kv.num_kv_heads != source.num_heads:
            raise ProtocolError(f"{peer} has {kind.kv.num_kv_heads} heads, not {source.num_heads}")
        if offer.num_tokens < source.num_tokens:
            raise ProtocolError(
                f"{peer} has {offer.num_tokens} tokens on offer, not {source.num_tokens}"
            )
        self._kinds[index] = kind
        if len(self._kinds) == len(self._message.sources):
            self._plan()

    def begin_turn(self) -> None:
        """All that was taken has come: the next turn's may be, if this one's has been."""
        if self._cuts or not self._turns:
            return
        by_source: dict[int, list[Piece]] = {}
        for piece in self._turns.popleft():
            by_source.setdefault(int(piece.source.holder), []).append(piece)
        for index, pieces in by_source.items():
            self._cuts.append((index, cut_pieces(pieces, self._kinds[index], self._own)))

    def take(self, may_ask: Callable[[int], bool]) -> tuple[int, ChunkCut] | None:
        """The next chunk of a source that may be asked, all of them in turn;
        None: there is none in this turn."""
        for _ in range(len(self._cuts)):
            index, cuts = self._cuts.popleft()
            cut = next(cuts, None) if (is_free := may_ask(index)) else None
            if cut is not None or not is_free:
                self._cuts.append((index, cuts))
            if cut is not None:
                return index, cut
        return None

    def num_bytes(self, index: int, cut: ChunkCut) -> int:
        """Of a source's chunk."""
        return ChunkShape.of(layout_of(self._kinds[index].kv), cut.request).num_bytes

    def _plan(self) -> None:
        """All is known of what there is. Raises ConfigError: it isn't enough."""
        message, kv = self._message, self._own.kv
        here = Box(
            _range(message.first_layer, kv.num_layers),
            _range(message.first_head, kv.num_kv_heads),
            _range(message.first_token, message.num_tokens),
        )
        there = [
            Region(
                HolderId(index),
                PartId(0),
                Box(
                    _range(source.first_layer, self._kinds[index].kv.num_layers),
                    _range(source.first_head, source.num_heads),
                    _range(source.first_token, source.num_tokens),
                ),
            )
            for index, source in enumerate(message.sources)
        ]
        mine = Region(_HERE, PartId(message.sequence_id), here)
        self._turns.extend(turns(redistribute({_SEQUENCE: there}, {_SEQUENCE: [mine]})))


def _range(first: int, number: int) -> range:
    return range(first, first + number)

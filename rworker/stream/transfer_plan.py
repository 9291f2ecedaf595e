"""What of a transfer is still to be asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import MAX_CHUNK_BYTES
from rworker.stream.cutting import CacheKind, ChunkCut, cut_pieces
from rworker.stream.pieces import Piece, turns

Way: TypeAlias = tuple[HolderId, HolderId]
"""From which cache, and to which."""


class TransferPlan:
    """Chunks of pieces, in an order in which each layer's and head's tokens follow upon
    each other: turn by turn. Within a turn ways take turns.

    Args:
        kinds: of a way's two caches.
        most_bytes: of a chunk.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        kinds: Callable[[Way], tuple[CacheKind, CacheKind]],
        most_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        self._kinds = kinds
        self._most_bytes = most_bytes
        self._turns = deque(turns(pieces))
        self._cuts: deque[tuple[Way, Iterator[ChunkCut]]] = deque()  # of this turn

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return not (self._turns or self._cuts)

    def begin_turn(self) -> None:
        """All that was taken has come: the next turn's chunks may be taken, if this one's
        have been. Raises ConfigError: a target can't take what a source has."""
        if self._cuts or not self._turns:
            return
        by_way: dict[Way, list[Piece]] = {}
        for piece in self._turns.popleft():
            by_way.setdefault((piece.source.holder, piece.target.holder), []).append(piece)
        for way, pieces in by_way.items():
            self._cuts.append((way, cut_pieces(pieces, *self._kinds(way), self._most_bytes)))

    def take(self, may_ask: Callable[[HolderId], bool]) -> tuple[Way, ChunkCut] | None:
        """The next chunk of a source that may be asked; None: there is none in this turn."""
        for _ in range(len(self._cuts)):
            way, cuts = self._cuts.popleft()
            cut = next(cuts, None) if (is_free := may_ask(way[0])) else None
            if cut is not None or not is_free:
                self._cuts.append((way, cuts))
            if cut is not None:
                return way, cut
        return None

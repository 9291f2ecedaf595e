"""One sequence on its way here: what is asked for next, and what has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final, Protocol, TypeAlias

from fastdecode.core.clock import Clock
from fastdecode.core.errors import FastDecodeError, ProtocolError
from fastdecode.core.holders import HolderId, PartId, SequenceId
from fastdecode.wire.kv.chunks import FetchedChunk
from fastdecode.wire.kv.handing import Gone, KVSource, OnOffer, Pulled, ReadOffer, ViewOffer
from fastdecode.wire.messages import PROTOCOL_VERSION, FromRWorker
from rworker.instructions import BeginPull, PlaceChunk
from rworker.pulling.ways import Take, Way
from rworker.stream.checks import store_chunk
from rworker.stream.chunks import ChunkShape, layout_of
from rworker.stream.cutting import CacheKind, Cut, cut_pieces
from rworker.stream.pieces import Box, Piece, Region, redistribute, turns

_SEQUENCE: Final = SequenceId(0)
"""As both sides' parts are called here."""
_HERE: Final = HolderId(-1)
OFFERED_WITHIN_S: Final = 1.0
"""An offer and whoever fetches it come over different connections: so long may
the offer come behind."""
_ASK_AGAIN_S: Final = 5e-3

Place: TypeAlias = "tuple[str, int]"
"""An address, and a line."""


class Placer(Protocol):
    """What writes K and V into a cache's memory."""

    def place(self, place: PlaceChunk) -> None: ...


class OnePull:
    """Fetches what one ``Pull`` names: of all sources first what they have, then
    the chunks, in an order in which each layer's and head's tokens follow upon
    each other.

    Args:
        order: what was asked for; room for it is there.
        placer: writes what comes.
        ways: to the sources.
        clock: seconds.
    """

    def __init__(
        self, order: BeginPull, placer: Placer, ways: Mapping[Place, Way], clock: Clock
    ) -> None:
        self.order = order
        self._placer = placer
        self._ways = ways
        self._clock = clock
        self._began_s = clock()
        self._not_yet: list[int] = []
        """Sources that don't know their tickets yet."""
        self._ask_again_s = 0.0
        self._own = CacheKind(order.books.hello.model_hash, order.books.hello.kv)
        self._kinds: dict[int, CacheKind] = {}
        self._turns: deque[list[Piece]] = deque()
        self._cuts: deque[tuple[int, Iterator[Cut]]] = deque()
        self._num_due = 0
        self.num_bytes = 0
        self.failed: str | None = None
        """Why not all can come."""
        self.is_over = False
        """Nothing that comes is wanted any more."""

    @property
    def is_done(self) -> bool:
        """Whether all has come."""
        is_planned = len(self._kinds) == len(self._sources)
        return is_planned and not (self._turns or self._cuts or self._num_due)

    def uses(self, place: Place) -> bool:
        """Whether a source is there."""
        return place in self._ways

    def begin(self) -> None:
        """Find out what the sources have. Raises WorkerError: one is gone."""
        self._not_yet = list(range(len(self._sources)))
        self._ask_again()

    def advance(self) -> int:
        """Ask for a chunk, if one is left to be asked for, and its way has
        credit: how many bytes it has; 0: none was. Raises FastDecodeError: a
        source is gone, or can't be read."""
        if self._not_yet and self._clock() >= self._ask_again_s:
            self._ask_again()
        if not self._cuts and self._turns and not self._num_due:
            self._begin_turn()
        for _ in range(len(self._cuts)):
            index, cuts = self._cuts.popleft()
            if not self._way(index).has_credit:
                self._cuts.append((index, cuts))
                continue
            cut = next(cuts, None)
            if cut is not None:
                self._cuts.append((index, cuts))
                self._ask(index, self._request(index, cut), partial(self._came, cut))
                return ChunkShape.of(layout_of(self._kinds[index].kv), cut.request).num_bytes
        return 0

    def _ask_again(self) -> None:
        asked, self._not_yet = self._not_yet, []
        for index in asked:
            view = ViewOffer(PROTOCOL_VERSION, self._sources[index].ticket)
            self._ask(index, view, partial(self._seen, index))

    def told(self, now_s: float, reason: str = "") -> Pulled:
        """What is said of it when it is over."""
        message = self.order.message
        seconds = max(0.0, now_s - self._began_s)
        return Pulled(self.order.holder, message.sequence_id, self.num_bytes, seconds, reason)

    @property
    def _sources(self) -> tuple[KVSource, ...]:
        return self.order.message.sources

    def _way(self, index: int) -> Way:
        source = self._sources[index]
        return self._ways[source.address, source.line]

    def _ask(self, index: int, message: ViewOffer | ReadOffer, take: Take) -> None:
        self._way(index).ask(message, partial(self._answered, take))
        self._num_due += 1

    def _answered(self, take: Take, answer: FromRWorker) -> None:
        """What is wrong with an answer ends this pull, and no other."""
        self._num_due -= 1
        if self.is_over or self.failed is not None:
            return
        try:
            take(answer)
        except FastDecodeError as error:
            self.failed = error.message

    def _seen(self, index: int, answer: FromRWorker) -> None:
        """A source has said what its ticket stands for."""
        peer, source = self._way(index).peer, self._sources[index]
        if isinstance(answer, Gone):
            now_s = self._clock()
            if now_s - self._began_s >= OFFERED_WITHIN_S:
                raise ProtocolError(f"{peer} says: {answer.reason}", code="gone")
            self._not_yet.append(index)
            self._ask_again_s = now_s + _ASK_AGAIN_S
            return
        if not isinstance(answer, OnOffer):
            raise ProtocolError(f"{peer} answered {type(answer).__name__} to ViewOffer")
        kv = answer.kv
        self._own.check_takes(kind := CacheKind(answer.model_hash, kv))
        if (kv.num_layers, kv.num_kv_heads) != (self._own.kv.num_layers, source.num_heads):
            raise ProtocolError(f"{peer} has other layers or heads than it was said to have")
        if answer.num_tokens < source.num_tokens:
            raise ProtocolError(
                f"{peer} has {answer.num_tokens} tokens on offer, not {source.num_tokens}"
            )
        self._kinds[index] = kind
        if len(self._kinds) == len(self._sources):
            self._plan()

    def _plan(self) -> None:
        """All is known of what there is. Raises ConfigError: it isn't enough."""
        message, kv = self.order.message, self._own.kv
        layers = range(kv.num_layers)
        here = Box(
            layers,
            range(message.first_head, message.first_head + kv.num_kv_heads),
            range(message.first_token, message.first_token + message.num_tokens),
        )
        there = [
            Region(
                HolderId(index),
                PartId(0),
                Box(
                    layers,
                    range(source.first_head, source.first_head + source.num_heads),
                    range(source.first_token, source.first_token + source.num_tokens),
                ),
            )
            for index, source in enumerate(self._sources)
        ]
        mine = Region(_HERE, PartId(message.sequence_id), here)
        self._turns.extend(turns(redistribute({_SEQUENCE: there}, {_SEQUENCE: [mine]})))

    def _begin_turn(self) -> None:
        by_source: dict[int, list[Piece]] = {}
        for piece in self._turns.popleft():
            by_source.setdefault(int(piece.source.holder), []).append(piece)
        for index, pieces in by_source.items():
            self._cuts.append((index, cut_pieces(pieces, self._kinds[index], self._own)))

    def _request(self, index: int, cut: Cut) -> ReadOffer:
        """A chunk of one sequence, by its ticket."""
        asked = cut.request
        return ReadOffer(
            self._sources[index].ticket,
            asked.form,
            asked.first_layer,
            asked.num_layers,
            asked.first_head,
            asked.num_heads,
            int(asked.first_tokens[0]),
            int(asked.num_tokens[0]),
        )

    def _came(self, cut: Cut, answer: FromRWorker) -> None:
        """A chunk is here. Whatever the books don't expect isn't written."""
        if isinstance(answer, Gone):
            raise ProtocolError(answer.reason, code="gone")
        if not isinstance(answer, FetchedChunk):
            raise ProtocolError(f"{type(answer).__name__} came where a chunk was due")
        order, chunk = self.order, cut.filled(answer.data)
        slots = store_chunk(order.books, chunk)
        self._placer.place(PlaceChunk(order.to, order.holder, chunk, slots))
        self.num_bytes += len(chunk.data)

"""One sequence on its way here: what is asked for next, and what has come."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final, Protocol, TypeAlias

from fastdecode.core.clock import Clock
from fastdecode.core.errors import FastDecodeError, ProtocolError
from fastdecode.wire.kv.chunks import FetchedChunk
from fastdecode.wire.kv.exporting import (
    DescribeExport,
    ExportDescription,
    ExportExpired,
    KVSource,
    Pulled,
    ReadExport,
)
from fastdecode.wire.messages import PROTOCOL_VERSION, FromRWorker
from rworker.instructions import BeginPull, PlaceChunk
from rworker.pulling.transfer_link import Take, TransferLink
from rworker.pulling.transfer_plan import TransferPlan
from rworker.stream.checks import store_chunk
from rworker.stream.cutting import ChunkCut

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
    the chunks.

    Args:
        order: what was asked for; room for it is there.
        placer: writes what comes.
        ways: to the sources.
        clock: seconds.
    """

    def __init__(
        self, order: BeginPull, placer: Placer, ways: Mapping[Place, TransferLink], clock: Clock
    ) -> None:
        self.order = order
        self._placer = placer
        self._ways = ways
        self._clock = clock
        self._began_s = clock()
        self._not_yet: list[int] = []
        """Sources that don't know their tickets yet."""
        self._ask_again_s = 0.0
        self._due = TransferPlan(order)
        self._num_due = 0
        self.num_bytes = 0
        self.failed: str | None = None
        """Why not all can come."""
        self.is_over = False
        """Nothing that comes is wanted any more."""

    @property
    def is_done(self) -> bool:
        """Whether all has come."""
        return self._due.are_all_taken and not self._num_due

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
        if not self._num_due:
            self._due.begin_turn()
        taken = self._due.take(lambda index: self._way(index).has_credit)
        if taken is None:
            return 0
        index, cut = taken
        self._ask(index, self._request(index, cut), partial(self._came, cut))
        return self._due.num_bytes(index, cut)

    def _ask_again(self) -> None:
        asked, self._not_yet = self._not_yet, []
        for index in asked:
            view = DescribeExport(PROTOCOL_VERSION, self._sources[index].ticket)
            self._ask(index, view, partial(self._seen, index))

    def told(self, now_s: float, reason: str = "") -> Pulled:
        """What is said of it when it is over."""
        message = self.order.message
        seconds = max(0.0, now_s - self._began_s)
        return Pulled(self.order.holder, message.sequence_id, self.num_bytes, seconds, reason)

    @property
    def _sources(self) -> tuple[KVSource, ...]:
        return self.order.message.sources

    def _way(self, index: int) -> TransferLink:
        source = self._sources[index]
        return self._ways[source.address, source.line]

    def _ask(self, index: int, message: DescribeExport | ReadExport, take: Take) -> None:
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
        peer = self._way(index).peer
        if isinstance(answer, ExportExpired):
            now_s = self._clock()
            if now_s - self._began_s >= OFFERED_WITHIN_S:
                raise ProtocolError(f"{peer} says: {answer.reason}", code="gone")
            self._not_yet.append(index)
            self._ask_again_s = now_s + _ASK_AGAIN_S
            return
        if not isinstance(answer, ExportDescription):
            raise ProtocolError(f"{peer} answered {type(answer).__name__} to DescribeExport")
        self._due.learn(index, answer, peer)

    def _request(self, index: int, cut: ChunkCut) -> ReadExport:
        """A chunk of one sequence, by its ticket."""
        asked = cut.request
        return ReadExport(
            self._sources[index].ticket,
            asked.form,
            asked.first_layer,
            asked.num_layers,
            asked.first_head,
            asked.num_heads,
            int(asked.first_tokens[0]),
            int(asked.num_tokens[0]),
        )

    def _came(self, cut: ChunkCut, answer: FromRWorker) -> None:
        """A chunk is here. Whatever the books don't expect isn't written."""
        if isinstance(answer, ExportExpired):
            raise ProtocolError(answer.reason, code="gone")
        if not isinstance(answer, FetchedChunk):
            raise ProtocolError(f"{type(answer).__name__} came where a chunk was due")
        order, chunk = self.order, cut.filled(answer.data)
        slots = store_chunk(order.books, chunk)
        self._placer.place(PlaceChunk(order.to, order.holder, chunk, slots))
        self.num_bytes += len(chunk.data)

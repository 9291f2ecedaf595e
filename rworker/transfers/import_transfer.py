"""Imports one sequence: what is asked for next, and what has come."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from msgspec.structs import replace

from fastdecode.core.clock import Clock
from fastdecode.core.errors import FastDecodeError, ProtocolError
from fastdecode.core.holders import HolderId, PartId, SequenceId
from fastdecode.wire.blocks import (
    DescribeExport,
    ExportDescription,
    ExportExpired,
    FetchChunk,
    FetchedChunk,
    KVSource,
    Pull,
    Pulled,
)
from fastdecode.wire.messages import PROTOCOL_VERSION, FromRWorker
from rworker.instructions import BeginPull
from rworker.stream.chunk_endpoints import LocalCache
from rworker.stream.cutting import CacheKind, ChunkCut
from rworker.stream.pieces import Box, Region, redistribute
from rworker.stream.transfer_plan import TransferPlan
from rworker.transfers.peer_link import PeerLink, Take
from rworker.transfers.throttle import Throttle

logger = logging.getLogger(__name__)

OFFERED_WITHIN_S: Final = 1.0
"""An export and the import of it come over different connections: the export may come
so much later."""
_ASK_AGAIN_S: Final = 5e-3
_SEQUENCE: Final = SequenceId(0)
"""As both sides' parts are called in a plan."""
_HERE: Final = HolderId(-1)


class ImportTransfer:
    """See the module, and ``Transfer``: asks all sources first what they have, then for
    the chunks.

    Args:
        order: what was asked for; there is room for it.
        sink: the cache.
        throttle: of all imports.
        clock: seconds.
    """

    def __init__(
        self, order: BeginPull, sink: LocalCache, throttle: Throttle, clock: Clock
    ) -> None:
        self.order = order
        self.to: Final = order.to
        self._sink = sink
        self._throttle = throttle
        self._clock = clock
        self._links: dict[str, PeerLink] = {}
        self._began_s = clock()
        self._not_yet: list[int] = []  # sources that don't know their tickets yet
        self._ask_again_s = 0.0
        self._kinds: dict[int, CacheKind] = {}  # of the sources
        self._plan: TransferPlan | None = None  # until all of them are known
        self._num_due = 0
        self._num_bytes = 0  # that have come
        self._failure: FastDecodeError | None = None
        self._is_over = False  # nothing that comes is wanted any more

    @property
    def is_done(self) -> bool:
        """See ``Transfer``."""
        return self._plan is not None and self._plan.is_over and not self._num_due

    def uses(self, address: str) -> bool:
        """Whether a source is there."""
        return address in self._links

    def begin(self, link_to: Callable[[str], PeerLink]) -> None:
        """Find out what the sources have. Raises FastDecodeError: one can't be reached."""
        for source in self._sources:
            link = self._links[source.address] = link_to(source.address)
            link.timeout_s = max(link.timeout_s, self.order.message.timeout_s)
        self._not_yet = list(range(len(self._sources)))
        self._ask_again()

    def advance(self) -> Iterable[Pulled]:
        """See ``Transfer``: asks for chunks, as far as pace and links' credit allow."""
        if self._failure is not None:
            raise self._failure
        if self._not_yet and self._clock() >= self._ask_again_s:
            self._ask_again()
        while self._throttle.may_ask and (num_bytes := self._ask_next()):
            self._throttle.asked(num_bytes, self.order.message.bytes_per_s)
        return ()

    def end(self, reason: str) -> Pulled:
        """See ``Transfer``."""
        sequence = self.order.message.sequence_id
        if reason:
            logger.info("sequence %d isn't fetched: %s", sequence, reason)
        seconds = max(0.0, self._clock() - self._began_s)
        return Pulled(self.order.holder, sequence, self._num_bytes, seconds, reason)

    def close(self) -> None:
        """See ``Transfer``. Its links are others', too."""
        self._is_over = True

    @property
    def _sources(self) -> tuple[KVSource, ...]:
        return self.order.message.sources

    def _link(self, index: int) -> PeerLink:
        return self._links[self._sources[index].address]

    def _ask_next(self) -> int:
        """Ask for a chunk, if one is left to be asked for, and its link has credit: how
        many bytes it has; 0: none was."""
        plan = self._plan
        if plan is None:
            return 0
        most = self._throttle.most_owed(self.order.message.bytes_per_s)
        if not self._num_due:
            plan.begin_turn()
        taken = plan.take(lambda source: self._link(source).num_owed < most)
        if taken is None:
            return 0
        (index, _), cut = taken
        request = replace(cut.request, ticket=self._sources[index].ticket)
        self._ask(index, request, partial(self._came, cut))
        return cut.num_bytes

    def _ask_again(self) -> None:
        asked, self._not_yet = self._not_yet, []
        for index in asked:
            view = DescribeExport(PROTOCOL_VERSION, self._sources[index].ticket)
            self._ask(index, view, partial(self._described, index))

    def _ask(self, index: int, message: DescribeExport | FetchChunk, take: Take) -> None:
        self._link(index).ask(message, partial(self._answered, take))
        self._num_due += 1

    def _answered(self, take: Take, answer: FromRWorker) -> None:
        """What is wrong with an answer ends this import, and no other."""
        self._num_due -= 1
        if self._is_over or self._failure is not None:
            return
        try:
            take(answer)
        except FastDecodeError as error:
            self._failure = error

    def _described(self, index: int, answer: FromRWorker) -> None:
        """A source has said what its ticket stands for."""
        peer = self._link(index).peer
        if isinstance(answer, ExportExpired):
            now_s = self._clock()
            if now_s - self._began_s >= OFFERED_WITHIN_S:
                raise ProtocolError(f"{peer} says: {answer.reason}", code="gone")
            self._not_yet.append(index)
            self._ask_again_s = now_s + _ASK_AGAIN_S
            return
        if not isinstance(answer, ExportDescription):
            raise ProtocolError(f"{peer} answered {type(answer).__name__} to DescribeExport")
        kind = _kind_of_export(self._sources[index], answer, peer)
        self._sink.kind.check_takes(kind)
        self._kinds[index] = kind
        if len(self._kinds) == len(self._sources):
            self._plan = _plan_import(self.order.message, self._sink.kind, self._kinds)

    def _came(self, cut: ChunkCut, answer: FromRWorker) -> None:
        """A chunk is here. What the cache doesn't expect isn't written."""
        if isinstance(answer, ExportExpired):
            raise ProtocolError(answer.reason, code="gone")
        if not isinstance(answer, FetchedChunk):
            raise ProtocolError(f"{type(answer).__name__} came where a chunk was due")
        self._sink.flush(cut.filled(answer.data))
        self._num_bytes += len(answer.data)


def _kind_of_export(source: KVSource, export: ExportDescription, peer: str) -> CacheKind:
    """The kind of cache that a source has. Raises ProtocolError: it isn't what is wanted."""
    kind = CacheKind(export.model_hash, export.kv)
    if kind.kv.num_kv_heads != source.num_heads:
        raise ProtocolError(f"{peer} has {kind.kv.num_kv_heads} heads, not {source.num_heads}")
    if export.num_tokens < source.num_tokens:
        raise ProtocolError(
            f"{peer} has {export.num_tokens} tokens on offer, not {source.num_tokens}"
        )
    return kind


def _plan_import(order: Pull, own: CacheKind, kinds: Mapping[int, CacheKind]) -> TransferPlan:
    """All that has to come; each source's index is its holder in the plan.

    Args:
        own: the cache's kind.
        kinds: the sources', by index.

    Raises:
        ConfigError: the sources don't have it all.
    """
    here = _region(_HERE, order.sequence_id, own, order)
    there = [
        _region(HolderId(index), 0, kinds[index], source)
        for index, source in enumerate(order.sources)
    ]
    pieces = redistribute({_SEQUENCE: there}, {_SEQUENCE: [here]})
    return TransferPlan(pieces, lambda way: (kinds[int(way[0])], own))


def _region(holder: HolderId, part_id: int, kind: CacheKind, of: Pull | KVSource) -> Region:
    """What a cache of this kind has, or is to get, of the sequence."""
    sides = (
        (of.first_layer, kind.kv.num_layers),
        (of.first_head, kind.kv.num_kv_heads),
        (of.first_token, of.num_tokens),
    )
    return Region(holder, PartId(part_id), Box(*[range(at, at + num) for at, num in sides]))

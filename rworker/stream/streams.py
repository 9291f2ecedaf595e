"""Streams K and V between caches, as planned."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from fastdecode.core.holders import HolderId
from fastdecode.wire.blocks import MAX_CHUNK_BYTES
from rworker.stream.chunk_endpoints import ChunkSink, ChunkSource
from rworker.stream.cutting import ChunkCut
from rworker.stream.pieces import Piece
from rworker.stream.transfer_plan import TransferPlan

READ_AHEAD: Final = 2
"""Chunks asked for before the one that is being sent."""
_Asked: TypeAlias = dict[HolderId, deque[tuple[ChunkCut, ChunkSink]]]
"""Of each source, in order: what is asked for, and where it goes."""


def expect_pieces(pieces: Sequence[Piece], sinks: Mapping[HolderId, ChunkSink]) -> None:
    """Have the targets expect what is going to come. Each sequence is open there, with
    room, and has all tokens before it."""
    ends: dict[tuple[HolderId, int], tuple[int, int]] = {}
    for piece in pieces:
        part = piece.target.holder, int(piece.target.part_id)
        tokens = piece.at_target.tokens
        start, end = ends.get(part, (tokens.start, tokens.stop))
        ends[part] = min(start, tokens.start), max(end, tokens.stop)
    for (holder, part_id), (start, end) in ends.items():
        sinks[holder].expect(part_id, end - start)


def stream_out(
    pieces: Sequence[Piece],
    sources: Mapping[HolderId, ChunkSource],
    sinks: Mapping[HolderId, ChunkSink],
    most_bytes: int = MAX_CHUNK_BYTES,
) -> int:
    """Send pieces that their targets expect (``expect_pieces``), and wait until
    all are there. Between every two caches they travel layer by layer; caches
    take turns.

    Returns:
        Bytes of K and V that were sent.

    Raises:
        ConfigError: a target can't take what a source has.
        WorkerError: one of them is gone, or refuses.
    """
    plan = TransferPlan(pieces, lambda way: (sources[way[0]].kind, sinks[way[1]].kind), most_bytes)
    asked: _Asked = {source: deque() for source in sources}
    num_bytes = 0
    while not plan.is_over:
        plan.begin_turn()
        while _ask_ahead(plan, asked, sources, sinks):
            for source, due in asked.items():
                if due:
                    cut, sink = due.popleft()
                    chunk = cut.filled(sources[source].fetch())
                    sink.flush(chunk)
                    num_bytes += len(chunk.data)
    for sink in sinks.values():
        sink.finish()
    return num_bytes


def _ask_ahead(
    plan: TransferPlan,
    asked: _Asked,
    sources: Mapping[HolderId, ChunkSource],
    sinks: Mapping[HolderId, ChunkSink],
) -> bool:
    """Ask each source for the chunks ahead. False: nothing of this turn is left."""
    while taken := plan.take(lambda source: len(asked[source]) <= READ_AHEAD):
        (source, target), cut = taken
        sources[source].ask(cut.request)
        asked[source].append((cut, sinks[target]))
    return any(asked.values())

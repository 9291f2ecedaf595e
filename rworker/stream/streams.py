"""Carries out a plan: pieces, from the caches that have them to those that are
to get them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Final, TypeAlias, TypeVar

from fastdecode.core.holders import HolderId
from fastdecode.wire.kv.chunks import MAX_CHUNK_BYTES
from rworker.stream.chunk_endpoints import ChunkSink, ChunkSource
from rworker.stream.cutting import ChunkCut, cut_pieces
from rworker.stream.pieces import Piece, turns

T = TypeVar("T")
_Cuts: TypeAlias = "Iterator[tuple[ChunkCut, ChunkSink]]"

READ_AHEAD: Final = 2
"""Chunks asked for before the one that is being sent."""


def expect_pieces(pieces: Sequence[Piece], sinks: Mapping[HolderId, ChunkSink]) -> None:
    """Tell the targets what is going to come. Each sequence is open there, with
    room, and has all tokens before those."""
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
    num_bytes = 0
    for turn in turns(pieces):
        ways: dict[HolderId, list[_Cuts]] = {}
        for (source, target), some in _by_way(turn).items():
            kinds = sources[source].kind, sinks[target].kind
            cuts = cut_pieces(some, *kinds, most_bytes)
            ways.setdefault(source, []).append(zip(cuts, repeat(sinks[target])))
        outlets = [_Outlet(sources[source], in_turns(some)) for source, some in ways.items()]
        num_bytes += sum(in_turns([outlet.send_all() for outlet in outlets]))
    for sink in sinks.values():
        sink.finish()
    return num_bytes


def _by_way(pieces: Sequence[Piece]) -> dict[tuple[HolderId, HolderId], list[Piece]]:
    """From which cache, and to which."""
    ways: dict[tuple[HolderId, HolderId], list[Piece]] = {}
    for piece in pieces:
        ways.setdefault((piece.source.holder, piece.target.holder), []).append(piece)
    return ways


class _Outlet:
    """All that one cache sends.

    Args:
        cuts: what, and where to; in this order.
    """

    def __init__(self, source: ChunkSource, cuts: _Cuts) -> None:
        self._source = source
        self._cuts = cuts
        self._asked: deque[tuple[ChunkCut, ChunkSink]] = deque()

    def send_all(self) -> Iterator[int]:
        """One chunk at a time: how many bytes it had."""
        while self._ask():
            cut, sink = self._asked.popleft()
            chunk = cut.filled(self._source.fetch())
            sink.flush(chunk)
            yield len(chunk.data)

    def _ask(self) -> bool:
        """Ask for the chunks ahead. False: none is left."""
        while len(self._asked) <= READ_AHEAD:
            due = next(self._cuts, None)
            if due is None:
                break
            self._source.ask(due[0].request)
            self._asked.append(due)
        return bool(self._asked)


def in_turns(iterators: Sequence[Iterator[T]]) -> Iterator[T]:
    """One of each, again and again, until all have ended."""
    waiting = deque(iterators)
    while waiting:
        iterator = waiting.popleft()
        try:
            item = next(iterator)
        except StopIteration:
            continue
        waiting.append(iterator)
        yield item

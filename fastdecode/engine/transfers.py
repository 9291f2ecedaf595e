"""Reports of R-workers on blocks that they move in the background: between tiers, and from other
engines' R-workers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from fastdecode.engine.extensions import EngineState, Extension
from fastdecode.schedule.life.events import Event
from fastdecode.wire.blocks import Done

_MOST_SPANS: Final = 256


class FetchingTime:
    """Time in which anything was fetched. Overlapping fetches count once."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=_MOST_SPANS)
        """The latest spans, in order, with gaps between them."""

    def add(self, ended_s: float, seconds: float) -> float:
        """Add a fetch of that length, the last one to end so far. Return how much of it wasn't
        counted yet."""
        began_s = ended_s - seconds
        counted_s = 0.0
        first_s = began_s
        while self._spans and self._spans[-1][1] >= began_s:
            span_began_s, span_ended_s = self._spans.pop()
            counted_s += span_ended_s - max(span_began_s, began_s)
            first_s = min(first_s, span_began_s)
        self._spans.append((first_s, ended_s))
        return seconds - counted_s


class Transfers(Extension):
    """Passes on how far transfers are."""

    def __init__(self, state: EngineState) -> None:
        self._fleet = state.fleet
        self._stock = state.lifecycle.scheduler.ledger.cache.stock
        self._stats = state.stats
        self._fetching = FetchingTime()

    def news(self) -> Iterable[Event]:
        for moved in self._fleet.take_moves():
            if isinstance(moved, Done):
                job = self._stock.jobs.get(moved.job)
                if job is not None and job.source:
                    self._count(moved)
            yield moved

    def _count(self, done: Done) -> None:
        self._stats.fetched_bytes += done.num_bytes
        self._stats.fetch_s += done.seconds
        self._stats.fetching_s += self._fetching.add(time.perf_counter(), done.seconds)

"""Extensions about KV that moves in the background: between tiers, and between engines. A prompt
that runs on one engine may decode on another, whose R-workers fetch its blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import ClassVar, Final

from fastdecode.core.delta import Delta
from fastdecode.core.holders import KVSource, Part
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.spec import HeadShare
from fastdecode.engine.extensions import EngineState, Extension
from fastdecode.schedule.life import events
from fastdecode.wire.blocks import Done

_MOST_SPANS: Final = 256
_LOOK_S: Final = 0.2
"""Pause between two looks at R-workers, while another engine has to report a fetch."""
_COPY_LOOK_S: Final = 0.005
"""The same, while blocks are copied to a lower tier and no sequence runs."""


class FetchingTime:
    """Time in which anything was fetched. Overlapping fetches count once."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=_MOST_SPANS)
        """The latest spans, in order, with gaps between them."""

    def add(self, ended_s: float, seconds: float) -> float:
        """Add a fetch of that length, the last one to end so far. Return how much of it wasn't
        counted yet."""
        began_s = ended_s - seconds
        counted_s, first_s = 0.0, began_s
        while self._spans and self._spans[-1][1] >= began_s:
            span_began_s, span_ended_s = self._spans.pop()
            counted_s += span_ended_s - max(span_began_s, began_s)
            first_s = min(first_s, span_began_s)
        self._spans.append((first_s, ended_s))
        return seconds - counted_s


class Transfers(Extension):
    """Passes on R-workers' reports on how far transfers are."""

    def __init__(self, state: EngineState) -> None:
        self._fleet = state.fleet
        self._stock = state.lifecycle.scheduler.ledger.cache.stock
        self._stats = state.stats
        self._fetching = FetchingTime()

    @property
    def has_work(self) -> bool:
        return self._stock.is_copying

    @property
    def idle_pause_s(self) -> float:
        return _COPY_LOOK_S if self._stock.has_lower else 0.0

    def listen(self) -> None:
        if self._stock.is_copying and self._fleet.is_owed:
            self._fleet.receive(most_s=0.0)

    def news(self) -> Iterable[events.Event]:
        for moved in self._fleet.take_moves():
            if isinstance(moved, Done):
                job = self._stock.jobs.get(moved.job)
                if job is not None and job.source:
                    fetching_s = self._fetching.add(time.perf_counter(), moved.seconds)
                    self._stats.fetched_bytes += moved.num_bytes
                    self._stats.fetch_s += moved.seconds
                    self._stats.fetching_s += fetching_s
            yield moved


class KVExchange(Extension):
    """Hands prompts over, and reports when prompts of other engines have been fetched.

    Args:
        spec: The whole model.
        address_of: Returns where others reach an R-worker, by its index in the pool.
        reading: A secret that gives the right to read the engine's R-workers.
        bytes_per_s: Most that one of its R-workers fetches. 0 for no limit.
        timeout_s: Longest silence of an R-worker that it fetches from.
    """

    instructions: ClassVar = (events.HandOver, events.HasFetched)

    def __init__(
        self,
        state: EngineState,
        spec: ModelSpec,
        address_of: Callable[[int], str],
        reading: int,
        bytes_per_s: float,
        timeout_s: float,
    ) -> None:
        self._fleet = state.fleet
        self._requests = state.requests
        self._sequences = state.lifecycle.handing
        self._address_of, self._reading = address_of, reading
        self._every_head = HeadShare(slice(0, spec.num_kv_heads), slice(0, 0))
        self._every_layer = range(spec.num_layers)
        state.lifecycle.scheduler.ledger.cache.stock.peer_terms = timeout_s, bytes_per_s

    @property
    def idle_pause_s(self) -> float:
        """Seconds between two looks while other engines fetch what is held. 0 if none does."""
        return _LOOK_S if self._sequences.has_exported else 0.0

    def listen(self) -> None:
        """Find out which R-workers with held blocks are lost."""
        if self._sequences.has_exported:
            self._fleet.look()

    def do(self, instruction: events.HandOver | events.HasFetched) -> tuple[()]:
        sequence = instruction.sequence
        delta = Delta(sequence.request.request_id, sequence.index)
        match instruction:
            case events.HandOver(num_tokens=num_tokens):
                assert sequence.residence is not None
                parts = [
                    replace(part, num_tokens=min(num_tokens, part.end) - part.first_token)
                    for part in sequence.residence.parts
                    if part.first_token < num_tokens
                ]
                self._requests.say(replace(delta, sources=self._sources(parts, is_held=True)))
            case events.HasFetched(failed=failed):
                self._requests.say(replace(delta, has_fetched=True, fetch_failed=failed))
        return ()

    def finishing(self, finish: events.Finish) -> None:
        """Report where the sequence's blocks can be read: other requests may start with them."""
        if sources := self._sources(finish.kept, is_held=False):
            sequence = finish.sequence
            self._requests.say(Delta(sequence.request.request_id, sequence.index, sources=sources))

    def _sources(self, parts: Iterable[Part], *, is_held: bool) -> tuple[KVSource, ...]:
        """Return where the blocks of these parts can be read."""
        sources: list[KVSource] = []
        placement = self._fleet.members.placement
        for part in parts:
            for member, shard in self._fleet.shards_of(part.holder).items():
                heads, layers = shard.heads or self._every_head, shard.layers or self._every_layer
                peer = self._address_of(placement[member]), self._reading
                kept = int(heads.kv.start), heads.num_kv_heads, layers.start, len(layers)
                source = KVSource(*peer, part.first_token, part.num_tokens, *kept, is_held)
                sources.append(source)
        return tuple(sources)

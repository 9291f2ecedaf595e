"""Prompts that run on one engine and decode on another: where other engines' R-workers read an
engine's blocks, and when these can be freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from fastdecode.core.delta import Delta
from fastdecode.core.holders import KVSource, Part
from fastdecode.core.spec import HeadShare
from fastdecode.engine.extensions import EngineState, Extension
from fastdecode.schedule.life import events

_LOOK_S: Final = 0.2
"""Pause between two looks at R-workers, while another engine has to report a fetch."""


@dataclass(frozen=True)
class PeerTerms:
    """How R-workers of other engines reach an engine's, and how its own fetch from them.

    Args:
        address_of: Returns where others reach an R-worker, by its index in the pool.
        num_kv_heads, num_layers: Sizes of the whole model.
        reading: A secret that gives the right to read the engine's R-workers.
        bytes_per_s: Most that one of its R-workers fetches. 0 for no limit.
        timeout_s: Longest silence of an R-worker that it fetches from.
    """

    address_of: Callable[[int], str]
    num_kv_heads: int
    num_layers: int
    reading: int
    bytes_per_s: float = 0.0
    timeout_s: float = 300.0


class KVExchange(Extension):
    """Hands prompts over, and reports when prompts of other engines have been fetched."""

    instructions: ClassVar = (events.HandOver, events.HasFetched)

    def __init__(self, state: EngineState, terms: PeerTerms) -> None:
        self._fleet = state.fleet
        self._requests = state.requests
        self._sequences = state.lifecycle.handing
        self._terms = terms
        stock = state.lifecycle.scheduler.ledger.cache.stock
        stock.peer_terms = terms.timeout_s, terms.bytes_per_s

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
        terms = self._terms
        whole, every = HeadShare(slice(0, terms.num_kv_heads), slice(0, 0)), range(terms.num_layers)
        sources: list[KVSource] = []
        placement = self._fleet.members.placement
        for part in parts:
            for member, shard in self._fleet.shards_of(part.holder).items():
                heads, layers = shard.heads or whole, shard.layers or every
                sources.append(
                    KVSource(
                        terms.address_of(placement[member]),
                        terms.reading,
                        part.first_token,
                        part.num_tokens,
                        int(heads.kv.start),
                        heads.num_kv_heads,
                        layers.start,
                        len(layers),
                        is_held,
                    )
                )
        return tuple(sources)

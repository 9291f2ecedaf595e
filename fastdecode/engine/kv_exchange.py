"""Prompts that run on one engine and decode on another: this engine exports the
KV of its prompts (a ticket for each), and imports that of others."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from fastdecode.core.delta import Delta
from fastdecode.core.errors import ProtocolError
from fastdecode.core.holders import HolderId, KVSource, Part
from fastdecode.core.spec import HeadShare, Shard
from fastdecode.engine.extensions import EngineState, Extension
from fastdecode.schedule.life import events
from fastdecode.wire.blocks import ExportSequence, Pull
from fastdecode.wire.messages import Answer

_TICKET_BYTES: Final = 16
_LOOK_FOR_FETCHED_S: Final = 1e-3
_LOOK_S: Final = 0.2
"""Between two looks after R-workers, while whoever fetches has to say when that is done."""


@dataclass(frozen=True)
class ExportAddresses:
    """How R-workers of other instances reach an engine's.

    Args:
        address_of: an R-worker, by its index in the pool: what others call it.
        num_kv_heads: of the model.
        fetch_bytes_per_s: that one of its R-workers may fetch; 0: as many as
            it can.
        timeout_s: that those it fetches from may say nothing.
    """

    address_of: Callable[[int], str]
    num_kv_heads: int
    fetch_bytes_per_s: float = 0.0
    timeout_s: float = 300.0

    def sources(self, workers: Mapping[int, Shard], offered: KVSource) -> Iterator[KVSource]:
        """Where a holder that these R-workers keep is fetched from: ``offered`` of each."""
        whole = HeadShare(slice(0, self.num_kv_heads), slice(0, 0))
        for worker, shard in workers.items():
            heads = shard.heads or whole
            yield replace(
                offered,
                address=self.address_of(worker),
                first_head=int(heads.kv.start),
                num_heads=heads.num_kv_heads,
                first_layer=0 if shard.layers is None else shard.layers.start,
            )


class KVExchange(Extension):
    """Exports and imports of one engine.

    Args:
        state: of the engine.
        exports: how others reach its R-workers.
    """

    instructions: ClassVar = (events.Pull, events.HandOver, events.HasFetched)

    def __init__(self, state: EngineState, exports: ExportAddresses) -> None:
        self._fleet = state.fleet
        self._requests = state.requests
        self._sequences = state.lifecycle.handing
        self._exports = exports

    @property
    def idle_pause_s(self) -> float:
        """All there is to do is for others, which fetch what is exported, or send
        what is imported."""
        if self._sequences.is_importing:
            return _LOOK_FOR_FETCHED_S
        return _LOOK_S if self._sequences.has_exported else 0.0

    def listen(self) -> None:
        """Take in what R-workers report of imports, and which of them are lost."""
        if self._sequences.is_importing and self._fleet.is_owed:
            received = self._fleet.receive(most_s=0.0)
            if received is not None:
                self._refuse(*received)
        elif self._sequences.has_exported:
            self._fleet.look()

    def do(self, instruction: events.Pull | events.HandOver | events.HasFetched) -> tuple[()]:
        """See ``Extension``."""
        match instruction:
            case events.Pull():
                self._import(instruction)
            case events.HandOver():
                self._export(instruction)
            case events.HasFetched():
                self._imported(instruction)
        return ()

    def _refuse(self, holder: HolderId, answer: Answer) -> None:
        """No step, room or takeover waits for an answer now."""
        text = f"{self._fleet.peer(holder)} sent {type(answer).__name__}, which nobody waits for"
        self._fleet.lose(holder, ProtocolError(text))

    def _export(self, instruction: events.HandOver) -> None:
        """Give each holder of a sequence a ticket, and the listener the places to fetch from."""
        sequence = instruction.sequence
        assert sequence.residence is not None
        sources: list[KVSource] = []
        for part in sequence.residence.parts:
            num_tokens = min(sequence.num_cached - part.first_token, part.num_tokens)
            if num_tokens > 0:
                sources += self._offer(part, num_tokens)
        request_id = sequence.request.request_id
        self._requests.say(Delta(request_id, sequence.index, sources=tuple(sources)))

    def _import(self, instruction: events.Pull) -> None:
        """Have a holder fetch what another engine exports."""
        part, exports = instruction.part, self._exports
        pull = Pull(
            part.part_id,
            part.first_token,
            instruction.num_tokens,
            instruction.sources,
            exports.timeout_s,
            exports.fetch_bytes_per_s,
        )
        self._fleet.send(part.holder, pull)

    def _imported(self, instruction: events.HasFetched) -> None:
        """The engine that exported it needn't keep it."""
        sequence = instruction.sequence
        request_id = sequence.request.request_id
        failed = instruction.failed
        delta = Delta(request_id, sequence.index, has_fetched=True, fetch_failed=failed)
        self._requests.say(delta)

    def _offer(self, part: Part, num_tokens: int) -> list[KVSource]:
        ticket = secrets.token_hex(_TICKET_BYTES)
        self._fleet.send(part.holder, ExportSequence(part.part_id, ticket))
        offered = KVSource("", ticket, part.first_token, num_tokens, 0, 0)
        return list(self._exports.sources(self._fleet.workers_of(part.holder), offered))

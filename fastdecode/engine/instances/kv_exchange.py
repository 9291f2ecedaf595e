"""Exports an engine's prompts to other instances, and imports theirs."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fastdecode.core.delta import Delta
from fastdecode.core.errors import ConfigError
from fastdecode.core.holders import HolderId, KVSource, Part
from fastdecode.core.spec import HeadShare
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.engine.requests import Requests
from fastdecode.schedule.life import events
from fastdecode.schedule.life.handing import Handing as Sequences
from fastdecode.wire.kv.exporting import ExportSequence, Pull

_TICKET_BYTES: Final = 16
_MOST_SPANS: Final = 256
_LOOK_FOR_FETCHED_S: Final = 1e-3
_LOOK_S: Final = 0.2
"""Between two looks after R-workers, while whoever fetches has to say when that is done."""


class FetchingTime:
    """In which anything was fetched: moments in which several were, count once."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=_MOST_SPANS)
        """The latest, with gaps between them, in order."""

    def add(self, ended_s: float, seconds: float) -> float:
        """A fetch is over that has taken so long, the last one to end so far; how
        much of that wasn't counted yet."""
        began_s = ended_s - seconds
        counted_s = 0.0
        first_s = began_s
        while self._spans and self._spans[-1][1] >= began_s:
            span_began_s, span_ended_s = self._spans.pop()
            counted_s += span_ended_s - max(span_began_s, began_s)
            first_s = min(first_s, span_began_s)
        self._spans.append((first_s, ended_s))
        return seconds - counted_s


@dataclass(frozen=True)
class ExportAddresses:
    """How R-workers of other instances reach an engine's.

    Args:
        addresses: of its R-workers, as these call each other.
        num_kv_heads: of the model.
        shares: the heads of each of those that share them out; None: each has
            all.
        fetch_bytes_per_s: that one of its R-workers may fetch; 0: as many as
            it can.
        timeout_s: that those it fetches from may say nothing.
    """

    addresses: Sequence[str] = ()
    num_kv_heads: int = 0
    shares: Callable[[], Mapping[HolderId, HeadShare]] | None = None
    fetch_bytes_per_s: float = 0.0
    timeout_s: float = 300.0

    def of(self, peer: int) -> list[tuple[str, int, int]]:
        """Who has a holder that this R-worker keeps: address, first KV head, and
        how many.

        Raises:
            ConfigError: others can't reach it.
        """
        if not self.addresses:
            raise ConfigError("these R-workers can't be reached by other instances'")
        if self.shares is None:
            return [(self.addresses[peer], 0, self.num_kv_heads)]
        return [
            (self.addresses[worker], int(share.kv.start), share.num_kv_heads)
            for worker, share in self.shares().items()
        ]


class KVExchange:
    """Of one engine.

    Args:
        fleet: its holders.
        requests: what isn't finished.
        sequences: those that go on elsewhere, or come from there.
        exports: how others reach its R-workers.
    """

    def __init__(
        self, fleet: Fleet, requests: Requests, sequences: Sequences, exports: ExportAddresses
    ) -> None:
        self._fleet = fleet
        self._requests = requests
        self._sequences = sequences
        self._exports = exports
        self.is_idle = False
        """Nothing could be started, and nothing has happened since."""

    @property
    def pause_s(self) -> float:
        """How long a step would do nothing: all there is to do is for others,
        who fetch what is offered, or send what is fetched."""
        sequences = self._sequences
        if not self.is_idle or not (sequences.is_pulling or sequences.has_parked):
            return 0.0
        return _LOOK_FOR_FETCHED_S if sequences.is_pulling else _LOOK_S

    def listen(self) -> None:
        """Nothing is in flight, and no answer owed: take in what R-workers say
        of what they fetch, and who of them is lost. Doesn't wait."""
        if self._sequences.is_pulling and self._fleet.is_owed:
            received = self._fleet.receive(most_s=0.0)
            assert received is None, "nothing else is owed"
        elif self._sequences.has_parked:
            self._fleet.look()

    def offer(self, instruction: events.HandOver) -> None:
        """Give a ticket to each holder of a sequence, and tell where to fetch."""
        sequence = instruction.sequence
        assert sequence.residence is not None
        sources: list[KVSource] = []
        for part in sequence.residence.parts:
            num_tokens = min(sequence.num_cached - part.first_token, part.num_tokens)
            if num_tokens > 0:
                sources += self._offer(part, num_tokens)
        request_id = sequence.request.request_id
        self._requests.say(Delta(request_id, sequence.index, sources=tuple(sources)))

    def pull(self, instruction: events.Pull) -> None:
        """Have a holder fetch what is offered elsewhere."""
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

    def fetched(self, instruction: events.HasFetched) -> None:
        """Whoever offered it needn't keep it."""
        sequence = instruction.sequence
        request_id = sequence.request.request_id
        failed = instruction.failed
        delta = Delta(request_id, sequence.index, has_fetched=True, fetch_failed=failed)
        self._requests.say(delta)

    def _offer(self, part: Part, num_tokens: int) -> list[KVSource]:
        ticket = secrets.token_hex(_TICKET_BYTES)
        self._fleet.send(part.holder, ExportSequence(part.part_id, ticket))
        return [
            KVSource(address, 0, ticket, part.first_token, num_tokens, first_head, num_heads)
            for address, first_head, num_heads in self._exports.of(self._keeper(part.holder))
        ]

    def _keeper(self, holder: HolderId) -> int:
        return self._fleet.keepers[holder]

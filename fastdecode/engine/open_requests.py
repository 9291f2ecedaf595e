"""Requests of a service that aren't over, and output that their readers haven't been given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastdecode.core.delta import Delta, DeltaQueue
from fastdecode.core.errors import FastDecodeError


@dataclass(eq=False)
class _OpenRequest:
    reader: DeltaQueue
    num_left: int  # sequences that aren't over


class OpenRequests:
    """Keeps deltas for readers until a step is over (``hand_out``)."""

    def __init__(self) -> None:
        self._open: dict[str, _OpenRequest] = {}
        self._fresh: dict[DeltaQueue, list[Delta]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._open))

    def add(self, request_id: str, reader: DeltaQueue, num_sequences: int) -> None:
        self._open[request_id] = _OpenRequest(reader, num_sequences)

    def of(self, reader: DeltaQueue) -> list[str]:
        """Return the ids of a reader's requests."""
        return [request_id for request_id, asked in self._open.items() if asked.reader is reader]

    def drop(self, reader: DeltaQueue) -> list[str]:
        """End all requests of a reader, which gets no last delta. Return their ids."""
        dropped = self.of(reader)
        for request_id in dropped:
            del self._open[request_id]
        self._fresh.pop(reader, None)
        return dropped

    def tell(self, delta: Delta) -> None:
        """Keep a delta for its reader until the step is over."""
        asked = self._open.get(delta.request_id)
        if asked is None:
            return
        self._fresh.setdefault(asked.reader, []).append(delta)
        asked.num_left -= delta.finish_reason is not None
        if delta.error is not None or not asked.num_left:
            del self._open[delta.request_id]

    def end(self, request_id: str, error: FastDecodeError) -> None:
        self.tell(Delta(request_id, 0, error=error))

    def hand_out(self) -> None:
        """Give readers what they haven't been given."""
        fresh, self._fresh = self._fresh, {}
        for reader, deltas in fresh.items():
            reader.put(deltas)

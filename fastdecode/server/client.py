"""Requests on their way through the engine, as the event loop of the HTTP process sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastdecode.core.delta import Delta, Pile
from fastdecode.core.errors import FastDecodeError
from fastdecode.core.sequence import Request
from fastdecode.server.link import Cancel, ServerMessage, Submit

if TYPE_CHECKING:
    from fastdecode.server.metrics import Metrics


class OpenRequests:
    """What one HTTP request asks of the engine: a request for each of its prompts. Deltas wait
    here until they are taken. Those of a sequence are merged, so that a slow reader holds no more
    than what it asked for."""

    def __init__(self, requests: Sequence[Request], metrics: Metrics) -> None:
        self.requests = requests
        self.accepted_s = time.monotonic()
        self.first_s: float | None = None
        """When the first token came, and the last one."""
        self.last_s: float | None = None
        self.num_tokens = 0  # generated so far
        self.num_sequences = sum(request.params.n for request in requests)
        self.num_left = self.num_sequences  # sequences that aren't over
        self.has_failed = False
        self._metrics = metrics
        self._piles: dict[tuple[int, int], Pile] = {}
        self._told_s: dict[tuple[int, int], float] = {}
        self._cached: dict[int, int] = {}
        """Tokens of each request's prompt that were in the prefix cache."""
        self._waiter: asyncio.Future[None] | None = None

    def put(self, place: int, delta: Delta) -> bool:
        """Add a delta of the request at ``place``. Return True if all of these requests are over.

        An error ends its own request; the others run until ``RequestTable.leave``."""
        now = time.monotonic()
        if delta.token_ids:
            self._count((place, delta.index), len(delta.token_ids), now)
        if delta.num_cached_tokens:
            cached = self._cached.get(place, 0)
            self._cached[place] = max(cached, delta.num_cached_tokens)
        self.num_left -= delta.finish_reason is not None
        self.has_failed |= delta.error is not None
        where = place, -1 if delta.error is not None else delta.index
        pile = self._piles.get(where)
        if pile is None:
            self._piles[where] = Pile([delta])
        else:
            pile.add(delta)
        self._wake()
        return self.num_left == 0 and not self.has_failed

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._cached.values())

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token of a sequence after its first, or None if it has one at most."""
        if self.first_s is None or self.last_s is None or self.num_tokens <= self.num_sequences:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens / self.num_sequences - 1)

    @property
    def figures(self) -> dict[str, Any]:
        ttft_s = None if self.first_s is None else round(self.first_s - self.accepted_s, 6)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_tokens,
            "max_tokens": self.requests[0].max_tokens,
            "n": self.requests[0].params.n,
            "prompts": len(self.requests),
            "ttft_s": ttft_s,
            "tpot_s": None if self.tpot_s is None else round(self.tpot_s, 6),
        }

    @property
    def all_begun(self) -> bool:
        return len(self._told_s) == self.num_sequences

    async def take(self, timeout_s: float | None) -> list[tuple[int, Delta]]:
        """Wait for output. Return a merged delta per sequence, with its request's place."""
        if not self._piles:
            await self._sleep(timeout_s)
        taken, self._piles = self._piles, {}
        return [(place, pile.whole()) for (place, _), pile in taken.items()]

    async def _sleep(self, timeout_s: float | None) -> None:
        # asyncio.wait_for makes a task, which costs more than all the rest of a chunk.
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _count(self, sequence: tuple[int, int], num_tokens: int, now: float) -> None:
        self.num_tokens += num_tokens
        self.last_s = now
        if self.first_s is None:
            self.first_s = now
            self._metrics.first_token(self)
        before = self._told_s.get(sequence)
        self._told_s[sequence] = now
        self._metrics.tokens(num_tokens, None if before is None else now - before)


class RequestTable:
    """Open requests, by their ids in the engine. ``send`` sends to the engine."""

    def __init__(self, send: Callable[[ServerMessage], None]) -> None:
        self._send = send
        self._open: dict[str, tuple[OpenRequests, int]] = {}
        self.waiting_since_s: float | None = None
        """When the current stretch of open requests began. None if none is open."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, opened: OpenRequests) -> None:
        if not self._open:
            self.waiting_since_s = time.monotonic()
        for place, request in enumerate(opened.requests):
            self._open[request.request_id] = opened, place
        self._send(Submit(tuple(opened.requests)))

    def leave(self, opened: OpenRequests) -> None:
        ids = [r.request_id for r in opened.requests if self._close(r.request_id)]
        if ids:
            self._send(Cancel(tuple(ids)))

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """Hand out deltas. Those of requests that are gone are dropped."""
        for delta in deltas:
            opened, place = self._open.get(delta.request_id, (None, 0))
            if opened is None:
                continue
            if opened.put(place, delta):
                for request in opened.requests:
                    self._close(request.request_id)
            elif delta.error is not None:
                self._close(delta.request_id)

    def fail_all(self, error: FastDecodeError) -> int:
        """End all with an error. Return the number of HTTP requests."""
        every = {id(opened): opened for opened, _ in self._open.values()}
        for opened in every.values():
            opened.put(0, Delta(opened.requests[0].request_id, 0, error=error))
        self._open.clear()
        self.waiting_since_s = None
        return len(every)

    def _close(self, request_id: str) -> bool:
        was_open = self._open.pop(request_id, None) is not None
        if not self._open:
            self.waiting_since_s = None
        return was_open

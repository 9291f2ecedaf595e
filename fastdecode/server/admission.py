"""Who is let into the queue, and when the others may try again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable

WINDOW_S = 60.0
"""By the starts within so long it is known how fast the queue moves."""
MIN_RETRY_S, MAX_RETRY_S = 1, 60
_UNKNOWN_RETRY_S = 5


class QueueFull(Exception):  # noqa: N818  (an answer)
    """Not now, but perhaps after so many seconds."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class QueueAdmission:
    """The queue: what asks for sequences of which some have no token yet.

    Args:
        max_requests: more sequences aren't let in.
        max_tokens: nor are those of more tokens together, prompts and expected
            answers. One that finds the queue empty always is.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self.max_tokens = max_tokens
        self._queued: dict[Hashable, tuple[int, int]] = {}
        self.num_requests = 0
        self.num_tokens = 0
        self._begun: deque[tuple[float, int, int]] = deque()
        """When how many requests of how many tokens have left the queue for a run."""

    def enter(self, key: Hashable, num_requests: int, num_tokens: int, now: float) -> None:
        """Let one in, or one that is in with what its size is known to be by
        now. Raises QueueFull: it isn't in."""
        self._leave(key)
        excess = self.num_requests + num_requests - self._max_requests
        excess_tokens = self.num_tokens + num_tokens - self.max_tokens
        if self._queued and (excess > 0 or excess_tokens > 0):
            raise QueueFull(self._retry_after_s(excess, excess_tokens, now))
        self._queued[key] = num_requests, num_tokens
        self.num_requests += num_requests
        self.num_tokens += num_tokens

    def begun(self, key: Hashable, now: float) -> None:
        """It has a token."""
        if (left := self._leave(key)) is not None:
            self._begun.append((now, *left))
            self._forget(now)

    def gone(self, key: Hashable) -> None:
        """It is over, begun or not."""
        self._leave(key)

    def _leave(self, key: Hashable) -> tuple[int, int] | None:
        left = self._queued.pop(key, None)
        if left is not None:
            self.num_requests -= left[0]
            self.num_tokens -= left[1]
        return left

    def _forget(self, now: float) -> None:
        while self._begun and now - self._begun[0][0] > WINDOW_S:
            self._begun.popleft()

    def _retry_after_s(self, excess: int, excess_tokens: int, now: float) -> int:
        """Until so much has left the queue, at the rate of late."""
        self._forget(now)
        if not self._begun:
            return _UNKNOWN_RETRY_S
        elapsed_s = max(1.0, now - self._begun[0][0])
        waits_s = (
            max(0, excess) * elapsed_s / sum(begun[1] for begun in self._begun),
            max(0, excess_tokens) * elapsed_s / max(1, sum(begun[2] for begun in self._begun)),
        )
        return min(max(math.ceil(max(waits_s)), MIN_RETRY_S), MAX_RETRY_S)

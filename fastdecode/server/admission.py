"""Which requests enter the queue, and when the others may try again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable

from fastdecode.server.http.errors import HttpRefusal

WINDOW_S = 60.0  # window, in seconds, for measuring how fast the queue drains
MOST_STARTED = 1 << 16  # more are not counted, only the latest
MIN_RETRY_S, MAX_RETRY_S = 1, 60
_UNKNOWN_RETRY_S = 5


class QueueAdmission:
    """Bounds the requests of which some sequence has no token yet, by their sequences and by their
    tokens: prompts plus expected answers. An empty queue admits any request."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self.max_tokens = max_tokens
        self._queued: dict[Hashable, tuple[int, int]] = {}
        self.num_requests = 0
        self.num_tokens = 0
        self._started: deque[tuple[float, int, int]] = deque(maxlen=MOST_STARTED)
        """Times at which requests left the queue with a token, their sequences and tokens."""

    def enter(self, key: Hashable, num_requests: int, num_tokens: int, now: float) -> None:
        """Queue a request, or update the size of a queued one. Raises HttpRefusal: If a limit would
        be exceeded. The request is then not queued."""
        self.remove(key)
        excess = self.num_requests + num_requests - self._max_requests
        excess_tokens = self.num_tokens + num_tokens - self.max_tokens
        if self._queued and (excess > 0 or excess_tokens > 0):
            retry_s = self._retry_after_s(excess, excess_tokens, now)
            raise HttpRefusal(
                429, f"too many requests wait: try again in {retry_s} s", "rate_limit_exceeded",
                kind="rate_limit_error", headers={"retry-after": str(retry_s)},
            )  # fmt: skip
        self._queued[key] = num_requests, num_tokens
        self.num_requests += num_requests
        self.num_tokens += num_tokens

    def remove(self, key: Hashable, started_s: float | None = None) -> None:
        """Remove a request, if it is queued. ``started_s`` is when its sequences all had a token,
        which counts for the drain rate. None if it has failed."""
        left = self._queued.pop(key, None)
        if left is None:
            return
        self.num_requests -= left[0]
        self.num_tokens -= left[1]
        if started_s is not None:
            self._started.append((started_s, *left))

    def _retry_after_s(self, excess: int, excess_tokens: int, now: float) -> int:
        """Return the seconds until the excess has drained, at the rate of ``WINDOW_S``."""
        started = self._started
        while started and now - started[0][0] > WINDOW_S:
            started.popleft()
        if not started:
            return _UNKNOWN_RETRY_S
        elapsed_s = max(1.0, now - started[0][0])
        waits_s = (
            max(0, excess) * elapsed_s / sum(each[1] for each in started),
            max(0, excess_tokens) * elapsed_s / max(1, sum(each[2] for each in started)),
        )
        return min(max(math.ceil(max(waits_s)), MIN_RETRY_S), MAX_RETRY_S)

"""What all routes of the HTTP process share."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections import deque
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from fastdecode.conversations.conversations import Conversations
from fastdecode.conversations.order import OpenTurns
from fastdecode.core.errors import FastDecodeError
from fastdecode.engine.checker import RequestChecker
from fastdecode.openai.requests import RequestReader
from fastdecode.server.client import RequestTable
from fastdecode.server.http.errors import HttpRefusal
from fastdecode.server.link import Opening, StatusReport
from fastdecode.server.metrics import Metrics
from fastdecode.server.options import ServeOptions
from fastdecode.server.request_log import RequestLog
from fastdecode.text.chat_format import ChatFormat
from fastdecode.text.chat_template import ChatTemplate
from fastdecode.text.codec import TextCodec

_TOKENS_UNTIL_READY: Final = 1 << 40
SILENCE_S: Final = 20.0  # the engine's process reports twice a second, while it runs at all
_SLOWER: Final = 10
"""A step that takes this many times as long as the longest one lately is a stall."""
WINDOW_S = 60.0  # window, in seconds, for measuring how fast the queue drains
MOST_STARTED = 1 << 16  # more are not counted, only the latest
MIN_RETRY_S, MAX_RETRY_S = 1, 60
_UNKNOWN_RETRY_S = 5


@dataclass
class Outlook:
    """What the HTTP process knows of the engine."""

    is_ready: bool = False  # requests were welcome once
    is_draining: bool = False
    is_lost: bool = False  # the engine's process has ended
    seen: StatusReport | None = None
    seen_s: float = 0.0  # when that arrived

    def trouble(self, waiting_since_s: float | None, now_s: float, stall_s: float) -> str | None:
        """Return why no token could come out, or None if one could: starting, draining, stalled,
        broken or no_r_worker.

        Args:
            waiting_since_s: When the current stretch of work began. None if there is no work.
            stall_s: Work without a step for this long is a stall, unless steps are long.
        """
        seen = self.seen
        # A drained engine is closed, too, but has done its work.
        is_broken = seen is not None and (
            seen.state == "broken"
            or (seen.state == "closed" and (seen.error is not None or not self.is_draining))
        )
        if self.is_lost or is_broken:
            return "broken"
        if self.is_draining:
            return "draining"
        if not self.is_ready or seen is None:
            return "starting"
        is_stalled = now_s - self.seen_s > min(SILENCE_S, stall_s)
        if waiting_since_s is not None:
            idle_s = now_s - max(waiting_since_s, seen.stepped_s or 0.0)
            is_stalled |= idle_s > max(stall_s, _SLOWER * seen.longest_step_s)
        if is_stalled:
            return "stalled"
        return None if seen.num_live_r_workers or not seen.num_r_workers else "no_r_worker"


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
        """Queue a request, or update its size. Raises HttpRefusal: If it exceeds a limit."""
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
        """Remove a request, if it is queued. With ``started_s`` it counts for the drain rate."""
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


@dataclass(eq=False)
class Front:
    """What all requests share. Belongs to one event loop."""

    opening: Opening
    options: ServeOptions
    codec: TextCodec
    template: ChatTemplate | None
    client: RequestTable
    log: RequestLog
    conversations: Conversations = field(default_factory=Conversations)
    outlook: Outlook = field(default_factory=Outlook)
    started_s: int = field(default_factory=lambda: int(time.time()))
    run_id: str = field(default_factory=partial(secrets.token_hex, 8))
    """In the ids of all answers, which differ from those of every other server."""
    began_s: float = field(default_factory=time.monotonic)
    num_exchanges: int = 0  # generations that are being answered
    num_cut: int = 0

    def __post_init__(self) -> None:
        opening = self.opening
        self.names = self.options.names(opening.model)
        self.reader = RequestReader(
            opening.sampling,
            self.names,
            self.template is not None,
            is_online=True,
            model_defaults=opening.model_defaults,
            chat_format=ChatFormat.of(self.template, self.codec.special_tokens, self.options),
        )
        self.checker = RequestChecker(self.codec, opening.vocab_size, opening.max_model_len)
        self.metrics = Metrics(opening.max_model_len, self.names[0])
        most = self.options.max_queued_tokens or _TOKENS_UNTIL_READY
        self.admission = QueueAdmission(self.options.max_queued_requests, most)
        # A process renders and another tokenises, so one thread asks each.
        self.body_threads = ThreadPoolExecutor(2, "bodies")
        """Parse what was asked, put together what is answered."""
        self.template_thread = ThreadPoolExecutor(1, "templates")
        self.tokenizer_thread = ThreadPoolExecutor(1, "tokenizer")
        self._turns = ThreadPoolExecutor(1, "conversations")
        self.turns = OpenTurns(self.conversations, self._turns)
        self.next_number = itertools.count(1).__next__
        """Returns a number of a generation, unique in this process."""

    def trouble(self) -> str | None:
        since_s = self.client.waiting_since_s
        return self.outlook.trouble(since_s, time.monotonic(), self.options.stall_s)

    def enter(self, number: int, num_sequences: int, num_tokens: int) -> None:
        """Put a request into the queue, or update its size. Raises HttpRefusal: If it is full."""
        try:
            self.admission.enter(number, num_sequences, num_tokens, time.monotonic())
        except HttpRefusal:
            self.metrics.rejected["queue_full"] += 1
            raise

    def fail_all(self, error: FastDecodeError) -> None:
        self.num_cut += self.client.fail_all(error)

    def close(self) -> None:
        """End the processes that encode and render, and the threads."""
        for pool in (self.body_threads, self.template_thread, self.tokenizer_thread, self._turns):
            pool.shutdown(wait=False, cancel_futures=True)
        self.conversations.close()
        self.codec.close()
        if self.template is not None:
            self.template.close()
        self.log.close()

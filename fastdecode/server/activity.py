"""A line on the terminal every ten seconds while a server works."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fastdecode.core.clock import Clock

EVERY_S: Final = 10.0


@dataclass(frozen=True)
class Activity:
    """What an engine does."""

    num_running: int
    num_waiting: int
    output_tokens: int
    """Generated in all."""
    workers: tuple[int, int]
    """R-workers that aren't lost, and all."""


class ActivityLines:
    """Tells how the server is, while it works and once more when it has stopped.

    Args:
        look: what the engine does now.
        tell: told a line.
        clock: in seconds.
    """

    def __init__(
        self,
        look: Callable[[], Activity],
        tell: Callable[[str], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self._look = look
        self._tell = tell
        self._clock = clock
        self._told_s = clock()
        self._tokens = look().output_tokens

    def turn(self) -> None:
        """Call it as often as you like."""
        now_s = self._clock()
        elapsed_s = now_s - self._told_s
        if elapsed_s < EVERY_S:
            return
        now = self._look()
        tokens, self._tokens, self._told_s = self._tokens, now.output_tokens, now_s
        if not (now.num_running or now.num_waiting or now.output_tokens > tokens):
            return
        live, num = now.workers
        workers = f", R-workers {live}/{num}" if num else ""
        self._tell(
            f"{now.num_running} running, {now.num_waiting} waiting, "
            f"{(now.output_tokens - tokens) / elapsed_s:.0f} tok/s{workers}"
        )

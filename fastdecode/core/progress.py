"""How far long work is, in a line: ``lines 1200/50000, 3 failed, 812 tok/s, ETA
0:52:10, R-workers 4/4``, or with a bar."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, TextIO

from fastdecode.core.clock import Clock

# Between two lines where there is no terminal, and between two looks of the one
# line where there is.
LINE_EVERY_S = 10.0
REFRESH_EVERY_S = 0.5
BAR_CHARS = 20
MOST_S = 1e10
"""No longer time is shown."""


class StatusLine:
    """A line about work that goes on. A failed write ends no work.

    Args:
        stream: a terminal gets one line that changes; anything else gets a line
            with the time of day every ten seconds.
        clock: in seconds.
    """

    def __init__(
        self, stream: TextIO, clock: Clock, now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._now = now
        self._on_terminal = stream.isatty()
        self._every_s = REFRESH_EVERY_S if self._on_terminal else LINE_EVERY_S
        self._shown_s = clock()
        self.is_shown = False

    def restart(self) -> None:
        """The first line is due after a full interval."""
        self._shown_s = self._clock()

    def show_if_due(self, line: Callable[[], str]) -> None:
        if self._clock() - self._shown_s >= self._every_s:
            self._shown_s = self._clock()
            self.show(line())

    def show(self, line: str) -> None:
        self.is_shown = True
        stamp = f"{self._now():%Y-%m-%d %H:%M:%S} "
        lead, end = ("\r\x1b[K", "") if self._on_terminal else (stamp, "\n")
        self._write(lead + line + end)

    def clear(self) -> None:
        if self._on_terminal:
            self._write("\r\x1b[K")

    def end(self, line: Callable[[], str]) -> None:
        self.show(line())
        if self._on_terminal:
            self._write("\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed, or a pipe without a reader
            self._stream.write(text)
            self._stream.flush()


class Bar:
    """Shows how much of a file was read, if that takes long. Use it in a ``with`` statement.

    Args:
        stream: as ``StatusLine`` takes it.
        clock: in seconds.
    """

    def __init__(self, stream: TextIO, title: str, clock: Clock = time.monotonic) -> None:
        self._line = StatusLine(stream, clock)
        self._title = title
        self._clock = clock
        self._began_s = clock()
        self._share = 0.0
        self._num_lines = 0

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._line.is_shown:
            self._line.end(self._text)

    def update(self, share: float, num_lines: int) -> None:
        self._share, self._num_lines = share, num_lines
        self._line.show_if_due(self._text)

    def _text(self) -> str:
        rate = self._num_lines / max(self._clock() - self._began_s, 1e-9)
        return (
            f"{self._title} {bar(self._share)} {self._share:.0%}, {self._num_lines} lines, "
            f"{rate:.0f} lines/s"
        )


def bar(share: float) -> str:
    """A share from 0 to 1 as a bar."""
    full = round(BAR_CHARS * min(max(share, 0.0), 1.0))
    return "[" + "#" * full + "." * (BAR_CHARS - full) + "]"


class Progress:
    """Shows how far work is. Use it in a ``with`` statement.

    Args:
        stream: As ``StatusLine`` takes it.
        unit: Name of what is counted.
        clock: Returns seconds.
        now: Returns the time of day.
    """

    def __init__(
        self,
        stream: TextIO,
        unit: str = "lines",
        clock: Clock = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._unit = unit
        self._status = StatusLine(stream, clock, now)
        self._clock = clock
        self._total = self._done_before = self._done = self._num_failed = self._num_tokens = 0
        self._num_running = 0
        self._workers = (0, 0)
        self._started_s = clock()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._total:
            self._status.end(self.line)

    def begin(self, total: int, done: int = 0) -> None:
        """Start counting. ``done``: units that were done before."""
        self._total, self._done_before, self._done = total, done, done
        self._started_s = self._clock()
        self._status.restart()

    def update(
        self,
        *,
        done: int,
        num_failed: int,
        num_tokens: int,
        workers: tuple[int, int],
        num_running: int = 0,
    ) -> None:
        """Note the state, and show it if a line is due. Call it as often as you like.

        Args:
            done: Units that are done, those before ``begin`` among them.
            num_tokens: Generated tokens since ``begin``.
            workers: R-workers that aren't lost, and all.
        """
        self._done, self._num_failed, self._num_tokens = done, num_failed, num_tokens
        self._num_running, self._workers = num_running, workers
        self._status.show_if_due(self.line)

    def line(self) -> str:
        live, num_workers = self._workers
        workers = f", R-workers {live}/{num_workers}" if num_workers else ""
        left_s = self.remaining_s
        is_known = left_s is not None and left_s < MOST_S
        eta = str(timedelta(seconds=round(left_s or 0.0))) if is_known else "-"
        return (
            f"{self._unit} {self._done}/{self._total}, {self._num_failed} failed, "
            f"{self._num_tokens / self._elapsed_s:.0f} tok/s, ETA {eta}{workers}"
        )

    @property
    def _elapsed_s(self) -> float:
        return max(self._clock() - self._started_s, 1e-9)

    @property
    def remaining_s(self) -> float | None:
        """Seconds until all is done, at the pace so far. None until a unit is done.

        Units that run count as half done."""
        done, left = self._done - self._done_before, self._total - self._done
        if left <= 0:
            return 0.0
        if done <= 0:
            return None
        half = min(self._num_running, left) / 2
        return self._elapsed_s * (left - half) / (done + half)

    @property
    def state(self) -> dict[str, Any]:
        return {
            "unit": self._unit,
            "done": self._done,
            "total": self._total,
            "num_failed": self._num_failed,
            "eta_s": self.remaining_s,
        }

    def print(self, text: str) -> None:
        """Print to stdout, which may be the same terminal."""
        self._status.clear()
        print(text, flush=True)

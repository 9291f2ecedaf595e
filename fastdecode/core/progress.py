"""How far long work is, in a line: ``lines 1200/50000, 3 failed, 812 tok/s, ETA
0:52:10, R-workers 4/4``, or with a bar."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, TextIO

from fastdecode.core.answer_lengths import AnswerCounts, EndedAnswers, few_limits, spread_evenly
from fastdecode.core.clock import Clock
from fastdecode.core.remaining_time import JobCounts, TokenTimes, remaining_s

# Between two lines where there is no terminal, and between two looks of the one
# line where there is.
LINE_EVERY_S = 10.0
REFRESH_EVERY_S = 0.5
BAR_CHARS = 20
MOST_S = 1e10
"""No longer time is shown."""

logger = logging.getLogger(__name__)


class StatusLine:
    """A line about work that goes on. A failed write ends no work.

    Args:
        stream: a terminal gets one line that changes; anything else gets a line
            with the time of day every ten seconds.
        clock: in seconds.
        now: the time of day.
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
    """Shows how much of a file was read, if that takes long. Use it in a ``with``
    statement.

    Args:
        stream: as ``StatusLine`` takes it.
        title: what is done.
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
        stream: as ``StatusLine`` takes it.
        unit: of what is counted.
        clock: in seconds.
        now: the time of day.
    """

    def __init__(
        self,
        stream: TextIO,
        unit: str = "lines",
        clock: Clock = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._unit = unit
        self._limits: Mapping[int, int] = {}
        self._status = StatusLine(stream, clock, now)
        self._clock = clock
        self._total = self._done_before = self._done = self._num_failed = self._num_tokens = 0
        self._num_prompt_tokens = self._num_running = 0
        self._running: AnswerCounts | None = None
        self._ended = EndedAnswers()
        self._times = TokenTimes()
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

    def begin(self, total: int, done: int = 0, limits: Mapping[int, int] | None = None) -> None:
        """
        Args:
            total: of the units.
            done: before now.
            limits: answers of all units by the most tokens that they may get; 0: no
                limit is known. None: a unit has one answer without a limit.
        """
        self._limits = few_limits(limits or {0: total})
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
        num_prompt_tokens: int = 0,
        num_running: int = 0,
        running: AnswerCounts | None = None,
        ended: EndedAnswers | None = None,
    ) -> None:
        """How it stands now: done in all, tokens since ``begin``, R-workers
        that aren't lost and all, sequences that run, and how far they are;
        answers that are complete since ``begin``. Call it as often as you like."""
        self._done, self._num_failed, self._num_tokens = done, num_failed, num_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._num_running, self._running = num_running, running
        self._ended = ended or self._ended
        self._workers = workers
        elapsed_s = self._clock() - self._started_s
        self._times.add(elapsed_s, num_prompt_tokens, num_tokens, num_running)
        self._status.show_if_due(self.line)

    def line(self) -> str:
        elapsed_s = max(self._clock() - self._started_s, 1e-9)
        live, num_workers = self._workers
        workers = f", R-workers {live}/{num_workers}" if num_workers else ""
        return (
            f"{self._unit} {self._done}/{self._total}, {self._num_failed} failed, "
            f"{self._num_tokens / elapsed_s:.0f} tok/s, ETA {self._eta()}{workers}"
        )

    @property
    def remaining_s(self) -> float | None:
        """Estimate of the seconds until all is done. None if too little is known."""
        # Counts of several threads: an answer may have ended whose tokens aren't in the sum.
        num_tokens = max(0, self._num_tokens - self._ended.num_tokens)
        running = self._running or spread_evenly(self._num_running, num_tokens, self._limits)
        counts = JobCounts(
            lines_left=self._total - self._done_before,
            lines_done=self._done - self._done_before,
            running=running,
            prompt_tokens=self._num_prompt_tokens,
            done=self._ended,
            limits=self._limits,
            num_lines=self._total,
        )
        try:
            return remaining_s(counts, self._times)
        except (ArithmeticError, LookupError, ValueError):
            logger.debug("no estimate of the time that is left", exc_info=True)
            return None

    @property
    def state(self) -> dict[str, Any]:
        return {
            "unit": self._unit,
            "done": self._done,
            "total": self._total,
            "num_failed": self._num_failed,
            "eta_s": self.remaining_s,
        }

    def _eta(self) -> str:
        left_s = self.remaining_s
        is_known = left_s is not None and 0 <= left_s < MOST_S
        return str(timedelta(seconds=round(left_s or 0.0))) if is_known else "-"

    def print(self, text: str) -> None:
        """Print to stdout, which may be the same terminal."""
        self._status.clear()
        print(text, flush=True)

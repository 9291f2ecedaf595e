"""Progress on long work: a bar on a terminal, a plain line now and then elsewhere. Always on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from tqdm import tqdm

# Between two plain lines.
LINE_EVERY_S = 5.0


class Progress:
    """Counts requests that are done, with tokens a second beside them. Use it in a ``with`` statement."""

    def __init__(self, *, total: int | None, enabled: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._enabled = enabled
        self._total = total
        self._started = self._last_line = time.perf_counter()
        self._num_done = self._num_failed = self._num_tokens = 0
        on_terminal = enabled and self._stream.isatty()
        self._bar = (
            tqdm(total=total, unit="req", file=self._stream, dynamic_ncols=True, desc="decoding")
            if on_terminal
            else None
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._enabled:
            self._print_line()

    def done(self, num_output_tokens: int, *, failed: bool = False) -> None:
        """One more request is over; ``num_output_tokens`` have been generated in all."""
        self._num_done += 1
        self._num_failed += failed
        self._num_tokens = num_output_tokens
        if self._bar is not None:
            self._bar.set_postfix_str(self._rates(), refresh=False)
            self._bar.update()
        elif self._enabled and time.perf_counter() - self._last_line >= LINE_EVERY_S:
            self._print_line()

    def print(self, text: str) -> None:
        """Print to stdout without tearing the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(text, flush=True)
        if self._bar is not None:
            self._bar.refresh()

    def _rates(self) -> str:
        elapsed = max(time.perf_counter() - self._started, 1e-9)
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        return f"{self._num_tokens} tokens, {self._num_tokens / elapsed:.0f} tok/s{failed}"

    def _print_line(self) -> None:
        self._last_line = time.perf_counter()
        of = "" if self._total is None else f"/{self._total}"
        print(f"decoding: {self._num_done}{of} requests, {self._rates()}", file=self._stream, flush=True)

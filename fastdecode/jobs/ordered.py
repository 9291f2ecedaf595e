"""A job's output in the order of its input: answers that are done before their
turn wait for it.

There is no journal of it: a job that writes such an output begins anew each
time. But what is written is whole lines, in order, also when the job is
interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastdecode.core.errors import FastDecodeError
from fastdecode.core.os_errors import explained
from fastdecode.jobs.line_sink import LineSink
from fastdecode.jobs.spill import MAX_IN_MEMORY, Answer, Spill


class OrderedOutput:
    """Writes answers by their place, 0 for the first line; made before there is
    an output, which ``begin`` replaces.

    Args:
        path: of the output; ``-``: standard output; ``….gz``: it is compressed.
        on_line: told each answer as it is written, with its prompt if that is
            text.
        max_in_memory: answers that wait; more are spilled.
    """

    def __init__(
        self,
        path: Path,
        on_line: Callable[[str | None, dict[str, Any]], None] | None = None,
        *,
        max_in_memory: int = MAX_IN_MEMORY,
    ) -> None:
        self._path = path
        self._on_line = on_line
        self._sink: LineSink | None = None
        self._early = Spill(path.resolve().parent, max_in_memory)
        self._next = 0
        self._is_failed = False

    def begin(self) -> None:
        """Replace the output by an empty one. Raises ConfigError."""
        self._sink = LineSink(self._path)

    def append(self, place: int, prompt: str | None, answer: dict[str, Any]) -> None:
        """Write an answer, and those that waited for it; or have it wait.

        Raises:
            FastDecodeError: (code ``output_failed``) the disk is full, or gone.
        """
        if place != self._next:
            try:
                self._early.put(place, (prompt, answer))
            except OSError as error:
                raise self._failed("keep an answer beside", error) from None
            return
        self._write(prompt, answer)
        self._next += 1
        while self._next in self._early:
            self._write(*self._waiting(self._next))
            self._next += 1

    def sync_if_due(self) -> None:
        """Nothing is resumed from it."""

    def sync(self) -> None:
        """Likewise."""

    def close(self) -> None:
        """Write what still waits, in order, though lines before it are missing."""
        with self._early:
            if self._sink is None:
                return
            try:
                for place in [] if self._is_failed else self._early.places():
                    self._write(*self._waiting(place))
            finally:
                sink, self._sink = self._sink, None
                self._close(sink)

    def _close(self, sink: LineSink) -> None:
        try:
            sink.close()
        except OSError as error:
            raise self._failed("write", error) from None

    def _waiting(self, place: int) -> Answer:
        """An answer that has waited for its turn."""
        try:
            return self._early.pop(place)
        except OSError as error:
            raise self._failed("read an answer that was kept beside", error) from None

    def _write(self, prompt: str | None, answer: dict[str, Any]) -> None:
        assert self._sink is not None, "not begun"
        line = json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            self._sink.write(line)
        except OSError as error:
            raise self._failed("write", error) from None
        if self._on_line is not None:
            self._on_line(prompt, answer)

    def _failed(self, what: str, error: OSError) -> FastDecodeError:
        self._is_failed = True
        return FastDecodeError(
            f"can't {what} the output file {self._path}: {explained(error)}", code="output_failed"
        )

"""Answers that are done before their turn, in bounded memory: some stay there,
the rest wait in an unnamed file."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeAlias

Answer: TypeAlias = "tuple[str | None, dict[str, Any]]"

# More than that is spilled. Those that come last are, so what is written next
# tends to be in memory.
MAX_IN_MEMORY = 4096


class Spill:
    """Answers (prompt if it is text, output line) by their place. Once closed,
    its file is gone.

    Args:
        directory: where the file is made, if one is needed. It begins anew
            whenever nothing waits in it.
    """

    def __init__(self, directory: Path, max_in_memory: int = MAX_IN_MEMORY) -> None:
        self._directory = directory
        self._max_in_memory = max_in_memory
        self._in_memory: dict[int, Answer] = {}
        self._file: IO[bytes] | None = None
        self._spilled: dict[int, int] = {}
        """Place → where in the file its line begins."""

    def __enter__(self) -> Spill:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what can't be written is wanted no more
                self._file.close()

    def __contains__(self, place: int) -> bool:
        return place in self._in_memory or place in self._spilled

    def places(self) -> list[int]:
        """All of them, ascending."""
        return sorted([*self._in_memory, *self._spilled])

    def put(self, place: int, answer: Answer) -> None:
        """Raises OSError: the file can't be written."""
        if len(self._in_memory) < self._max_in_memory:
            self._in_memory[place] = answer
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 (closed by __exit__)
        elif not self._spilled:
            self._file.seek(0)
            self._file.truncate()
        self._spilled[place] = self._file.seek(0, 2)
        self._file.write(json.dumps(answer).encode() + b"\n")

    def pop(self, place: int) -> Answer:
        """Raises OSError: the file can't be read."""
        if place in self._in_memory:
            return self._in_memory.pop(place)
        assert self._file is not None
        self._file.seek(self._spilled.pop(place))
        prompt, line = json.loads(self._file.readline())
        return prompt, line

"""Notices that the HTTP process reads nothing any more: it was stopped, or hangs."""

from __future__ import annotations

import math
from typing import Final

_MOST_BETWEEN_LOOKS_S: Final = 1.0
"""More isn't counted: the engine's process was stopped itself, or made a long step."""


class Silence:
    """Of the HTTP process, which answers what it is asked twice a second.

    ``asked`` and ``heard`` may be called by any thread, ``look`` by one.

    Args:
        limit_s: an answer that takes longer means that nobody reads.
    """

    def __init__(self, limit_s: float = math.inf) -> None:
        self.limit_s = limit_s
        self._is_owed = False
        self._was_heard = False
        """Since the last look."""
        self._waited_s = 0.0
        self._looked_s: float | None = None
        self._is_silent = False

    def asked(self) -> None:
        """An answer is owed from now on."""
        self._is_owed = True

    def heard(self) -> None:
        """It has said something."""
        self._is_owed = False
        self._was_heard = True

    def look(self, now_s: float) -> bool | None:
        """Return True if it has read nothing for too long since the last look, False if it
        reads again, and None if nothing has changed. Call it several times a second.

        Args:
            now_s: by a clock that never goes back.
        """
        before_s, self._looked_s = self._looked_s, now_s
        was_heard, self._was_heard = self._was_heard, False
        if was_heard or not self._is_owed:
            self._waited_s = 0.0
        elif before_s is not None:
            self._waited_s += min(now_s - before_s, _MOST_BETWEEN_LOOKS_S)
        is_silent = self._waited_s > self.limit_s
        was_silent, self._is_silent = self._is_silent, is_silent
        return None if is_silent == was_silent else is_silent

"""How long at least one of several things was under way that overlap."""

from __future__ import annotations

from collections import deque
from typing import Final

_MOST_SPANS: Final = 256
"""That are kept: whoever is over began in one of the latest, or before all."""


class Overlapping:
    """Is told of each when it is over."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=_MOST_SPANS)
        """Beginnings and ends, apart from each other, in their order."""

    def over(self, end_s: float, seconds: float) -> float:
        """One is over, which took so long.

        Args:
            end_s: by whichever clock; doesn't fall from call to call.

        Returns:
            Seconds of that in which none of those that are over was under way.
        """
        begin_s, known_s = end_s - seconds, 0.0
        while self._spans and self._spans[-1][1] >= begin_s:
            first_s, last_s = self._spans.pop()
            known_s += last_s - max(first_s, begin_s)
            begin_s = min(first_s, begin_s)
            if first_s < end_s - seconds:
                break
        self._spans.append((begin_s, end_s))
        return max(0.0, seconds - known_s)

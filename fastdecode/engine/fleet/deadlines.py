"""How long an R-worker may take to answer, and how long it may be silent."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Final

from fastdecode.core.clock import Clock

GREETING_TIMEOUT_S: Final = 300.0
"""An R-worker may take so long, at least, to answer ``Hello``: it compiles kernels."""
GREETING_SILENCE_S: Final = 5.0
"""And be silent so long, at least, before it does: a compiler shares its core
with the thread that gives signs."""
_LOOK_AWAY_S: Final = 1.0
"""When nobody has looked for so long, signs of life may have come and not been taken in."""


@dataclass
class Deadlines:
    """When a peer that owes an answer has to be given up. Only time counts in
    which somebody looked.

    Args:
        timeout_s: how long an answer may take.
        silence_s: how long a peer may give no sign of life, where connections
            tell of those.
        clock: seconds, as ``Connection.heard_s`` has them.
    """

    timeout_s: float
    silence_s: float = math.inf
    clock: Clock = time.monotonic
    _looked_s: float = -math.inf
    _looking_since_s: float = -math.inf

    def while_greeting(self) -> Deadlines:
        """Those that hold until an R-worker has answered ``Hello``."""
        return replace(
            self,
            timeout_s=max(self.timeout_s, GREETING_TIMEOUT_S),
            silence_s=max(self.silence_s, GREETING_SILENCE_S),
        )

    def begin_look(self) -> float:
        """Somebody begins to wait for answers, and takes signs of life in. Returns the time."""
        now = self.clock()
        if now - self._looked_s > _LOOK_AWAY_S:
            self._looking_since_s = now
        return now

    def end_look(self) -> None:
        """The wait is over."""
        self._looked_s = self.clock()

    def wait_s(self, now: float, until_s: float) -> float:
        """How long to wait at a time. Not longer than the silence: a peer may
        give its first sign, and fall silent, meanwhile."""
        return max(0.0, min(until_s - now, self.silence_s))

    def end(self, since_s: float, heard_s: float | None, num_answers: int = 1) -> tuple[float, str]:
        """When a peer has to be given up, and why.

        Args:
            since_s: when it was asked.
            heard_s: when it last gave a sign of life; None: it gives none.
            num_answers: of others, one after the other, that it needs itself.
        """
        timeout_s = self.timeout_s * num_answers
        overdue_s = since_s + timeout_s
        silent_s, reason = self.silent_end(since_s, heard_s)
        if silent_s < overdue_s:
            return silent_s, reason
        return overdue_s, f"hasn't answered for {timeout_s:g} s (worker_timeout_s)"

    def silent_end(self, since_s: float, heard_s: float | None) -> tuple[float, str]:
        """The same of one that may take as long as it likes, if it isn't silent."""
        if heard_s is None:
            return math.inf, ""
        silent_s = max(heard_s, self._looking_since_s, since_s) + self.silence_s
        return silent_s, f"has given no sign of life for {self.silence_s:g} s (worker_silence_s)"

"""How far the answers are that an engine runs."""

from __future__ import annotations

import time
from typing import Any, Final

from fastdecode.core.answer_lengths import AnswerCounts
from fastdecode.core.clock import Clock
from fastdecode.engine.service import EngineService

EVERY_S: Final = 1.0


class RunningAnswers:
    """Asks the engine's thread about once a second, without waiting for it.

    Args:
        service: the engine's.
        clock: in seconds.
    """

    def __init__(self, service: EngineService[Any], clock: Clock = time.monotonic) -> None:
        self._service = service
        self._clock = clock
        self._asked_s = -EVERY_S
        self._latest: AnswerCounts = {}

    def latest(self) -> AnswerCounts:
        """As the engine was when it answered last."""
        now_s = self._clock()
        if now_s - self._asked_s >= EVERY_S:
            self._asked_s = now_s
            self._service.look(self._look)
        return self._latest

    def _look(self, served: Any) -> None:
        """In the engine's thread, between two steps."""
        self._latest = served.engine.running_answers

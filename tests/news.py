"""Waiting for what a controller of instances comes to know."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fastdecode import LLM

WAIT_S = 120.0


class NewsLLM(LLM):
    """An ``LLM`` of instances, of whose news others may wait."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._news = threading.Condition()
        registry = self._running._registry
        hear = registry.hear

        def hear_and_tell(most_s: float | None) -> None:
            hear(most_s)
            self._tell()

        registry.hear = hear_and_tell

    def _tell(self) -> None:
        with self._news:
            self._news.notify_all()

    def until(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
        """Once something has come true that only news change; False: it hasn't in time."""
        with self._news:
            return self._news.wait_for(condition, timeout_s)

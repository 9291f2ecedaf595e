"""Engines that wait for whoever reads what they say."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

from fastdecode import LLM

WAIT_S = 120.0


@contextlib.contextmanager
def steps_held(llm: LLM, after: int) -> Iterator[None]:
    """Within, no more than so many steps are made: a reader that is slow finds
    what they have said, and not all that was asked for."""
    engine, may_go_on, numbers = llm._running.engine, threading.Event(), itertools.count()
    step = engine.step

    def held() -> None:
        if next(numbers) >= after:
            assert may_go_on.wait(WAIT_S)
        step()

    engine.step = held
    try:
        yield
    finally:
        may_go_on.set()
        del engine.step

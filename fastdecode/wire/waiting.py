"""Looking after what doesn't call back: politely in the thread that waits, and
in the background while it is busy."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_LOOKS: Final = 30
_NUM_YIELDS: Final = 50
_FIRST_SLEEP_S: Final = 20e-6
_SLEEP_GROWTH: Final = 1.02
_LONGEST_SLEEP_S: Final = 1e-3


def look_until_found(look: Callable[[], T | None], timeout_s: float | None) -> T | None:
    """What ``look`` gives once it isn't None; or None when the time is over,
    but not before it has looked.

    The first looks come back to back, as a quick peer's answer is near; then
    others may have the core between two looks; then it sleeps, the longer the
    longer it has waited, by 2 % or so of that.
    """
    started = time.monotonic()
    num_looks, sleep_s = 0, _FIRST_SLEEP_S
    while True:
        found = look()
        if found is not None:
            return found
        if timeout_s is not None and time.monotonic() - started >= timeout_s:
            return None
        num_looks += 1
        if num_looks > _NUM_LOOKS + _NUM_YIELDS:
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * _SLEEP_GROWTH, _LONGEST_SLEEP_S)
        elif num_looks > _NUM_LOOKS:
            os.sched_yield()


class Watchdog(threading.Thread):
    """Barks when somebody should be looking and hasn't for ``num_ticks`` ticks: a
    call that never waits does.

    Args:
        looks: how often somebody has looked by now; None while nobody should.
        bark: what to do then; told for how many ticks nobody has looked. Where it
            returns False it is called again a tick later; else never again.
        tick_s: between two of its own looks. Ticks are counted, not time: a
            process that was stopped has missed both.
    """

    def __init__(
        self,
        looks: Callable[[], int | None],
        bark: Callable[[int], bool],
        *,
        tick_s: float,
        num_ticks: int,
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._looks = looks
        self._bark = bark
        self._tick_s = tick_s
        self._num_ticks = num_ticks
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        before, num_same = None, 0
        while not self._stopped.wait(self._tick_s):
            looks = self._looks()
            num_same = num_same + 1 if looks is not None and looks == before else 0
            before = looks
            if num_same >= self._num_ticks and self._bark(num_same):
                return


class Pump(threading.Thread):
    """Calls ``work`` every so often until it returns False; then rests until it is woken."""

    def __init__(self, work: Callable[[], bool], interval_s: float) -> None:
        super().__init__(name="pump", daemon=True)
        self._work = work
        self._interval_s = interval_s
        self._wanted = threading.Event()
        self.is_wanted = False
        """Whether it has been woken, and hasn't rested since."""
        self._stopped = False
        self._has_failed = False

    def wake(self) -> None:
        self.is_wanted = True
        self._wanted.set()

    def stop(self) -> None:
        """And wait until it has stopped."""
        self._stopped = True
        self._wanted.set()
        self.join()

    def run(self) -> None:
        while not self._stopped:
            self._wanted.wait()
            self._wanted.clear()
            self.is_wanted = False  # calls of `wake` until here are served: it works now
            while not self._stopped and self._works():
                time.sleep(self._interval_s)

    def _works(self) -> bool:
        """A mistake in it is logged, once, and ends nothing: others rely on this
        thread."""
        try:
            return self._work()
        except Exception:
            if not self._has_failed:
                logger.exception("work in the background failed, and goes on")
            self._has_failed = True
            return True

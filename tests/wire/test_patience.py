"""The watchdog: it barks when whoever should look is stuck, and only then."""

from __future__ import annotations

import threading

from fastdecode.wire.waiting import Watchdog

TICK_S = 0.001


def test_it_barks_when_nobody_looks_who_should_until_that_is_heard() -> None:
    barks: list[int] = []

    def bark(num_ticks: int) -> bool:
        barks.append(num_ticks)
        return num_ticks == 5

    dog = Watchdog(lambda: 7, bark, tick_s=TICK_S, num_ticks=3)
    dog.start()
    dog.join(60.0)
    assert barks == [3, 4, 5] and not dog.is_alive()


def test_it_is_quiet_while_somebody_looks_and_while_nobody_should() -> None:
    done = threading.Event()
    barks: list[int] = []
    seen = 0

    def looks() -> int | None:
        """Looked at for two ticks at most; then nobody waits for some; then again."""
        nonlocal seen
        seen += 1
        if seen > 60:
            done.set()
        return None if seen % 20 > 10 else seen // 3

    dog = Watchdog(looks, lambda n: barks.append(n) is None, tick_s=TICK_S, num_ticks=3)
    dog.start()
    assert done.wait(60.0)
    dog.stop()
    dog.join(60.0)
    assert not barks

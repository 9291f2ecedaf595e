"""The watchdog: it barks when whoever should look is stuck, and only then."""

from __future__ import annotations

import threading

from fastdecode.wire.patience import Watchdog

TICK_S = 0.001


def test_it_barks_once_when_nobody_looks_who_should() -> None:
    barked = threading.Event()
    dog = Watchdog(lambda: 7, barked.set, tick_s=TICK_S, num_ticks=3)
    dog.start()
    dog.join(60.0)
    assert barked.is_set() and not dog.is_alive()


def test_it_is_quiet_while_somebody_looks_and_while_nobody_should() -> None:
    done = threading.Event()
    barks: list[None] = []
    seen = 0

    def looks() -> int | None:
        """Looked at for two ticks at most; then nobody waits for some; then again."""
        nonlocal seen
        seen += 1
        if seen > 60:
            done.set()
        return None if seen % 20 > 10 else seen // 3

    dog = Watchdog(looks, lambda: barks.append(None), tick_s=TICK_S, num_ticks=3)
    dog.start()
    assert done.wait(60.0)
    dog.stop()
    dog.join(60.0)
    assert not barks

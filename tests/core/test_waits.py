"""How soon a thread goes on after a short wait."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastdecode.core.host.waits import (
    SWITCH_INTERVAL_S,
    TIMER_SLACK_NS,
    shorten_sleeps,
    switch_threads_sooner,
    timer_slack_ns,
)

CHECKPOINT = Path(__file__).parents[2] / "examples" / "model" / "checkpoint"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux'")


def in_a_thread(look: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    return found[0]


def test_sleeps_of_this_thread_and_of_those_it_starts_are_shortened() -> None:
    before = timer_slack_ns()

    def shorten() -> int:
        assert shorten_sleeps()
        assert timer_slack_ns() == TIMER_SLACK_NS
        return in_a_thread(timer_slack_ns)

    assert in_a_thread(shorten) == TIMER_SLACK_NS
    assert timer_slack_ns() == before, "other threads keep theirs"


@pytest.fixture
def switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switch_interval")
@pytest.mark.parametrize(("before_s", "after_s"), [(5e-3, SWITCH_INTERVAL_S), (1e-5, 1e-5)])
def test_threads_switch_sooner_and_never_later(before_s: float, after_s: float) -> None:
    sys.setswitchinterval(before_s)
    switch_threads_sooner()
    assert sys.getswitchinterval() == pytest.approx(after_s)


def test_the_thread_of_an_engine_sleeps_in_time() -> None:
    from fastdecode import LLM

    with LLM(str(CHECKPOINT), r_workers=1) as llm:
        slacks: list[int] = []
        llm.service.call(lambda engine: slacks.append(timer_slack_ns()))
    assert slacks == [TIMER_SLACK_NS]

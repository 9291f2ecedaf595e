"""The loop that owns an engine: when it steps, when it waits, and what it does
meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from fastdecode.core.errors import WorkerError
from fastdecode.engine.loop import EngineLoop

DEADLINE_S = 60.0
BOTH_IN_TURN = [*["act", "act", "step"] * 2, "act", "closed"]
"""One more act between two steps than there was to begin with: no more, or who
asks much would starve the steps."""


class Stepping:
    """An engine with work for so many steps, each of which has to wait."""

    num_running = num_unfinished_sequences = 0
    num_r_workers = num_live_r_workers = 1
    has_hung_r_workers = False

    def __init__(self, num_left: int, pause_s: float = 0.0) -> None:
        self.num_left = num_left
        self.pause_s = pause_s
        self.told: list[str] = []

    @property
    def engine(self) -> Stepping:
        return self

    @property
    def has_work(self) -> bool:
        return self.num_left > 0

    def step(self) -> None:
        self.told.append("step")
        self.num_left -= 1

    def look(self) -> None:
        self.told.append("look")

    def close(self) -> None:
        self.told.append("closed")


def run(engine: Stepping, first: Callable[[EngineLoop[Any]], None]) -> EngineLoop[Any]:
    """A loop that begins with what ``first`` puts into its inbox, to its end."""
    ended: list[str] = []
    loop: EngineLoop[Any] = EngineLoop(lambda: ended.append("over"))
    made: SimpleQueue[BaseException | None] = SimpleQueue()
    first(loop)
    loop.run(lambda: engine, made)
    assert made.get(timeout=DEADLINE_S) is None and ended == ["over"] and loop.is_over
    return loop


def act_until_nothing_is_left(engine: Stepping, loop: EngineLoop[Any]) -> None:
    def act() -> None:
        engine.told.append("act")
        if engine.has_work:
            loop.put(act)
        else:
            loop.ask_to_close()

    loop.put(act)


def test_what_others_want_is_done_between_two_steps() -> None:
    engine = Stepping(2)
    run(engine, lambda loop: act_until_nothing_is_left(engine, loop))
    assert engine.told == BOTH_IN_TURN


def test_a_step_that_would_have_to_wait_keeps_nobody_waiting() -> None:
    """Its pause is far longer than a test may take: only the inbox ends it."""
    engine = Stepping(2, pause_s=1e6)
    run(engine, lambda loop: act_until_nothing_is_left(engine, loop))
    assert engine.told == BOTH_IN_TURN


def test_who_comes_when_it_is_over_is_served_all_the_same() -> None:
    loop = run(Stepping(0), lambda loop: loop.ask_to_close())
    told: list[str] = []
    loop.put(lambda: told.append("late"))
    assert told == ["late"]
    assert loop.when_drained().get(timeout=DEADLINE_S) is None


def test_what_making_raises_ends_it() -> None:
    loop: EngineLoop[Any] = EngineLoop(lambda: None)
    error = WorkerError("nobody is there")

    def make() -> Any:
        raise error

    made: SimpleQueue[BaseException | None] = SimpleQueue()
    loop.run(make, made)
    assert made.get(timeout=DEADLINE_S) is error and loop.is_over and loop.owner is None


class Interrupted(SimpleQueue[BaseException | None]):
    """An interrupt comes where it is said that the engine was made."""

    def put(
        self, item: BaseException | None, block: bool = True, timeout: float | None = None
    ) -> None:
        super().put(item, block, timeout)
        if item is None:
            raise KeyboardInterrupt


def test_an_engine_that_was_made_is_closed_whatever_comes_then() -> None:
    engine = Stepping(0)
    loop: EngineLoop[Any] = EngineLoop(lambda: None)
    made = Interrupted()
    loop.run(lambda: engine, made)
    assert engine.told == ["closed"] and loop.is_over
    assert made.get(timeout=DEADLINE_S) is None
    assert isinstance(made.get(timeout=DEADLINE_S), KeyboardInterrupt)


def test_a_look_for_r_workers_is_no_step() -> None:
    """Or an engine that waits for them would look as if it went on."""
    stranded = run(Stepping(2, pause_s=1e6), lambda loop: close_after_a_step(loop))
    assert stranded.owned.numbers.num_steps == 0
    stepping = run(Stepping(1), lambda loop: close_after_a_step(loop))
    assert stepping.owned.numbers.num_steps == 1


def close_after_a_step(loop: EngineLoop[Any]) -> None:
    loop.put(lambda: loop.put(loop.ask_to_close))

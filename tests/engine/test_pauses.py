"""One that comes in a lost R-worker's place, and is lost again soon, is waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
from state_machine import HELLO

from fastdecode.engine.fleet.pending import Deadlines
from fastdecode.engine.fleet.replacements import LONGEST_PAUSE_S, HubReplacements
from fastdecode.wire.messages import FromRWorker, Hello, ToRWorker, Welcome


class Willing:
    """A connection to an R-worker that answers every ``Hello``."""

    peer = "R-worker r0"
    heard_s = None
    is_reached = True

    def __init__(self) -> None:
        self._answers: deque[FromRWorker] = deque()

    def check(self) -> None:
        pass

    def send(self, message: ToRWorker) -> None:
        assert isinstance(message, Hello)
        self._answers.append(Welcome("r0", 10, message.kv.block_size, 1))

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        raise AssertionError("nobody waits for it")

    def poll(self) -> FromRWorker | None:
        return self._answers.popleft() if self._answers else None

    def close(self) -> None:
        pass


class Place:
    """Where one comes as often as it is wanted."""

    def __init__(self) -> None:
        self.connections: Sequence[Willing] = [Willing()]

    def reconnect(self, index: int) -> Willing:
        return Willing()

    def replace(self, index: int, connection: Willing) -> None:
        self.connections = [connection]


class Job:
    """An R-worker that is lost again and again."""

    def __init__(self, timeout_s: float) -> None:
        self.now_s = 1000.0
        self.comes = HubReplacements(Place(), HELLO, Deadlines(timeout_s, clock=lambda: self.now_s))

    def waits_s(self, *, serves_s: float) -> float:
        """Return the seconds from a loss to a replacement, which then serves ``serves_s``."""
        lost_s = self.now_s
        while not self.comes.look([0]):
            self.now_s += 0.25
        waited_s = self.now_s - lost_s
        self.comes.admit(0)
        self.now_s += serves_s
        return waited_s


@pytest.mark.parametrize(
    ("timeout_s", "longest"), [(300.0, LONGEST_PAUSE_S), (20.0, 5.0), (float("inf"), 60.0)]
)
def test_every_time_it_is_waited_for_twice_as_long(timeout_s: float, longest: float) -> None:
    job = Job(timeout_s)
    waited = [job.waits_s(serves_s=0.01) for _ in range(9)]
    doubling = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
    assert waited == pytest.approx([min(each, longest) for each in doubling], abs=0.25)


def test_one_that_has_served_for_long_comes_at_once() -> None:
    job = Job(300.0)
    for _ in range(4):
        job.waits_s(serves_s=0.01)
    assert job.waits_s(serves_s=LONGEST_PAUSE_S) > 1.0
    assert job.waits_s(serves_s=0.01) == 0.0
    assert job.waits_s(serves_s=0.01) == pytest.approx(1.0, abs=0.25), "and from the beginning"

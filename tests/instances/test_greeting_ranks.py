"""Instances that are ranks of one job, as they are greeted: in simulated time."""

from __future__ import annotations

from typing import Any

import pytest
from messages_for_tests import INSTANCE_WELCOME
from values import replace

from fastdecode.core.errors import WorkerError
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.instances.messages import InstanceHello, StatusReport
from fastdecode.wire.transport import CLOSED, TIMEOUT

pytest.importorskip("mpi4py", reason="needs mpi4py: pip install mpi4py")

SEEN = StatusReport(7, state="ready", num_live_r_workers=2)
HELLO = InstanceHello(1, INSTANCE_WELCOME.model_hash)


class Ranks(InprocHub[Any, Any]):
    """To four of them. Whoever waits in vain has waited as long as it may, and
    while it waits the first of them says how it is."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.given_up: list[int] = []
        self.ends = [connect(self, "rank 0", InprocHub(), f"rank {i}")[1] for i in range(4)]
        self.chatty = False

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, Any]:
        assert timeout_s is not None, "it would wait for ever"
        if self.chatty:
            self.now_s += 0.5
            self.ends[0].send(SEEN)
            return super().receive_any(0.0)
        try:
            return super().receive_any(0.0)
        except WorkerError as error:
            if error.code == TIMEOUT:
                self.now_s += timeout_s
            raise

    def give_up(self, number: int) -> None:
        self.given_up.append(number)

    def greet_all(self, hello: InstanceHello, timeout_s: float) -> Any:
        raise NotImplementedError

    def wake(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("chatty", [False, True])
def test_who_never_says_what_it_is_is_given_up(chatty: bool) -> None:
    from fastdecode.engine.instances.connections import greet_together

    hub = Ranks()
    hub.ends[0].send(INSTANCE_WELCOME)
    hub.ends[1].close()
    hub.ends[3].send(replace(INSTANCE_WELCOME, model_hash="another"))
    hub.chatty = chatty
    welcomes, failed = greet_together(hub, HELLO, 100.0, lambda: hub.now_s)
    assert welcomes == {0: INSTANCE_WELCOME} and hub.given_up == [2]
    assert {i: error.code for i, error in failed.items()} == {
        1: CLOSED, 2: TIMEOUT, 3: "other_model"
    }  # fmt: skip
    assert "rank 2 lives, but hasn't loaded its model in 100 s" in failed[2].message
    assert 100.0 <= hub.now_s < 101.0


def test_nobody_is_waited_for_who_has_answered() -> None:
    from fastdecode.engine.instances.connections import greet_together

    hub = Ranks()
    for end in hub.ends:
        end.send(INSTANCE_WELCOME)
    welcomes, failed = greet_together(hub, HELLO, 100.0, lambda: hub.now_s)
    assert (welcomes, failed) == (dict.fromkeys(range(4), INSTANCE_WELCOME), {})
    assert hub.now_s == 0.0 and not hub.given_up

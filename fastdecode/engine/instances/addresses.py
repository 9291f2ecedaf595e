"""Instances at addresses, over ZeroMQ: the controller's end, and theirs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final, get_args

from fastdecode.core.errors import WorkerError
from fastdecode.engine.instances.connections import BUSY, welcome_of
from fastdecode.wire.instances import (
    InstanceHello,
    InstanceSays,
    InstanceWelcome,
    ToInstance,
)
from fastdecode.wire.messages import Failed
from fastdecode.wire.traits import Role
from fastdecode.wire.zmq.connection import ZmqConnection
from fastdecode.wire.zmq.hub import ZmqHub, ZmqListener
from fastdecode.wire.zmq.keys import ClusterKey

_BUSY_S: Final = 0.1
"""Between two attempts at one that serves another controller, which may be gone."""
_ANSWER_S: Final = 10.0


class InstanceHub(ZmqHub):
    """Of a controller.

    Args:
        addresses: of the instances.
        key, silence_s: see ``ZmqHub``.

    Raises:
        ConfigError: one of them is none, or may not be used without a key.
    """

    peer_kind = "instance"
    command = "fastdecode instance --bind"
    parameter = "instances"
    receives = frozenset([*get_args(InstanceSays), Failed])

    def __init__(self, addresses: Sequence[str], key: ClusterKey | None, silence_s: float) -> None:
        super().__init__(key, silence_s=silence_s)
        try:
            for address in addresses:
                self.add(address)
        except BaseException:
            self.close()
            raise

    has_hung_r_workers = False
    """Other processes' R-workers keep nobody here from ending."""

    def give_up(self, number: int) -> None:
        """See ``InstanceConnectionHub``. It is somebody else's to end."""
        self.connections[number].close()

    def greet_all(
        self, hello: InstanceHello, timeout_s: float
    ) -> tuple[dict[int, InstanceWelcome], dict[int, WorkerError]]:
        """What those say that are there, and why others aren't."""
        end_s = time.monotonic() + timeout_s
        failed = self.reach(timeout_s)
        welcomes: dict[int, InstanceWelcome] = {}
        for number, line in enumerate(self.connections):
            try:
                if number not in failed:
                    welcomes[number] = greet(line, hello, end_s + timeout_s)
            except WorkerError as error:
                failed[number] = error
        return welcomes, failed


def greet(line: ZmqConnection, hello: InstanceHello, end_s: float) -> InstanceWelcome:
    """Say hello to an instance, again and again while it serves another
    controller.

    Args:
        end_s: on ``time.monotonic``; then it is given up.

    Raises:
        WorkerError: it is gone, has refused, or answers nothing.
    """
    was_busy = False
    while not was_busy or time.monotonic() + _BUSY_S < end_s:
        line.send(hello)
        # One that has answered once does so soon: once its engine has come by.
        wait_s = max(_ANSWER_S if was_busy else 0.0, end_s - time.monotonic())
        welcome = welcome_of(line, hello, line.receive(wait_s))
        if welcome is not None:
            return welcome
        was_busy = True
        time.sleep(_BUSY_S)
    raise WorkerError(f"{line.peer} serves another controller: end that first", code=BUSY)


class InstanceListener(ZmqListener):
    """Where a controller connects."""

    receives = frozenset(get_args(ToInstance))
    most_peers: Mapping[Role, int] = {Role.CONTROLLER: 1}

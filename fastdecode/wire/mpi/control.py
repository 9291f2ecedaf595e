"""Connections between the controller of instances and these, where all are ranks
of an MPI job. They aren't in a hurry, and whoever looks after them leaves its
core to the engine beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Final

from fastdecode.core.errors import WorkerError
from fastdecode.wire.messages import Message
from fastdecode.wire.mpi.hub import PULSE_S, MpiHub, ReceiveT, SendT
from fastdecode.wire.mpi.job import CONTROL_TAG, DEFAULT_TAG, S_RANK, MpiJob
from fastdecode.wire.transport import TIMEOUT, PeerLostError, timeout_error
from fastdecode.wire.waiting import look_until_found

_LOOK_S: Final = 1e-3
_FIRST_SIGN_S: Final = 120.0
"""That a peer may take to give its first sign of life: it may load torch before."""
THE_END: Final = 1
"""Of an instance's connections: over it rank 0 says goodbye when it leaves."""


class ControlHub(MpiHub[SendT, ReceiveT]):
    """See ``MpiHub``. Others may have whoever waits look up.

    Args:
        job, peers, receives: see ``MpiHub``.
        silence_s: a peer that gives no sign of life for so long is lost: the
            launcher ends it when this rank leaves. 0: it isn't expected to
            give any.
        pulse_s: how often to give the peers a sign of life; 0: never.
        keeps_places: see ``MpiHub``.
    """

    def __init__(
        self,
        job: MpiJob,
        peers: Iterable[tuple[int, str]],
        receives: frozenset[type[Message]],
        *,
        silence_s: float = 0.0,
        pulse_s: float = 0.0,
        keeps_places: bool = True,
    ) -> None:
        self._woken = threading.Event()
        self._silence_s = silence_s
        super().__init__(
            job,
            peers,
            receives,
            tag=CONTROL_TAG,
            pump_interval_s=0,  # it is looked after all the time
            pulse_s=pulse_s,
            peers_give_signs=silence_s > 0,
            keeps_places=keeps_places,
        )
        self._began_s = [connection.heard_s for connection in self.connections]

    def wake(self) -> None:
        """Have whoever waits in ``receive_any`` look up, or who does so next, as
        if its time were over; any thread."""
        self._woken.set()

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        """See ``Hub``."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._caller:
                received = self._look_at_all()
            if received is not None:
                return received
            self.check_silence()
            is_late = end_s is not None and time.monotonic() >= end_s
            if is_late or self._woken.wait(_LOOK_S):
                self._woken.clear()
                raise timeout_error(self._open_peers(), timeout_s or 0.0)

    def check_silence(self) -> None:
        """Raises PeerLostError: a peer has given no sign of life for too long."""
        now = time.monotonic()
        for index, connection in enumerate(self.connections):
            heard_s = connection.heard_s
            if heard_s is None or not connection.is_open:
                continue
            is_first = heard_s == self._began_s[index]
            if now - heard_s <= max(self._silence_s, is_first * _FIRST_SIGN_S):
                continue
            connection.give_up()
            why = f"{connection.peer} has given no sign of life for {now - heard_s:.3g} s: it hangs"
            raise PeerLostError(index, WorkerError(why, code=TIMEOUT))


def to_controller(job: MpiJob, receives: frozenset[type[Message]]) -> ControlHub[SendT, ReceiveT]:
    """An instance's side: to the controller, and behind it (``THE_END``) where
    that says goodbye when it leaves, however far it has got."""
    hub: ControlHub[SendT, ReceiveT] = ControlHub(
        job, [(S_RANK, "the controller (rank 0)")], receives, pulse_s=PULSE_S
    )
    hub.add(S_RANK, "rank 0", tag=DEFAULT_TAG, takes_signs=False)
    return hub


class TheEnd:
    """Of a job: rank 0 leaves, or has died. Whoever leaves before might have the
    launcher end the job."""

    def __init__(self, job: MpiJob) -> None:
        self._hub: MpiHub[Message, Message] = MpiHub(
            job, [(S_RANK, "rank 0")], frozenset(), tag=DEFAULT_TAG, pump_interval_s=0
        )
        self._has_come = False

    def look(self) -> bool:
        """Whether it has come."""
        try:
            if not self._has_come:
                self._hub.connections[0].poll()
        except WorkerError:
            self._has_come = True
        return self._has_come

    def wait(self) -> None:
        """Until it has come; then nothing more is to be done with this."""
        look_until_found(lambda: self.look() or None, None)
        self._hub.close()

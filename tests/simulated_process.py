"""R-workers' processes, in one thread and on a clock that only moves when somebody
waits: what they do is the real thing, and they may crash or hang."""

from __future__ import annotations

import contextlib
import math
import random
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

from simulated_disk import SimulatedDisk

from fastdecode.core.errors import WorkerError
from fastdecode.schedule.simulation.clock import VirtualClock
from fastdecode.wire.kv.replicating import ReplicationNews
from fastdecode.wire.messages import AttendResult, FromRWorker, ToRWorker
from fastdecode.wire.transport import PeerLostError, closed_error, timeout_error
from rworker.attention import AttentionExecutor
from rworker.grace_period import GracePeriod
from rworker.instructions import Compute
from rworker.serving_terms import ServingTerms
from rworker.state import RWorkerState
from rworker.transfers.background_transfers import BackgroundTransfers
from rworker.worker import RWorker, serve_next


class End(Enum):
    END = "the other side has closed the connection"


class _Executor(AttentionExecutor):
    """Whose next computations may be made to fail."""

    num_failures = 0
    """So many are left."""

    def compute(self, compute: Compute) -> AttendResult:
        if self.num_failures:
            self.num_failures -= 1
            raise MemoryError("no more memory")
        return super().compute(compute)


class Side(Protocol):
    """A process's side of a connection."""

    def send(self, message: FromRWorker) -> None: ...

    def close(self) -> None: ...


class Process:
    """One R-worker's process, and its side of every connection to it.

    Args:
        name: of the R-worker.
        kv_bytes: its memory for K and V.
        keep_s: for how long it keeps caches of an S-worker that is lost.
        time: that passes.
        chance: what nobody chooses.
        reach: makes what it reaches its neighbours by.
        disk: where replicas may be; None: nowhere.
    """

    def __init__(
        self,
        name: str,
        kv_bytes: int,
        keep_s: float,
        time: VirtualClock,
        chance: random.Random,
        reach: Callable[[Process], Any],
        disk: SimulatedDisk | None = None,
    ) -> None:
        serving = ServingTerms(keeps_serving=True, keep_s=keep_s)
        has_tier = disk is not None
        self.state = RWorkerState(name, kv_bytes=kv_bytes, serving=serving, has_tier=has_tier)
        self._grace_period = GracePeriod(serving, time)
        self._awaits = False
        self.executor = _Executor(num_threads=1, clock=time)
        self.neighbours = reach(self)
        files: Any = None if disk is None else disk.of(self)
        reached = self.executor, self.neighbours, self._tell, time, files
        self.links = BackgroundTransfers(*reached)
        self.is_up = True
        self.hangs_until_s = 0.0
        self.hung_since_s = math.inf
        self.connections: list[Side] = []
        self._time = time
        self._chance = chance
        self._inbox: deque[tuple[int, ToRWorker | End]] = deque()
        self._has_answers = False
        self._is_busy = False

    def connect(self, side: Side) -> int:
        self.connections.append(side)
        return len(self.connections) - 1

    def deliver(self, peer: int, message: ToRWorker | End) -> None:
        self._inbox.append((peer, message))
        self._go_on()

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ToRWorker]:
        """As a hub's; if there is nothing, links have something to do."""
        if not self._inbox:
            raise timeout_error("every peer", 0.0)
        peer, message = self._inbox.popleft()
        if isinstance(message, End):
            raise PeerLostError(peer, closed_error("the S-worker", by_peer=True))
        return peer, message

    def crash(self) -> None:
        self.is_up = False
        self.links.close()
        for side in self.connections:
            side.close()

    def wake(self) -> None:
        """A neighbour has answered."""
        self._has_answers = True
        self._go_on()

    def hang(self, for_s: float) -> None:
        if self._time.now >= self.hangs_until_s:
            self.hung_since_s = self._time.now
        self.hangs_until_s = max(self.hangs_until_s, self._time.now + for_s)
        self._time.at(self.hangs_until_s, self._go_on)

    @property
    def hangs(self) -> bool:
        return self._time.now < self.hangs_until_s

    @property
    def _has_work(self) -> bool:
        wait_s = self.links.wait_s  # None: there are no links any more
        return bool(self._inbox or wait_s == 0 or (self._has_answers and wait_s is not None))

    def _go_on(self) -> None:
        if self._has_work and self.is_up and not self.hangs and not self._is_busy:
            self._is_busy = True
            self._time.at(self._time.now + self._chance.uniform(0, 2e-4), self._work)

    def _work(self) -> None:
        self._is_busy = False
        if not self.is_up or self.hangs or not self._has_work:
            return
        if not self._inbox:  # else what neighbours say waits
            self._has_answers = False
        if not self._serve_next():
            self.crash()
        self._await_returns()
        self._go_on()

    def _serve_next(self) -> bool:
        worker = RWorker(self, self.state, self.executor, self.links)
        return serve_next(self, worker, self._grace_period)

    def _await_returns(self) -> None:
        """Look again when an S-worker that is lost has been for too long."""
        wait_s = self._grace_period.wait_s(self.state)
        if wait_s is not None and not self._awaits:
            self._awaits = True
            self._time.at(self._time.now + wait_s, self._look_again)

    def _look_again(self) -> None:
        self._awaits = False
        if self.is_up and not self._is_busy:
            self._serve_next()
            self._await_returns()

    def _tell(self, peer: int, news: ReplicationNews) -> None:
        with contextlib.suppress(WorkerError):
            self.connections[peer].send(news)

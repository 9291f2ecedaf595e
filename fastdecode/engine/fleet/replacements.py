"""R-workers that take a lost one's place: another process at the same address,
or the same one once it is reached again. Only ZeroMQ knows addresses; an MPI
job's ranks never come back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fastdecode.core.clock import Clock
from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.wire.messages import FromRWorker, Hello, ToRWorker, Welcome
from fastdecode.wire.zmq.hub import ZmqConnection, ZmqHub

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two attempts at an address where somebody answers, but doesn't serve us."""


@dataclass(eq=False)
class _Candidate:
    connection: ZmqConnection[ToRWorker, FromRWorker]
    is_greeted: bool = False


class AddressReplacements:
    """Connects again to the addresses of lost R-workers; see
    ``fastdecode.engine.fleet.workers.Replacements``.

    Args:
        hub: whose connections are to be replaced.
        hello: what a new R-worker is greeted with.
        timeout_s: how long to go on when all are lost.
        clock: seconds.
    """

    def __init__(
        self,
        hub: ZmqHub,
        hello: Hello,
        *,
        timeout_s: float = 0.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._hub = hub
        self._hello = hello
        self.timeout_s = timeout_s
        self._clock = clock
        self._most_blocks: Mapping[int, int] = {}
        self._candidates: dict[int, _Candidate] = {}
        self._not_before: dict[int, float] = {}
        self._welcomes: dict[int, Welcome] = {}

    def limit(self, num_blocks: Mapping[int, int]) -> None:
        """See ``Replacements``."""
        self._most_blocks = num_blocks

    def look(self, lost: Iterable[int]) -> dict[int, Welcome]:
        """Those of the lost R-workers in whose place another one waits to be let in (``admit``)."""
        for worker in lost:
            if worker not in self._welcomes and self._clock() >= self._not_before.get(worker, 0.0):
                self._reconnect(worker)
        return dict(self._welcomes)

    def admit(self, worker: int) -> None:
        """From now on the hub's connection of that number is the new R-worker's."""
        del self._welcomes[worker]
        self._hub.replace(worker, self._candidates.pop(worker).connection)

    def _reconnect(self, worker: int) -> None:
        candidate = self._candidates.get(worker)
        if candidate is None:
            # One that was given up though it lives would go on serving the old
            # connection, and be busy for ever.
            self._hub.connections[worker].close()
            try:
                candidate = _Candidate(self._hub.reconnect(worker))
            except (
                FastDecodeError
            ) as error:  # no socket left, or a name that isn't known any more: others may live
                logger.info("no replacement yet: %s", error)
                self._not_before[worker] = self._clock() + RETRY_S
                return
            self._candidates[worker] = candidate
        connection = candidate.connection
        try:
            connection.check()
            if connection.is_reached and not candidate.is_greeted:
                most = self._most_blocks.get(worker, self._hello.max_blocks)
                connection.send(replace(self._hello, holder=worker, max_blocks=most))
                candidate.is_greeted = True
            answer = connection.poll()
            if isinstance(answer, Welcome):
                self._hello.check(answer)
        except ProtocolError as lie:
            self._give_up(worker, f"{connection.peer} {lie.message}")
            return
        except WorkerError as error:
            self._give_up(worker, error.message)
            return
        if isinstance(answer, Welcome):
            self._welcomes[worker] = answer
        elif answer is not None:
            self._give_up(
                worker, f"{connection.peer}: {getattr(answer, 'message', type(answer).__name__)}"
            )

    def _give_up(self, worker: int, reason: str) -> None:
        """For now."""
        logger.info("no replacement yet: %s", reason)
        self._candidates.pop(worker).connection.close()
        self._not_before[worker] = self._clock() + RETRY_S

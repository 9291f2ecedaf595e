"""The R-workers as the engine sees them: who is alive, who owes an answer, and since when."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from fastdecode.core.errors import CapacityError, ConfigError, FastDecodeError, WorkerError, without_frames
from fastdecode.core.holders import HolderId
from fastdecode.wire.messages import (
    Attend,
    ExtendSequence,
    Failed,
    ForkSequence,
    FromRWorker,
    Hello,
    OpenSequence,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.transport import TIMEOUT, Hub, loss

logger = logging.getLogger(__name__)

RHub: TypeAlias = Hub[ToRWorker, FromRWorker]

GREETING_TIMEOUT_S = 600.0
"""How long an R-worker may take to answer ``Hello``."""

GREETING_SILENCE_S = 60.0
"""And be silent before it does: compilers don't let other threads run all the time."""
_LOOK_AWAY_S = 1.0
"""When nobody has looked for so long, signs of life may have come and not been taken in."""

_ANSWERED = (Hello, OpenSequence, ForkSequence, ExtendSequence, Attend)


class Fleet:
    """Sends to R-workers by index, receives from whichever answers first, and notices the dead and the silent.

    A worker is **lost** when its connection breaks, when it says ``Failed``, or when an answer is overdue. What is sent
    to a lost worker goes nowhere. It never comes back, though another one may take its place (``revive``).

    Args:
        hub: one connection a worker; a worker's index is its connection's.
        timeout_s: how long an answer may take.
        silence_s: how long a worker that owes an answer may give no sign of life, where connections tell of those.
            Only time counts in which somebody looked.
        clock: seconds, as ``Connection.heard_s`` has them.
    """

    def __init__(
        self,
        hub: RHub,
        timeout_s: float,
        silence_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub = hub
        self._timeout_s = timeout_s
        self._silence_s = silence_s
        self._clock = clock
        self._looked_s = self._looking_since_s = -math.inf
        self._due: list[deque[float]] = [deque() for _ in hub.connections]  # when each unanswered message was sent
        self._early: deque[tuple[int, FromRWorker]] = deque()
        self._lost: dict[int, WorkerError] = {}
        self._untold: list[tuple[HolderId, WorkerError]] = []

    def __len__(self) -> int:
        return len(self._due)

    @property
    def lost(self) -> dict[int, WorkerError]:
        """The workers that are lost, and why."""
        return self._lost

    def take_losses(self) -> list[tuple[HolderId, WorkerError]]:
        """The losses of which nobody has been told yet, in their order. Each is told once."""
        losses, self._untold = self._untold, []
        return losses

    def peer(self, worker: int) -> str:
        return self._hub.connections[worker].peer

    def send(self, worker: int, message: ToRWorker) -> None:
        """Send, or do nothing if the worker is lost (finding that out may be this call's doing)."""
        if worker in self._lost:
            return
        if isinstance(message, _ANSWERED):
            self._due[worker].append(self._clock())
        try:
            self._hub.connections[worker].send(message)
        except WorkerError as error:
            self.lose(worker, self._last_words(worker) or error)

    def receive(self) -> tuple[int, FromRWorker] | None:
        """The next answer of any worker that owes one. None: look again, and at ``lost`` before.

        Waits at most until the first worker has to be given up. Must not be called when nobody owes anything.
        """
        if self._early:
            return self._taken(*self._early.popleft())
        now = self._clock()
        if now - self._looked_s > _LOOK_AWAY_S:
            self._looking_since_s = now
        until_s = min(self._patience_ends(worker)[0] for worker, due in enumerate(self._due) if due)
        try:
            # Not longer than that: a worker may give its first sign of life, and fall silent, while we wait.
            return self._taken(*self._hub.receive_any(max(0.0, min(until_s - now, self._silence_s))))
        except WorkerError as error:
            if error.code == TIMEOUT:
                self._give_up_overdue()
            else:
                self._find_closed()
            return None
        finally:
            self._looked_s = self._clock()

    def _patience_ends(self, worker: int) -> tuple[float, str]:
        """When a worker that owes an answer has to be given up, and why."""
        overdue_s = self._due[worker][0] + self._timeout_s
        heard_s = self._hub.connections[worker].heard_s
        if heard_s is not None:
            silent_s = max(heard_s, self._looking_since_s, self._due[worker][0]) + self._silence_s
            if silent_s < overdue_s:
                return silent_s, f"has given no sign of life for {self._silence_s:g} s (--worker-silence-s)"
        return overdue_s, f"hasn't answered for {self._timeout_s:g} s (--worker-timeout-s)"

    def _give_up_overdue(self) -> None:
        """Nobody answered; but they may have given signs of life meanwhile."""
        now = self._clock()
        for worker, due in enumerate(self._due):
            if due:
                end_s, reason = self._patience_ends(worker)
                if end_s <= now:
                    self.lose(worker, WorkerError(f"{self.peer(worker)} {reason}", code=TIMEOUT))

    def _taken(self, worker: int, answer: FromRWorker) -> tuple[int, FromRWorker] | None:
        if worker in self._lost:
            return None  # it was given up, and answers after all
        if isinstance(answer, Failed):
            self.lose(worker, _failure(answer))
            return None
        if self._due[worker]:
            self._due[worker].popleft()
        return worker, answer

    def _last_words(self, worker: int) -> WorkerError | None:
        """Why a worker closed its connection, if it said so before."""
        try:
            while (answer := self._hub.connections[worker].poll()) is not None:
                if isinstance(answer, Failed):
                    return _failure(answer)
        except WorkerError:
            pass
        return None

    def _find_closed(self) -> None:
        """Some connection has closed: find out whose. Answers that come to light are kept for ``receive``."""
        for worker, connection in enumerate(self._hub.connections):
            if worker in self._lost:
                continue
            try:
                answer = connection.poll()
            except WorkerError as error:
                self.lose(worker, error)
            else:
                if answer is not None:
                    self._early.append((worker, answer))

    def greet(self, hello: Hello) -> list[Welcome]:
        """Say Hello to every worker and collect their answers.

        A worker compiles its kernels before it answers, so this may take longer than anything that follows.

        Raises:
            ConfigError: a worker hasn't the memory for one KV block, or can't hold such a cache.
            WorkerError: a worker was lost, or didn't answer in time.
        """
        patience = self._timeout_s, self._silence_s
        self._timeout_s = max(self._timeout_s, GREETING_TIMEOUT_S)
        self._silence_s = max(self._silence_s, GREETING_SILENCE_S)
        try:
            return self._greet(hello)
        finally:
            self._timeout_s, self._silence_s = patience

    def _greet(self, hello: Hello) -> list[Welcome]:
        for worker in range(len(self)):
            self.send(worker, hello)
        welcomes: dict[int, Welcome] = {}
        while len(welcomes) < len(self):
            received = self.receive() if not self._lost else None
            if self._lost:
                error = next(iter(self._lost.values()))
                is_usage = error.code in (CapacityError.default_code, ConfigError.default_code)
                raise ConfigError(error.message, code=error.code) if is_usage else error
            if received is not None:
                worker, answer = received
                if not isinstance(answer, Welcome):
                    raise WorkerError(f"{self.peer(worker)} answered Hello with {type(answer).__name__}")
                welcomes[worker] = answer
        return [welcomes[worker] for worker in range(len(self))]

    def lose(self, worker: int, error: FastDecodeError) -> None:
        """Give a worker up."""
        if worker not in self._lost:
            lost = error if isinstance(error, WorkerError) else WorkerError(str(error), code=error.code)
            self._lost[worker] = without_frames(lost)
            self._untold.append((HolderId(worker), self._lost[worker]))
            self._due[worker].clear()
            logger.error("%s", loss(self.peer(worker), error))

    def revive(self, worker: int) -> None:
        """The hub has another connection in the place of a lost worker's: whoever is there has said ``Welcome``."""
        del self._lost[worker]
        self._early = deque(early for early in self._early if early[0] != worker)


def _failure(failed: Failed) -> WorkerError:
    return WorkerError(f"R-worker {failed.worker} failed: {failed.message}", code=failed.code)

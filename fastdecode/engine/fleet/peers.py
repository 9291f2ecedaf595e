"""The processes at the other ends of an engine's connections: who owes an
answer, and since when; who is dead, silent, or says what nobody asked for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.deadlines import Deadlines
from fastdecode.wire.kv.replicating import ReplicationNews
from fastdecode.wire.messages import Answer, Failed, FromRWorker, ToRWorker
from fastdecode.wire.transport import TIMEOUT, Connection, Hub, PeerLostError, loss

logger = logging.getLogger(__name__)

RHub: TypeAlias = Hub[ToRWorker, FromRWorker]
RConnection: TypeAlias = Connection[ToRWorker, FromRWorker]


@dataclass(frozen=True)
class _Due:
    """An answer that is owed."""

    since_s: float
    holder: HolderId
    kinds: tuple[type[Answer], ...]


class Peers:
    """Sends to R-workers by their connections' index, receives from whichever
    answers first, and notices the dead and the silent.

    A peer answers in the order in which it was asked. It is **lost** when its
    connection breaks, when it says ``Failed``, when an answer is overdue, or
    isn't one that it owes.

    Args:
        hub: one connection a peer.
        deadlines: how long a peer may take, and be silent. It may be replaced
            at any time.
        lost: those that aren't there to begin with, and why.
        beside: one more peer, behind the hub's, that answers at once; it is
            never lost.
    """

    def __init__(
        self,
        hub: RHub,
        deadlines: Deadlines,
        lost: Mapping[int, WorkerError],
        beside: RConnection | None = None,
    ) -> None:
        self._hub = hub
        self._beside = beside
        self.deadlines = deadlines
        self.lost = dict(lost)
        """Who is lost, and why."""
        self._untold = list(self.lost)
        num_peers = len(hub.connections) + (beside is not None)
        self._due: list[deque[_Due]] = [deque() for _ in range(num_peers)]
        self._early: deque[tuple[int, FromRWorker]] = deque()
        self._told: list[tuple[int, ReplicationNews]] = []

    def __len__(self) -> int:
        return len(self._due)

    def name(self, index: int) -> str:
        """What a peer is called."""
        return self._connection(index).peer

    @property
    def is_owed(self) -> bool:
        """Whether anybody owes an answer."""
        return bool(self._early) or any(self._due)

    @property
    def is_owed_at_once(self) -> bool:
        """Whether an answer is owed by who answers at once."""
        return self._beside is not None and bool(self._due[-1])

    def take_losses(self) -> list[int]:
        """Those that are lost, of which nobody has been told yet, in their order. Told once."""
        losses, self._untold = self._untold, []
        return losses

    def take_told(self) -> list[tuple[int, ReplicationNews]]:
        """What peers have said unasked, and who. Told once."""
        told, self._told = self._told, []
        return told

    def send(self, index: int, message: ToRWorker, holder: HolderId) -> None:
        """Send, about a holder, to a peer that isn't lost (finding out that it
        is may be this call's doing)."""
        if message.answers:
            due = _Due(self.deadlines.clock(), holder, message.answers)
            self._due[index].append(due)
        try:
            self._connection(index).send(message)
        except WorkerError as error:
            self.lose(index, self._last_words(index) or error)

    def receive(self, *, wait: bool = True) -> tuple[HolderId, Answer] | None:
        """The next answer, and about which holder. None: look again, and at
        ``lost`` before.

        Waits at most until the first peer has to be given up; or not at all.
        Must not be called when nobody owes anything.
        """
        if self._early:
            return self._taken(*self._early.popleft())
        if self.is_owed_at_once:
            assert self._beside is not None
            return self._taken(len(self._due) - 1, self._beside.receive())
        now = self.deadlines.begin_look()
        until_s = min(self._end(index)[0] for index, due in enumerate(self._due) if due)
        wait_s = self.deadlines.wait_s(now, until_s) if wait else 0.0
        try:
            return self._taken(*self._hub.receive_any(wait_s))
        except PeerLostError as error:
            self.lose(error.index, error)
        except WorkerError as error:
            if error.code == TIMEOUT:
                self._give_up_overdue()
            else:
                self._find_closed()
        finally:
            self.deadlines.end_look()
        return None

    def look(self) -> None:
        """Find out who has gone, while nobody owes an answer."""
        self._find_closed()
        while self._early:
            self._taken(*self._early.popleft())

    def lose(self, index: int, error: FastDecodeError) -> None:
        """Give a peer up."""
        if index in self.lost:
            return
        self._due[index].clear()
        self._early = deque(early for early in self._early if early[0] != index)
        # Another error: one that was raised keeps all that its frames hold alive.
        self.lost[index] = WorkerError(error.message, code=error.code)
        self._untold.append(index)
        logger.error("%s", loss(self.name(index), error))

    def revive(self, index: int) -> None:
        """The hub has another connection in the place of a lost peer's."""
        self.lost.pop(index, None)
        self._due[index].clear()
        self._untold = [lost for lost in self._untold if lost != index]

    def _connection(self, index: int) -> RConnection:
        if index < len(self._hub.connections):
            return self._hub.connections[index]
        assert self._beside is not None
        return self._beside

    def _end(self, index: int) -> tuple[float, str]:
        """When a peer that owes an answer has to be given up, and why."""
        heard_s = self._connection(index).heard_s
        return self.deadlines.end(self._due[index][0].since_s, heard_s)

    def _give_up_overdue(self) -> None:
        """Nobody answered; but they may have given signs of life meanwhile."""
        now = self.deadlines.clock()
        for index, due in enumerate(self._due):
            if due:
                end_s, reason = self._end(index)
                if end_s <= now:
                    self.lose(index, WorkerError(f"{self.name(index)} {reason}", code=TIMEOUT))

    def _taken(self, index: int, message: FromRWorker) -> tuple[HolderId, Answer] | None:
        if index in self.lost:
            return None  # it was given up, and answers after all
        if isinstance(message, Failed):
            self.lose(index, _failure(message))
        elif isinstance(message, ReplicationNews):
            self._told.append((index, message))
        else:
            return self._take_answer(index, message)
        return None

    def _take_answer(self, index: int, answer: Answer) -> tuple[HolderId, Answer] | None:
        due = self._due[index]
        if not due or not isinstance(answer, due[0].kinds):
            text = f"{self.name(index)} sent {type(answer).__name__}, which nobody asked for"
            self.lose(index, ProtocolError(text))
            return None
        return due.popleft().holder, answer

    def _last_words(self, index: int) -> WorkerError | None:
        """Why a peer closed its connection, if it said so before."""
        try:
            while (answer := self._hub.connections[index].poll()) is not None:
                if isinstance(answer, Failed):
                    return _failure(answer)
        except WorkerError:
            pass
        return None

    def _find_closed(self) -> None:
        """Some connection has closed: find out whose. Answers that come to
        light are kept for ``receive``."""
        for index, connection in enumerate(self._hub.connections):
            if index in self.lost:
                continue
            try:
                answer = connection.poll()
            except WorkerError as error:
                self.lose(index, error)
            else:
                if answer is not None:
                    self._early.append((index, answer))


def _failure(failed: Failed) -> WorkerError:
    return WorkerError(f"R-worker {failed.worker} failed: {failed.message}", code=failed.code)

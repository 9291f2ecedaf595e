"""The processes at the other ends of an engine's connections: who owes an
answer, and since when; who is dead, silent, or says what nobody asked for."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from typing import TypeAlias, cast

from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.deadlines import Deadlines
from fastdecode.engine.fleet.keepers import Keepers
from fastdecode.engine.fleet.owed import OwedAnswers
from fastdecode.engine.fleet.unasked import Unasked
from fastdecode.engine.stages.links import FromAnyStage, StageLinks
from fastdecode.wire.kv.exporting import MoveNews
from fastdecode.wire.kv.replicating import ReplicationNews
from fastdecode.wire.messages import Answer, Failed, FromRWorker, ToRWorker
from fastdecode.wire.transport import TIMEOUT, Connection, Hub, PeerLostError, loss

logger = logging.getLogger(__name__)

RHub: TypeAlias = Hub[ToRWorker, FromRWorker]
RConnection: TypeAlias = Connection[ToRWorker, FromRWorker]


class Peers:
    """Sends to R-workers by their connections' index, receives from whichever
    answers first, and notices the dead and the silent.

    A peer answers in the order in which it was asked. It is **lost** when its
    connection breaks, when it says ``Failed``, when an answer is overdue, or
    isn't one that it owes.

    Args:
        hub: one connection a peer.
        deadlines: how long a peer may take, and be silent.
        lost: those that aren't there to begin with, and why.
        keepers: who of them keeps which holder.
        beside: one more peer, behind the hub's, that answers at once; it is
            never lost.
        stages: other stages of the pipeline, which the hub's last connections
            are to; whoever loses one gets a WorkerError at once.
    """

    def __init__(
        self,
        hub: RHub,
        deadlines: Deadlines,
        lost: Mapping[int, WorkerError],
        keepers: Keepers,
        beside: RConnection | None = None,
        stages: StageLinks | None = None,
    ) -> None:
        self._hub = hub
        self._beside = beside
        self.unasked = Unasked(keepers, self._lied)
        """What they have said without having been asked."""
        self.lost = dict(lost)
        """Who is lost, and why."""
        self._untold = list(self.lost)
        num_peers = len(hub.connections) + (beside is not None)
        self.owed = OwedAnswers(num_peers, deadlines, lambda index: self._connection(index).heard_s)
        """What each owes."""
        self._stages = stages
        self._first_stage = num_peers
        if stages is not None:
            assert beside is None
            self._first_stage -= len(stages)
            stages.join(self.owed, self._first_stage)
        self._early: deque[tuple[int, FromRWorker]] = deque()

    def __len__(self) -> int:
        """R-workers, and who is beside."""
        return self._first_stage

    def name(self, index: int) -> str:
        """What a peer is called."""
        return self._connection(index).peer

    @property
    def is_owed(self) -> bool:
        """Whether anybody owes an answer."""
        return bool(self._early) or self.owed.any_owed

    @property
    def is_owed_at_once(self) -> bool:
        """Whether an answer is owed by who answers at once."""
        return self._beside is not None and self.owed.is_owed_by(len(self) - 1)

    def take_losses(self) -> list[int]:
        """Those that are lost, of which nobody has been told yet, in their order. Told once."""
        losses, self._untold = self._untold, []
        return losses

    def send(self, index: int, message: ToRWorker, holder: HolderId) -> None:
        """Send, about a holder, to a peer that isn't lost (finding out that it
        is may be this call's doing)."""
        self.owed.ask(index, message, holder)
        connection = self._connection(index)
        try:
            connection.send(message)
        except WorkerError as error:
            self.lose(index, _last_words(connection) or error)

    def receive(self, *, most_s: float = math.inf) -> tuple[HolderId, Answer] | None:
        """The next answer, and about which holder. None: look again, and at
        ``lost`` before.

        Waits at most until the first peer has to be given up, and for so many
        seconds. Must not be called when nobody owes anything, unless orders may
        come from other stages.
        """
        if self._early:
            return self._taken(*self._early.popleft())
        if self.is_owed_at_once:
            assert self._beside is not None
            return self._taken(len(self) - 1, self._beside.receive())
        wait_s = self.owed.wait_s(most_s)
        try:
            index, message = self._hub.receive_any(None if wait_s == math.inf else wait_s)
        except PeerLostError as error:
            self.lose(error.index, error)
        except WorkerError as error:
            if error.code == TIMEOUT:
                for index, reason in self.owed.overdue():
                    text = f"{self.name(index)} {reason}"
                    self.lose(index, WorkerError(text, code=TIMEOUT))
            else:
                self._find_closed()
        else:
            return self._taken(index, message)
        finally:
            self.owed.deadlines.end_look()
        return None

    def look(self) -> None:
        """Find out who has gone, while nobody awaits an answer: what is here
        already is taken in."""
        self._find_closed()
        while self._early:
            while self._early:
                self._taken(*self._early.popleft())
            self._find_closed()

    def lose(self, index: int, error: FastDecodeError) -> None:
        """Give a peer up."""
        if index in self.lost:
            return
        if index >= self._first_stage and self._stages is not None:
            raise self._stages.lost(index, error)
        self.owed.forget(index)
        self._early = deque(early for early in self._early if early[0] != index)
        self.unasked.forget(index)
        # Another error: one that was raised keeps all that its frames hold alive.
        self.lost[index] = WorkerError(error.message, code=error.code)
        self._untold.append(index)
        logger.error("%s", loss(self.name(index), error))

    def revive(self, index: int) -> None:
        """The hub has another connection in the place of a lost peer's."""
        self.lost.pop(index, None)
        self.owed.forget(index)
        self._untold = [lost for lost in self._untold if lost != index]

    def _connection(self, index: int) -> RConnection:
        connections = self._hub.connections
        if index < len(connections):
            return connections[index]
        assert self._beside is not None
        return self._beside

    def _taken(self, index: int, message: FromRWorker) -> tuple[HolderId, Answer] | None:
        if index in self.lost:
            return None  # it was given up, and answers after all
        if index >= self._first_stage and self._stages is not None:
            self._stages.take(index, cast(FromAnyStage, message))
            return None
        if isinstance(message, Failed):
            self.lose(index, _failure(message))
        elif isinstance(message, ReplicationNews):
            self.unasked.hear_replica(index, message)
        elif not isinstance(message, MoveNews):
            try:
                return self.owed.take(index, message), message
            except ProtocolError as lie:
                self._lied(index, lie.message)
        elif self.owed.jobs.take(index, message):
            self.unasked.hear_tier(index, message)
        else:
            self._lied(index, f"sent {type(message).__name__}, which nobody asked for")
        return None

    def _lied(self, index: int, what: str) -> None:
        """A peer has said what it can't mean."""
        self.lose(index, ProtocolError(f"{self.name(index)} {what}"))

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


def _last_words(connection: RConnection) -> WorkerError | None:
    """Why a peer closed its connection, if it said so before."""
    try:
        while (answer := connection.poll()) is not None:
            if isinstance(answer, Failed):
                return _failure(answer)
    except WorkerError:
        pass
    return None


def _failure(failed: Failed) -> WorkerError:
    return WorkerError(f"R-worker {failed.worker} failed: {failed.message}", code=failed.code)

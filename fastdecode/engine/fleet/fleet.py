"""The holders of KV as the engine sees them: who is there, and what each is
asked and answers.

The engine talks to **holders**, which are caches. The fleet knows the **peer**
that keeps each: a process at the end of one connection. At first every peer
keeps one; it may take over others' (``keepers``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace

from fastdecode.core.clock import Clock
from fastdecode.core.errors import (
    CapacityError,
    ConfigError,
    FastDecodeError,
    ProtocolError,
    WorkerError,
)
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.deadlines import Deadlines
from fastdecode.engine.fleet.keepers import Keepers
from fastdecode.engine.fleet.peers import Peers, RConnection, RHub
from fastdecode.wire.kv.replicating import ReplicationNews
from fastdecode.wire.messages import Answer, Hello, ToRWorker, Welcome


class Fleet:
    """Sends to holders, and receives their answers.

    With a peer (``fastdecode.engine.fleet.peers``) all its holders are lost.
    What is sent to a lost holder goes nowhere. It never comes back, though
    another peer may take its place (``revive``, ``keepers.move``).

    Args:
        hub: one connection an R-worker; at first a holder's number is its
            connection's index.
        timeout_s: how long an answer may take.
        silence_s: how long a peer that owes an answer may give no sign of life,
            where connections tell of those. Only time counts in which somebody
            looked.
        clock: seconds, as ``Connection.heard_s`` has them.
        absent: the holders that aren't there to begin with, and why: they are
            lost.
        device: the cache on the S-worker's device, beside R-workers: the last
            holder.
    """

    def __init__(
        self,
        hub: RHub,
        timeout_s: float,
        silence_s: float = math.inf,
        clock: Clock = time.monotonic,
        absent: Mapping[int, WorkerError] | None = None,
        device: RConnection | None = None,
    ) -> None:
        self._peers = Peers(hub, Deadlines(timeout_s, silence_s, clock), absent or {}, device)
        self.keepers = Keepers(len(self._peers))
        """Which peer keeps which holder."""

    def __len__(self) -> int:
        return len(self.keepers)

    @property
    def lost(self) -> dict[HolderId, WorkerError]:
        """The holders that are lost, and why."""
        lost = self._peers.lost
        return {
            holder: lost[self.keepers[holder]]
            for holder in self.keepers
            if self.keepers[holder] in lost
        }

    @property
    def is_owed(self) -> bool:
        """Whether anybody owes an answer."""
        return self._peers.is_owed

    @property
    def is_owed_at_once(self) -> bool:
        """Whether an answer is owed by who answers at once: the device beside R-workers."""
        return self._peers.is_owed_at_once

    @property
    def gone(self) -> dict[int, WorkerError]:
        """The R-workers that are lost, whoever has taken their holders over, and why."""
        return self._peers.lost

    def take_losses(self) -> list[tuple[HolderId, WorkerError]]:
        """The losses of which nobody has been told yet, in their order. Each is told once."""
        losses = [
            (holder, self._peers.lost[index])
            for index in self._peers.take_losses()
            for holder in self.keepers.kept_by(index)
        ]
        for holder, _ in losses:
            self.keepers.give_back(holder)  # another may come in its first R-worker's place
        return losses

    def take_told(self) -> list[ReplicationNews]:
        """What R-workers have said unasked of replicas. Told once."""
        told = []
        for index, news in self._peers.take_told():
            if self.keepers.keeps(index, news.holder):
                told.append(news)
            else:
                text = f"{self._peers.name(index)} speaks of holder {news.holder}, which isn't its"
                self._peers.lose(index, ProtocolError(text))
        return told

    def peer(self, holder: HolderId) -> str:
        """What the R-worker that keeps a holder is called."""
        return self._peers.name(self.keepers[holder])

    def send(self, holder: HolderId, message: ToRWorker) -> None:
        """Send, or do nothing if the holder is lost (finding that out may be this call's doing)."""
        index = self.keepers[holder]
        if index in self._peers.lost:
            return
        if self.keepers.has_moved or isinstance(message, Hello):
            message = message.for_holder(holder)
        self._peers.send(index, message, holder)

    def receive(self, *, wait: bool = True) -> tuple[HolderId, Answer] | None:
        """The next answer of any holder that owes one. None: look again, and at
        ``lost`` before.

        Waits at most until the first peer has to be given up; or not at all.
        Must not be called when nobody owes anything.
        """
        return self._peers.receive(wait=wait)

    def look(self) -> None:
        """Find out who has gone, while nobody owes an answer."""
        self._peers.look()

    def greet(
        self, hello: Hello, max_blocks: Mapping[HolderId, int] | None = None
    ) -> dict[HolderId, Welcome]:
        """Say Hello to every holder's R-worker and collect the answers of those
        that are there. ``max_blocks``: the most that each is to offer; None: as
        many as it can.

        An R-worker compiles its kernels before it answers, so this may take
        longer than anything that follows.

        Raises:
            ConfigError: an R-worker hasn't the memory for one KV block, or
                can't hold such a cache.
        """
        owed = self._peers.owed
        usual = owed.deadlines
        owed.deadlines = usual.while_greeting()
        try:
            for holder in self.keepers:
                most = (max_blocks or {}).get(holder, hello.max_blocks)
                self.send(holder, replace(hello, max_blocks=most))
            welcomes = _welcomed(self, hello)
        finally:
            owed.deadlines = usual
        return {holder: welcomes[holder] for holder in welcomes if holder not in self.lost}

    def lose(self, holder: HolderId, error: FastDecodeError) -> None:
        """Give up the R-worker that keeps a holder."""
        self._peers.lose(self.keepers[holder], error)

    def revive(self, holder: HolderId) -> None:
        """The hub has another connection in the place of a lost peer's: whoever
        is there has said ``Welcome``."""
        self._peers.revive(self.keepers[holder])


def _welcomed(fleet: Fleet, hello: Hello) -> dict[HolderId, Welcome]:
    """What is answered to ``hello``, which all were told.

    Raises:
        ConfigError: see ``Fleet.greet``.
    """
    welcomes: dict[HolderId, Welcome] = {}
    while fleet.is_owed:
        received = fleet.receive()
        for error in fleet.gone.values():
            if error.code in (CapacityError.default_code, ConfigError.default_code):
                raise ConfigError(error.message, code=error.code)
        if received is None:
            continue
        holder, welcome = received
        assert isinstance(welcome, Welcome), "nothing else was asked"
        try:
            hello.check(welcome)
        except ProtocolError as lie:
            fleet.lose(holder, ProtocolError(f"{fleet.peer(holder)} {lie.message}"))
        else:
            welcomes[holder] = welcome
    return welcomes

"""The holders of KV as the engine sees them: who is there, and what each is
asked and answers.

The engine talks to **holders**, which are caches. The fleet knows the **peer**
that keeps each: a process at the end of one connection. At first every peer
keeps one; it may take over others' (``move``).
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
from fastdecode.engine.fleet.peers import Peers, RConnection, RHub
from fastdecode.wire.kv.replicating import ReplicationNews
from fastdecode.wire.messages import Answer, Hello, ToRWorker, Welcome


class Fleet:
    """Sends to holders, and receives their answers.

    With a peer (``fastdecode.engine.fleet.peers``) all its holders are lost.
    What is sent to a lost holder goes nowhere. It never comes back, though
    another peer may take its place (``revive``, ``move``).

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
        self._peer_of = {HolderId(index): index for index in range(len(self._peers))}
        self._has_moved = False  # a peer may keep several holders

    def __len__(self) -> int:
        return len(self._peer_of)

    @property
    def lost(self) -> dict[HolderId, WorkerError]:
        """The holders that are lost, and why."""
        lost = self._peers.lost
        return {holder: lost[index] for holder, index in self._peer_of.items() if index in lost}

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
            (holder, self._peers.lost[lost])
            for lost in self._peers.take_losses()
            for holder, index in self._peer_of.items()
            if index == lost
        ]
        for holder, _ in losses:
            self._peer_of[holder] = holder  # where another may come in its place
        return losses

    def take_told(self) -> list[ReplicationNews]:
        """What R-workers have said unasked of replicas. Told once."""
        told = []
        for index, news in self._peers.take_told():
            if self._peer_of.get(HolderId(news.holder)) == index:
                told.append(news)
            else:
                text = f"{self._peers.name(index)} speaks of holder {news.holder}, which isn't its"
                self._peers.lose(index, ProtocolError(text))
        return told

    def peer(self, holder: HolderId) -> str:
        """What the R-worker that keeps a holder is called."""
        return self._peers.name(self._peer_of[holder])

    def send(self, holder: HolderId, message: ToRWorker) -> None:
        """Send, or do nothing if the holder is lost (finding that out may be this call's doing)."""
        index = self._peer_of[holder]
        if index in self._peers.lost:
            return
        if self._has_moved or isinstance(message, Hello):
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
        usual = self._peers.deadlines
        self._peers.deadlines = usual.while_greeting()
        try:
            return self._greet(hello, max_blocks)
        finally:
            self._peers.deadlines = usual

    def lose(self, holder: HolderId, error: FastDecodeError) -> None:
        """Give up the R-worker that keeps a holder."""
        self._peers.lose(self._peer_of[holder], error)

    def revive(self, holder: HolderId) -> None:
        """The hub has another connection in the place of a lost peer's: whoever
        is there has said ``Welcome``."""
        self._peers.revive(self._peer_of[holder])

    def move(self, holder: HolderId, to: HolderId) -> None:
        """From now on the R-worker that keeps ``to`` keeps a lost holder, too:
        it has a cache under that name."""
        assert holder in self.lost and to not in self.lost
        self._peer_of[holder] = self._peer_of[to]
        self._has_moved = True

    def give_back(self, holder: HolderId) -> None:
        """A holder that was taken over has nothing left: it is lost, and another
        may come in the place of whoever kept it first."""
        assert self._peer_of[holder] != holder
        self._peer_of[holder] = holder

    def _greet(
        self, hello: Hello, max_blocks: Mapping[HolderId, int] | None
    ) -> dict[HolderId, Welcome]:
        for holder in self._peer_of:
            most = (max_blocks or {}).get(holder, hello.max_blocks)
            self.send(holder, replace(hello, max_blocks=most))
        welcomes: dict[HolderId, Welcome] = {}
        while self._peers.is_owed:
            received = self.receive()
            for error in self._peers.lost.values():
                if error.code in (CapacityError.default_code, ConfigError.default_code):
                    raise ConfigError(error.message, code=error.code)
            if received is not None:
                holder, welcome = received
                assert isinstance(welcome, Welcome), "nothing else was asked"
                try:
                    hello.check(welcome)
                except ProtocolError as lie:
                    self.lose(holder, ProtocolError(f"{self.peer(holder)} {lie.message}"))
                else:
                    welcomes[holder] = welcome
        return {holder: welcome for holder, welcome in welcomes.items() if holder not in self.lost}

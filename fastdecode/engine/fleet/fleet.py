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
from typing import Final

from fastdecode.core.clock import Clock
from fastdecode.core.errors import FastDecodeError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.deadlines import Deadlines
from fastdecode.engine.fleet.keepers import Keepers
from fastdecode.engine.fleet.peers import Peers, RConnection, RHub
from fastdecode.engine.fleet.unasked import Unasked
from fastdecode.engine.stages.later import LaterStages
from fastdecode.engine.stages.links import StageLinks
from fastdecode.engine.stages.tiers import ColumnTiers
from fastdecode.wire.messages import Answer, Hello, ToRWorker


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
        stages: other stages of the pipeline, which the hub's last connections
            are to. To the first of them a holder is a column: an R-worker here,
            and one in every later stage.
    """

    def __init__(
        self,
        hub: RHub,
        timeout_s: float,
        silence_s: float = math.inf,
        clock: Clock = time.monotonic,
        absent: Mapping[int, WorkerError] | None = None,
        device: RConnection | None = None,
        stages: StageLinks | None = None,
    ) -> None:
        deadlines = Deadlines(timeout_s, silence_s, clock)
        num_peers = len(hub.connections) + (device is not None) - len(stages or ())
        self.keepers = Keepers(num_peers)
        """Which peer keeps which holder."""
        self._peers = Peers(hub, deadlines, absent or {}, self.keepers, device, stages)
        self.unasked = self._peers.unasked
        """What R-workers have said unasked."""
        self.owed: Final = self._peers.owed
        """What they owe, and when they were heard, by their connections' index."""
        self.later: LaterStages | None = None
        """The stages behind this one, if this is the first."""
        self.moves: Unasked | ColumnTiers = self.unasked
        """What holders have said of what they have moved: of columns, once all of
        their R-workers have."""
        if stages is not None and not stages.is_asked:
            self.later = LaterStages(stages, self._send, self.unasked)
            self.moves = self.later.tiers
        self.told_first: tuple[ToRWorker, ...] = ()
        """What whoever comes in the place of a lost R-worker is told first."""

    def __len__(self) -> int:
        return len(self.keepers)

    @property
    def lost(self) -> dict[HolderId, WorkerError]:
        """The holders that are lost, and why."""
        lost = self._peers.lost
        void = {} if self.later is None else self.later.losses.void
        return {
            **void,
            **{
                holder: lost[self.keepers[holder]]
                for holder in self.keepers
                if self.keepers[holder] in lost
            },
        }

    @property
    def is_owed(self) -> bool:
        """Whether anybody owes an answer."""
        return self._peers.is_owed or (self.later is not None and self.later.rooms.has_answers)

    @property
    def is_owed_at_once(self) -> bool:
        """Whether an answer is owed by who answers at once: the device beside R-workers."""
        return self._peers.is_owed_at_once

    @property
    def gone(self) -> dict[int, WorkerError]:
        """The R-workers that are lost, whoever has taken their holders over, and why."""
        return self._peers.lost

    @property
    def kept_by_gone(self) -> list[HolderId]:
        """The holders whose R-worker is lost, and that nobody has taken over."""
        gone = self._peers.lost
        return [holder for holder in self.keepers if self.keepers[holder] in gone] if gone else []

    def take_losses(self) -> list[tuple[HolderId, WorkerError]]:
        """The losses of which nobody has been told yet, in their order. Each is told once."""
        losses = [
            (holder, self._peers.lost[index])
            for index in self._peers.take_losses()
            for holder in self.keepers.kept_by(index)
        ]
        for holder, _ in losses:
            self.keepers.give_back(holder)  # another may come in its first R-worker's place
        if self.later is None:
            return losses
        self.later.losses.lose_own(losses)
        return self.later.take_lost()

    def peer(self, holder: HolderId) -> str:
        """What the R-worker that keeps a holder is called."""
        return self._peers.name(self.keepers[holder])

    def send(self, holder: HolderId, message: ToRWorker) -> None:
        """Send, or do nothing if the holder is lost (finding that out may be this call's doing)."""
        if self.later is None or not message.in_every_stage:
            self._send(holder, message)
        elif holder not in self.later.losses.over:
            self._send(holder, message)
            self.later.tell(holder, message)

    def _send(self, holder: HolderId, message: ToRWorker) -> None:
        """To the holder's R-worker here."""
        index = self.keepers[holder]
        if index in self._peers.lost:
            return
        if self.keepers.has_moved or isinstance(message, Hello):
            message = message.for_holder(holder)
        self._peers.send(index, message, holder)

    def receive(self, *, most_s: float = math.inf) -> tuple[HolderId, Answer] | None:
        """The next answer of any holder that owes one. None: look again, and at
        ``lost`` before.

        Waits at most until the first peer has to be given up, and for so many
        seconds. Must not be called when nobody owes anything.
        """
        if self.later is None:
            return self._peers.receive(most_s=most_s)
        if self.later.rooms.has_answers:
            return self.later.rooms.next_answer()
        return self.later.joined(self._peers.receive(most_s=most_s))

    def look(self) -> None:
        """Find out who has gone, while nobody owes an answer."""
        self._peers.look()
        if self.later is not None:
            self.later.listen()

    def lose(self, holder: HolderId, error: FastDecodeError) -> None:
        """Give up the R-worker that keeps a holder."""
        self._peers.lose(self.keepers[holder], error)

    def revive(self, holder: HolderId) -> None:
        """The hub has another connection in the holder's own place: whoever is
        there has said ``Welcome``, and keeps it from now on."""
        self.keepers.give_back(holder)
        self._peers.revive(self.keepers[holder])
        for message in self.told_first:
            self.send(holder, message)

"""The R-workers of an engine: which holder each keeps, what each was asked and answers, and which
of them are lost.

The engine talks to **holders**, which are caches. The pool knows the **worker** that keeps each: a
process at the end of one connection, by that connection's index (``Placement``). A worker answers
in the order in which it was asked. It is **lost**, with all its holders, when its connection
breaks, when it sends ``Failed``, when an answer is overdue, or when it doesn't owe an answer.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from fastdecode.core.clock import Clock
from fastdecode.core.errors import FastDecodeError, ProtocolError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import Shard
from fastdecode.engine.fleet.pending import Deadlines, PendingReplies
from fastdecode.wire.blocks import MoveNews, ReplicationNews, UseTier
from fastdecode.wire.messages import (
    REFUSALS,
    Answer,
    AttendResult,
    Failed,
    FromRWorker,
    Hello,
    ToRWorker,
    Welcome,
)
from fastdecode.wire.traits import unasked
from fastdecode.wire.transport import TIMEOUT, Connection, Hub, PeerLostError, loss

logger = logging.getLogger(__name__)

RHub: TypeAlias = Hub[ToRWorker, FromRWorker]
RConnection: TypeAlias = Connection[ToRWorker, FromRWorker]


class Placement:
    """Which worker keeps which holder: at first that of its index, unless it is one of the
    ``keepers``, which only keep replicas."""

    def __init__(self, workers: Iterable[int], keepers: Collection[int] = ()) -> None:
        self.worker_of: Final = {HolderId(index): index for index in workers}
        """Each holder's worker."""
        self._holders = [one for one in self.worker_of if one not in keepers]
        self._former: set[tuple[int, HolderId]] = set()
        self.has_moved = False
        """True once a worker may keep several holders, or another than its own."""

    def __len__(self) -> int:
        return len(self._holders)

    def __iter__(self) -> Iterator[HolderId]:
        return iter(self._holders)

    def __getitem__(self, holder: HolderId) -> int:
        return self.worker_of[holder]

    def keeps(self, index: int, holder: int) -> bool:
        """Return True if the worker keeps the holder, which may be a number that none has."""
        return self.worker_of.get(HolderId(holder)) == index

    def kept_once(self, index: int, holder: int) -> bool:
        """Return True if the worker kept the holder before. It may not know that this ended."""
        return (index, holder) in self._former

    def move(self, holder: HolderId, to: HolderId) -> None:
        """Move a lost holder to the worker that keeps ``to``, and has a cache under the lost
        one's name."""
        self.place(holder, self.worker_of[to])

    def place(self, holder: HolderId, index: int) -> None:
        self._former.add((self.worker_of[holder], holder))
        self.worker_of[holder] = index
        self.has_moved |= index != holder

    def give_back(self, holder: HolderId) -> None:
        """Move a holder to its own place: the worker that took it over is lost, has nothing left
        of it, or has handed it over."""
        self.place(holder, holder)


class WorkerPool:
    """Sends to holders, receives their answers, and notices dead and silent workers.

    What is sent to a lost holder is dropped. A lost worker never returns, though another may take
    its place (``revive``, ``placement.move``).

    Args:
        hub: One connection per worker. At first a holder's number is its connection's index.
        absent: The workers that are lost from the beginning, and why.
        device: The cache on the S-worker's device, beside R-workers: the last holder. It answers
            inside ``send``, and is never lost.
        num_others: Number of the hub's last connections, which are not to R-workers.
        num_relayed: Number of workers that are reached over those. Their indices are the last.
        keepers: Workers that only keep replicas, by their indices.
    """

    def __init__(
        self,
        hub: RHub,
        timeout_s: float,
        silence_s: float = math.inf,
        clock: Clock = time.monotonic,
        absent: Mapping[int, WorkerError] | None = None,
        device: RConnection | None = None,
        num_others: int = 0,
        num_relayed: int = 0,
        keepers: Collection[int] = (),
    ) -> None:
        self._hub = hub
        self._device = device
        num_peers = len(hub.connections) + (device is not None)
        self.num_workers: Final = num_peers - num_others
        """R-workers that are connected here, and the device beside them."""
        relayed = range(num_peers, num_peers + num_relayed)
        self.placement: Final = Placement([*range(self.num_workers), *relayed], keepers)
        """Which worker keeps which holder."""
        self._unheard = [*map(int, self.placement)] if keepers and not num_others else []
        self.pending: Final = PendingReplies(
            num_peers + num_relayed, Deadlines(timeout_s, silence_s, clock), self._heard_s
        )
        """Answers that workers owe, and their last heartbeats, by their indices."""
        self._replications: list[tuple[int, ReplicationNews]] = []
        self._moves: list[tuple[int, MoveNews]] = []
        self.gone: Final = dict(absent or {})
        """The workers that are lost, whether or not others have taken their holders over, and
        why."""
        self.tier: UseTier | None = None
        """Opens the lower tiers of holders. None if they have none."""
        self._untold = list(self.gone)
        self._newcomers: list[str] = []
        self._early: deque[tuple[int, FromRWorker]] = deque()

    def __len__(self) -> int:
        return len(self.placement)

    @property
    def lost(self) -> dict[HolderId, WorkerError]:
        if not self.gone:
            return {}
        return {x: self.gone[self.placement[x]] for x in self.placement if self.is_lost(x)}

    @property
    def is_owed(self) -> bool:
        return bool(self._early) or any(self.pending.due) or any(self.pending.jobs)

    @property
    def is_owed_at_once(self) -> bool:
        """True if the device beside R-workers, which answers inside ``send``, owes an answer."""
        return False

    def hear_reports(self) -> None:
        """Take in reports of devices whose replicas R-workers keep: steps on a device never
        receive. Answers are kept for ``receive``."""
        for index in self._unheard:
            connection = self._connection(index)
            try:
                while index not in self.gone and (message := connection.poll()) is not None:
                    if isinstance(message, (Failed, ReplicationNews)):
                        self._taken(index, message)
                    else:
                        self._early.append((index, message))
            except WorkerError as error:
                self._lose(index, error)

    def open_tier(self, holder: HolderId) -> None:
        if self.tier is not None:
            self.send(holder, self.tier)

    @property
    def has_moves(self) -> bool:
        return bool(self._moves)

    @property
    def moves(self) -> list[MoveNews]:
        """Reports on transfers and lower tiers that weren't taken yet."""
        return [news for _, news in self._moves]

    def take_moves(self) -> list[MoveNews]:
        """Return the reports on transfers in their order. Each is taken once."""
        reports, self._moves = self._moves, []
        return [news for index, news in reports if self._may_report(index, news.holder)]

    def take_replications(self) -> list[ReplicationNews]:
        """Return the reports on replicas in their order. Each is taken once. A holder may have
        been taken over meanwhile, unknown to its former worker, whose reports are dropped."""
        reports, self._replications = self._replications, []
        once = self.placement.kept_once
        return [
            news
            for index, news in reports
            if self._may_report(index, news.holder, is_late=once(index, news.holder))
        ]

    def _may_report(self, index: int, holder: int, *, is_late: bool = False) -> bool:
        """Return True if a worker keeps a holder. One that reports on another is lost, unless it
        kept that before (``is_late``)."""
        is_its = self.placement.keeps(index, holder)
        if not is_its and not is_late:
            self._lied(index, f"speaks of holder {holder}, which isn't its")
        return is_its

    def take_losses(self) -> list[tuple[HolderId, WorkerError]]:
        """Return the losses that weren't taken yet, in their order. Each is taken once."""
        untold, self._untold = self._untold, []
        places = self.placement
        losses = [(x, self.gone[index]) for index in untold for x in places if places[x] == index]
        for holder, _ in losses:
            places.give_back(holder)  # a replacement may come in its first worker's place
        return losses

    def take_newcomers(self) -> list[str]:
        """Return the names of R-workers that have replaced lost ones. Each is taken once."""
        taken, self._newcomers = self._newcomers, []
        return taken

    @property
    def holders(self) -> list[HolderId]:
        return list(self.placement)

    @property
    def r_workers(self) -> list[HolderId]:
        """The holders of R-workers that are connected here, lost ones included."""
        return [x for x in self.placement if x < self.num_workers - (self._device is not None)]

    def is_here(self, holder: HolderId) -> bool:
        """Return True if the worker that keeps a holder is connected here, and not relayed to."""
        return holder < self.num_workers

    def is_lost(self, holder: HolderId) -> bool:
        return self.placement[holder] in self.gone

    @property
    def members(self) -> WorkerPool:
        """The pool that every group's members are holders of."""
        return self

    def shards_of(self, holder: HolderId) -> Mapping[HolderId, Shard]:
        """Return the holders that keep parts of a holder, and what each keeps: itself."""
        return {holder: Shard()}

    def owner(self, member: HolderId) -> HolderId:
        return member

    def take_lost_members(self, holder: HolderId) -> list[HolderId]:
        """Return the members that a lost holder has lost since the last call."""
        return [holder]

    def resume(self, holder: HolderId) -> None:
        """Use a lost holder again: neighbours have taken over the members that it had lost."""

    def give_up(self, holder: HolderId) -> None:
        """Treat a holder as lost until it is revived: no neighbour takes over its members."""

    def peer(self, holder: HolderId) -> str:
        """Return the name of the worker that keeps a holder, for people."""
        return self._name(self.placement[holder])

    def send(self, holder: HolderId, message: ToRWorker) -> None:
        """Send, or do nothing if the holder is lost. This call may find out that it is."""
        index = self.placement.worker_of[holder]
        if index in self.gone:
            return
        if self.placement.has_moved or isinstance(message, Hello):
            message = message.for_holder(holder)
        self.pending.ask(index, message, holder)
        connection = self._connection(index)
        try:
            connection.send(message)
        except WorkerError as error:
            said = last_words(connection)
            self._lose(index, error if said is None else failure(f"R-worker {said.worker}", said))

    def receive(self, *, most_s: float = math.inf) -> tuple[HolderId, Answer] | None:
        """Wait for the next answer of any holder, while one is owed, up to ``most_s`` or the
        first worker's deadline. Return None if none has arrived that counts: then check
        ``lost`` before the next call."""
        if self._early:
            return self._taken(*self._early.popleft())
        wait_s = self.pending.wait_s(most_s)
        try:
            index, message = self._hub.receive_any(None if wait_s == math.inf else wait_s)
        except PeerLostError as error:
            self._lose(error.index, error)
            return None
        except WorkerError as error:
            if error.code != TIMEOUT:
                self._find_closed()
                return None
            for late, reason in self.pending.overdue():
                self._lose(late, WorkerError(f"{self._name(late)} {reason}", code=TIMEOUT))
            return None
        finally:
            self.pending.deadlines.end_look()
        return self._taken(index, message)

    def look(self) -> list[tuple[HolderId, Answer]]:
        """Find out which workers are lost, outside ``receive``. Return the answers that have
        arrived already."""
        answers = []
        self._find_closed()
        while self._early:
            answers.append(self._taken(*self._early.popleft()))
            if not self._early:
                self._find_closed()
        return [answer for answer in answers if answer is not None]

    def lose(self, holder: HolderId, error: FastDecodeError) -> None:
        self._lose(self.placement[holder], error)

    def revive(self, holder: HolderId, *, has_cache: bool = True) -> None:
        """Let a replacement keep a holder, which has connected in the holder's own place, and
        answered ``Welcome``. ``has_cache``: False if it is to take over a copy of a cache."""
        self.placement.give_back(holder)
        index = self.placement[holder]
        self.gone.pop(index, None)
        self.pending.forget(index)
        self._untold = [lost for lost in self._untold if lost != index]
        if self.is_here(holder):
            self._newcomers.append(self._name(index))
        if has_cache:
            self.open_tier(holder)

    def revive_elsewhere(self, holders: Iterable[HolderId]) -> bool:
        """Let the replacements of lost holders that later stages keep serve them, if all of them
        have one. Return True if they have."""
        return True

    def _lose(self, index: int, error: FastDecodeError) -> None:
        if index in self.gone:
            return
        self.pending.forget(index)
        self._early = deque(early for early in self._early if early[0] != index)
        self._moves = [(one, news) for one, news in self._moves if one != index]
        # Another error: one that was raised keeps all that its frames hold alive.
        self.gone[index] = WorkerError(error.message, code=error.code)
        self._untold.append(index)
        logger.error("%s", loss(self._name(index), error))

    def _lied(self, index: int, what: str) -> None:
        self._lose(index, ProtocolError(f"{self._name(index)} {what}"))

    def _taken(self, index: int, message: FromRWorker) -> tuple[HolderId, Answer] | None:
        if index in self.gone:
            return None  # it was given up, and answers after all
        if type(message) is not AttendResult:  # as nearly all are
            if isinstance(message, Failed):
                self._lose(index, failure(f"R-worker {message.worker}", message))
                return None
            if isinstance(message, ReplicationNews):
                self._replications.append((index, message))
                return None
            if isinstance(message, MoveNews):
                if self.pending.take_report(index, message):
                    self._moves.append((index, message))
                else:
                    self._lied(index, unasked(message))
                return None
        due = self.pending.due[index]
        try:
            if not due:
                raise ProtocolError(unasked(message))
            due[0].message.check(message)
        except ProtocolError as lie:
            self._lied(index, lie.message)
            return None
        if isinstance(message, Welcome):  # what the worker was to move before is forgotten
            self.pending.jobs[index].clear()
        return due.popleft().holder, message

    def _find_closed(self) -> None:
        """Find out which connections have closed. Answers that have arrived are kept for
        ``receive``."""
        for index, connection in enumerate(self._hub.connections):
            if index in self.gone:
                continue
            try:
                answer = connection.poll()
            except WorkerError as error:
                self._lose(index, error)
            else:
                if answer is not None:
                    self._early.append((index, answer))

    def _name(self, index: int) -> str:
        return self._connection(index).peer

    def _connection(self, index: int) -> RConnection:
        return self._hub.connections[index]

    def _heard_s(self, index: int) -> float | None:
        return self._connection(index).heard_s


_LOOK_S: Final = 1e-3
"""Pause between two looks at a device that fetches, while R-workers are waited for."""


class MixedPool(WorkerPool):
    """R-workers, and the cache on the S-worker's device as the last holder; see ``WorkerPool``."""

    @property
    def _device_index(self) -> int:
        return len(self.placement) - 1

    def _connection(self, index: int) -> RConnection:
        if self._device is not None and index == self._device_index:
            return self._device
        return super()._connection(index)

    @property
    def is_owed_at_once(self) -> bool:
        return self.pending.owes_answer(self._device_index)

    def receive(self, *, most_s: float = math.inf) -> tuple[HolderId, Answer] | None:
        """Wait for the next answer. While the device fetches, R-workers are waited for in short
        turns."""
        if not self._early:
            index = self._device_index
            device = self._connection(index)
            if self.is_owed_at_once:
                return self._taken(index, device.receive())
            if self.pending.has_transfers(index):
                report = device.poll()
                if report is not None:
                    return self._taken(index, report)
                most_s = min(most_s, _LOOK_S)
        return super().receive(most_s=most_s)


def last_words(connection: Connection[Any, Any]) -> Failed | None:
    """Return why a peer closed its connection, if it has sent that."""
    try:
        while (message := connection.poll()) is not None:
            if isinstance(message, Failed):
                return message
    except WorkerError:
        pass
    return None


def failure(name: str, failed: Failed) -> WorkerError:
    what = "refuses this job" if failed.code in REFUSALS else "failed"
    return WorkerError(f"{name} {what}: {failed.message}", code=failed.code)

"""The R-workers as the engine sees them: who is alive, who owes an answer, and
since when.

The engine talks to **holders**, which are caches. The fleet knows the **peer**
that keeps each: a process at the end of one connection. At first every peer
keeps one; it may take over others' (``move``).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from fastdecode.core.errors import (
    CapacityError,
    ConfigError,
    FastDecodeError,
    ProtocolError,
    WorkerError,
)
from fastdecode.core.exhaustive import assert_never
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.deadlines import Deadlines
from fastdecode.wire.messages import (
    Answer,
    Failed,
    FromRWorker,
    Hello,
    ToRWorker,
    Unasked,
    Welcome,
)
from fastdecode.wire.transport import TIMEOUT, Hub, PeerLostError, loss

logger = logging.getLogger(__name__)

RHub: TypeAlias = Hub[ToRWorker, FromRWorker]


@dataclass(frozen=True)
class _Due:
    """An answer that is owed."""

    since_s: float
    holder: HolderId
    kinds: tuple[type[Answer], ...]


@dataclass(eq=False)
class _Peer:
    """An R-worker's process. It answers in the order in which it was asked."""

    due: deque[_Due] = field(default_factory=deque)
    is_lost: bool = False


class Fleet:
    """Sends to holders, receives from whichever R-worker answers first, and
    notices the dead and the silent.

    A peer is **lost** when its connection breaks, when it says ``Failed``, when
    an answer is overdue, or isn't one that it owes; and with it all its
    holders. What is sent to a lost holder goes nowhere. It never comes back,
    though another peer may take its place (``revive``, ``move``).

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
    """

    def __init__(
        self,
        hub: RHub,
        timeout_s: float,
        silence_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        absent: Mapping[int, WorkerError] | None = None,
    ) -> None:
        self._hub = hub
        self._deadlines = Deadlines(timeout_s, silence_s, clock)
        self._lost: dict[int, WorkerError] = dict(absent or {})
        self._peers = [_Peer(is_lost=index in self._lost) for index in range(len(hub.connections))]
        self._peer_of: dict[int, int] = {index: index for index in range(len(self._peers))}
        self._has_moved = False  # a peer may keep several holders
        self._early: deque[tuple[int, FromRWorker]] = deque()
        self._untold = [(HolderId(holder), error) for holder, error in self._lost.items()]

    def __len__(self) -> int:
        return len(self._peer_of)

    @property
    def lost(self) -> dict[int, WorkerError]:
        """The holders that are lost, and why."""
        return self._lost

    @property
    def is_owed(self) -> bool:
        """Whether anybody owes an answer."""
        return bool(self._early) or any(peer.due for peer in self._peers)

    def take_losses(self) -> list[tuple[HolderId, WorkerError]]:
        """The losses of which nobody has been told yet, in their order. Each is told once."""
        losses, self._untold = self._untold, []
        return losses

    def peer(self, holder: int) -> str:
        """What the R-worker that keeps a holder is called."""
        return self._name(self._peer_of[holder])

    def send(self, holder: int, message: ToRWorker) -> None:
        """Send, or do nothing if the holder is lost (finding that out may be this call's doing)."""
        if holder in self._lost:
            return
        index = self._peer_of[holder]
        if message.answers:
            self._peers[index].due.append(
                _Due(self._deadlines.clock(), HolderId(holder), message.answers)
            )
        if self._has_moved or isinstance(message, Hello):
            message = message.for_holder(holder)
        try:
            self._hub.connections[index].send(message)
        except WorkerError as error:
            self._lose_peer(index, self._last_words(index) or error)

    def receive(self, *, wait: bool = True) -> tuple[HolderId, Answer] | None:
        """The next answer of any holder that owes one. None: look again, and at
        ``lost`` before.

        Waits at most until the first peer has to be given up; or not at all.
        Must not be called when nobody owes anything.
        """
        if self._early:
            return self._taken(*self._early.popleft())
        now = self._deadlines.begin_look()
        until_s = min(self._end(index)[0] for index, peer in enumerate(self._peers) if peer.due)
        try:
            wait_s = self._deadlines.wait_s(now, until_s) if wait else 0.0
            return self._taken(*self._hub.receive_any(wait_s))
        except PeerLostError as error:
            self._lose_peer(error.index, error)
        except WorkerError as error:
            if error.code == TIMEOUT:
                self._give_up_overdue()
            else:
                self._find_closed()
        finally:
            self._deadlines.end_look()
        return None

    def greet(self, hello: Hello) -> dict[int, Welcome]:
        """Say Hello to every holder's R-worker and collect the answers of those
        that are there.

        An R-worker compiles its kernels before it answers, so this may take
        longer than anything that follows.

        Raises:
            ConfigError: an R-worker hasn't the memory for one KV block, or
                can't hold such a cache.
        """
        usual = self._deadlines
        self._deadlines = usual.while_greeting()
        try:
            return self._greet(hello)
        finally:
            self._deadlines = usual

    def lose(self, holder: int, error: FastDecodeError) -> None:
        """Give up the R-worker that keeps a holder."""
        self._lose_peer(self._peer_of[holder], error)

    def revive(self, holder: int) -> None:
        """The hub has another connection in the place of a lost peer's: whoever
        is there has said ``Welcome``."""
        index = self._peer_of[holder]
        self._peers[index] = _Peer()
        kept = self._holders(index)
        for holder_there in kept:
            self._lost.pop(holder_there, None)
        self._untold = [loss_ for loss_ in self._untold if loss_[0] not in kept]
        self._early = deque(early for early in self._early if early[0] != index)

    def move(self, holder: int, to: int) -> None:
        """From now on the R-worker that keeps ``to`` keeps a lost holder, too:
        it has a cache under that name."""
        assert holder in self._lost and to not in self._lost
        self._peer_of[holder] = self._peer_of[to]
        self._has_moved = True
        del self._lost[holder]

    def _holders(self, index: int) -> list[HolderId]:
        return [HolderId(holder) for holder, peer in self._peer_of.items() if peer == index]

    def _name(self, index: int) -> str:
        return self._hub.connections[index].peer

    def _end(self, index: int) -> tuple[float, str]:
        """When a peer that owes an answer has to be given up, and why."""
        return self._deadlines.end(
            self._peers[index].due[0].since_s, self._hub.connections[index].heard_s
        )

    def _give_up_overdue(self) -> None:
        """Nobody answered; but they may have given signs of life meanwhile."""
        now = self._deadlines.clock()
        for index, peer in enumerate(self._peers):
            if peer.due:
                end_s, reason = self._end(index)
                if end_s <= now:
                    self._lose_peer(
                        index, WorkerError(f"{self._name(index)} {reason}", code=TIMEOUT)
                    )

    def _taken(self, index: int, message: FromRWorker) -> tuple[HolderId, Answer] | None:
        if self._peers[index].is_lost:
            return None  # it was given up, and answers after all
        if isinstance(message, Failed):
            self._take_unasked(index, message)
            return None
        return self._take_answer(index, message)

    def _take_unasked(self, index: int, message: Unasked) -> None:
        """What an R-worker says of its own accord."""
        match message:
            case Failed():
                self._lose_peer(index, _failure(message))
            case _:
                assert_never(message)

    def _take_answer(self, index: int, answer: Answer) -> tuple[HolderId, Answer] | None:
        due = self._peers[index].due
        if not due or not isinstance(answer, due[0].kinds):
            text = f"{self._name(index)} sent {type(answer).__name__}, which nobody asked for"
            self._lose_peer(index, ProtocolError(text))
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
            if self._peers[index].is_lost:
                continue
            try:
                answer = connection.poll()
            except WorkerError as error:
                self._lose_peer(index, error)
            else:
                if answer is not None:
                    self._early.append((index, answer))

    def _greet(self, hello: Hello) -> dict[int, Welcome]:
        for holder in self._peer_of:
            self.send(holder, hello)
        welcomes: dict[int, Welcome] = {}
        while any(peer.due for peer in self._peers):
            received = self.receive()
            for error in self._lost.values():
                if error.code in (CapacityError.default_code, ConfigError.default_code):
                    raise ConfigError(error.message, code=error.code)
            if received is not None:
                holder, welcome = received
                assert isinstance(welcome, Welcome), "nothing else was asked"
                try:
                    hello.check(welcome)
                except ProtocolError as lie:
                    self.lose(holder, lie)
                else:
                    welcomes[holder] = welcome
        return {holder: welcome for holder, welcome in welcomes.items() if holder not in self._lost}

    def _lose_peer(self, index: int, error: FastDecodeError) -> None:
        """Give a peer up, and all that it keeps."""
        if self._peers[index].is_lost:
            return
        self._peers[index].is_lost = True
        self._peers[index].due.clear()
        # Another error: one that was raised keeps all that its frames hold alive.
        told = WorkerError(error.message, code=error.code)
        for holder in self._holders(index):
            self._lost[holder] = told
            self._untold.append((holder, told))
        logger.error("%s", loss(self._name(index), error))


def _failure(failed: Failed) -> WorkerError:
    return WorkerError(f"R-worker {failed.worker} failed: {failed.message}", code=failed.code)

"""In the place of a group of R-workers of which one is lost come those that are
left, and share the heads anew."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.deadlines import Deadlines
from fastdecode.engine.fleet.heads.hub import GROUP, HeadsHub
from fastdecode.engine.fleet.replacements import HubReplacements
from fastdecode.schedule.ring import num_shared
from fastdecode.wire.messages import Hello, Welcome

logger = logging.getLogger(__name__)


def most_blocks(hub: HeadsHub, hello: Hello) -> int:
    """That each of a group may offer, which has just been greeted, and of which
    each is to keep its neighbour's replica; of a single one all.

    Raises:
        ConfigError: there isn't the memory.
    """
    if len(hub.shares) < 2:
        return 0
    blocks = [welcome.num_blocks for welcome in hub.welcomes.values()]
    return num_shared(blocks, [hello.part(x).kv.block_bytes for x in hub.shares.values()])


class Resharing:
    """See the module, and ``fastdecode.engine.fleet.replacements.Replacements``.

    Args:
        hub: theirs.
        hello: what they are greeted with again.
        deadlines: how long an answer may take, and a silence last.
        places: who may come in the place of one; None: nobody. Used with
            replicas only.
    """

    def __init__(
        self,
        hub: HeadsHub,
        hello: Hello,
        deadlines: Deadlines,
        places: HubReplacements[Any] | None = None,
    ) -> None:
        self._hub = hub
        self._hello = hello
        self._deadlines = deadlines
        self._places = places
        self._have_ended: Callable[[], bool] | None = None
        self._greeting: tuple[Deadlines, float] | None = None
        """How long they may take to answer, and since when they have been asked."""
        self._most_blocks: int | None = None  # that they were asked for
        self._welcome: Welcome | None = None
        self._told: set[int] = set()  # of whose loss was spoken

    @property
    def timeout_s(self) -> float:
        """See ``Replacements``."""
        if self._num_left:
            return math.inf
        return 0.0 if self._have_ended is None or self._places is None else self._places.timeout_s

    @property
    def _num_left(self) -> int:
        members = self._hub.members
        return len(members) - len(members.gone)

    def limit(self, num_blocks: Mapping[int, int]) -> None:
        """See ``Replacements``. What a group may offer depends on who is left."""

    def keep_replicas(self, have_ended: Callable[[], bool]) -> HubReplacements[Any] | None:
        """Those that share the heads anew keep replicas, too. Returns who may
        come in the place of one.

        Args:
            have_ended: whether nobody can go on for a lost one any more.
        """
        self._have_ended = have_ended
        self._limit()
        return self._places

    def look(self, lost: Iterable[int]) -> dict[int, Welcome]:
        """See ``Replacements``. They may take long to answer: they may have to
        compile kernels for other numbers of heads."""
        if GROUP not in lost or not self._may_begin():
            return {}
        while self._welcome is None and self._num_left:
            try:
                if self._greeting is None:
                    self._begin()
                else:
                    self._hear(*self._greeting)
                    break
            except WorkerError:
                self._greeting = None  # one less
        return {} if self._welcome is None else {GROUP: self._welcome}

    def admit(self, worker: int) -> None:
        """See ``Replacements``."""
        self._welcome = self._greeting = None
        self._limit()

    def _limit(self) -> None:
        """Those that come in a member's place have its heads, and as much room."""
        if self._places is not None:
            least = min(welcome.num_blocks for welcome in self._hub.welcomes.values())
            self._places.limit(dict.fromkeys(self._hub.shares, least), self._hub.shares)

    def _may_begin(self) -> bool:
        """Whether nothing is left of replicas, nor in the way of new ones."""
        if self._greeting is not None or self._welcome is not None or self._have_ended is None:
            return True
        return self._have_ended() and self._let_in()

    def _let_in(self) -> bool:
        """Those that wait in the place of lost ones are there from now on. False:
        some have been greeted and haven't answered yet."""
        if self._places is None:
            return True
        found = self._places.look(list(self._hub.members.gone))
        if self._places.is_owed:
            return False
        for place in found:
            self._places.admit(place)
            self._hub.members.revive(HolderId(place))
        return True

    def _begin(self) -> None:
        """Raises WorkerError: another one is lost."""
        if self._have_ended is None:  # else it was asked before
            self._hub.give_up_the_slowest()
        gone = self._hub.members.gone
        for index in gone.keys() - self._told:
            peer = self._hub.members.peer(HolderId(index))
            logger.error("%s is lost, its heads of every sequence with it", peer)
        self._told = set(gone)
        if self._num_left:
            self._greet(0)

    def _greet(self, most: int) -> None:
        """``most``: blocks; 0: as many as they have. Raises as above."""
        self._most_blocks = most
        self._hub.send(replace(self._hello, max_blocks=most))
        deadlines = self._deadlines.while_greeting()
        self._greeting = deadlines, deadlines.clock()

    def _hear(self, deadlines: Deadlines, asked_s: float) -> None:
        """Everybody's answer, once all have given it. Raises WorkerError:
        another one is lost."""
        deadlines.begin_look()
        try:
            answer = self._hub.poll()
            if answer is None:
                self._hub.give_up_overdue(deadlines, asked_s)
        finally:
            deadlines.end_look()
        assert answer is None or isinstance(answer, Welcome)
        if answer is None or self._have_ended is None or self._most_blocks:
            self._welcome = answer
        elif most := self._offered():
            self._greet(most)
        else:
            self._welcome = answer

    def _offered(self) -> int:
        """Blocks that each is to offer beside a replica; 0: all."""
        try:
            return most_blocks(self._hub, self._hello)
        except ConfigError as error:
            raise WorkerError(error.message) from None

"""Links between R-workers on which messages are damaged, in both directions: an
owner serves its S-worker as ever and has no replica any more, and the neighbour
keeps what else it has.
"""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any, get_args

from damaged_frames import SESSION, SMALL, Served, _End, damaged, read
from state_machine import KV_BYTES
from values import replace

from fastdecode.core.errors import WorkerError
from fastdecode.wire.kv.replicating import Replicate, ReplicationNews, Unprotected
from fastdecode.wire.messages import (
    Accepted,
    CloseSequence,
    FromRWorker,
    OpenSequence,
    Shutdown,
    ToRWorker,
)
from rworker.attention import AttentionExecutor
from rworker.serving_terms import ServingTerms
from rworker.state import RWorkerState
from rworker.transfers.background_transfers import BackgroundTransfers
from rworker.worker import RWorker

LINK_BYTES = 1 << 20
DAMAGED = 0.1
"""Of a link's messages."""
S_WORKER = 0


class Wire:
    """The owner's end of a link, on which either side's messages are damaged.

    Args:
        chance: which, and how.
        keeper: the neighbour.
        index: of this link, there.
    """

    peer = "the neighbour"
    heard_s = None
    is_reached = True

    def __init__(self, chance: random.Random, keeper: Keeper, index: int) -> None:
        self._chance = chance
        self._keeper = keeper
        self._index = index
        self._is_over = False
        self.num_damaged = 0

    def send(self, message: ToRWorker) -> None:
        found = self._carried(message)
        if found is None:
            self.close()  # the neighbour hangs up on it
        elif isinstance(found, ToRWorker) and not isinstance(found, Shutdown):
            self._keeper.tell(self._index, found)

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        raise AssertionError("a link is polled")

    def poll(self) -> FromRWorker | None:
        answers = self._keeper.ends[self._index].answers
        if not answers:
            if self._is_over:
                raise WorkerError("the neighbour is gone")
            return None
        found = self._carried(answers.pop(0))
        if not isinstance(found, get_args(FromRWorker)):
            raise WorkerError("the neighbour broke the protocol")
        return found

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._keeper.lose(self._index)

    def _carried(self, message: Any) -> Any:
        """None: it can't be read any more."""
        if self._chance.random() >= DAMAGED:
            return message
        self.num_damaged += 1
        return read(damaged(self._chance, message))


class Keeper:
    """The neighbour, with its S-worker's own cache, and the way to it."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._state = RWorkerState(
            "keeper", kv_bytes=2 * KV_BYTES, serving=ServingTerms(keeps_serving=True)
        )
        self._executor = AttentionExecutor(num_threads=1)
        self.ends: dict[int, _End] = {S_WORKER: _End()}
        self.wires: list[Wire] = []
        self.tell(S_WORKER, replace(SMALL, holder=1, session=SESSION))

    def connect(self, address: str, line: int) -> Wire:
        index = 1 + len(self.wires)
        self.ends[index] = _End()
        self.wires.append(Wire(self._chance, self, index))
        return self.wires[-1]

    def expect(self, address: str, line: int) -> None:
        pass

    def _at_work(self) -> RWorker:
        peers: Any = SimpleNamespace(connections=self.ends)
        return RWorker(peers, self._state, self._executor)

    def tell(self, peer: int, message: ToRWorker) -> None:
        self._at_work().obey(self._state.handle(peer, message))
        self._state.check_invariants()

    def lose(self, peer: int) -> None:
        self._at_work().obey(self._state.lost(peer))
        self._state.check_invariants()

    def serves(self) -> bool:
        """Whether its S-worker is served as ever."""
        end = self.ends[S_WORKER]
        end.answers.clear()
        self.tell(S_WORKER, OpenSequence(1, 8, 1))
        self.tell(S_WORKER, CloseSequence(1, 1))
        return end.answers == [Accepted(1)]


class Owner(Served):
    """An R-worker whose cache a neighbour keeps."""

    def __init__(self, keeper: Keeper) -> None:
        self.links: BackgroundTransfers | None = None
        self.told: list[ReplicationNews] = []
        super().__init__()
        self.links = BackgroundTransfers(
            self.executor, keeper, lambda peer, news: self.told.append(news)
        )

    def tell(self, peer: int, message: ToRWorker) -> None:
        peers: Any = SimpleNamespace(connections=self.peers)
        at_work = RWorker(peers, self.state, self.executor, self.links)
        at_work.obey(self.state.handle(peer, message))
        self.state.check_invariants()
        if self.links is not None:
            self.links.work()


def to_links(number: int, chance: random.Random) -> Counter[str]:
    """So many damaged messages, on one link after another."""
    counts: Counter[str] = Counter()
    keeper = Keeper(chance)
    owner = Owner(keeper)
    while counts["sent"] < number:
        link = 1 + len(keeper.wires)
        owner.tell(Owner.HONEST, Replicate("keeper", "", LINK_BYTES, link, 1e6))
        is_right = owner.is_unchanged() and keeper.serves()
        counts["right" if is_right else "changed"] += 1
        counts["links given up"] += any(isinstance(news, Unprotected) for news in owner.told)
        owner.told.clear()
        counts["sent"] += keeper.wires[-1].num_damaged
    return counts

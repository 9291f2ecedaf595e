"""What the engine makes of what R-workers say of their replicas."""

from __future__ import annotations

import pytest
from state_machine import HELLO
from values import replace

from fastdecode.core.holders import HolderId
from fastdecode.engine.fleet.greeting import greet
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.engine.fleet.replicas import Replicas
from fastdecode.engine.fleet.ring import LinkOptions
from fastdecode.wire.blocks import NO_STEP, Dropped, Replicate, Replicated
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.messages import FromRWorker, Open, ToRWorker, Welcome
from fastdecode.wire.transport import TIMEOUT

End = InprocConnection[FromRWorker, ToRWorker]
SESSION = 5
HOLDERS = [HolderId(0), HolderId(1), HolderId(2)]


class Ring:
    """Three R-workers, in whose hands it is what they say."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
        self.ends: list[End] = [
            connect(hub, "S", InprocHub[FromRWorker, ToRWorker](), f"R-worker r{i}")[1]
            for i in HOLDERS
        ]
        self.now_s = 0.0
        self.fleet = WorkerPool(hub, timeout_s, clock=lambda: self.now_s)
        hello = replace(HELLO, session=SESSION)
        for end in self.ends:
            end.send(Welcome("r", 10, hello.kv.block_size, 1))
        greet(self.fleet, hello)
        names = [f"r{i}" for i in HOLDERS]
        rings = [(HOLDERS, LinkOptions(names, 1 << 20, 60.0, SESSION))]
        self.replicas = Replicas(self.fleet, rings, clock=lambda: self.now_s)
        self.replicas.begin()

    def say(self, holder: int, lane: int, step: int, of: int | None = None, link: int = 1) -> None:
        """An R-worker tells how far a replica is; its own, if nothing else is said."""
        self.ends[holder].send(Replicated(holder if of is None else of, lane, step, link))
        self.fleet.look()
        self.replicas.take_news(last_step=9)

    def drop(self, keeper: int, cache: int) -> None:
        """An R-worker has dropped a replica."""
        self.ends[keeper].send(Dropped(keeper, cache))
        self.fleet.look()
        self.replicas.take_news(last_step=9)

    def lose(self, holder: int) -> bool:
        self.ends[holder].close()
        self.fleet.look()
        (lost,) = (lost for lost, _ in self.fleet.take_losses())
        return self.replicas.lose(lost, is_used=True)

    def told(self, holder: int) -> list[ToRWorker]:
        told = []
        while (message := self.ends[holder].poll()) is not None:
            told.append(message)
        return told


def test_who_hangs_and_is_to_drop_a_replica_is_given_up_in_time() -> None:
    """The deadline is that of the answers of its pool."""
    ring = Ring(timeout_s=8.0)
    (members,) = ring.replicas.rings
    assert not members.end_all()
    for keeper, cache in ((0, 2), (1, 0)):
        ring.drop(keeper, cache)
    ring.now_s = 7.9
    assert not members.end_all() and not ring.fleet.gone
    ring.now_s = 8.0
    assert members.end_all()
    assert list(ring.fleet.gone) == [2] and ring.fleet.gone[HolderId(2)].code == TIMEOUT


def test_a_replica_is_there_when_its_owner_has_said_so() -> None:
    """A neighbour that is asked for one that it hasn't would be lost, too."""
    ring = Ring()
    ring.say(0, 0, NO_STEP)
    assert ring.lose(0)
    assert not ring.lose(1), "nothing was heard of its replica"
    assert ring.replicas.figures.num_recomputed_holders == 1


def test_time_without_a_replica_counts_from_the_beginning() -> None:
    ring = Ring()
    for holder in HOLDERS:
        ring.now_s += 1.0
        ring.say(holder, 0, NO_STEP)
    assert ring.replicas.figures.unprotected_s == 3.0
    ring.now_s += 1.0
    ring.say(0, 1, 7)
    assert ring.replicas.figures.unprotected_s == 3.0
    assert ring.lose(1)
    ring.now_s += 2.0
    ring.replicas.take_news(last_step=9)
    assert ring.replicas.figures.unprotected_s == 5.0
    assert [type(x) for x in ring.told(0)][-2:] == [Replicate, Replicate]


@pytest.mark.parametrize("of", [2, -1, 1 << 40])
def test_news_that_cannot_be_are_believed_nowhere(of: int) -> None:
    ring = Ring()
    ring.say(1, 0, 1, of)
    assert [holder for holder, _ in ring.fleet.take_losses()] == [1]
    assert ring.fleet.lost[HolderId(1)].code == "protocol_error"
    assert ring.replicas.lose(HolderId(1), is_used=True) is False
    ring.fleet.send(HolderId(0), Open(1, 8))
    assert isinstance(ring.told(0)[-1], Open), "the others go on"


def test_the_ring_is_not_closed_over_others_before_it_knows_of_a_loss() -> None:
    """Or the replica of the lost one would be dropped."""
    ring = Ring()
    for holder in HOLDERS:
        ring.say(holder, 0, NO_STEP)
        ring.told(holder)
    ring.ends[1].close()
    ring.fleet.look()
    ring.replicas.mend()
    assert not ring.told(0) and not ring.told(2)
    ((lost, _),) = ring.fleet.take_losses()
    assert ring.replicas.lose(lost, is_used=True)

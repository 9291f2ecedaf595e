"""R-workers at the end of a network that a test makes up: one thread, a clock
that only moves when somebody waits, and faults at chosen moments.

What an R-worker does is the real thing (``rworker.worker.serve_next``: its
state, its kernels). Messages take a while and keep their order; a **crashed**
R-worker's connections close, one that **hangs** does nothing for a while and
then goes on where it was, and a **cut** link delivers nothing until it heals.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from simulated_disk import SimulatedDisk
from simulated_process import End, Process

from fastdecode.core.errors import WorkerError
from fastdecode.schedule.simulation.clock import VirtualClock
from fastdecode.wire.messages import FromRWorker, ToRWorker
from fastdecode.wire.transport import PeerLostError, closed_error, timeout_error
from rworker.caches import Caches, HolderCache


class _WorkersSide:
    """An R-worker's side of a connection."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.is_closed = False

    peer = "the S-worker"

    def send(self, message: FromRWorker) -> None:
        if self.is_closed:
            raise closed_error(self.peer, by_peer=False)
        if self._link.is_closed:
            raise closed_error(self.peer, by_peer=True)
        self._link.travel(lambda: self._link.arrive(message), to_worker=False)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._link.travel(lambda: self._link.arrive(End.END), to_worker=False)


class Link:
    """The S-worker's side of a connection; ``ZmqConnection``, to whoever uses it.

    Args:
        network: whose process of this number it leads to.
    """

    def __init__(self, network: Network, number: int) -> None:
        self._network = network
        self._number = number
        self._process: Process | None = None
        self._index = -1
        self._last_s = {True: 0.0, False: 0.0}
        self._cut_until_s = 0.0
        self._cut_since_s = math.inf
        self.is_closed = False
        self.has_ended = False
        self._bind()

    @property
    def peer(self) -> str:
        return f"R-worker r{self._number}"

    @property
    def heard_s(self) -> float | None:
        """Signs of life come all the time."""
        now_s, process = self._network.time.now, self._process
        heard_s = now_s
        if now_s < self._cut_until_s:
            heard_s = self._cut_since_s
        if process is not None and process.hangs:
            heard_s = min(heard_s, process.hung_since_s)
        return heard_s

    @property
    def is_reached(self) -> bool:
        self._bind()
        return self._process is not None

    @property
    def is_open(self) -> bool:
        return not self.is_closed and not self.has_ended

    def cut(self, for_s: float) -> None:
        """What is under way arrives; what is sent from now on, only then."""
        now_s = self._network.time.now
        if now_s >= self._cut_until_s:
            self._cut_since_s = now_s
        self._cut_until_s = max(self._cut_until_s, now_s + for_s)

    def travel(self, act: Callable[[], None], *, to_worker: bool) -> None:
        """Do it at the other side, behind all that is under way there."""
        self._network.count_sent()
        at_s = max(self._network.time.now, self._cut_until_s) + self._network.latency_s()
        at_s = self._last_s[to_worker] = max(at_s, self._last_s[to_worker])
        self._network.time.at(at_s, act)

    def arrive(self, message: FromRWorker | End) -> None:
        if not self.is_closed:
            self._network.arrivals.append((self, message))

    def check(self) -> None:
        if any(link is self and message is End.END for link, message in self._network.arrivals):
            raise closed_error(self.peer, by_peer=True)

    def send(self, message: ToRWorker) -> None:
        if not self.is_open:
            raise closed_error(self.peer, by_peer=not self.is_closed)
        self._tell(message)

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        raise AssertionError("the hub receives")

    def poll(self) -> FromRWorker | None:
        if not self.is_open:
            raise closed_error(self.peer, by_peer=not self.is_closed)
        for place, (link, message) in enumerate(self._network.arrivals):
            if link is self:
                del self._network.arrivals[place]
                return self.take(message)
        return None

    def take(self, message: FromRWorker | End) -> FromRWorker:
        if isinstance(message, End):
            self.has_ended = True
            raise closed_error(self.peer, by_peer=True)
        return message

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._tell(End.END)

    def forsake(self, *, is_seen: bool) -> None:
        """Nobody is at this side any more."""
        if not self.is_closed:
            self.is_closed = True
            if is_seen:
                self._tell(End.END)

    @property
    def caches(self) -> list[HolderCache]:
        """What its R-worker keeps for this connection, if it is there and answers."""
        process = self._process
        if process is None or not process.is_up or process.hangs:
            return []
        caches: Caches = process.state._caches
        return [cache for cache in caches if cache.owner == self._index]

    def _tell(self, message: ToRWorker | End) -> None:
        process, index = self._process, self._index
        if process is not None:
            self.travel(lambda: process.deliver(index, message), to_worker=True)

    def _bind(self) -> None:
        """To the process that is there, if one is and this side has none."""
        process = self._network.processes[self._number]
        if self._process is None and process.is_up:
            self._process = process
            self._index = process.connect(_WorkersSide(self))


class _NeighbourLink(Link):
    """From one R-worker to another."""

    def __init__(self, network: Network, number: int, owner: Process) -> None:
        self._arrived: deque[FromRWorker | End] = deque()
        self._owner = owner
        super().__init__(network, number)

    def arrive(self, message: FromRWorker | End) -> None:
        if not self.is_closed:
            self._arrived.append(message)
            self._owner.wake()

    def poll(self) -> FromRWorker | None:
        if not self.is_open:
            raise closed_error(self.peer, by_peer=not self.is_closed)
        return self.take(self._arrived.popleft()) if self._arrived else None


class _Neighbours:
    """How a process reaches others: by their numbers."""

    def __init__(self, network: Network, owner: Process) -> None:
        self._links: list[_NeighbourLink] = []
        self._cut_until_s = 0.0
        self._network = network
        self._owner = owner

    def connect(self, address: str, line: int) -> _NeighbourLink:
        link = _NeighbourLink(self._network, int(address), self._owner)
        link.cut(self._cut_until_s - self._network.time.now)
        self._links.append(link)
        return link

    def cut(self, for_s: float) -> None:
        """Links that are there, and those that begin meanwhile."""
        self._cut_until_s = max(self._cut_until_s, self._network.time.now + for_s)
        for link in self._links:
            link.cut(for_s)

    def expect(self, address: str, line: int) -> None:
        pass


class Network:
    """The S-worker's hub (``ZmqHub``, to whoever uses it), and the processes behind it.

    Args:
        num_workers: processes, one connection each.
        kv_bytes: memory of each for K and V.
        chance: what nobody chooses.
        session_keep_s: for how long processes keep caches of an S-worker that
            is lost; 0: they don't.
        most_file_bytes: of a replica's file on the disk that all share; None: there is none.
    """

    def __init__(
        self,
        num_workers: int,
        kv_bytes: int,
        chance: random.Random,
        session_keep_s: float = 0.0,
        *,
        most_file_bytes: float | None = None,
    ) -> None:
        self.time = VirtualClock(most_events=1_000_000)
        self.session_keep_s = session_keep_s
        self.num_sent = 0
        """Messages, in both directions."""
        self._when_sent: dict[int, list[Callable[[], None]]] = {}
        self.arrivals: deque[tuple[Link, FromRWorker | End]] = deque()
        self._kv_bytes = kv_bytes
        self._chance = chance
        self._usual_s = chance.choice([1e-5, 1e-4, 2e-3])
        self.disk = None if most_file_bytes is None else SimulatedDisk(self, most_file_bytes)
        self.processes: list[Any] = [None] * num_workers
        for number in range(num_workers):
            self.start(number)
        self._links = [Link(self, number) for number in range(num_workers)]

    def start(self, number: int) -> None:
        """A process comes, in the place of one that is gone."""
        assert self.processes[number] is None or not self.processes[number].is_up
        name = f"r{number}"
        self.last_started = number
        self.processes[number] = Process(
            name,
            self._kv_bytes,
            self.session_keep_s,
            self.time,
            self._chance,
            lambda process: _Neighbours(self, process),
            self.disk,
        )

    def when_sent(self, number: int, act: Callable[[], None]) -> None:
        """Do it when so many messages have been sent."""
        self._when_sent.setdefault(number, []).append(act)

    def count_sent(self) -> None:
        self.num_sent += 1
        for act in self._when_sent.pop(self.num_sent, []):
            self.time.at(self.time.now, act)

    def latency_s(self) -> float:
        return self._usual_s * self._chance.uniform(0.5, 3.0)

    @property
    def connections(self) -> Sequence[Link]:
        return self._links

    def forsake(self, *, is_seen: bool) -> None:
        """The S-worker is gone without a goodbye, and another one comes, with
        connections of its own. ``is_seen``: processes learn it at once."""
        for link in self._links:
            link.forsake(is_seen=is_seen)
        self.arrivals.clear()
        self._links = [Link(self, number) for number in range(len(self.processes))]

    def reconnect(self, index: int) -> Link:
        return Link(self, index)

    def replace(self, index: int, link: Link) -> None:
        self._links[index] = link

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, FromRWorker]:
        until_s = math.inf if timeout_s is None else self.time.now + timeout_s
        while True:
            for place, (link, message) in enumerate(self.arrivals):
                if link in self._links and link.is_open:
                    del self.arrivals[place]
                    return self._taken(link, message)
            if not any(link.is_open for link in self._links):
                raise closed_error("every R-worker", by_peer=True)
            if not self.time.next(until_s):
                assert timeout_s is not None
                raise timeout_error("any R-worker", timeout_s)

    def _taken(self, link: Link, message: FromRWorker | End) -> tuple[int, FromRWorker]:
        index = self._links.index(link)
        try:
            return index, link.take(message)
        except WorkerError as error:
            raise PeerLostError(index, error) from None

"""R-workers at the end of a network that a test makes up: one thread, a clock that only moves when
a thread waits, and faults at chosen moments.

What an R-worker does is the real thing (``rworker.worker.serve_next``: its state, its kernels).
Messages take a while and keep their order; a **crashed** R-worker's connections close, one that
**hangs** does nothing for a while and then continues where it was, and a **cut** link delivers
nothing until it heals."""

from __future__ import annotations

import contextlib
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, Protocol

from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.schedule.simulation.clock import VirtualClock
from fastdecode.wire.blocks import ReplicationNews
from fastdecode.wire.messages import AttendResult, FromRWorker, ToRWorker
from fastdecode.wire.transport import PeerLostError, closed_error, timeout_error
from rworker.attention import AttentionExecutor
from rworker.caches import Caches, HolderCache
from rworker.instructions import Compute, LinkReplica, ReadReplica
from rworker.serving_terms import ServingTerms
from rworker.state import RWorkerState
from rworker.stream.mirror import UNANSWERED
from rworker.transfers.background_transfers import BackgroundTransfers
from rworker.transfers.replica_file import ReplicaSink, answer_of
from rworker.worker import GracePeriod, RWorker, serve_next

Name = tuple[int, int, int]


class SimulatedDisk:
    """Its files, by session, holder and link.

    Args:
        network: whose clock and chance it has.
        most_bytes: Most bytes of K and V in a file before it is rewritten.
    """

    def __init__(self, network: Network, most_bytes: float = math.inf) -> None:
        self.files: dict[Name, list[ToRWorker]] = {}
        self.num_settled = 0
        """Files that took the place of ones before."""
        self.network = network
        self.most_bytes = most_bytes

    def of(self, owner: Process) -> ProcessFiles:
        return ProcessFiles(self, owner)


class ProcessFiles:
    """See ``ReplicaFiles``: as one process uses them."""

    def __init__(self, disk: SimulatedDisk, owner: Process) -> None:
        self._disk = disk
        self._owner = owner

    def sink(self, order: LinkReplica) -> ReplicaSink:
        session = order.books.hello.session
        self.remove(session, order.holder, order.number)
        name = session, order.holder, order.number
        written: list[_File] = []

        def connect() -> Any:
            written.append(_File(self._disk, self._owner))
            if len(written) == 1:
                self._disk.files[name] = written[-1].records
            return written[-1]

        def settle() -> None:
            self._disk.num_settled += 1
            self._disk.files[name] = written[-1].records

        def discard() -> None:
            self._disk.files.pop(name, None)

        return ReplicaSink(connect, self._disk.most_bytes, settle, discard)

    def read(self, order: ReadReplica) -> Iterator[ToRWorker]:
        of_holder = order.message.session, order.message.holder
        names = [name for name in self._disk.files if name[:2] == of_holder]
        if not names:
            raise ConfigError("there is no such file")
        yield from list(self._disk.files[max(names)])

    def remove(self, session: int, holder: int, link: int) -> None:
        files = self._disk.files
        for name in [x for x in files if x[:2] == (session, holder) and x[2] <= link]:
            del files[name]


class _File:
    peer = "a file"
    is_reached = True

    def __init__(self, disk: SimulatedDisk, owner: Process) -> None:
        self.records: list[ToRWorker] = []
        self._answers: deque[FromRWorker] = deque()
        self._disk = disk
        self._owner = owner
        self._last_s = 0.0
        self._is_cut = False

    def send(self, message: ToRWorker) -> None:
        network = self._disk.network
        at_s = max(network.time.now + network.latency_s(), self._last_s)
        self._last_s = at_s
        network.time.at(at_s, lambda: self._arrive(message))

    def _arrive(self, message: ToRWorker) -> None:
        if not self._owner.is_up:
            return
        self.records.append(message)
        if not isinstance(message, UNANSWERED):
            self._answers.append(answer_of(message))
            self._owner.wake()

    def poll(self) -> FromRWorker | None:
        if self._is_cut:
            raise WorkerError("it is closed")
        return self._answers.popleft() if self._answers else None

    def close(self) -> None:
        self._is_cut = True


class End(Enum):
    END = "the other side has closed the connection"


class _Executor(AttentionExecutor):
    """An executor that can fail a number of computations."""

    num_failures = 0  # computations that still fail

    def compute(self, compute: Compute) -> AttendResult:
        if self.num_failures:
            self.num_failures -= 1
            raise MemoryError("no more memory")
        return super().compute(compute)


class Side(Protocol):
    """A process's side of a connection."""

    def send(self, message: FromRWorker) -> None: ...

    def close(self) -> None: ...


class Process:
    """One R-worker's process, and its side of every connection to it.

    Args:
        name: of the R-worker.
        kv_bytes: its memory for K and V.
        keep_s: for how long it keeps caches of an S-worker that is lost.
        time: that passes.
        chance: Source of random moments.
        reach: makes what it reaches its neighbours by.
        disk: Where replicas are stored. None stores none.
    """

    def __init__(
        self,
        name: str,
        kv_bytes: int,
        keep_s: float,
        time: VirtualClock,
        chance: random.Random,
        reach: Callable[[Process], Any],
        disk: SimulatedDisk | None = None,
    ) -> None:
        serving = ServingTerms(keeps_serving=True, keep_s=keep_s)
        has_tier = disk is not None
        self.state = RWorkerState(name, kv_bytes=kv_bytes, serving=serving, has_tier=has_tier)
        self._grace_period = GracePeriod(serving, time)
        self._awaits = False
        self.executor = _Executor(num_threads=1, clock=time)
        self.neighbours = reach(self)
        files: Any = None if disk is None else disk.of(self)
        reached = self.executor, self.neighbours, self._tell, time, files
        self.links = BackgroundTransfers(*reached)
        self.is_up = True
        self.hangs_until_s = 0.0
        self.hung_since_s = math.inf
        self.connections: list[Side] = []
        self._time = time
        self._chance = chance
        self._inbox: deque[tuple[int, ToRWorker | End]] = deque()
        self._has_answers = False
        self._is_busy = False

    def connect(self, side: Side) -> int:
        self.connections.append(side)
        return len(self.connections) - 1

    def deliver(self, peer: int, message: ToRWorker | End) -> None:
        self._inbox.append((peer, message))
        self._go_on()

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ToRWorker]:
        """As a hub's; if there is nothing, links have something to do."""
        if not self._inbox:
            raise timeout_error("every peer", 0.0)
        peer, message = self._inbox.popleft()
        if isinstance(message, End):
            raise PeerLostError(peer, closed_error("the S-worker", by_peer=True))
        return peer, message

    def crash(self) -> None:
        self.is_up = False
        self.links.close()
        for side in self.connections:
            side.close()

    def wake(self) -> None:
        """Continue after a neighbour's answer."""
        self._has_answers = True
        self._go_on()

    def hang(self, for_s: float) -> None:
        if self._time.now >= self.hangs_until_s:
            self.hung_since_s = self._time.now
        self.hangs_until_s = max(self.hangs_until_s, self._time.now + for_s)
        self._time.at(self.hangs_until_s, self._go_on)

    @property
    def hangs(self) -> bool:
        return self._time.now < self.hangs_until_s

    @property
    def _has_work(self) -> bool:
        wait_s = self.links.wait_s  # None: there are no links any more
        return bool(self._inbox or wait_s == 0 or (self._has_answers and wait_s is not None))

    def _go_on(self) -> None:
        if self._has_work and self.is_up and not self.hangs and not self._is_busy:
            self._is_busy = True
            self._time.at(self._time.now + self._chance.uniform(0, 2e-4), self._work)

    def _work(self) -> None:
        self._is_busy = False
        if not self.is_up or self.hangs or not self._has_work:
            return
        if not self._inbox:  # else what neighbours say waits
            self._has_answers = False
        if not self._serve_next():
            self.crash()
        self._await_returns()
        self._go_on()

    def _serve_next(self) -> bool:
        worker = RWorker(self, self.state, self.executor, self.links)
        return serve_next(self, worker, self._grace_period)

    def _await_returns(self) -> None:
        """Look again when an S-worker that is lost has been for too long."""
        wait_s = self._grace_period.wait_s(self.state)
        if wait_s is not None and not self._awaits:
            self._awaits = True
            self._time.at(self._time.now + wait_s, self._look_again)

    def _look_again(self) -> None:
        self._awaits = False
        if self.is_up and not self._is_busy:
            self._serve_next()
            self._await_returns()

    def _tell(self, peer: int, news: ReplicationNews) -> None:
        with contextlib.suppress(WorkerError):
            self.connections[peer].send(news)


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
    """The S-worker's side of a connection, in place of ``ZmqConnection``.

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
        """Deliver what is under way, and hold later messages for ``for_s``."""
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
        """Close this side, as a process that ended."""
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
        """Connect this side to the process that listens, unless it has one."""
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

    def open(self, address: str) -> _NeighbourLink:
        link = _NeighbourLink(self._network, int(address), self._owner)
        link.cut(self._cut_until_s - self._network.time.now)
        self._links.append(link)
        return link

    def cut(self, for_s: float) -> None:
        """Cut all links, and those that begin within ``for_s``."""
        self._cut_until_s = max(self._cut_until_s, self._network.time.now + for_s)
        for link in self._links:
            link.cut(for_s)


class Network:
    """The S-worker's hub, in place of ``ZmqHub``, and the processes behind it.

    Args:
        num_workers: processes, one connection each.
        kv_bytes: memory of each for K and V.
        chance: Source of random moments.
        session_keep_s: How long processes keep caches of a lost S-worker. 0 drops them.
        most_file_bytes: Most bytes of a replica's file on a shared disk. None for no disk.
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
        """Act once ``number`` messages have been sent."""
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

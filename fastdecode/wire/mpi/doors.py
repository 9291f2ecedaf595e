"""How ranks of several instances, which are one MPI job, read the K and V that others
keep: R-workers, and S-workers with KV on their devices.

MPI has no listener: who is to receive has to know from whom, and by which tag.
So a reader knocks: it sends the number of a line that no other connection of
the two ranks has, or had for a long time, and reads over that. What was sent
over a line that is over never comes in over another.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterable
from typing import Final, get_args

from fastdecode.core.errors import WorkerError
from fastdecode.wire.blocks import FEEDING_LINE
from fastdecode.wire.messages import Failed, FromRWorker, ToRWorker
from fastdecode.wire.mpi.connection import MpiConnection
from fastdecode.wire.mpi.control import ControlHub, TheEnd
from fastdecode.wire.mpi.hub import PULSE_S, MpiHub
from fastdecode.wire.mpi.job import DEFAULT_TAG, KNOCK_TAG, LINK_TAGS, MpiJob
from fastdecode.wire.mpi.library import MPI
from fastdecode.wire.mpi.neighbours import link_tag, other_rank
from fastdecode.wire.traits import MOST_PEERS, Role
from fastdecode.wire.transport import TIMEOUT, closed_error

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1e-3
_TAKE_IN_S: Final = 0.05
"""Signs of life, of those that aren't asked for anything."""
_LEAVING_S: Final = 5.0
"""That an S-worker may take to leave once rank 0 has; or it hangs."""
_KNOCK_BYTES: Final = 4
_NUM_LINES: Final = len(LINK_TAGS) // 2
_MOST_READERS: Final = MOST_PEERS[Role.READER]


class ReaderConnection:
    """A connection to an R-worker that is read; see
    ``rworker.transfers.neighbours.NeighbourConnection``. One that has heard us knock,
    and then gives no sign of life, is lost.

    Args:
        connection: over MPI.
        silence_s: for so long.
    """

    def __init__(self, connection: MpiConnection[ToRWorker, FromRWorker], silence_s: float) -> None:
        self._connection = connection
        self._silence_s = silence_s
        self._began_s = connection.heard_s
        self.peer = connection.peer

    @property
    def is_reached(self) -> bool:
        """Whether it has been heard of; where it gives no signs, it is there."""
        return self.heard_s is None or self.heard_s != self._began_s

    @property
    def heard_s(self) -> float | None:
        return self._connection.heard_s

    def send(self, message: ToRWorker) -> None:
        self._connection.send(message)

    def receive(self, timeout_s: float | None = None) -> FromRWorker:
        return self._connection.receive(timeout_s)

    def poll(self) -> FromRWorker | None:
        message = self._connection.poll()
        heard_s = self.heard_s
        if message is None and heard_s is not None and self.is_reached:
            silent_s = time.monotonic() - heard_s
            if silent_s > self._silence_s:
                why = f"{self.peer} has given no sign of life for {silent_s:.3g} s: it hangs"
                raise WorkerError(why, code=TIMEOUT)
        return message

    def close(self) -> None:
        self._connection.close()


class RankReaders:
    """How an R-worker reaches others, and reads what those of other instances offer; see
    ``rworker.transfers.neighbours.Neighbours``.

    Args:
        job: this process's part in the job.
        silence_s: one that gives no sign of life for so long is lost.
    """

    def __init__(self, job: MpiJob, silence_s: float) -> None:
        self._job = job
        self._silence_s = silence_s
        self._numbers = itertools.count()
        self.feeders: list[int] = []
        """Stages that bring prompts from now on."""
        self._knocks: list[tuple[MPI.Request, bytes]] = []
        self._hub: MpiHub[ToRWorker, FromRWorker] = MpiHub(
            job,
            [],
            frozenset(get_args(FromRWorker)),
            pump_interval_s=0,  # the R-worker's own hub has one, and looks often
            peers_give_signs=True,
            keeps_places=False,
        )

    def connect(self, address: str, line: int) -> ReaderConnection:
        """See ``Neighbours``; the line is a new one. Raises WorkerError: that
        rank is dead."""
        rank = other_rank(self._job, address)
        # A line of the one that reads, of two that read each other.
        own = 2 * next(self._numbers) + (self._job.rank < rank)
        own %= _NUM_LINES - _NUM_LINES % 2
        self._knock(rank, own)
        connection = self._hub.add(rank, f"R-worker rank {rank}", tag=link_tag(own))
        return ReaderConnection(connection, self._silence_s)

    def expect(self, address: str, line: int) -> None:
        """Every peer knocks, but for a stage that brings prompts, which has one line."""
        if line == FEEDING_LINE:
            self.feeders.append(other_rank(self._job, address))

    def take_in(self) -> None:
        """What those have said that aren't asked for anything: that they live."""
        with self._job.lock:
            for connection in self._hub.connections:
                connection.advance()

    def close(self) -> None:
        """Close what was connected."""
        self._hub.close()
        with self._job.lock:
            self._job.abandoned.extend(self._knocks)

    def _knock(self, rank: int, line: int) -> None:
        said = line.to_bytes(_KNOCK_BYTES, "little")
        with self._job.lock:
            self._job.peers.add(rank)
            try:
                self._knocks = [each for each in self._knocks if not each[0].Test()]
                request = self._job.comm.Isend([said, MPI.BYTE], rank, KNOCK_TAG)
            except MPI.Exception:
                raise closed_error(f"R-worker rank {rank}", by_peer=True) from None
            self._knocks.append((request, said))


class Doors:
    """Where readers knock, of a rank that is read.

    Args:
        job: this process's part in the job.
        guests: ranks that may knock.
        readers: how it reads them, which is looked after here, too.
    """

    def __init__(self, job: MpiJob, guests: Iterable[int], readers: RankReaders) -> None:
        self._job = job
        self._guests = [*guests]
        self._lines: dict[tuple[int, int], MpiConnection[FromRWorker, ToRWorker]] = {}
        """That are open, by the reader's rank and its line."""
        self._liars: set[int] = set()
        self._readers = readers
        self._looked_s = self._took_in_s = 0.0

    def look(self, hub: MpiHub[FromRWorker, ToRWorker]) -> None:
        """Open lines of ``hub`` to the peers that have knocked."""
        while self._readers.feeders:
            rank = self._readers.feeders.pop()
            hub.add(rank, f"the stage at rank {rank}", tag=link_tag(FEEDING_LINE))
        now = time.monotonic()
        if now - self._looked_s >= _LOOK_S:
            self._looked_s = now
            for rank, line in self._knocks():
                self._open(hub, rank, line)
        if now - self._took_in_s >= _TAKE_IN_S:
            self._took_in_s = now
            self._readers.take_in()

    def _open(self, hub: MpiHub[FromRWorker, ToRWorker], rank: int, line: int) -> None:
        """A reader has knocked: it is served, if it may be and there is room."""
        self._lines = {each: line for each, line in self._lines.items() if not line.is_over}
        is_its_own = line < _NUM_LINES and line % 2 == (rank < self._job.rank)
        if not is_its_own or (rank, line) in self._lines:
            if rank not in self._liars:
                self._liars.add(rank)
                logger.warning("rank %d knocks for line %d, which it can't have", rank, line)
            return
        connection = hub.add(rank, f"the reader at rank {rank}", tag=link_tag(line))
        if len(self._lines) < _MOST_READERS:
            self._lines[rank, line] = connection
            return
        busy = f"it serves {len(self._lines)} readers"
        with contextlib.suppress(WorkerError):  # it is gone
            connection.send(Failed(f"rank {self._job.rank}", "busy", busy))
        connection.close()

    def _knocks(self) -> list[tuple[int, int]]:
        """Who has knocked, and over which line it reads."""
        found: list[tuple[int, int]] = []
        status = MPI.Status()
        with self._job.lock:
            for rank in list(self._guests):
                try:
                    if self._job.comm.Iprobe(rank, KNOCK_TAG, status):
                        said = bytearray(status.Get_count())
                        self._job.comm.Recv(said, rank, KNOCK_TAG)
                        if len(said) == _KNOCK_BYTES:
                            found.append((rank, int.from_bytes(said, "little")))
                except MPI.Exception:  # it has died
                    self._guests.remove(rank)
        return found


class DoorHub(MpiHub[FromRWorker, ToRWorker]):
    """An R-worker's: its S-worker, and readers that have knocked.

    Args:
        job: this process's part in the job.
        s_rank: its S-worker's.
        doors: where readers knock.
        end: of the job, after which nobody is served.
    """

    def __init__(self, job: MpiJob, s_rank: int, doors: Doors, end: TheEnd) -> None:
        self._doors = doors
        self._end = end
        self._ended_s: float | None = None
        self._asked_s = 0.0
        super().__init__(
            job,
            [(s_rank, f"the S-worker (rank {s_rank})")],
            frozenset(get_args(ToRWorker)),
            tag=DEFAULT_TAG,
            pulse_s=PULSE_S,
            keeps_places=False,
        )

    def _look_at_all(self) -> tuple[int, ToRWorker] | None:
        self._doors.look(self)
        now = time.monotonic()
        if now - self._asked_s >= _TAKE_IN_S:
            self._asked_s = now
            self._look_for_the_end(now)
        return super()._look_at_all()

    def _look_for_the_end(self, now: float) -> None:
        """Raises WorkerError: it came a while ago, and the S-worker doesn't leave."""
        if self._ended_s is None and self._end.look():
            self._ended_s = now
        if self._ended_s is not None and now - self._ended_s > _LEAVING_S:
            raise closed_error("rank 0", by_peer=True)


class DeviceDoorHub(ControlHub[FromRWorker, ToRWorker]):
    """Of a device's KV cache: readers that have knocked. It waits politely, beside an
    S-worker."""

    def __init__(self, job: MpiJob, doors: Doors) -> None:
        self._doors = doors
        hears = frozenset(get_args(ToRWorker))
        super().__init__(job, [], hears, pulse_s=PULSE_S, keeps_places=False)

    def _look_at_all(self) -> tuple[int, ToRWorker] | None:
        self._doors.look(self)
        if not any(connection.is_open for connection in self.connections):
            return None
        return super()._look_at_all()

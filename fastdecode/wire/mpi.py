"""Connections between the ranks of an MPI job. Point to point and buffers only; no collective, no pickling.

A small message is one MPI message: head and body in one piece, copied into a buffer. A large one is two: its head, and
its body, sent from where it lies if it lies in one piece (``Frame.whole_body``), else from a copy. Closing is an empty
message::

    tag | head, body                        small
    tag | head          tag + 1 | body      large
    tag | (nothing)                         this side has closed

Receives for the next few messages are always posted, and a large body's is as soon as its head is here. So the next
message comes in while the present one is worked on, as far as MPI moves anything by itself. Over TCP it doesn't: there,
while the caller computes, the **pump**, a thread, looks after what is under way every so often, in both directions.
Waiting is polite: look a few times, then yield the core between looks, then sleep.

Nobody is trusted to be alive. MPI tells of a dead rank where it can (Open MPI under ``--with-ft ulfm``) or ends the
job; a rank that hangs or can't be reached is the business of the caller's deadlines.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast, get_args

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from fastdecode.core.errors import ConfigError, ProtocolError, WorkerError
from fastdecode.wire import codec
from fastdecode.wire.arrays import aligned
from fastdecode.wire.buffers import BufferPool
from fastdecode.wire.messages import FromRWorker, Message, ToRWorker
from fastdecode.wire.mpi_job import DEFAULT_TAG, S_RANK, MpiJob
from fastdecode.wire.patience import Pump, look_until_found
from fastdecode.wire.transport import CLOSED, closed_error, timeout_error

SendT = TypeVar("SendT", bound=Message)
ReceiveT = TypeVar("ReceiveT", bound=Message)
T = TypeVar("T")

INLINE_BYTES: Final = 1 << 16
"""Messages of up to so many bytes travel in one piece: copying them costs less than a second MPI message."""
PUMP_INTERVAL_S: Final = 250e-6
_PUMP_RESTS_AFTER_S: Final = 1.0
_PUMP_GIVES_UP_AFTER_S: Final = 30.0
_PUMP_RESTS_IN_WAIT_AFTER_S: Final = 0.01
_SLOT_BYTES: Final = max(INLINE_BYTES, codec.MAX_HEAD_BYTES)
_NUM_SLOTS: Final = 4
_LINGER_S: Final = 2.0
_NOTHING: Final = np.empty(0, np.uint8)
_PROCESS_FAILED: Final[int] = getattr(MPI, "ERR_PROC_FAILED", -1)


class _Arriving(NamedTuple):
    """A message whose head is here."""

    head: codec.Head
    body: NDArray[np.uint8]
    request: MPI.Request | None
    """The body's; None: it is here."""


class _Slot(NamedTuple):
    """A posted receive."""

    buffer: memoryview
    request: MPI.Prequest


class MpiConnection(Generic[SendT, ReceiveT]):
    """A link to one rank; see ``fastdecode.wire.transport.Connection``. Made by its hub."""

    def __init__(self, hub: MpiHub[SendT, ReceiveT], rank: int, peer: str, receives: frozenset[type[Message]]) -> None:
        self._hub = hub
        self._job = hub.job
        self._rank = rank
        self._tag = hub.tag
        self._peer = peer
        self._receives = receives
        self._status = MPI.Status()
        self._slots = deque(self._post_slot() for _ in range(_NUM_SLOTS))  # in the order in which they are filled
        self._arriving: deque[_Arriving] = deque()
        # What MPI isn't done with, and the memory that it needs for that.
        self._leaving: deque[tuple[MPI.Request, object]] = deque()
        self._closed = False
        self._gone = False  # the peer has closed, or died
        self._end: WorkerError | None = None  # nothing more will be received, because of this
        self.told = False
        """Whether the caller has been told the end."""

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def is_open(self) -> bool:
        return not (self._closed or self.told)

    @property
    def is_sending(self) -> bool:
        return bool(self._leaving)

    def send(self, message: SendT) -> None:
        frame = codec.encode(message)
        with self._job.lock:
            if self._closed or self._gone:
                raise closed_error(self._peer, by_peer=not self._closed)
            try:
                self._post(frame)
            except MPI.Exception as error:
                self._lose(error)
                raise closed_error(self._peer, by_peer=True) from None
            self.advance()
        self._hub.stir()

    def receive(self, timeout_s: float | None = None) -> ReceiveT:
        return self._hub.wait(self.poll, timeout_s, lambda: self._peer)

    def poll(self) -> ReceiveT | None:
        if self._closed:
            raise closed_error(self._peer, by_peer=False)
        with self._job.lock:
            arrived = self._take()
            if arrived is None:
                if not self._take_in():  # else the caller wants to go on at once
                    self._let_leave()
                arrived = self._take()
        return None if arrived is None else cast(ReceiveT, arrived.head.message(arrived.body))

    def close(self) -> None:
        """See ``Connection``. What was sent before still leaves; the hub's ``close`` waits for that."""
        with self._job.lock:
            if self._closed:
                return
            self._closed = True
            if not self._gone:
                with contextlib.suppress(MPI.Exception):
                    self._leaving.append((self._isend(b"", self._tag), None))
            self._take_back_receives()
            self._let_leave()
        self._hub.stir()

    def give_up(self) -> None:
        """Close, and have the launcher end the peer when this rank leaves, unless it is dead already: it hangs."""
        if not self._gone:
            self._job.hanging.add(self._rank)
        self.close()

    def advance(self) -> None:
        """Take in what has arrived, and let go of what has left. Never raises; the job's lock is held."""
        while self._take_in():
            pass
        self._let_leave()

    def abandon(self) -> None:
        """Give up what hasn't left. Its memory is kept until the process ends; lock held."""
        self._job.abandoned.extend(self._leaving)
        self._leaving.clear()

    def _take(self) -> _Arriving | None:
        """The next message if it is here; lock held."""
        if self._arriving:
            arriving = self._arriving[0]
            try:
                if arriving.request is None or arriving.request.Test():
                    return self._arriving.popleft()
                return None
            except MPI.Exception as error:
                self._lose(error)
        if self._end is not None:
            self.told = True
            raise self._end
        return None

    def _post_slot(self) -> _Slot:
        buffer = np.empty(_SLOT_BYTES, np.uint8)
        slot = _Slot(buffer.data, self._job.comm.Recv_init([buffer, MPI.BYTE], self._rank, self._tag))
        slot.request.Start()
        return slot

    def _take_in(self) -> bool:
        """Note what came next, if anything did, and post its slot again; lock held. Never raises."""
        if self._closed or self._end is not None:
            return False
        slot = self._slots[0]
        try:
            if not slot.request.Test(self._status):
                return False
            num_bytes = self._status.Get_count(MPI.BYTE)
            if num_bytes:
                self._arriving.append(self._read(slot.buffer, num_bytes))
                self._slots.rotate(-1)
                slot.request.Start()
            else:
                self._gone = True
                self._end = closed_error(self._peer, by_peer=True)
        except MPI.Exception as error:
            self._lose(error)
        except ProtocolError as error:
            self._end = WorkerError(f"{self._peer} broke the protocol: {error}", code=error.code)
        return True

    def _read(self, buffer: memoryview, num_bytes: int) -> _Arriving:
        """What came into a slot."""
        head = codec.read_head(buffer[:num_bytes])
        if head.kind not in self._receives:
            raise ProtocolError(f"{head.kind.__name__} is not for this side")
        if not head.body_bytes:
            return _Arriving(head, _NOTHING, None)
        body = self._hub.pool.take(head.body_bytes)
        start = aligned(head.head_bytes)
        if head.head_bytes == num_bytes:
            return _Arriving(head, body, self._job.comm.Irecv([body, MPI.BYTE], self._rank, self._tag + 1))
        if start + head.body_bytes != num_bytes:
            raise ProtocolError(f"{head.kind.__name__}: {num_bytes} bytes came, not {start} + {head.body_bytes}")
        body.data[:] = buffer[start:num_bytes]
        return _Arriving(head, body, None)

    def _post(self, frame: codec.Frame) -> None:
        if frame.num_bytes <= INLINE_BYTES:
            whole = frame.whole()
            self._leaving.append((self._isend(whole, self._tag), whole))
            return
        self._leaving.append((self._isend(frame.head, self._tag), frame.head))
        if frame.body_bytes:
            body = frame.whole_body()
            if body is None:
                body = self._hub.pool.take(frame.body_bytes)
                frame.write_body(body.data)
            self._leaving.append((self._isend(body, self._tag + 1), body))

    def _isend(self, data: Any, tag: int) -> MPI.Request:
        return self._job.comm.Isend([data, MPI.BYTE], self._rank, tag)

    def _let_leave(self) -> None:
        try:
            while self._leaving and self._leaving[0][0].Test():
                request, _ = self._leaving.popleft()
                if isinstance(request, MPI.Prequest):
                    request.Free()  # others are free once they are complete
        except MPI.Exception as error:
            self._lose(error)

    def _lose(self, error: MPI.Exception) -> None:
        """MPI says that the peer is no longer there."""
        self._gone = True
        reason = "its process has died" if error.Get_error_class() == _PROCESS_FAILED else error.Get_error_string()
        self._end = WorkerError(f"{self._peer} is lost: {reason}", code=CLOSED)
        self._take_back_receives()
        self.abandon()

    def _take_back_receives(self) -> None:
        """Nothing more is wanted: cancel what is posted, and see it off like what is being sent."""
        for slot in self._slots:
            with contextlib.suppress(MPI.Exception):
                slot.request.Cancel()
            self._leaving.append((slot.request, slot.buffer))
        self._slots.clear()
        self._leaving.extend((x.request, x.body) for x in self._arriving if x.request is not None)
        self._arriving.clear()


class MpiHub(Generic[SendT, ReceiveT]):
    """Connections to other ranks; see ``fastdecode.wire.transport.Hub``. Close it when done.

    Args:
        job: this process's part in the job.
        peers: the other ranks, and what to call them.
        receives: the messages that they may send.
        tag: this and the next one are used; two hubs of a rank need tags of their own.
        pump_interval_s: how often the pump looks while the caller computes; 0: there is no pump.
    """

    def __init__(
        self,
        job: MpiJob,
        peers: Iterable[tuple[int, str]],
        receives: frozenset[type[Message]],
        *,
        tag: int = DEFAULT_TAG,
        pump_interval_s: float = PUMP_INTERVAL_S,
    ) -> None:
        self.job = job
        self.tag = tag
        self.pool = BufferPool()
        with job.lock:
            self._connections = tuple(MpiConnection(self, rank, peer, receives) for rank, peer in peers)
        self._first = 0
        self._waits_since: float | None = None
        self._stirred = 0.0
        self._pump: Pump | None = None
        if pump_interval_s > 0 and job.threads_may_take_turns:
            self._pump = Pump(self._keep_going, pump_interval_s)
            self._pump.start()

    @property
    def connections(self) -> tuple[MpiConnection[SendT, ReceiveT], ...]:
        return self._connections

    def receive_any(self, timeout_s: float | None = None) -> tuple[int, ReceiveT]:
        return self.wait(self._poll_any, timeout_s, lambda: " or ".join(x.peer for x in self._connections if x.is_open))

    def close(self) -> None:
        """Close every connection, and see off what was sent over them, for a few seconds at most."""
        for connection in self._connections:
            connection.close()
        look_until_found(self._all_left, _LINGER_S)
        if self._pump is not None:
            self._pump.stop()
        with self.job.lock:
            for connection in self._connections:
                connection.abandon()

    def _all_left(self) -> bool | None:
        with self.job.lock:
            for connection in self._connections:
                connection.advance()
        return True if not any(connection.is_sending for connection in self._connections) else None

    def wait(self, look: Callable[[], T | None], timeout_s: float | None, whom: Callable[[], str]) -> T:
        """What ``look`` gives, as soon as it gives anything."""
        self._waits_since = time.monotonic()
        try:
            found = look_until_found(look, timeout_s)
        finally:
            self._waits_since = None
            self.stir()
        if found is None:
            assert timeout_s is not None
            raise timeout_error(whom(), timeout_s)
        return found

    def stir(self) -> None:
        """The caller goes its way: have the pump look after what is under way."""
        if self._pump is not None:
            self._stirred = time.monotonic()
            self._pump.wake()

    def _poll_any(self) -> tuple[int, ReceiveT] | None:
        """Asks every open connection, each call starting behind the one that answered last."""
        connections = self._connections
        any_open = False
        for i in range(len(connections)):
            index = (self._first + i) % len(connections)
            if connections[index].is_open:
                any_open = True
                message = connections[index].poll()
                if message is not None:
                    self._first = index + 1
                    return index, message
        if not any_open:
            raise closed_error(", ".join(x.peer for x in connections) or "every peer", by_peer=True)
        return None

    def _keep_going(self) -> bool:
        """The pump's work. Returns whether to come again soon."""
        now, waits_since = time.monotonic(), self._waits_since
        if waits_since is not None:  # the caller looks after things itself
            return now - waits_since < _PUMP_RESTS_IN_WAIT_AFTER_S
        if self.job.lock.acquire(blocking=False):
            try:
                for connection in self._connections:
                    connection.advance()
            finally:
                self.job.lock.release()
        patience_s = _PUMP_GIVES_UP_AFTER_S if any(x.is_sending for x in self._connections) else _PUMP_RESTS_AFTER_S
        return now - self._stirred < patience_s


def connect_workers(job: MpiJob, *, tag: int = DEFAULT_TAG, num_s_ranks: int = 1) -> MpiHub[ToRWorker, FromRWorker]:
    """The S-worker's side: a connection to each R-worker of the job, in the order of their ranks. Never waits.

    Args:
        num_s_ranks: the first ranks, which are S-workers; this is rank 0, which speaks for all.

    Raises:
        ConfigError: this isn't the S-worker's rank, or no rank is left to be an R-worker.
    """
    if job.rank != S_RANK:
        raise ConfigError(
            f"this is rank {job.rank}: in an MPI job the S-worker is rank {S_RANK}, the first that starts"
        )
    if job.size <= num_s_ranks:
        raise ConfigError(
            f"all {job.size} MPI ranks are S-workers (tp={num_s_ranks}): start more ranks, which will be R-workers",
            code="too_few_ranks",
        )
    peers = [(rank, f"R-worker rank {rank}") for rank in job.r_ranks[num_s_ranks - 1 :]]
    return MpiHub(job, peers, frozenset(get_args(FromRWorker)), tag=tag)


def connect_to_s_worker(job: MpiJob, *, tag: int = DEFAULT_TAG) -> MpiHub[FromRWorker, ToRWorker]:
    """An R-worker's side: its one connection. Never waits.

    Raises:
        ConfigError: this is the S-worker's rank.
    """
    if job.rank == S_RANK:
        raise ConfigError(
            f"an R-worker was started as rank {S_RANK}, the S-worker's: begin the mpirun line with "
            "-n 1 fastdecode generate ... and let the R-workers follow behind a colon"
        )
    peers = [(S_RANK, f"the S-worker (rank {S_RANK})")]
    return MpiHub(job, peers, frozenset(get_args(ToRWorker)), tag=tag)

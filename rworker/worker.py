"""The R-worker's loop, and R-workers as threads of this process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fastdecode.core.clock import Clock
from fastdecode.core.errors import FastDecodeError, WorkerError
from fastdecode.core.exhaustive import assert_never
from fastdecode.core.host.facts import this_host
from fastdecode.wire.arrays import Array
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.kv.chunks import ChunkStored, FetchedChunk
from fastdecode.wire.kv.replicating import ReplicationNews, Unprotected
from fastdecode.wire.messages import (
    PROTOCOL_VERSION,
    AttendResult,
    Failed,
    FromRWorker,
    Report,
    Shutdown,
    ToRWorker,
)
from fastdecode.wire.transport import CLOSED, TIMEOUT, Hub, PeerLostError
from rworker.attention import AttentionExecutor
from rworker.instructions import (
    Compute,
    CopyBlocks,
    Drop,
    EndStep,
    Follow,
    HangUp,
    Instruction,
    Link,
    PlaceChunk,
    Prepare,
    ReadChunk,
    Send,
    Stop,
    TellAboutHost,
)
from rworker.state import RWorkerState
from rworker.stream.links import Links, Neighbours, NoNeighbours, ThreadNeighbours

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """What carries out the instructions that aren't I/O."""

    def prepare(self, prepare: Prepare) -> None: ...

    def copy_blocks(self, copy: CopyBlocks) -> None: ...

    def compute(self, compute: Compute) -> AttendResult: ...

    def place(self, place: PlaceChunk) -> None: ...

    def read(self, read: ReadChunk) -> Array: ...

    def drop(self, drop: Drop) -> None: ...


class Peer(Protocol):
    """Where answers go: a connection, as far as instructions need it."""

    @property
    def peer(self) -> str: ...

    def send(self, message: FromRWorker) -> None: ...

    def close(self) -> None: ...


def serve(
    hub: Hub[FromRWorker, ToRWorker],
    state: RWorkerState,
    executor: Executor,
    return_s: float | None = None,
    neighbours: Neighbours | None = None,
) -> None:
    """Serve the peers of a hub until the state says that all is done, or none
    is left; then close all connections.

    A state that awaits the return of an S-worker is given ``return_s`` seconds
    for it. Replicas are kept by R-workers that are reached through
    ``neighbours``.

    Whatever goes wrong with one peer is logged, and told to that peer as
    ``Failed`` before its connection closes. The others go on.
    """
    logger.info("R-worker %s serves", state.name)
    links = Links(executor, neighbours or NoNeighbours(), partial(_tell_news, hub))
    try:
        while serve_next(hub, state, executor, return_s, links):
            pass
        logger.info("R-worker %s has stopped", state.name)
    finally:
        links.close()
        for connection in hub.connections:
            connection.close()


def serve_next(
    hub: Hub[FromRWorker, ToRWorker],
    state: RWorkerState,
    executor: Executor,
    return_s: float | None,
    links: Links | None = None,
) -> bool:
    """Deal with what comes next; ``links``: to neighbours, if there may be any.
    False: leave the loop."""
    if links is not None and links.is_late:
        links.work()
    link_wait_s = None if links is None else links.wait_s
    away_s = return_s if state.is_deserted else None
    try:
        peer, message = hub.receive_any(away_s if link_wait_s is None else link_wait_s)
    except PeerLostError as error:
        if error.code == CLOSED:
            logger.info("R-worker %s goes on without a peer: %s", state.name, error)
        else:
            _tell(hub.connections[error.index], last_words(state.name, error))
        return obey(
            (HangUp(error.index, may_return=error.code == CLOSED),),
            hub.connections,
            state,
            executor,
            links,
        )
    except WorkerError as error:
        if error.code == TIMEOUT and links is not None and link_wait_s is not None:
            links.work()
            return True
        logger.info("R-worker %s stops: %s", state.name, error)
        return False
    try:
        return obey(state.handle(peer, message), hub.connections, state, executor, links)
    except Exception as error:
        if isinstance(error, WorkerError) and error.code == CLOSED:
            return True  # a peer that was to be told something is gone: the hub says so next
        _tell(hub.connections[peer], last_words(state.name, error))
        return obey((HangUp(peer),), hub.connections, state, executor, links)


def obey(
    instructions: tuple[Instruction, ...],
    peers: Sequence[Peer],
    state: RWorkerState,
    executor: Executor,
    links: Links | None = None,
) -> bool:
    """Carry out instructions in order. False: leave the loop. ``links``: to
    neighbours; None: of a worker that can't reach any."""
    for instruction in instructions:
        match instruction:
            case Compute():
                peers[instruction.to].send(executor.compute(instruction))
            case Send(to, message):
                _answer(state.name, peers[to], message)
            case TellAboutHost(to, num_threads, kv_bytes, model_hash):
                report = Report(
                    state.name, PROTOCOL_VERSION, this_host(), num_threads, kv_bytes, model_hash
                )
                peers[to].send(report)
            case PlaceChunk():
                executor.place(instruction)
                peers[instruction.to].send(ChunkStored(len(instruction.chunk.data)))
            case ReadChunk():
                peers[instruction.to].send(FetchedChunk(executor.read(instruction)))
            case CopyBlocks():
                executor.copy_blocks(instruction)
            case Prepare():
                if links is not None:
                    links.drop(instruction.holder)
                executor.prepare(instruction)
            case Link() | Follow() | EndStep():
                _obey_link(instruction, peers, links)
            case Drop():
                if links is not None:
                    links.drop(instruction.holder)
                executor.drop(instruction)
            case HangUp(peer, may_return):
                peers[peer].close()
                if not obey(state.lost(peer, may_return=may_return), peers, state, executor, links):
                    return False
            case Stop():
                return False
            case _:
                assert_never(instruction)
    return True


def _answer(name: str, peer: Peer, message: FromRWorker) -> None:
    if isinstance(message, Failed):
        logger.error("R-worker %s gives up on %s: %s", name, peer.peer, message.message)
    peer.send(message)


def _obey_link(
    instruction: Link | Follow | EndStep, peers: Sequence[Peer], links: Links | None
) -> None:
    if links is not None:
        links.obey(instruction)
    elif isinstance(instruction, Link):
        reason = "this R-worker can't reach others"
        news = Unprotected(instruction.holder, reason, instruction.number)
        peers[instruction.to].send(news)


def last_words(name: str, error: Exception) -> Failed:
    """Log why an R-worker can't go on, and what to tell its peer."""
    if isinstance(error, FastDecodeError):
        logger.error("R-worker %s gives up: %s", name, error)
        return Failed(name, error.code, error.message)
    logger.error("R-worker %s crashed", name, exc_info=error)
    return Failed(name, "worker_failed", f"{type(error).__name__}: {error}")


def _tell(peer: Peer, message: Failed | ReplicationNews) -> None:
    try:
        peer.send(message)
    except WorkerError:
        logger.info("%s is gone, and can't be told", peer.peer)


def _tell_news(hub: Hub[FromRWorker, ToRWorker], peer: int, news: ReplicationNews) -> None:
    _tell(hub.connections[peer], news)


@dataclass(frozen=True)
class WorkerThread:
    """An R-worker that runs as a thread of this process."""

    name: str
    connection: InprocConnection[ToRWorker, FromRWorker]
    """The S-worker's side."""
    thread: threading.Thread
    hub: InprocHub[FromRWorker, ToRWorker]
    """The R-worker's, to which others may be connected at any time."""

    def stop(self) -> None:
        """Ask the R-worker to end once it has done what it was sent; does
        nothing if it has ended."""
        try:
            self.connection.send(Shutdown())
        except WorkerError:
            logger.debug("R-worker %s has ended already", self.name)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended; ``stop`` it first, or close the connection.

        Raises:
            WorkerError: it hasn't in ``timeout_s`` seconds.
        """
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            raise WorkerError(
                f"R-worker {self.name} has not ended within {timeout_s:g} s", code="worker_timeout"
            )


def start_worker_thread(
    name: str,
    *,
    kv_bytes: int,
    num_threads: int = 1,
    hub: InprocHub[ToRWorker, FromRWorker] | None = None,
    clock: Clock = time.perf_counter,
    executor: Executor | None = None,
    neighbours: ThreadNeighbours | None = None,
) -> WorkerThread:
    """Start an R-worker as a daemon thread of this process.

    Args:
        name: of the worker and its thread.
        kv_bytes: memory for K and V.
        num_threads: CPU threads that its kernels use.
        hub: the S-worker's, which gets a connection more; None: a hub of its
            own.
        clock: seconds, for the times that the worker reports.
        executor: in place of ``AttentionExecutor``, for tests.
        neighbours: the other threads, which it joins; None: it keeps no
            replicas.

    Raises:
        ConfigError: an option is out of range.
    """
    state = RWorkerState(name, kv_bytes=kv_bytes, num_threads=num_threads)
    runner = executor or AttentionExecutor(num_threads=num_threads, clock=clock)
    peers: InprocHub[FromRWorker, ToRWorker] = InprocHub()
    here, _ = connect(
        InprocHub() if hub is None else hub, "the S-worker", peers, f"R-worker {name}"
    )
    if neighbours is not None:
        neighbours.add(name, peers)
    thread = threading.Thread(
        target=serve,
        args=(peers, state, runner, None, neighbours),
        name=f"rworker-{name}",
        daemon=True,
    )
    thread.start()
    return WorkerThread(name, here, thread, peers)

"""The R-worker's loop, and R-workers as threads of this process."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from fastdecode.core.clock import Clock
from fastdecode.core.errors import ConfigError, FastDecodeError, WorkerError, assert_never
from fastdecode.core.holders import HolderId
from fastdecode.core.host.facts import this_host
from fastdecode.wire.blocks import BlockData, Inventory
from fastdecode.wire.inproc import InprocConnection, InprocHub, connect
from fastdecode.wire.messages import (
    REFUSALS,
    AttendResult,
    Failed,
    FromRWorker,
    Refused,
    Report,
    Shutdown,
    ToRWorker,
)
from fastdecode.wire.transport import CLOSED, TIMEOUT, Hub, PeerLostError
from rworker.attention import AttentionExecutor
from rworker.instructions import (
    RESTORER,
    Compute,
    CopyBlocks,
    Drop,
    DropStored,
    EndStep,
    Follow,
    HangUp,
    Instruction,
    LinkReplica,
    MoveBlocks,
    Occasional,
    OpenTier,
    PlaceChunk,
    Prepare,
    ReadReplica,
    RemoveReplica,
    Send,
    SendBlocks,
    Stop,
    TellAboutHost,
    Unlink,
)
from rworker.serving_terms import ServingTerms
from rworker.state import RWorkerState
from rworker.tiers.disk import Disk
from rworker.tiers.tiers import Tiers
from rworker.transfers.background_transfers import (
    BackgroundTransfers,
    TransferMemory,
    TransferNews,
)
from rworker.transfers.neighbours import Neighbourhood, Neighbours, NoNeighbours
from rworker.transfers.replica_file import ReplicaFiles

logger = logging.getLogger(__name__)


class RWorkerExecutor(TransferMemory, Protocol):
    """Carries out the instructions that are not I/O."""

    def prepare(self, prepare: Prepare) -> None: ...

    def copy_blocks(self, copy: CopyBlocks) -> None: ...

    def compute(self, compute: Compute) -> AttendResult: ...

    def drop(self, drop: Drop) -> None: ...

    def open_tier(self, wanted: OpenTier) -> Iterable[Inventory]: ...


class Peer(Protocol):
    """A connection, as far as instructions need it."""

    @property
    def peer(self) -> str: ...

    def send(self, message: FromRWorker) -> None: ...

    def close(self) -> None: ...


class Peers(Protocol):
    """A hub, as far as instructions need it."""

    @property
    def connections(self) -> Sequence[Peer] | Mapping[int, Peer]: ...


class Answers:
    """The only peer of an R-worker without a hub, and its connections.

    Args:
        peer: name of the peer.
        index: number of the peer.
    """

    def __init__(self, peer: str, index: int) -> None:
        self.peer: Final = peer
        self.connections: Final[Mapping[int, Peer]] = {index: self}
        self.queue: Final[deque[FromRWorker]] = deque()
        self.are_over = False
        """True if the R-worker has hung up. What it answered before is in the queue."""

    def send(self, message: FromRWorker) -> None:
        self.queue.append(message)

    def close(self) -> None:
        self.are_over = True


class RWorker:
    """An R-worker at work: its state decides, its executor computes, its peers get answers.

    Args:
        behind: background transfers. None if it can't reach other R-workers.
    """

    def __init__(
        self,
        peers: Peers,
        state: RWorkerState,
        executor: RWorkerExecutor,
        behind: BackgroundTransfers | None = None,
    ) -> None:
        self.peers, self.state, self.executor = peers, state, executor
        self.behind = behind or BackgroundTransfers(executor, NoNeighbours(), partial(tell, peers))

    def obey(self, instructions: tuple[Instruction, ...]) -> bool:
        """Carry out instructions in order. Return False to leave the loop.

        A peer that is gone costs only what was to be sent to it. The hub reports it next.
        """
        for instruction in instructions:
            match instruction:
                case Compute():
                    self._compute(instruction)
                case Send(to, message):
                    self._answer(to, message)
                case _:
                    if not self._obey_occasional(instruction):
                        return False
        return True

    def lose(self, error: PeerLostError) -> bool:
        """Continue without a peer. Return False to leave the loop."""
        if error.code == CLOSED:
            logger.info("R-worker %s goes on without a peer: %s", self.state.name, error)
        else:
            tell(self.peers, error.index, last_words(self.state.name, error))
        continues = self.obey((HangUp(error.index, may_return=error.code == CLOSED),))
        if self.state.kept:
            logger.info("R-worker %s keeps the KV cache of a lost S-worker", self.state.name)
        return continues

    def _compute(self, compute: Compute) -> None:
        """Answer with a layer. Report failed blocks that it read before."""
        result = self.executor.compute(compute)
        if self.behind.is_used:
            self.behind.attended()
        if compute.plan.coming:
            self.behind.report_moves()
        self._send(compute.to, result)

    def _answer(self, to: int, message: FromRWorker) -> None:
        if isinstance(message, Failed):
            name, peer = self.state.name, self.peers.connections[to].peer
            say, does = logger.error, "gives up on"
            if message.code in REFUSALS:
                say, does = logger.warning, "refuses"
            say("R-worker %s %s %s: %s", name, does, peer, message.message)
        self._send(to, message)

    def _send(self, to: int, message: FromRWorker) -> None:
        """Send a peer a message, unless it is gone."""
        peer = self.peers.connections[to]
        try:
            peer.send(message)
        except WorkerError as error:
            if error.code != CLOSED:
                raise
            logger.info("%s is gone: it gets no %s", peer.peer, type(message).__name__)

    def _obey_occasional(self, instruction: Occasional) -> bool:
        """Carry out one instruction. Return False to leave the loop."""
        executor = self.executor
        match instruction:
            case TellAboutHost(to, num_threads, kv_bytes, model_hash):
                offered = num_threads, kv_bytes, model_hash
                self._send(to, Report(self.state.name, this_host(), *offered))
            case PlaceChunk():
                executor.place(instruction)
            case SendBlocks(to, is_there, read):
                self._send(to, BlockData(is_there, executor.read(read)))
            case CopyBlocks():
                executor.copy_blocks(instruction)
            case Prepare():
                self.behind.drop(instruction.holder)
                executor.prepare(instruction)
            case LinkReplica() | Follow() | EndStep() | MoveBlocks() | DropStored():
                self.behind.obey(instruction)
            case ReadReplica():
                return self._restore(instruction)
            case RemoveReplica(holder, session, link):
                if self.behind.files is not None:
                    self.behind.files.remove(session, holder, link)
            case OpenTier():
                for page in executor.open_tier(instruction):
                    self._send(instruction.to, page)
            case Unlink(holder):
                self.behind.drop(holder)
            case Drop(holder):
                self.behind.drop(holder)
                executor.drop(instruction)
            case HangUp(peer, may_return, is_torn):
                self.peers.connections[peer].close()
                return self.obey(self.state.lost(peer, may_return=may_return, is_torn=is_torn))
            case Stop():
                return False
            case _:
                assert_never(instruction)
        return True

    def _restore(self, order: ReadReplica) -> bool:
        """Carry out the messages of a replica's file, and let a peer take over what it gives."""
        files, answers = self.behind.files, Answers("a replica's file", RESTORER)
        worker = RWorker(answers, self.state, self.executor, self.behind)
        is_torn, refusal = False, ""
        try:
            if files is None:
                raise ConfigError("this R-worker has no disk for replicas")
            for message in files.read(order):
                is_torn = True
                worker.obey(self.state.handle(RESTORER, message))
                is_torn = False
                refused = [x.message for x in answers.queue if isinstance(x, Failed | Refused)]
                answers.queue.clear()
                if refused:
                    refusal = refused[0]
                    break
        except Exception as error:  # whatever it is, no peer may find what is left
            refusal = f"{type(error).__name__}: {error}"
        found = f"wasn't read to its end: {refusal}" if refusal else "was read"
        logger.info("holder %d's replica %s", order.message.holder, found)
        self.obey(self.state.lost(RESTORER, is_torn=is_torn))
        return self.obey(self.state.restored(order))


def tell(peers: Peers, index: int, message: Failed | TransferNews) -> None:
    """Send a peer a report, unless it is gone."""
    peer = peers.connections[index]
    try:
        peer.send(message)
    except WorkerError:
        logger.info("%s is gone, and gets no report", peer.peer)


class GracePeriod:
    """Runs since the last S-worker was lost without ``Shutdown``, and for each kept cache since its
    own was."""

    def __init__(self, serving: ServingTerms, clock: Clock = time.monotonic) -> None:
        self._serving: Final = serving
        self._clock = clock
        self._num_lost = 0
        self._lost_s = 0.0
        self._kept_until_s: dict[HolderId, float] = {}

    def look(self, state: RWorkerState) -> None:
        """Note which S-workers were lost, and which have returned."""
        now_s = self._clock()
        if state.num_lost != self._num_lost:
            self._num_lost = state.num_lost
            self._lost_s = now_s
        before, self._kept_until_s = self._kept_until_s, {}
        for cache in state.kept:
            until_s = before.get(cache.holder, now_s + self._serving.keep_s)
            self._kept_until_s[cache.holder] = until_s
            cache.kept_for_s = max(0.0, until_s - now_s)

    def wait_s(self, state: RWorkerState) -> float | None:
        """Return the time until something is to be done. None if nothing will be."""
        self.look(state)
        until_s = self._until_s(state)
        return None if until_s is None else max(0.0, until_s - self._clock())

    def end(self, state: RWorkerState) -> tuple[Instruction, ...]:
        """Return what is to be done now, if the time is over."""
        self.look(state)
        until_s, now_s = self._until_s(state), self._clock()
        if until_s is None or until_s > now_s:
            return ()
        if not self._kept_until_s:
            return (Stop(),)
        return state.forget_kept([one for one, s in self._kept_until_s.items() if s <= now_s])

    def _until_s(self, state: RWorkerState) -> float | None:
        if self._kept_until_s:
            return min(self._kept_until_s.values())
        return self._lost_s + self._serving.return_s if state.is_deserted else None


def serve(
    hub: Hub[FromRWorker, ToRWorker],
    state: RWorkerState,
    executor: RWorkerExecutor,
    grace_period: GracePeriod | None = None,
    neighbours: Neighbours | None = None,
) -> None:
    """Serve the peers of a hub until the state returns ``Stop``, or none is left. Then close all
    connections.

    Whatever goes wrong with one peer is logged, and sent to that peer as ``Failed`` before its
    connection closes. Others continue.

    Args:
        grace_period: how long to wait for lost S-workers. None for ever.
        neighbours: other R-workers.
    """
    logger.info("R-worker %s serves", state.name)
    directory = executor.tiers.directory
    behind = BackgroundTransfers(
        executor,
        neighbours or NoNeighbours(),
        partial(tell, hub),
        files=None if directory is None else ReplicaFiles(directory),
    )
    worker = RWorker(hub, state, executor, behind)
    try:
        while serve_next(hub, worker, grace_period):
            pass
        logger.info("R-worker %s has stopped", state.name)
    finally:
        behind.close()
        for connection in hub.connections:
            connection.close()


def serve_next(
    hub: Hub[FromRWorker, ToRWorker], worker: RWorker, grace_period: GracePeriod | None
) -> bool:
    """Take the next message, or do a unit of transfers. Return False to leave the loop."""
    state, behind = worker.state, worker.behind
    behind_s = behind.wait_s if behind.is_used else None
    if behind_s is not None:
        behind.report_moves()
        if behind.is_late:
            behind.work()
        behind_s = behind.wait_s
    if grace_period is not None and (over := grace_period.end(state)):
        return worker.obey(over)
    away_s = None if grace_period is None else grace_period.wait_s(state)
    waits_s = [each for each in (behind_s, away_s) if each is not None]
    try:
        peer, message = hub.receive_any(min(waits_s, default=None))
    except WorkerError as error:
        return _without_message(worker, error, is_waiting=bool(waits_s))
    if grace_period is not None:
        grace_period.look(state)
    try:
        return worker.obey(state.handle(peer, message))
    except Exception as error:
        tell(hub, peer, last_words(state.name, error))
        return worker.obey((HangUp(peer, is_torn=True),))


def _without_message(worker: RWorker, error: WorkerError, *, is_waiting: bool) -> bool:
    """Return whether the loop continues without a message."""
    if isinstance(error, PeerLostError):
        return worker.lose(error)
    if error.code == TIMEOUT and is_waiting:
        if worker.behind.is_used:
            worker.behind.work()
        return True
    logger.info("R-worker %s stops: %s", worker.state.name, error)
    return False


def last_words(name: str, error: Exception) -> Failed:
    """Log why an R-worker can't continue, and return what to tell its peer."""
    if isinstance(error, FastDecodeError):
        logger.error("R-worker %s gives up: %s", name, error)
        return Failed(name, error.code, error.message)
    logger.error("R-worker %s crashed", name, exc_info=error)
    return Failed(name, "worker_failed", f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class WorkerThread:
    """An R-worker that runs as a thread of this process."""

    name: str
    connection: InprocConnection[ToRWorker, FromRWorker]
    """The S-worker's side."""
    thread: threading.Thread
    hub: InprocHub[FromRWorker, ToRWorker]
    """The R-worker's hub, to which others may connect at any time."""

    def stop(self) -> None:
        """Ask the R-worker to end once it has done what it was sent."""
        try:
            self.connection.send(Shutdown())
        except WorkerError:
            logger.debug("R-worker %s has ended already", self.name)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended. ``stop`` it first, or close the connection.

        Raises:
            WorkerError: If it has not ended in ``timeout_s`` seconds.
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
    executor: RWorkerExecutor | None = None,
    neighbours: Neighbourhood | None = None,
    disk: Disk | None = None,
) -> WorkerThread:
    """Start an R-worker as a daemon thread of this process.

    Args:
        name: name of the worker and its thread.
        kv_bytes: memory for K and V.
        num_threads: CPU threads of its kernels.
        hub: the S-worker's, which gets another connection. None for a hub of its own.
        clock: seconds, for the times that the worker reports.
        executor: in place of ``AttentionExecutor``, for tests.
        neighbours: other R-workers, which it joins. None if it reaches none.
        disk: where cached blocks may go. None if nowhere.

    Raises:
        ConfigError: If an option is out of range.
    """
    state = RWorkerState(
        name, kv_bytes=kv_bytes, num_threads=num_threads, has_tier=disk is not None
    )
    runner = executor or AttentionExecutor(num_threads=num_threads, clock=clock, tiers=Tiers(disk))
    peers: InprocHub[FromRWorker, ToRWorker] = InprocHub(keeps_places=False)
    here, _ = connect(
        InprocHub() if hub is None else hub, "the S-worker", peers, f"R-worker {name}"
    )
    reaches = None if neighbours is None else neighbours.add(name, peers)

    def run() -> None:
        try:
            serve(peers, state, runner, None, reaches)
        finally:
            peers.close()  # or a later caller would wait for ever

    thread = threading.Thread(target=run, name=f"rworker-{name}", daemon=True)
    thread.start()
    return WorkerThread(name, here, thread, peers)

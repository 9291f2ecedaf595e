"""Where an engine's R-workers come from, and how they are stopped again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from fastdecode.core.errors import WorkerError, imports_for
from fastdecode.core.holders import Holder, HolderKind
from fastdecode.engine.fleet.deadlines import Deadlines
from fastdecode.engine.fleet.fleet import Fleet
from fastdecode.engine.fleet.peers import RHub
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import FromRWorker, Hello, Shutdown, ToRWorker, Welcome
from fastdecode.wire.transport import Connection, SoleHub
from rworker.inline import make_inline_worker
from rworker.stream.links import ThreadNeighbours
from rworker.worker import start_worker_thread

if TYPE_CHECKING:
    from fastdecode.engine.step.remote import Attention
    from sworker.worker import SWorker

logger = logging.getLogger(__name__)

REACH_TIMEOUT_S = 20.0
"""For R-workers that are being started at the same time."""
LEAST_STUCK_S = 2.0
"""However short the silence is that R-workers are allowed: a large message may
keep MPI busy for a while."""


class Replacements(Protocol):
    """R-workers that take the place of lost ones. Never waits."""

    @property
    def timeout_s(self) -> float:
        """How long to go on looking when all are lost. Infinite: whoever may
        come is sure to answer, or to be lost, too."""

    def limit(self, num_blocks: Mapping[int, int]) -> None:
        """From now on those that come in a lost one's place offer so many KV
        blocks, at most."""

    def look(self, lost: Collection[int]) -> Mapping[int, Welcome]:
        """Those of the lost R-workers in whose place another one waits to be let in (``admit``)."""

    def admit(self, worker: int) -> None:
        """From now on the hub's connection of that number is the new R-worker's."""


@dataclass(frozen=True)
class Reached:
    """R-workers that have been reached, or what is in their place."""

    hub: RHub
    """One connection a holder."""
    close: Callable[[Collection[int], float], None]
    """Stop them all and let go of them, once. ``(lost, timeout_s)``: those that
    are lost aren't waited for, they may hang for ever. Raises WorkerError: one
    that wasn't lost did not stop in time."""
    absent: Mapping[int, WorkerError] = field(default_factory=dict)
    """Those that couldn't be reached, by their connection's index, and why."""
    replacements: Callable[[Hello, Deadlines], Replacements] | None = None
    """Makes what looks for those that take the place of lost ones; None:
    nobody does."""
    kind: HolderKind = HolderKind.R_WORKER
    answers_at_once: bool = False
    addresses: tuple[str, ...] = ()
    """What R-workers call each other, where they can reach one another."""
    attention: Callable[[Fleet, Holder, SWorker], Attention] | None = None
    """Makes what attends, where that isn't done by sending q, k and v."""
    group: RHub | None = None
    """The R-workers, where the engine sees a group of them as one."""
    group_lost: Mapping[int, WorkerError] = field(default_factory=dict)
    """Those of the group that are lost, and why."""
    give_up_heads: Callable[[NDArray[np.bool_], str], None] | None = None
    """Gives up those of the group that answered for any of some query heads,
    for a reason; None: whole holders are given up."""

    @property
    def num_r_workers(self) -> int:
        return len((self.group or self.hub).connections)

    def lost(self, fleet: Fleet) -> list[WorkerError]:
        """Why those R-workers are lost that are."""
        return list(fleet.gone.values() if self.group is None else self.group_lost.values())

    @property
    def greeting(self) -> str:
        """What is being done before the first step, for people."""
        peers = [connection.peer for connection in (self.group or self.hub).connections]
        if self.kind is HolderKind.DEVICE:
            return f"no R-workers: {', '.join(peers)}"
        return f"greeting {len(peers)} R-worker(s): {', '.join(peers)}"


def reach_threads(num_workers: int, *, kv_bytes: int, num_threads: int) -> Reached:
    """R-workers as threads of this process.

    Args:
        num_workers: how many.
        kv_bytes: KV cache of each.
        num_threads: CPU threads of each.
    """
    hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
    neighbours = ThreadNeighbours()
    names = tuple(f"r{index}" for index in range(num_workers))
    threads = [
        start_worker_thread(
            name, kv_bytes=kv_bytes, num_threads=num_threads, hub=hub, neighbours=neighbours
        )
        for name in names
    ]

    def close(lost: Collection[int], timeout_s: float) -> None:
        for thread in threads:
            thread.stop()
        for index, thread in enumerate(threads):
            if index in lost:
                thread.connection.close()
            else:
                thread.join(timeout_s)

    return Reached(hub, close, addresses=names)


def reach_inline(*, kv_bytes: int, num_threads: int, openmp_library: str | None) -> Reached:
    """One R-worker in this very thread; see ``rworker.inline``.

    Args:
        kv_bytes, num_threads, openmp_library: see ``make_inline_worker``.
    """
    worker = make_inline_worker(
        "r0", kv_bytes=kv_bytes, num_threads=num_threads, openmp_library=openmp_library
    )
    return Reached(SoleHub(worker), lambda lost, timeout_s: worker.close(), answers_at_once=True)


def reach_ranks(num_s_ranks: int = 1, *, silence_s: float) -> Reached:
    """R-workers as the other ranks of this MPI job; this process is rank 0.
    Each decides its own memory and threads.

    Args:
        num_s_ranks: the first ranks, which are S-workers.
        silence_s: a rank that keeps MPI from returning for so long hangs;
            nothing but the job's end helps then.

    Raises:
        ConfigError: not started by a launcher, by the wrong one, as another
            rank, or with no R-worker.
        MissingExtraError: mpi4py or an MPI library is missing.
    """
    from fastdecode.wire.mpi import hub as mpi
    from fastdecode.wire.mpi import joining
    from fastdecode.wire.mpi.neighbours import link_address

    hub = mpi.connect_workers(
        joining.join(),
        roles=mpi.RankRoles(num_s_ranks),
        stuck_after_s=max(LEAST_STUCK_S, silence_s),
    )

    def close(lost: Collection[int], timeout_s: float) -> None:
        for index, connection in enumerate(hub.connections):
            if index in lost:
                connection.give_up()
            else:
                _shut_down(connection)
        hub.close()

    names = tuple(link_address(num_s_ranks + index) for index in range(len(hub.connections)))
    return Reached(hub, close, addresses=names)


def reach_addresses(
    addresses: Sequence[str],
    *,
    key_file: str | None,
    silence_s: float,
    min_workers: int = 1,
    reach_timeout_s: float = REACH_TIMEOUT_S,
) -> Reached:
    """R-workers at addresses. Each decides its own memory and threads. Waits
    for all of them for a while.

    Args:
        addresses: tcp://HOST:PORT, one a worker.
        key_file: with the cluster's key; None: R-workers of this host only.
        silence_s: one that gives no sign of life for so long is lost.
        min_workers: so many have to be there.
        reach_timeout_s: how long to wait for all of them.

    Raises:
        ConfigError: an address or the key can't be used.
        MissingExtraError: pyzmq is missing.
        WorkerError: fewer than that could be reached in time; the others aren't
            there, or refused the key.
    """
    with imports_for("the ZeroMQ transport"):
        from fastdecode.engine.fleet.replacements import AddressReplacements
        from fastdecode.wire.zmq.access import ClusterKey
        from fastdecode.wire.zmq.hub import ZmqHub
    key = None if key_file is None else ClusterKey.read(Path(key_file))
    hub = ZmqHub(key, silence_s=silence_s)
    try:
        for address in addresses:
            hub.add(address)
        absent = hub.reach(reach_timeout_s)
        if len(addresses) - len(absent) < min_workers:
            raise next(iter(absent.values()))
    except BaseException:
        hub.close()
        raise

    def close(lost: Collection[int], timeout_s: float) -> None:
        for index, connection in enumerate(hub.connections):
            if index not in lost:
                _shut_down(connection)
        hub.close()

    def replacements(hello: Hello, deadlines: Deadlines) -> Replacements:
        return AddressReplacements(hub, hello, timeout_s=deadlines.timeout_s)

    return Reached(hub, close, absent, replacements, addresses=tuple(addresses))


def _shut_down(connection: Connection[ToRWorker, FromRWorker]) -> None:
    try:
        connection.send(Shutdown())
    except WorkerError:
        logger.debug("%s has ended already", connection.peer)

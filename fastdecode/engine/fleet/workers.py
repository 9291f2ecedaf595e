"""Where an engine's R-workers come from, and how they are stopped again."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from fastdecode.core.errors import WorkerError, imports_for
from fastdecode.engine.fleet.deadlines import Deadlines
from fastdecode.engine.fleet.fleet import RHub
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import FromRWorker, Hello, Shutdown, ToRWorker, Welcome
from fastdecode.wire.transport import Connection, SoleHub
from rworker.inline import make_inline_worker
from rworker.worker import WorkerThread, start_worker_thread

logger = logging.getLogger(__name__)

REACH_TIMEOUT_S = 20.0
"""For R-workers that are being started at the same time."""
LEAST_STUCK_S = 2.0
"""However short the silence is that R-workers are allowed: a large message may
keep MPI busy for a while."""


class Newcomers(Protocol):
    """R-workers that take the place of lost ones."""

    def look(self, lost: Collection[int]) -> Mapping[int, Welcome]:
        """Those of the lost R-workers in whose place another one waits to be let in (``admit``)."""

    def await_any(self, lost: Collection[int]) -> bool:
        """All are lost: wait until one comes, for as long as that makes sense.
        Returns whether ``look`` has any."""

    def admit(self, worker: int) -> None:
        """From now on the hub's connection of that number is the new R-worker's."""


class Workers(Protocol):
    """R-workers that can be reached."""

    @property
    def hub(self) -> RHub:
        """One connection a worker."""

    @property
    def absent(self) -> Mapping[int, WorkerError]:
        """Those that couldn't be reached, by their connection's index, and why."""

    def replacements(self, hello: Hello, deadlines: Deadlines) -> Newcomers | None:
        """Who may take the place of those that are lost; None: nobody."""

    def close(self, lost: Collection[int], timeout_s: float) -> None:
        """Stop them all and let go of them. Those that are lost aren't waited
        for: they may hang for ever.

        Raises:
            WorkerError: a worker that wasn't lost did not stop in time.
        """


class ThreadWorkers:
    """R-workers as threads of this process.

    Args:
        num_workers: how many.
        kv_bytes: KV cache of each.
        num_threads: CPU threads of each.
    """

    absent: Mapping[int, WorkerError] = {}

    def __init__(self, num_workers: int, *, kv_bytes: int, num_threads: int) -> None:
        self.hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
        self._threads: list[WorkerThread] = []
        for index in range(num_workers):
            thread = start_worker_thread(
                f"r{index}", kv_bytes=kv_bytes, num_threads=num_threads, hub=self.hub
            )
            self._threads.append(thread)

    def replacements(self, hello: Hello, deadlines: Deadlines) -> None:
        return None

    def close(self, lost: Collection[int], timeout_s: float) -> None:
        for thread in self._threads:
            thread.stop()
        for index, thread in enumerate(self._threads):
            if index in lost:
                thread.connection.close()
            else:
                thread.join(timeout_s)
        self._threads = []


class InlineWorkers:
    """One R-worker in this very thread; see ``rworker.inline``.

    Args:
        kv_bytes, num_threads, openmp_library: see ``make_inline_worker``.
    """

    absent: Mapping[int, WorkerError] = {}

    def __init__(self, *, kv_bytes: int, num_threads: int, openmp_library: str | None) -> None:
        worker = make_inline_worker(
            "r0", kv_bytes=kv_bytes, num_threads=num_threads, openmp_library=openmp_library
        )
        self.hub = SoleHub(worker)

    def replacements(self, hello: Hello, deadlines: Deadlines) -> None:
        return None

    def close(self, lost: Collection[int], timeout_s: float) -> None:
        for connection in self.hub.connections:
            connection.close()


class MpiWorkers:
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

    absent: Mapping[int, WorkerError] = {}

    def __init__(self, num_s_ranks: int = 1, *, silence_s: float) -> None:
        from fastdecode.wire.mpi import hub as mpi
        from fastdecode.wire.mpi import joining

        self.hub: mpi.MpiHub[ToRWorker, FromRWorker] = mpi.connect_workers(
            joining.join(),
            roles=mpi.RankRoles(num_s_ranks),
            stuck_after_s=max(LEAST_STUCK_S, silence_s),
        )

    def replacements(self, hello: Hello, deadlines: Deadlines) -> None:
        return None

    def close(self, lost: Collection[int], timeout_s: float) -> None:
        for index, connection in enumerate(self.hub.connections):
            if index in lost:
                connection.give_up()
            else:
                _shut_down(connection)
        self.hub.close()


class ZmqWorkers:
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

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        key_file: str | None,
        silence_s: float,
        min_workers: int = 1,
        reach_timeout_s: float = REACH_TIMEOUT_S,
    ) -> None:
        with imports_for("the ZeroMQ transport"):
            from fastdecode.wire.zmq.access import ClusterKey
            from fastdecode.wire.zmq.hub import ZmqHub
        self.hub = ZmqHub(
            None if key_file is None else ClusterKey.read(Path(key_file)), silence_s=silence_s
        )
        try:
            for address in addresses:
                self.hub.add(address)
            self.absent = self.hub.reach(reach_timeout_s)
            if len(addresses) - len(self.absent) < min_workers:
                raise next(iter(self.absent.values()))
        except BaseException:
            self.hub.close()
            raise

    def replacements(self, hello: Hello, deadlines: Deadlines) -> Newcomers:
        from fastdecode.engine.fleet.replacements import Replacements

        return Replacements(self.hub, hello, timeout_s=deadlines.timeout_s)

    def close(self, lost: Collection[int], timeout_s: float) -> None:
        for index, connection in enumerate(self.hub.connections):
            if index not in lost:
                _shut_down(connection)
        self.hub.close()


def _shut_down(connection: Connection[ToRWorker, FromRWorker]) -> None:
    try:
        connection.send(Shutdown())
    except WorkerError:
        logger.debug("%s has ended already", connection.peer)

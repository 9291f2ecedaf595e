"""Where an engine's R-workers come from, and how they are stopped again."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Protocol

from fastdecode.core.errors import WorkerError
from fastdecode.engine.fleet import RHub
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.messages import FromRWorker, Shutdown, ToRWorker
from rworker.worker import WorkerThread, start_worker_thread

logger = logging.getLogger(__name__)


class Workers(Protocol):
    """R-workers that can be reached."""

    @property
    def hub(self) -> RHub:
        """One connection a worker."""

    def close(self, lost: Collection[int], timeout_s: float) -> None:
        """Stop them all and let go of them. Those that are lost aren't waited for: they may hang for ever.

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

    def __init__(self, num_workers: int, *, kv_bytes: int, num_threads: int) -> None:
        self.hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
        self._threads: list[WorkerThread] = []
        for index in range(num_workers):
            thread = start_worker_thread(f"r{index}", kv_bytes=kv_bytes, num_threads=num_threads, hub=self.hub)
            self._threads.append(thread)

    def close(self, lost: Collection[int], timeout_s: float) -> None:
        for thread in self._threads:
            thread.stop()
        for index, thread in enumerate(self._threads):
            if index in lost:
                thread.connection.close()
            else:
                thread.join(timeout_s)
        self._threads = []


class MpiWorkers:
    """R-workers as the other ranks of this MPI job; this process is rank 0. Each decides its own memory and threads.

    Raises:
        ConfigError: not started by a launcher, by the wrong one, as another rank, or with no R-worker.
        MissingExtraError: mpi4py or an MPI library is missing.
    """

    def __init__(self) -> None:
        from fastdecode.wire import mpi, mpi_job

        self.hub: mpi.MpiHub[ToRWorker, FromRWorker] = mpi.connect_workers(mpi_job.join())

    def close(self, lost: Collection[int], timeout_s: float) -> None:
        for index, connection in enumerate(self.hub.connections):
            if index in lost:
                connection.give_up()
                continue
            try:
                connection.send(Shutdown())
            except WorkerError:
                logger.debug("%s has ended already", connection.peer)
        self.hub.close()

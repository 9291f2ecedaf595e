"""A directory that simulated R-workers share: each record is there after a while, and in
order; what a crashed process had under way never is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fastdecode.core.errors import ConfigError, WorkerError
from fastdecode.wire.messages import FromRWorker, ToRWorker
from rworker.instructions import LinkReplica, ReadReplica
from rworker.stream.mirror import UNANSWERED
from rworker.transfers.replica_file import ReplicaSink, answer_of

if TYPE_CHECKING:
    from simulated_cluster import Network
    from simulated_process import Process

Name = tuple[int, int, int]


class SimulatedDisk:
    """Its files, by session, holder and link.

    Args:
        network: whose clock and chance it has.
        most_bytes: of K and V in a file, before it is written anew.
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
        name = order.session, order.holder, order.link
        if name not in self._disk.files:
            raise ConfigError("there is no such file")
        yield from list(self._disk.files[name])

    def remove(self, session: int, holder: int, link: int) -> None:
        files = self._disk.files
        for name in [x for x in files if x[:2] == (session, holder) and x[2] <= link]:
            del files[name]


class _File:
    """See ``FileConnection``."""

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

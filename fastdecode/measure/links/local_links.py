"""The links of this machine, each with what its raw thing is: memory, threads,
files, ZeroMQ, and from one R-worker to another."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastdecode.core.errors import WorkerError
from fastdecode.measure.links.caches import (
    KV,
    SEQUENCE_BYTES,
    TIMEOUT_S,
    File,
    MemoryTarget,
    Target,
    Worker,
    hello,
    pieces,
)
from fastdecode.measure.links.neighbours import RConnection, examine_neighbours
from fastdecode.measure.links.rates import (
    LinkRate,
    Raw,
    copy_twice,
    measure,
    stream,
    write_file,
)
from fastdecode.wire.inproc import InprocHub
from fastdecode.wire.kv.chunks import MAX_CHUNK_BYTES
from fastdecode.wire.messages import FromRWorker, Inspect, Report, Shutdown, ToRWorker
from rworker.transfers.neighbours import ThreadNeighbours
from rworker.worker import start_worker_thread

_POLL_S: Final = 0.05


class LocalLinks:
    """Measures links, so many bytes at a time.

    Args:
        num_sequences: of 4 MiB each.
        rounds: that count, of each link.
        tell: told each link's rate as it is known.
    """

    def __init__(self, num_sequences: int, rounds: int, tell: Callable[[LinkRate], None]) -> None:
        self._num_sequences = num_sequences
        self._rounds = rounds
        self._tell = tell
        self._source = MemoryTarget(KV, num_sequences).fill()
        self.kv_bytes = 2 * num_sequences * SEQUENCE_BYTES + 64 * KV.block_bytes
        """Of each R-worker that is measured."""
        self.rates: list[LinkRate] = []
        """What was found."""

    def memory(self) -> None:
        """From a cache in memory to another."""
        self._to("memory", MemoryTarget(KV, self._num_sequences), copy_twice)

    def disk(self, directory: Path) -> None:
        """To a file in a directory."""
        target = File(directory / "stream.fdkv", KV)
        self._to("disk", target, write_file(directory / "raw"))

    def threads(self) -> None:
        """To an R-worker that is a thread, and from one to another."""
        hub: InprocHub[ToRWorker, FromRWorker] = InprocHub()
        neighbours = ThreadNeighbours()
        start = partial(start_worker_thread, hub=hub, neighbours=neighbours)
        names = ["r0", "r1"]
        workers = [start(name, kv_bytes=self.kv_bytes) for name in names]
        try:
            connections = [worker.connection for worker in workers]
            self.to_worker("threads", connections[0], copy_twice)
            self.between("threads", connections, names, copy_twice)
        finally:
            for worker in workers:
                worker.stop()
            for worker in workers:
                worker.join(TIMEOUT_S)

    def zmq(self) -> None:
        """The same of R-workers that are processes of their own."""
        from fastdecode.wire.zmq.hub import ZmqHub

        with _peers(2, self.kv_bytes) as (addresses, raw):
            hub = ZmqHub()
            try:
                connections = [hub.add(address) for address in addresses]
                self.to_worker("zmq", connections[0], raw)
                self.between("zmq", connections, addresses, raw)
                for connection in connections:
                    connection.send(Shutdown())
            finally:
                hub.close()

    def inspect(self, connections: Iterable[RConnection]) -> None:
        """Take what R-workers are able to hold, if that is less.

        Raises:
            WorkerError: they can't be measured, or not with so much.
        """
        for connection in connections:
            connection.send(Inspect())
            report = connection.receive(TIMEOUT_S)
            if not isinstance(report, Report):
                told = getattr(report, "message", type(report).__name__)
                raise WorkerError(f"{connection.peer}: {told}")
            if report.kv_bytes < self.kv_bytes:
                raise WorkerError(
                    f"{connection.peer} has {report.kv_bytes / 1e6:.0f} MB for K and V, and "
                    f"{self.kv_bytes / 1e6:.0f} are needed: measure with less (--mib)"
                )

    def to_worker(self, link: str, connection: RConnection, raw: Raw | None) -> None:
        """From here to an R-worker, which nobody uses."""
        self._to(link, Worker(connection, hello(KV), self._num_sequences), raw)

    def between(
        self, link: str, connections: Sequence[RConnection], addresses: list[str], raw: Raw | None
    ) -> None:
        """From each R-worker to the next. The pages of a replica are written for
        the first time."""
        kv_bytes = [self.kv_bytes] * len(addresses)
        for facts in examine_neighbours(connections, addresses, kv_bytes):
            if facts.error:
                raise WorkerError(f"{facts.peer} to {facts.neighbour}: {facts.error}")
            raw_s = None if raw is None else raw(facts.num_bytes, MAX_CHUNK_BYTES)
            share = None if raw_s is None else raw_s / facts.seconds
            name = f"{link}, R-worker to R-worker"
            rate = LinkRate(name, MAX_CHUNK_BYTES, facts.num_bytes, facts.seconds, raw_s, share)
            self._found(rate)

    def _to(self, link: str, target: Target, raw: Raw | None) -> None:
        some = pieces(range(self._num_sequences))
        act = partial(stream, self._source, target, some)
        self._found(measure(link, act, raw, self._rounds))

    def _found(self, rate: LinkRate) -> None:
        self.rates.append(rate)
        self._tell(rate)


@contextlib.contextmanager
def _peers(number: int, kv_bytes: int) -> Iterator[tuple[list[str], Raw]]:
    """R-workers' addresses, and how raw bytes get to the process of the first."""
    import zmq

    with contextlib.ExitStack() as stack:
        directories = [
            Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(number)
        ]
        children = [stack.enter_context(_child(each, kv_bytes)) for each in directories]
        told = [_addresses(*pair) for pair in zip(children, directories, strict=True)]
        context = zmq.Context()
        stack.callback(context.destroy, 0)
        socket = context.socket(zmq.DEALER)
        socket.connect(told[0][1])
        yield [address for address, _ in told], partial(_send_raw, socket)


@contextlib.contextmanager
def _child(directory: Path, kv_bytes: int) -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-m", "fastdecode.measure.links.zmq_peer"]
    child = subprocess.Popen([*words, str(directory), str(kv_bytes)])
    try:
        yield child
        child.wait(TIMEOUT_S)
    finally:
        child.kill()
        child.wait()


def _addresses(child: subprocess.Popen[bytes], directory: Path) -> tuple[str, str]:
    """At which a child listens, once it does. Raises WorkerError."""
    from fastdecode.measure.links.zmq_peer import ADDRESSES

    found = directory / ADDRESSES
    end = time.monotonic() + TIMEOUT_S
    while not found.exists():
        if child.poll() is not None or time.monotonic() > end:
            raise WorkerError("the process at the other side of the link didn't start")
        time.sleep(_POLL_S)
    address, raw_address = found.read_text().split()
    return address, raw_address


def _send_raw(socket: Any, num_bytes: int, size: int) -> float:
    data = np.ones(size, np.uint8)
    sizes = [min(size, num_bytes - at) for at in range(0, num_bytes, size)]
    started = time.perf_counter()
    socket.send(str(len(sizes)).encode())
    for count in sizes:
        socket.send(data[:count], copy=False)
    socket.recv()
    return time.perf_counter() - started

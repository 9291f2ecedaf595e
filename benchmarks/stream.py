"""How near streams of K and V come to what carries them.

    python benchmarks/stream.py --out benchmarks/results/stream.json

Chunks of several sizes are streamed from a cache in memory to another in memory,
in a file, behind ZeroMQ, and over MPI (shared memory, TCP). The **raw** thing is
as many bytes in buffers of the same size over the same library: two copies, one
into the buffer and one out of it; ``write`` and ``fsync``; ``zmq`` sockets; MPI
sends. The other side gets them all and answers once. Both take turns, but over
MPI, where raw sends come first. A ratio is raw seconds over ours, the median
over pairs: 1 is as fast.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance

from cpu_kernels import allocate_pool
from fastdecode.core.dtype import DType
from fastdecode.core.holders import HolderId, PartId
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.blocks import MAX_CHUNK_BYTES
from fastdecode.wire.messages import PROTOCOL_VERSION, Close, Hello, Open, Shutdown
from rworker.cache_state import CacheState
from rworker.stream.chunk_endpoints import MemoryCache, WorkerCache
from rworker.stream.chunks import layout_of
from rworker.stream.cutting import CacheKind
from rworker.stream.files import KVFileWriter
from rworker.stream.pieces import Box, Piece, Region
from rworker.stream.streams import expect_pieces, stream_out

TIMEOUT_S = 60.0
KV = KVSpec(4, 8, 128, DType.BFLOAT16, 64)
NUM_SEQUENCES = 64
TOKENS = 256
HERE, THERE = HolderId(0), HolderId(1)
SIZES = (1 << 18, 1 << 20, MAX_CHUNK_BYTES)
KV_BYTES = 2 << 30
Raw = Callable[[int, int], float]
"""(bytes in all, bytes of a buffer) -> seconds."""


@dataclass(frozen=True)
class Row:
    way: str
    form: str
    chunk_bytes: int
    num_bytes: int
    raw_s: float
    ours_s: float
    ratio: float


def hello(kv: KVSpec) -> Hello:
    spec = AttentionSpec(kv.num_kv_heads, kv.num_kv_heads, kv.head_dim, 0.1)
    return Hello(PROTOCOL_VERSION, "streamed", kv, (spec,) * kv.num_layers, DType.BFLOAT16)


class Memory:
    """A cache here; every page of it was written."""

    def __init__(self, kv: KVSpec) -> None:
        num_blocks = NUM_SEQUENCES * kv.num_blocks_for(TOKENS)
        self.books = CacheState(hello(kv), num_blocks)
        pool = allocate_pool(layout_of(kv), kv.num_layers, num_blocks)
        pool[:] = 1
        self.sink = MemoryCache(self.books, pool)

    def fill(self) -> MemoryCache:
        for i in range(NUM_SEQUENCES):
            self.books.reserve(Open(i, TOKENS))
            self.books.store.append(np.array([i], np.int64), np.array([TOKENS], np.int32))
        return self.sink

    def begin(self) -> MemoryCache:
        for i in range(NUM_SEQUENCES):
            if i in self.books.store:
                self.books.close(Close(i))
            self.books.reserve(Open(i, TOKENS))
        return self.sink

    def end(self) -> None: ...


class Worker:
    """An R-worker's."""

    def __init__(self, connection: Any, kv: KVSpec) -> None:
        self._connection = connection
        self._kind = CacheKind("streamed", kv)
        connection.send(hello(kv))
        connection.receive(TIMEOUT_S)
        self._is_open = False

    def begin(self) -> WorkerCache:
        for i in range(NUM_SEQUENCES):
            if self._is_open:
                self._connection.send(Close(i))
            self._connection.send(Open(i, TOKENS))
            self._connection.receive(TIMEOUT_S)
        self._is_open = True
        return WorkerCache(self._connection, self._kind)

    def end(self) -> None: ...


class File:
    def __init__(self, path: Path, kv: KVSpec) -> None:
        self._path, self._kind = path, CacheKind("streamed", kv)

    def begin(self) -> KVFileWriter:
        self._path.unlink(missing_ok=True)
        self._writer = KVFileWriter(self._path, self._kind)
        return self._writer

    def end(self) -> None:
        self._writer.__exit__(None, None, None)


def pieces(kv: KVSpec) -> list[Piece]:
    """Return pieces of all tokens, layers and heads of all sequences."""
    whole = Box(range(kv.num_layers), range(kv.num_kv_heads), range(TOKENS))
    return [
        Piece(Region(HERE, PartId(i), whole), Region(THERE, PartId(i), whole), whole)
        for i in range(NUM_SEQUENCES)
    ]


def stream(source: Any, target: Any, size: int, some: list[Piece]) -> tuple[int, float]:
    """Bytes, and the seconds that they took."""
    sink = target.begin()
    expect_pieces(some, {THERE: sink})
    started = time.perf_counter()
    num_bytes = stream_out(some, {HERE: source}, {THERE: sink}, size)
    target.end()
    return num_bytes, time.perf_counter() - started


def measure(way: str, make: Callable[[KVSpec], Any], raw: Raw, rounds: int) -> list[Row]:
    rows = []
    for form, kv in (("blocks", KV), ("tokens", replace(KV, block_size=128))):
        source, target, some = Memory(KV).fill(), make(kv), pieces(KV)
        for size in SIZES:
            times = []
            for _ in range(rounds + 1):
                num_bytes, ours_s = stream(source, target, size, some)
                times.append((raw(num_bytes, size), ours_s))
            raw_s, ours_s = (statistics.median(x) for x in zip(*times[1:], strict=True))
            ratio = statistics.median(one / other for one, other in times[1:])
            rows.append(Row(way, form, size, num_bytes, raw_s, ours_s, ratio))
            print(rows[-1], flush=True)
    return rows


# ZeroMQ: the other side is a process of its own.


@contextlib.contextmanager
def zmq_way(directory: Path) -> Iterator[tuple[Callable[[KVSpec], Any], Raw]]:
    import zmq

    from fastdecode.wire.zmq.hub import ZmqHub

    other = subprocess.Popen([sys.executable, __file__, "--serve-zmq", str(directory)])
    found = directory / "addresses"
    while not found.exists():
        time.sleep(0.05)
    address, raw_address = found.read_text().split()
    hub, context = ZmqHub(), zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(raw_address)

    def send(num_bytes: int, size: int) -> float:
        data = np.ones(size, np.uint8)
        sizes = [min(size, num_bytes - at) for at in range(0, num_bytes, size)]
        started = time.perf_counter()
        socket.send(str(len(sizes)).encode())
        for count in sizes:
            socket.send(data[:count], copy=False)
        socket.recv()
        return time.perf_counter() - started

    connection = hub.add(address)
    try:
        yield lambda kv: Worker(connection, kv), send
        connection.send(Shutdown())
    finally:
        hub.close()
        context.destroy(0)
        other.wait(TIMEOUT_S)


def serve_zmq(directory: Path) -> None:
    import zmq

    from fastdecode.wire.zmq.hub import ZmqListener
    from rworker.host import make_worker
    from rworker.worker import serve

    socket = zmq.Context().socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def take_raw() -> None:
        while True:
            identity, count = socket.recv_multipart()
            for _ in range(int(count)):
                socket.recv_multipart(copy=False)
            socket.send_multipart([identity, b""])

    threading.Thread(target=take_raw, daemon=True).start()
    listener = ZmqListener("tcp://127.0.0.1:*", "r0")
    (directory / "tmp").write_text(f"{listener.address} tcp://127.0.0.1:{port}")
    (directory / "tmp").rename(directory / "addresses")
    serve(listener, *make_worker("r0", kv_memory_gb=KV_BYTES / 1e9, num_threads=1))
    listener.close()
    os._exit(0)  # the thread of raw sends never ends


def mpi_rank(way: str, out: Path, rounds: int) -> None:
    from fastdecode.wire.mpi.job import join, leave
    from fastdecode.wire.ranks import S_RANK, StageRanks

    job = join()
    from fastdecode.wire.mpi.hub import MPI, connect_stage, r_worker_hub
    from rworker.host import make_worker
    from rworker.worker import serve

    num_bytes = NUM_SEQUENCES * TOKENS * KV.token_bytes
    if job.rank != S_RANK:
        for size in SIZES * 2 * (rounds + 1):
            buffers = [np.empty(size, np.uint8) for _ in range(2)]
            for at in range(0, num_bytes, size):
                job.comm.Recv([buffers[at // size % 2], MPI.BYTE], 0, 7)
            job.comm.Send([np.zeros(1, np.uint8), MPI.BYTE], 0, 7)
        peers = r_worker_hub(job)
        serve(peers, *make_worker("r0", kv_memory_gb=KV_BYTES / 1e9, num_threads=1))
        peers.close()
        leave(0)
    raw_s: dict[int, list[float]] = {}
    for size in SIZES * 2 * (rounds + 1):
        data = np.ones(size, np.uint8)
        started = time.perf_counter()
        for at in range(0, num_bytes, size):
            job.comm.Send([data[: min(size, num_bytes - at)], MPI.BYTE], 1, 7)
        job.comm.Recv([np.zeros(1, np.uint8), MPI.BYTE], 1, 7)
        raw_s.setdefault(size, []).append(time.perf_counter() - started)
    hub, _ = connect_stage(job, StageRanks(1), 0, [1])
    connection = hub.connections[0]
    rows = measure(
        way,
        lambda kv: Worker(connection, kv),
        lambda _, size: statistics.median(raw_s[size][1:]),
        rounds,
    )
    out.write_text(json.dumps([asdict(row) for row in rows]))
    connection.send(Shutdown())
    hub.close()
    leave(0)


def run_mpi(directory: Path, rounds: int) -> list[dict[str, Any]]:
    rows = []
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    for btl in ("self,sm", "self,tcp"):
        out = directory / btl.replace(",", "-")
        options = f"--with-ft ulfm --mca pml ob1 --mca btl {btl} --oversubscribe".split()
        command = [mpirun, "-n", "2", *options, sys.executable, __file__]
        command += ["--mpi-rank", f"mpi {btl}", "--out", str(out), "--rounds", str(rounds)]
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        subprocess.run(command, check=True, timeout=600, env={**os.environ, **allowed})
        rows += json.loads(out.read_text())
    return rows


def run_all(rounds: int) -> dict[str, Any]:
    from rworker.worker import start_worker_thread

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rows = measure("memory", Memory, copy_twice, rounds)
        worker = start_worker_thread("r0", kv_bytes=KV_BYTES)
        rows += measure("thread", lambda kv: Worker(worker.connection, kv), copy_twice, rounds)
        worker.stop()
        worker.join(TIMEOUT_S)
        make_file = lambda kv: File(directory / "kv.fdkv", kv)  # noqa: E731
        rows += measure("file", make_file, write_file(directory / "raw"), rounds)
        with zmq_way(directory) as (make, raw):
            rows += measure("zmq", make, raw, rounds)
        all_rows = [*map(asdict, rows), *run_mpi(directory, rounds)]
    return {"provenance": provenance(), "rows": all_rows}


def copy_twice(num_bytes: int, size: int) -> float:
    """Into a buffer, and out of it."""
    one, buffer, other = (np.ones(x, np.uint8) for x in (num_bytes, size, num_bytes))
    started = time.perf_counter()
    for at in range(0, num_bytes, size):
        count = min(size, num_bytes - at)
        buffer[:count] = one[at : at + count]
        other[at : at + count] = buffer[:count]
    return time.perf_counter() - started


def write_file(path: Path) -> Raw:
    """Into a new file of this name, and on to the disk."""

    def write(num_bytes: int, size: int) -> float:
        data = np.ones(size, np.uint8)
        path.unlink(missing_ok=True)
        started = time.perf_counter()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        for at in range(0, num_bytes, size):
            os.write(fd, data[: min(size, num_bytes - at)].data)
        os.fsync(fd)
        os.close(fd)
        return time.perf_counter() - started

    return write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve-zmq", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mpi-rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_zmq:
        serve_zmq(args.serve_zmq)
    elif args.mpi_rank:
        mpi_rank(args.mpi_rank, args.out, args.rounds)
    else:
        results = run_all(args.rounds)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

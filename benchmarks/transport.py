"""What do codec and loop add to the wire? A layer's round trip against the raw
ping-pong of the same bytes.

    python benchmarks/transport.py --out benchmarks/results/transport.json

An S-worker sends q, k and v (equal thirds of the size) to each of 1 to 3
R-workers, which answer o (a third) from a null kernel. The raw ping-pong moves
as many bytes over the same transport, between the same processes, with one
plain buffer each way and the same polite waiting. Both are measured in turns
within one run, so that what else the machine does falls on both.

Goals: at most 15 us added at 16 KB, at most 1.3 times the raw time at 256 KB
and above.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from provenance import provenance

from fastdecode.core.dtype import DType
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.wire.messages import Attend, AttendResult, Hello, Shutdown
from fastdecode.wire.waiting import look_until_found

SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
SIZES_R = (1, 2, 3)
ROUNDS = 12
TRIPS = 25
"""A round: so many raw trips, then so many of ours."""
HEAD_DIM = 64
TIMEOUT_S = 60.0
KV, ATTENTION = KVSpec(1, 8, 64, DType.FLOAT16), AttentionSpec(8, 8, 64, 1)
HELLO = Hello("-", KV, (ATTENTION,), DType.FLOAT16)
ROOT = Path(__file__).parents[1]

MPIRUN = "--with-ft ulfm --oversubscribe --bind-to none --mca pml ob1 --mca btl"
BTLS = {"mpi sm": "self,sm", "mpi tcp": "self,tcp --mca btl_tcp_if_include lo"}


@dataclass(frozen=True)
class Row:
    transport: str
    r_workers: int
    bytes_out: int
    """To each R-worker; a third of it comes back."""
    raw_s: float
    ours_s: float

    @property
    def added_s(self) -> float:
        return self.ours_s - self.raw_s

    @property
    def ratio(self) -> float:
        return self.ours_s / self.raw_s


class Raw(Protocol):
    """Plain buffers to and from every peer."""

    def trip(self, out: np.ndarray, back: np.ndarray) -> None: ...

    def answer(self, out: np.ndarray, back: np.ndarray) -> None: ...


class RawMpi:
    def __init__(self, job: Any, ranks: list[int]) -> None:
        from fastdecode.wire.mpi.hub import MPI

        self._mpi, self._job, self._ranks = MPI, job, ranks

    def trip(self, out: np.ndarray, back: np.ndarray) -> None:
        world = self._mpi.COMM_WORLD
        with self._job.lock:
            receives = [world.Irecv([back, self._mpi.BYTE], rank, 7) for rank in self._ranks]
            sends = [world.Isend([out, self._mpi.BYTE], rank, 7) for rank in self._ranks]
        self._wait([*sends, *receives])

    def answer(self, out: np.ndarray, back: np.ndarray) -> None:
        with self._job.lock:
            receive = self._mpi.COMM_WORLD.Irecv([out, self._mpi.BYTE], self._ranks[0], 7)
        self._wait([receive])
        with self._job.lock:
            send = self._mpi.COMM_WORLD.Isend([back, self._mpi.BYTE], self._ranks[0], 7)
        self._wait([send])

    def _wait(self, requests: list[Any]) -> None:
        def has_ended(request: Any) -> bool | None:
            with self._job.lock:
                return request.Test() or None

        for request in requests:
            assert look_until_found(partial(has_ended, request), TIMEOUT_S)


class RawZmq:
    def __init__(self, sockets: list[Any]) -> None:
        self._sockets = sockets

    def trip(self, out: np.ndarray, back: np.ndarray) -> None:
        for socket in self._sockets:
            socket.send(out, copy=False)
        for socket in self._sockets:
            socket.recv(copy=False)

    def answer(self, out: np.ndarray, back: np.ndarray) -> None:
        identity, _ = self._sockets[0].recv_multipart(copy=False)
        self._sockets[0].send_multipart([identity.bytes, back], copy=False)


def shape(size: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Of each of q, k, v and o."""
    return np.dtype(np.uint16), (size // 3 // (2 * HEAD_DIM * 8), 8, HEAD_DIM)


def measure(transport: str, hub: Any, raw: Raw) -> list[Row]:
    """The S-worker's side."""
    rows, num_r = [], len(hub.connections)
    for size in SIZES:
        dtype, dims = shape(size)
        message = Attend(1, 0, 0, *[np.ones(dims, dtype) for _ in range(3)])
        out, back = np.ones(3 * message.q.nbytes, np.uint8), np.ones(message.q.nbytes, np.uint8)
        times: dict[str, list[float]] = {"raw": [], "ours": []}
        for _ in range(ROUNDS):
            for _ in range(TRIPS):
                started = time.perf_counter()
                raw.trip(out, back)
                times["raw"].append(time.perf_counter() - started)
            for _ in range(TRIPS):
                started = time.perf_counter()
                trip(hub, message)
                times["ours"].append(time.perf_counter() - started)
        middle = {name: statistics.median(values) for name, values in times.items()}
        rows.append(Row(transport, num_r, out.nbytes, middle["raw"], middle["ours"]))
    for connection in hub.connections:
        connection.send(Shutdown())
    return rows


def trip(hub: Any, message: Attend) -> None:
    for connection in hub.connections:
        connection.send(message)
    for _ in hub.connections:
        hub.receive_any(TIMEOUT_S)


def serve(connection: Any, raw: Raw) -> None:
    """An R-worker's side: the same turns, a null kernel."""
    for size in SIZES:
        dtype, dims = shape(size)
        o = np.ones(dims, dtype)
        out, back = np.ones(3 * o.nbytes, np.uint8), np.ones(o.nbytes, np.uint8)
        for _ in range(ROUNDS):
            for _ in range(TRIPS):
                raw.answer(out, back)
            for _ in range(TRIPS):
                message = connection.receive(TIMEOUT_S)
                connection.send(
                    AttendResult(message.step, message.lane, message.layer, o, None, 0.0)
                )
    assert isinstance(connection.receive(TIMEOUT_S), Shutdown)


def mpi_rank(transport: str, out: Path) -> None:
    from fastdecode.wire.mpi.job import join, leave
    from fastdecode.wire.ranks import S_RANK, StageRanks

    job = join()
    from fastdecode.wire.mpi.hub import connect_stage, r_worker_hub

    pin(job.rank)
    if job.rank == S_RANK:
        r_ranks = range(1, job.size)
        hub, _ = connect_stage(job, StageRanks(1), 0, r_ranks)
        for connection in hub.connections:
            connection.send(HELLO)
        save(out, measure(transport, hub, RawMpi(job, list(r_ranks))))
        hub.close()
    else:
        s_side = r_worker_hub(job)
        index, hello = s_side.receive_any(TIMEOUT_S)
        assert hello == HELLO
        serve(s_side.connections[index], RawMpi(job, [S_RANK]))
        s_side.close()
    leave(0)


def zmq_r_worker(index: int, directory: Path) -> None:
    import zmq

    from fastdecode.wire.zmq.hub import ZmqListener

    pin(1 + index)
    listener = ZmqListener("tcp://127.0.0.1:*", f"r{index}")
    raw = zmq.Context().socket(zmq.ROUTER)
    port = raw.bind_to_random_port("tcp://127.0.0.1")
    (directory / f"{index}.tmp").write_text(f"{listener.address} tcp://127.0.0.1:{port}")
    (directory / f"{index}.tmp").rename(directory / f"{index}.addresses")
    index, hello = listener.receive_any(TIMEOUT_S)
    assert hello == HELLO
    serve(listener.connections[index], RawZmq([raw]))
    listener.close()
    os._exit(0)


def zmq_s_worker(num_r: int, out: Path) -> None:
    import zmq

    from fastdecode.wire.zmq.hub import ZmqHub

    pin(0)
    directory = Path(tempfile.mkdtemp())
    command = [sys.executable, __file__, "--directory", str(directory), "--role"]
    workers = [subprocess.Popen([*command, f"zmq-r {i}"]) for i in range(num_r)]
    hub, context, sockets = ZmqHub(), zmq.Context(), []
    for index in range(num_r):
        path = directory / f"{index}.addresses"
        assert look_until_found(lambda p=path: p.exists() or None, TIMEOUT_S)
        address, raw_address = path.read_text().split()
        hub.add(address).send(HELLO)
        sockets.append(context.socket(zmq.DEALER))
        sockets[-1].connect(raw_address)
    save(out, measure("zmq", hub, RawZmq(sockets)))
    hub.close()
    for worker in workers:
        worker.wait(TIMEOUT_S)
    os._exit(0)


def pin(index: int) -> None:
    """Processes side by side as far as there are cores."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})


def save(path: Path, rows: list[Row]) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows]))


def run(transport: str, num_r: int) -> list[Row]:
    """One job of its own."""
    with tempfile.TemporaryDirectory(prefix="fd", dir="/tmp") as directory:
        out = Path(directory, "rows.json")
        env = dict(os.environ, OMP_NUM_THREADS="1", TMPDIR=directory, PYTHONPATH=str(ROOT))
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        python = [sys.executable, __file__, "--out", str(out), "--role"]
        if transport == "zmq":
            command = [*python, f"zmq-s {num_r}"]
        else:
            mpirun = str(Path(sys.executable).with_name("mpirun"))
            options = f"{MPIRUN} {BTLS[transport]} -n {1 + num_r}".split()
            command = [mpirun, *options, *python, transport]
        subprocess.run(command, env=env, stdin=subprocess.DEVNULL, check=True, timeout=600)
        return [Row(**row) for row in json.loads(out.read_text())]


def table(rows: list[Row]) -> str:
    lines = ["transport  R     bytes out        raw        ours      added   ratio"]
    lines += [
        f"{r.transport:<9}  {r.r_workers}  {r.bytes_out:>12,} {1e6 * r.raw_s:>8.1f} us "
        f"{1e6 * r.ours_s:>8.1f} us {1e6 * r.added_s:>7.1f} us   {r.ratio:.2f}"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("transport.json"))
    parser.add_argument("--transports", nargs="+", default=[*BTLS, "zmq"], choices=[*BTLS, "zmq"])
    parser.add_argument("--r-workers", nargs="+", type=int, default=list(SIZES_R))
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role in BTLS:
        mpi_rank(args.role, args.out)
    elif args.role is not None:
        kind, number = args.role.split()
        if kind == "zmq-r":
            zmq_r_worker(int(number), args.directory)
        else:
            zmq_s_worker(int(number), args.out)
    else:
        before = provenance()
        rows = [
            row
            for transport in args.transports
            for num_r in args.r_workers
            for row in run(transport, num_r)
        ]
        print(table(rows))
        described = [asdict(row) | {"added_s": row.added_s, "ratio": row.ratio} for row in rows]
        result = {**before, "load_average_after": os.getloadavg(), "rows": described}
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

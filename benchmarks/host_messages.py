"""What would one message a host save the S-worker's thread? CPU time of a layer's
messages to one host with 4 and with 16 R-workers, over ZeroMQ on loopback.

    python benchmarks/host_messages.py [--out FILE]

Three ways to send 256 rows of an 8B Llama (q of 32 heads, k and v of 8, 128 dims, 16
bits) and to take o in; a process on the other side answers at once:

* ``messages``: one to each R-worker, as engines do (``WorkerPool``, ``ZmqHub``);
* ``bundle``: each R-worker's, encoded and decoded by itself, all in one ZeroMQ message.
  That is what a relay in front of R-workers would take. It is not part of the product;
* ``one``: one R-worker with all rows, as engines do.

Answers have come before they are taken in, so no wait is counted; nor is what the
pipeline does for each R-worker (``host_loop.py``), which a bundle would not change.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from provenance import provenance

from fastdecode.core.dtype import DType
from fastdecode.core.holders import HolderId
from fastdecode.core.spec import AttentionSpec, KVSpec
from fastdecode.engine.fleet.pool import WorkerPool
from fastdecode.wire import codec
from fastdecode.wire.messages import (
    PROTOCOL_VERSION,
    Attend,
    AttendResult,
    BeginStep,
    Hello,
    Shutdown,
)
from fastdecode.wire.patience import look_until_found
from fastdecode.wire.zmq.hub import ZmqHub
from fastdecode.wire.zmq.listener import ZmqListener

ROWS, Q_HEADS, KV_HEADS, HEAD_DIM = 256, 32, 8, 128
LAYERS = 100
TIMEOUT_S = 60.0
SETTLED_S = 0.02
"""After so long all answers are here, as a rule."""
HELLO = Hello(
    PROTOCOL_VERSION,
    "-",
    KVSpec(1, KV_HEADS, HEAD_DIM, DType.FLOAT16),
    (AttentionSpec(Q_HEADS, KV_HEADS, HEAD_DIM, 1),),
    DType.FLOAT16,
)


def rows_of(num_r_workers: int) -> tuple[np.ndarray, np.ndarray]:
    """One R-worker's share: q, and k or v."""
    num_rows = ROWS // num_r_workers
    return (
        np.zeros((num_rows, Q_HEADS, HEAD_DIM), np.uint16),
        np.zeros((num_rows, KV_HEADS, HEAD_DIM), np.uint16),
    )


def publish(directory: Path, name: str, address: str) -> None:
    (directory / f"{name}.new").write_text(address)
    (directory / f"{name}.new").rename(directory / name)


def published(directory: Path, name: str) -> str:
    assert look_until_found(lambda: (directory / name).exists() or None, TIMEOUT_S)
    return (directory / name).read_text()


def serve_each(num_r_workers: int, directory: Path) -> None:
    """R-workers that answer q for o."""

    def serve(index: int) -> None:
        listener = ZmqListener("tcp://127.0.0.1:*", f"r{index}")
        publish(directory, str(index), listener.address)
        connection: Any = listener.accept(TIMEOUT_S)
        while not isinstance(message := connection.receive(TIMEOUT_S), Shutdown):
            if isinstance(message, Attend):
                lane, layer = message.lane, message.layer
                connection.send(AttendResult(message.step, lane, layer, message.q, None, 0.0))
        listener.close()

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(num_r_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def serve_bundle(num_r_workers: int, directory: Path) -> None:
    """The same, all in one message."""
    socket = zmq.Context().socket(zmq.ROUTER)
    publish(directory, "0", f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
    o, _ = rows_of(num_r_workers)
    answer = in_one_piece([AttendResult(0, 0, 0, o, None, 0.0)])
    while True:
        sender, kind, *_ = socket.recv_multipart(copy=False)
        if not kind.bytes:
            return
        parts = [sender.bytes, b"layer", *[answer] * num_r_workers]
        socket.send_multipart(parts, copy=False)


def in_one_piece(messages: list[Any]) -> bytearray:
    frames = [codec.encode(message, epoch=7) for message in messages]
    room, at = bytearray(sum(frame.num_bytes for frame in frames)), 0
    for frame in frames:
        frame.write(memoryview(room)[at : at + frame.num_bytes])
        at += frame.num_bytes
    return room


def timed(send: Callable[[int], None], take_in: Callable[[], None]) -> dict[str, float]:
    """Microseconds of a layer: the median of ``LAYERS``."""
    sent, taken = [], []
    for layer in range(LAYERS):
        started = time.thread_time()
        send(layer)
        sent.append(time.thread_time() - started)
        time.sleep(SETTLED_S)
        started = time.thread_time()
        take_in()
        taken.append(time.thread_time() - started)
    send_us, take_in_us = (round(1e6 * statistics.median(x), 1) for x in (sent, taken))
    return {"send_us": send_us, "take_in_us": take_in_us, "us": round(send_us + take_in_us, 1)}


def time_messages(num_r_workers: int, directory: Path) -> dict[str, float]:
    hub = ZmqHub()
    for index in range(num_r_workers):
        hub.add(published(directory, str(index))).send(HELLO)
    pool = WorkerPool(hub, timeout_s=300.0)
    q, kv = rows_of(num_r_workers)
    n = np.ones(len(q), np.int32)
    holders = [HolderId(index) for index in range(num_r_workers)]
    for holder in holders:
        pool.send(holder, BeginStep(0, 0, np.arange(len(q)), n, n, n, n))

    def send(layer: int) -> None:
        for holder in holders:
            pool.send(holder, Attend(0, 0, layer, q, kv, kv))

    def take_in() -> None:
        pool.receive()  # behind a wait; the others as they are here
        for _ in holders[1:]:
            if pool.receive(most_s=0.0) is None:
                pool.receive()

    found = timed(send, take_in)
    for connection in hub.connections:
        connection.send(Shutdown())
    hub.close()
    return found


def time_bundle(num_r_workers: int, directory: Path) -> dict[str, float]:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(published(directory, "0"))
    q, kv = rows_of(num_r_workers)

    def send(layer: int) -> None:
        messages = [Attend(0, 0, layer, q, kv, kv) for _ in range(num_r_workers)]
        socket.send_multipart([b"layer", in_one_piece(messages)], copy=False)

    def take_in() -> None:
        for part in socket.recv_multipart(copy=False)[1:]:
            codec.decode(np.frombuffer(part.buffer, np.uint8))

    found = timed(send, take_in)
    socket.send(b"")
    return found


WAYS = {"messages": (serve_each, time_messages), "bundle": (serve_bundle, time_bundle)}


def measure(way: str, num_r_workers: int) -> dict[str, float]:
    """With the other side in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, "--serve", way, str(num_r_workers), scratch]
        server = subprocess.Popen(command)
        try:
            return WAYS[way][1](num_r_workers, Path(scratch))
        finally:
            server.kill()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        way, num_r_workers, directory = options.serve
        WAYS[way][0](int(num_r_workers), Path(directory))
        return
    record: dict[str, Any] = {**provenance(), "rows": []}
    for num_r_workers in (4, 16):
        row = {
            "r_workers": num_r_workers,
            "messages": measure("messages", num_r_workers),
            "bundle": measure("bundle", num_r_workers),
            "one": measure("messages", 1),
        }
        record["rows"].append(row)
        print(json.dumps(row), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

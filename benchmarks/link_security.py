"""What a ZeroMQ I/O thread carries, as the key has it: an S-worker's
hub and an R-worker's listener in two processes, messages of a decode step there
and back on loopback.

    python benchmarks/link_security.py [--out FILE]

A thread's rate is bytes over the CPU seconds of that end's I/O threads alone, so
that it holds where a network, and not this loopback, is between two hosts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fastdecode.wire.messages import Attend, AttendResult, Inspect
from fastdecode.wire.zmq.access import ClusterKey
from fastdecode.wire.zmq.hub import ZmqHub
from fastdecode.wire.zmq.io_threads import io_cpu_s
from fastdecode.wire.zmq.listener import ZmqListener

MODES = ("no key", "authenticate", "encrypt")
NUM_TOKENS = 256
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Of an 8B Llama."""


def answer(path: str | None, told: Any) -> None:
    """An R-worker that sends back what it is sent."""
    key = None if path is None else ClusterKey.read(Path(path))
    with contextlib.closing(ZmqListener("tcp://127.0.0.1:*", "r", key=key)) as listener:
        told.send(listener.address)
        while not told.poll(0):
            with contextlib.suppress(Exception):
                index, message = listener.receive_any(0.2)
                if isinstance(message, Attend):
                    result = AttendResult(
                        message.step, message.lane, message.layer, message.q, None, 0.0
                    )
                    listener.connections[index].send(result)
        told.recv()
        told.send(io_cpu_s())
        told.recv()


def measure(mode: str, num_messages: int, directory: Path) -> dict[str, Any]:
    path = None
    if mode != "no key":
        path = str(directory / f"key {mode}")
        ClusterKey.create(Path(path), mode)
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=answer, args=(path, theirs))
    process.start()
    key = None if path is None else ClusterKey.read(Path(path))
    with contextlib.closing(ZmqHub(key)) as hub:
        connection = hub.add(ours.recv())
        assert hub.reach(30) == {}
        connection.send(Inspect())
        q = np.ones((NUM_TOKENS, Q_HEADS, HEAD_DIM), np.uint16)
        kv = np.ones((NUM_TOKENS, KV_HEADS, HEAD_DIM), np.uint16)
        num_bytes = 2 * q.nbytes + 2 * kv.nbytes
        before_s, started = io_cpu_s(), time.perf_counter()
        for layer in range(num_messages):
            connection.send(Attend(0, layer % 2, layer, q, kv, kv))
            if layer:
                connection.receive(30)
        connection.receive(30)
        wall_s, io_s = time.perf_counter() - started, io_cpu_s() - before_s
        ours.send("end")
        their_io_s = ours.recv()
        ours.send("ended")
    process.join()
    total = num_messages * num_bytes
    return {
        "mode": mode, "messages": num_messages, "bytes_both_ways": num_bytes,
        "gbps_wall": total / wall_s / 1e9, "gbps_s_thread": total / io_s / 1e9,
        "gbps_r_thread": total / their_io_s / 1e9,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=400)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for mode in MODES:
            rows.append(measure(mode, args.messages, Path(directory)))
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in rows[-1].items()})
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

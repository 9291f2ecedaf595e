"""The other side of a ZeroMQ link, in a process of its own: an R-worker, and a
socket that takes raw bytes. ``python -m fastdecode.measure.links.zmq_peer
DIRECTORY KV_BYTES`` writes both addresses into the directory."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Final

import zmq

from fastdecode.core.errors import FastDecodeError
from fastdecode.wire.zmq.listener import ZmqListener
from fastdecode.wire.zmq.neighbours import ZmqNeighbours
from rworker.host import make_worker
from rworker.worker import serve

ADDRESSES: Final = "addresses"


def serve_both(directory: Path, kv_bytes: int) -> None:
    """Until the R-worker is told to end."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    threading.Thread(target=_take_raw, args=(socket,), daemon=True).start()
    listener = ZmqListener("tcp://127.0.0.1:*", "measured")
    partial = directory / f"{ADDRESSES}.part"
    partial.write_text(f"{listener.address} tcp://127.0.0.1:{port}")
    partial.rename(directory / ADDRESSES)
    neighbours = ZmqNeighbours(None)
    worker = make_worker("measured", kv_memory_gb=kv_bytes / 1e9, num_threads=1)
    serve(listener, *worker, None, neighbours)
    neighbours.close()
    listener.close()


def _take_raw(socket: zmq.Socket[bytes]) -> None:
    """Take as many messages as the first one says, and answer once; again and again."""
    while True:
        identity, count = socket.recv_multipart()
        for _ in range(int(count)):
            socket.recv_multipart(copy=False)
        socket.send_multipart([identity, b""])


if __name__ == "__main__":
    try:
        serve_both(Path(sys.argv[1]), int(sys.argv[2]))
    except FastDecodeError as error:
        print(error, file=sys.stderr)
        os._exit(1)
    os._exit(0)  # the thread that takes raw bytes never ends

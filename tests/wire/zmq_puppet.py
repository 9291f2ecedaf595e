"""An R-worker's side of the ZeroMQ transport in a process of its own. Usage:
zmq_puppet.py SOCKET NUMBER"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from puppet import WAIT_S, obey  # noqa: E402

from fastdecode.wire.traits import Role  # noqa: E402
from fastdecode.wire.zmq.hub import ZmqListener  # noqa: E402
from fastdecode.wire.zmq.keys import read_key  # noqa: E402


class Side:
    """A listener, and the connection that it accepted last."""

    def __init__(self, listener: ZmqListener) -> None:
        self.listener = listener
        self.connection: Any = None

    def accept(self) -> Any:
        """Wait for an S-worker, and give its Hello."""
        index, hello = self.listener.receive_any(WAIT_S)
        self.connection = self.listener.connections[index]
        return hello

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


def main(path: str, number: str) -> None:
    side: Side | None = None

    def open_listener(address: str, key_file: str | None, silence_s: float) -> tuple[Side, str]:
        nonlocal side
        if side is not None:
            side.listener.close()
        key = read_key(key_file)
        one = {Role.S_WORKER: 1}
        side = Side(
            ZmqListener(address, f"puppet {number}", key=key, silence_s=silence_s, most_peers=one)
        )
        return side, side.listener.address

    obey(path, int(number), os.getpid(), open_listener)
    if side is not None:
        side.listener.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

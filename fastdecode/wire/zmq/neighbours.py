"""Links between R-workers at addresses."""

from __future__ import annotations

from fastdecode.wire.messages import FromRWorker, ToRWorker
from fastdecode.wire.zmq.connection import ZmqConnection
from fastdecode.wire.zmq.hub import DEFAULT_SILENCE_S, ZmqHub
from fastdecode.wire.zmq.keys import ClusterKey


class ZmqNeighbours:
    """How an R-worker reaches others. They reach it at the address at which it
    listens anyway.

    Args:
        key: of the cluster; None: R-workers of this host only.
        silence_s: one that gives no sign of life for so long is lost.
    """

    def __init__(self, key: ClusterKey | None, silence_s: float = DEFAULT_SILENCE_S) -> None:
        self._hub = ZmqHub(key, silence_s=silence_s)

    def connect(self, address: str, line: int) -> ZmqConnection[ToRWorker, FromRWorker]:
        """See ``rworker.transfers.neighbours.Neighbours``."""
        return self._hub.open(address)

    @property
    def num_connections(self) -> int:
        """That are open."""
        return self._hub.num_outside

    def expect(self, address: str, line: int) -> None:
        """Any process with the key may connect at any time."""

    def close(self) -> None:
        """Close what was connected."""
        self._hub.close()

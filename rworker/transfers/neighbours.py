"""How an R-worker reaches others, over whatever transport connects them."""

from __future__ import annotations

from typing import Protocol

from fastdecode.core.errors import ConfigError
from fastdecode.wire.inproc import InprocHub, connect
from fastdecode.wire.messages import FromRWorker, ToRWorker
from fastdecode.wire.transport import Connection


class NeighbourConnection(Connection[ToRWorker, FromRWorker], Protocol):
    """To another R-worker."""

    @property
    def is_reached(self) -> bool:
        """Whether the other end has been heard of."""


class Neighbours(Protocol):
    """How other R-workers are reached over this one's transport."""

    def open(self, address: str) -> NeighbourConnection:
        """Open a new connection to one. Never waits: it needn't be reached yet.

        Raises:
            FastDecodeError: If there is no such address, or it may not be used.
        """


class Neighbourhood(Protocol):
    """Where R-workers that are threads of this process meet others."""

    def add(self, name: str, hub: InprocHub[FromRWorker, ToRWorker]) -> Neighbours:
        """One can be reached from now on. Returns how it reaches others."""

    def address_of(self, name: str) -> str:
        """The address at which others reach it."""


class ThreadNeighbours:
    """R-workers that are threads of this process, by name."""

    def __init__(self) -> None:
        self._hubs: dict[str, InprocHub[FromRWorker, ToRWorker]] = {}

    def add(self, name: str, hub: InprocHub[FromRWorker, ToRWorker]) -> Neighbours:
        """See ``Neighbourhood``."""
        self._hubs[name] = hub
        return self

    def address_of(self, name: str) -> str:
        """See ``Neighbourhood``."""
        return name

    def open(self, address: str) -> NeighbourConnection:
        if address not in self._hubs:
            raise ConfigError(f"there is no R-worker {address!r} in this process")
        here, _ = connect(InprocHub(), "a neighbour", self._hubs[address], f"R-worker {address}")
        return here


class NoNeighbours:
    """Of an R-worker that can't reach others."""

    def open(self, address: str) -> NeighbourConnection:
        raise ConfigError("this R-worker can't reach others: it keeps no replicas")

"""The thread that uses a hub's connections: what it is at, which the watchdog
and the pump go by."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from fastdecode.wire.transport import timeout_error
from fastdecode.wire.waiting import Pump, look_until_found

T = TypeVar("T")


class Caller:
    """Used as a context around what uses MPI, or waits for the pump that does."""

    def __init__(self) -> None:
        self.pump: Pump | None = None
        """Looks after what is under way while the caller is elsewhere."""
        self.waits_since: float | None = None
        self.left_s = 0.0
        """When it last went its way."""
        self.num_looks = 0
        """How often it has looked, which whatever looks for it counts."""
        self._is_in_mpi = False

    def __enter__(self) -> None:
        self.num_looks += 1
        self._is_in_mpi = True

    def __exit__(self, *_: object) -> None:
        self._is_in_mpi = False
        self._leave()

    def looks(self) -> int | None:
        """For the watchdog: how often it has looked; None while it needn't."""
        return self.num_looks if self._is_in_mpi or self.waits_since is not None else None

    def wait(
        self, look: Callable[[], T | None], timeout_s: float | None, whom: Callable[[], str]
    ) -> T:
        """What ``look`` gives, as soon as it gives anything."""
        self.waits_since = time.monotonic()
        try:
            found = look_until_found(look, timeout_s)
        finally:
            self.waits_since = None
            self._leave()
        if found is None:
            assert timeout_s is not None
            raise timeout_error(whom(), timeout_s)
        return found

    def _leave(self) -> None:
        """The caller goes its way: have the pump look after what is under way."""
        if self.pump is not None:
            self.left_s = time.monotonic()
            if not self.pump.is_wanted:
                self.pump.wake()

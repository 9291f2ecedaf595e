"""Notices when a process that this one works with ends: also in the middle of a
collective, which says nothing."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping


class PeerWatch:
    """Watches processes of this host, by what Linux calls a pidfd. Elsewhere
    nothing is noticed.

    Args:
        processes: rank → process id.
        on_end: called with the ranks that have ended, once, in a thread of its
            own, when the first does.
    """

    def __init__(self, processes: Mapping[int, int], on_end: Callable[[list[int]], None]) -> None:
        self._ranks: dict[int, int] = {}  # by file descriptor
        self._gone: list[int] = []  # ended before they could be watched
        self._on_end = on_end
        for rank, process in processes.items():
            try:
                self._ranks[os.pidfd_open(process)] = rank
            except ProcessLookupError:
                self._gone.append(rank)
            except (AttributeError, OSError):
                continue  # not on this system
        self._wakes, self._woken_by = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)
        self._thread.start()

    def ended(self, wait_s: float = 0.0) -> list[int]:
        """The ranks that have ended; waits until one has, ``wait_s`` at most."""
        if self._gone:
            return self._gone
        return self._poll(int(wait_s * 1000))

    def close(self) -> None:
        """Watch no more."""
        os.close(self._woken_by)
        self._thread.join()
        for fd in (self._wakes, *self._ranks):
            os.close(fd)

    def _poll(self, timeout_ms: int | None, *others: int) -> list[int]:
        poll = select.poll()
        for fd in (*self._ranks, *others):
            poll.register(fd, select.POLLIN)
        return [self._ranks[fd] for fd, _ in poll.poll(timeout_ms) if fd in self._ranks]

    def _watch(self) -> None:
        ended = self._gone or self._poll(None, self._wakes)
        if ended:
            self._on_end(ended)

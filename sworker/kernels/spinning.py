"""How long OpenMP's idle threads spin, by whether anybody else wants the cores.

Between two parallel regions of a step lie tens of microseconds. A thread that
sleeps in them has to be woken, 120 times a step, so threads spin for some
milliseconds. Where another process wants the same cores for long, a thread that
spins uses up the time that the system would give it, and a step can take ten
times as long: there threads should sleep almost at once.

GNU's runtime reads how long its threads spin when it is loaded, and then knows
two lengths: one for as many threads as there are cores or fewer, and a very
short one for more. ``SpareThreads`` makes it count more threads than cores.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from fastdecode.core.clock import Clock

WINDOW_S: Final = 0.1
"""Looked at anew after so long."""
MANY_WAIT: Final = 0.4
"""Seconds that threads waited for a core, in each second, from which the
cores count as wanted by others. A neighbour that takes half of one core makes it
0.25, at which spinning still gains; one that takes all it can get 0.5."""
NONE_WAIT: Final = 0.05
"""Below which they count as free again."""
_TASKS: Final = Path("/proc/self/task")


class Brake(Protocol):
    """Makes idle threads sleep almost at once, while it is on."""

    def turn_on(self) -> None: ...
    def turn_off(self) -> None: ...


class IdleThreads:
    """Watches how long this process's threads wait for a core.

    Args:
        brake: turned on and off by it.
        waited_s: seconds that all threads have waited for a core until now.
        clock: seconds.
    """

    def __init__(
        self,
        brake: Brake,
        waited_s: Callable[[], float],
        clock: Clock = time.monotonic,
    ) -> None:
        self._brake, self._waited_s, self._clock = brake, waited_s, clock
        self._began_s, self._waited_before_s = clock(), waited_s()
        weakref.finalize(self, brake.turn_off)
        self.is_crowded = False
        """Whether others want the cores."""

    def look(self) -> None:
        """Called before every step: cheap."""
        now = self._clock()
        length_s = now - self._began_s
        if length_s < WINDOW_S:
            return
        waited_s = self._waited_s()
        share = (waited_s - self._waited_before_s) / length_s
        self._began_s, self._waited_before_s = now, waited_s
        if share >= MANY_WAIT and not self.is_crowded:
            self.is_crowded = True
            self._brake.turn_on()
        elif share < NONE_WAIT and self.is_crowded:
            self.is_crowded = False
            self._brake.turn_off()


def waited_for_cores(tasks: Path = _TASKS) -> float:
    """Seconds that this process's threads have waited for a core, while they
    could have run. Those of threads that have ended don't count."""
    total = 0
    for task in os.listdir(tasks):
        try:
            total += int((tasks / task / "schedstat").read_text().split()[1])
        except (OSError, IndexError):  # it has just ended
            continue
    return total / 1e9


class SpareThreads:
    """A brake for GNU's runtime: threads that do nothing, of a region in a
    thread of its own. With them the runtime counts more threads than cores.

    Args:
        library: the runtime's file.
        num_threads: that the engine's regions have.
        num_cores: of this process.
    """

    def __init__(self, library: str, num_threads: int, num_cores: int) -> None:
        self._parallel = ctypes.CDLL(library).GOMP_parallel
        self._nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)
        self._num_spare = max(2, num_cores - num_threads + 2)
        self._done: threading.Event | None = None

    def turn_on(self) -> None:
        self._done = threading.Event()
        spare = threading.Thread(
            target=self._hold, args=(self._done,), name="openmp-spare", daemon=True
        )
        spare.start()

    def turn_off(self) -> None:
        if self._done is not None:
            self._done.set()
            self._done = None

    def _hold(self, done: threading.Event) -> None:
        self._parallel(self._nothing, None, self._num_spare, 0)
        done.wait()  # the runtime ends the region's threads with this one


def watch_idle_threads(library: str | None, num_threads: int, num_cores: int) -> IdleThreads | None:
    """For regions of ``num_threads`` threads in the calling thread; None where
    there is nothing to be done: one thread, another runtime than GNU's, or a
    system that doesn't tell who waits.

    Args:
        library: the runtime's file; None: it isn't known.
        num_cores: of this process.
    """
    if num_threads < 2 or library is None or not Path(library).name.startswith("libgomp"):
        return None
    if not (_TASKS / str(threading.get_native_id()) / "schedstat").exists():
        return None
    return IdleThreads(SpareThreads(library, num_threads, num_cores), waited_for_cores)

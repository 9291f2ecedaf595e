"""The threads that torch runs its operators with, and how long OpenMP's idle ones spin.

Between two parallel regions of a step lie tens of microseconds. A thread that sleeps in them has
to be woken, 120 times a step, so threads spin for some milliseconds. Where another process wants
the same cores for long, a thread that spins uses up the time that the system would give it, and a
step can take ten times as long: there threads should sleep almost at once.

GNU's runtime reads how long its threads spin when it is loaded, and then knows two lengths: one
for as many threads as there are cores or fewer, and a very short one for more. ``SpareThreads``
makes it count more threads than cores."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import torch

from fastdecode.core.clock import Clock

logger = logging.getLogger(__name__)

WINDOW_S: Final = 0.1  # seconds between two measurements
MANY_WAIT: Final = 0.42
"""Seconds that threads waited for a core, in each second of two windows in a
row, from which the cores count as wanted by others. Measured on two cores: 0.25
to 0.36 beside a neighbour that takes half of one, where spinning still gains; 0.52
to 0.8 beside one that takes all it can get, with the brake and without."""
FEW_WAIT: Final = 0.35  # below this they count as free again
FIRST_HOLD_S: Final = 1.0
"""Seconds for which the brake stays on at first; then it is turned off to try. A thread that
sleeps and wakes can share a core with the thread that wakes it, and wait for that one:
with the brake on, waiting alone doesn't show that other processes want the cores."""
LONGEST_HOLD_S: Final = 16.0  # limit of its doubling, while the brake is still needed
_TASKS: Final = Path("/proc/self/task")
_NAMES = ("libgomp", "libiomp5", "libomp")
_MAPS = Path("/proc/self/maps")
_SOFT: Final = 1  # ``omp_pause_soft``: the runtime keeps its settings


class IdleThreads:
    """Watches how long this process's threads wait for a core.

    Args:
        brake: turned on and off by it.
        waited_s: seconds that all threads have waited for a core until now.
        clock: seconds.
    """

    def __init__(
        self,
        brake: SpareThreads,
        waited_s: Callable[[], float],
        clock: Clock = time.monotonic,
    ) -> None:
        self._brake, self._waited_s, self._clock = brake, waited_s, clock
        self._began_s, self._waited_before_s = clock(), waited_s()
        weakref.finalize(self, brake.turn_off)
        self._had_many = False
        self._hold_s, self._until_s = FIRST_HOLD_S, 0.0
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
        had_many, self._had_many = self._had_many, share >= MANY_WAIT
        if self.is_crowded:
            if share < FEW_WAIT or now >= self._until_s:
                self.is_crowded = self._had_many = False
                self._brake.turn_off()
        elif had_many and self._had_many:
            self.is_crowded, self._until_s = True, now + self._hold_s
            self._hold_s = min(2 * self._hold_s, LONGEST_HOLD_S)
            self._brake.turn_on()
        elif not self._had_many:
            self._hold_s = FIRST_HOLD_S


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
    """A brake for GNU's runtime, which makes idle threads sleep almost at once while it is on.
    A separate thread runs a region of threads that do nothing, so that the runtime counts more
    threads than cores.

    Args:
        num_threads: Threads of the engine's regions.
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
    """Watch idle threads of regions of ``num_threads`` threads in the calling thread. Return None
    for one thread, for another runtime than GNU's, or if the system doesn't measure waiting.

    Args:
        library: The runtime's file, or None if it is unknown.
    """
    if num_threads < 2 or library is None or not Path(library).name.startswith("libgomp"):
        return None
    if not (_TASKS / str(threading.get_native_id()) / "schedstat").exists():
        return None
    return IdleThreads(SpareThreads(library, num_threads, num_cores), waited_for_cores)


def openmp_library(maps: Path = _MAPS) -> str | None:
    """Return the file of the OpenMP runtime that torch's operators run on in this process. None
    if there is none, or if it is not clear which of several it is."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        lines = maps.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    found = {path for path in paths if Path(path).name.startswith(_NAMES)}
    own = {
        path for path in found if Path(path).is_relative_to(Path(torch.__file__).resolve().parent)
    }
    chosen = own or found
    if len(chosen) != 1:
        logger.info(
            "torch's OpenMP runtime isn't known, so only torch uses its threads: found %s",
            chosen or "none",
        )
        return None
    return chosen.pop()


@cache
def _pause() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of GNU's runtime: ends the threads of the calling thread's
    regions. Other runtimes end all."""
    library = openmp_library()
    if library is None or not Path(library).name.startswith("libgomp"):
        return None
    pause: Callable[[int], int] | None
    pause = getattr(ctypes.CDLL(library), "omp_pause_resource_all", None)
    return pause


def end_own_threads() -> bool:
    """End the threads that have run parallel regions of the calling thread, if the runtime is
    GNU's; the next region starts new ones. Return True if it was done.

    Each thread that runs regions has its own helper threads, and the runtime counts them all. If
    they are more than the cores, idle threads sleep immediately, so that each region of a step
    has to wake its threads. A script that has used torch once would slow down an engine that
    computes in another thread."""
    pause = _pause()
    return pause is not None and pause(_SOFT) == 0

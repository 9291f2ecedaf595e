"""The threads that torch runs its operators with."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

logger = logging.getLogger(__name__)

ELEMENTS_ALONE: Final = 3 << 14
"""Fewer than so many aren't worth a second thread."""
_NAMES = ("libgomp", "libiomp5", "libomp")
_MAPS = Path("/proc/self/maps")


def openmp_library(maps: Path = _MAPS) -> str | None:
    """The file of the OpenMP runtime that torch's operators run on in this
    process; None where there is none, or it isn't known which of several it
    is."""
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
def parallel_regions() -> Callable[..., None] | None:
    """``GOMP_parallel`` of torch's OpenMP runtime: runs a function on so many threads."""
    library = openmp_library()
    if library is None:
        return None
    function: Callable[..., None] | None = getattr(ctypes.CDLL(library), "GOMP_parallel", None)
    return function


class Job(threading.local):
    """A calling thread's own memory of a job, aligned to cache lines.

    Args:
        loops: a compiled function that takes the job's address and does units of
            it until none is left: Numba's ``CFunc``.
        size: of the job, in bytes.
    """

    def __init__(self, loops: Any, size: int) -> None:
        self.memory = ctypes.create_string_buffer(size + 64)
        self.offset = -ctypes.addressof(self.memory) % 64
        self.address = ctypes.addressof(self.memory) + self.offset
        self._run_alone: Callable[[int], None] = loops.ctypes
        self._given = ctypes.c_void_p(loops.address), ctypes.c_void_p(self.address)

    def run(self, num_threads: int, elements: int = ELEMENTS_ALONE) -> None:
        """Have all units done; in this thread alone, where they are of few elements."""
        parallel = parallel_regions()
        if elements < ELEMENTS_ALONE or num_threads == 1 or parallel is None:
            self._run_alone(self.address)
        else:
            parallel(*self._given, num_threads, 0)

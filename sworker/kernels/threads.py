"""The threads that torch runs its operators with."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import torch

logger = logging.getLogger(__name__)

_NAMES = ("libgomp", "libiomp5", "libomp")
_MAPS = Path("/proc/self/maps")
_SOFT: Final = 1
"""``omp_pause_soft``: the runtime keeps its settings."""


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
    """End the threads that have run parallel regions of the calling thread, if the
    runtime is GNU's; the next region starts new ones. Returns whether it was done.

    Each thread that runs regions has threads of its own, and the runtime counts them
    all. Where they are more than there are cores, idle threads sleep at once, so that
    each region of a step has to wake its threads. A script that has used torch once
    would slow down an engine that computes in another thread.
    """
    pause = _pause()
    return pause is not None and pause(_SOFT) == 0

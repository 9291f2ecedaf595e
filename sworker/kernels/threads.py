"""The threads that torch runs its operators with."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

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

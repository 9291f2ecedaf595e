"""How attention prefetches: which hint, how far ahead; and where int8 is multiplied.

Which way is best depends on the CPU, the dtype and the head dim. Results don't depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NO_PREFETCH, PREFETCH_T0, PREFETCH_T1 = range(3)
"""Which caches a line is brought into: none, all, or all but the first."""


@dataclass(frozen=True)
class Prefetch:
    """One way to prefetch."""

    name: str
    hint: int
    """NO_PREFETCH, PREFETCH_T0 (into all caches) or PREFETCH_T1 (into all but the first)."""
    pieces_ahead: int = 1
    """K or V of one head and block is a piece. 1: the next piece is prefetched; 2: the one
    after it."""
    byte_tiles: bool = False
    """int8 is multiplied in AMX tiles, where there are any, and not in vectors."""


PREFETCHES: Final = (
    Prefetch("t0", PREFETCH_T0),
    Prefetch("t0-far", PREFETCH_T0, 2),
    Prefetch("t1", PREFETCH_T1),
    Prefetch("t1-far", PREFETCH_T1, 2),
    Prefetch("none", NO_PREFETCH),
    Prefetch("t0-tiles", PREFETCH_T0, byte_tiles=True),
    Prefetch("t1-tiles", PREFETCH_T1, byte_tiles=True),
)
DEFAULT_PREFETCH: Final = PREFETCHES[0]


def find_prefetch(name: str) -> Prefetch:
    """The way of that name.

    Raises:
        ValueError: there is none.
    """
    for prefetch in PREFETCHES:
        if prefetch.name == name:
            return prefetch
    known = ", ".join(prefetch.name for prefetch in PREFETCHES)
    raise ValueError(f"prefetch={name!r} is not one of {known}")

"""How much is tried: in ``make test`` a quarter of a property's examples, always
the same ones, and tables of cases without what is named ``MORE_…``; in ``make
campaign`` all."""

from __future__ import annotations

import os
from typing import Final

TRIES_ALL: Final = "FASTDECODE_ALL_EXAMPLES" in os.environ


def examples(number: int) -> int:
    """Of so many."""
    return number if TRIES_ALL else -(-number // 4)

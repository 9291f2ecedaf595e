"""How many examples a property is tried with. In ``make test`` a quarter of
them, always the same ones; in ``make campaign`` all."""

from __future__ import annotations

import os
from typing import Final

TRIES_ALL: Final = "FASTDECODE_ALL_EXAMPLES" in os.environ


def examples(number: int) -> int:
    """Of so many."""
    return number if TRIES_ALL else -(-number // 4)

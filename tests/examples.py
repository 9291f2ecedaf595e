"""How much is tried: in ``make test`` a quarter of a property's examples (an
eighth of those that cost most), always the same ones, and tables of cases
without what is named ``MORE_…``; in ``make campaign`` all."""

from __future__ import annotations

import os
from typing import Final

TRIES_ALL: Final = "FASTDECODE_ALL_EXAMPLES" in os.environ


def examples(number: int, share: int = 4) -> int:
    """Of so many; in ``make test`` one of ``share``."""
    return number if TRIES_ALL else -(-number // share)

"""Whom an R-worker serves, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ServingTerms:
    model_hash: str | None = None
    """Only model that S-workers may run. None for any."""
    keeps_serving: bool = False
    """It stays when the last S-worker has left."""
    return_s: float = 0.0
    """Time to wait for another S-worker when the last one is lost without ``Shutdown``."""
    keep_s: float = 0.0
    """Time to keep the caches of a lost S-worker, for one that resumes the session."""


ANYBODY_ONCE: Final = ServingTerms()
